"""Text to tokens, and tokens to text as they come: never half a character, never the beginning of a stop string.

A model that was trained here has bytes for tokens. One from elsewhere has the files of a tokenizer of its own; the
package `tokenizers`, which reads them, comes with the extra `hf`.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from shoal.checkpoint.byte_tokenizer import NUM_BYTES
from shoal.checkpoint.model_folder import TOKENIZER
from shoal.checkpoint.model_source import ModelSource
from shoal.errors import MALFORMED, ConfigError
from shoal.inference.prompt_trial import require_ends
from shoal.model.hf.cached import ends_of
from shoal.model.hf.skeleton import Part
from shoal.model.hf.tokenizer import (
    GENERATION,
    SETTINGS,
    TOKENIZER_FILE,
    end_of_document,
    has_patterns,
    makes_tokens,
    read_tokenizer,
)
from shoal.model.stage import StageModule

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class TextStream(Protocol):
    """Text of one sequence, as its tokens come."""

    def push(self, token: int) -> str:
        """Take a token; return the text that is now complete."""
        ...

    def flush(self) -> str:
        """Return what is left, as far as it is text."""
        ...


class Tokens(Protocol):
    """What a model's tokens mean.

    Attributes:
        ends: The tokens that end a text.
    """

    @property
    def ends(self) -> frozenset[int]: ...

    def encode(self, text: str) -> list[int]:
        """The tokens of a text.

        Raises:
            ConfigError: It has none, or they take too long.
        """
        ...

    def stream(self, after: Sequence[int] = ()) -> TextStream:
        """Begin a text behind these tokens."""
        ...


class ByteTokens:
    """Token i is the byte i; what is above is none."""

    ends: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        """UTF-8; bytes of the command line that are none are taken as they are."""
        return list(text.encode("utf-8", "surrogateescape"))

    def stream(self, after: Sequence[int] = ()) -> TextStream:
        return _ByteStream()


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token >= NUM_BYTES:
            return self._decoder.decode(b"", final=True) + _UNKNOWN
        return self._decoder.decode(bytes([token]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class FileTokens:
    """The tokens of a `tokenizer.json`.

    Args:
        ends: What ends a text, as the model's config says; a `generation_config.json` comes first, as in transformers.
            Empty: what ends a document.
        adds_tokens: Put those around a text that the tokenizer's own rules want there, as in transformers.

    Raises:
        ConfigError: The package is not installed, or the files are none that it reads.
        OSError: A file cannot be read.
    """

    def __init__(self, folder: Path, ends: Sequence[int] = (), *, adds_tokens: bool = True) -> None:
        self._path = folder / TOKENIZER_FILE
        content = self._path.read_bytes()
        self._tokenizer: Any = read_tokenizer(content, str(self._path))
        self._is_tried_first = has_patterns(content)
        self._adds_tokens = adds_tokens
        said = _ends(_settings(folder / GENERATION).get("eos_token_id")) or tuple(ends)
        self.ends = frozenset(said or self._named_end(folder))

    @property
    def vocabulary(self) -> int:
        """How many tokens there are, without those that were added for a chat or an image."""
        return self._tokenizer.get_vocab_size(with_added_tokens=False)

    def encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the prompt is no text in UTF-8 ({error}), and the model's tokens are of text") from None
        if self._is_tried_first:
            require_ends(self._path, text)
        with makes_tokens("the model's tokenizer makes no tokens of the prompt", len(text)):
            return list(self._tokenizer.encode(text, add_special_tokens=self._adds_tokens).ids)

    def stream(self, after: Sequence[int] = ()) -> TextStream:
        return _FileStream(self._tokenizer, after[-1:])

    def _named_end(self, folder: Path) -> tuple[int, ...]:
        found = _settings(folder / SETTINGS).get("eos_token")
        text = cast("dict[str, Any]", found).get("content") if isinstance(found, dict) else found
        if isinstance(text, str) and (known := _ends(self._tokenizer.token_to_id(text))):
            return known
        return _ends(end_of_document({TOKENIZER_FILE: (folder / TOKENIZER_FILE).read_bytes()}))


def _settings(path: Path) -> dict[str, Any]:
    """Read a file that need not be there."""
    try:
        found: object = json.loads(path.read_bytes())
    except (FileNotFoundError, *MALFORMED):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _ends(said: object) -> tuple[int, ...]:
    """One token or several, as files say it."""
    found = cast("list[object]", said) if isinstance(said, list) else [said]
    return tuple(token for token in found if isinstance(token, int))


class _FileStream:
    """A token may be part of a character, and what it means may depend on the one before.

    So it is decoded behind the tokens whose text was given last, and not behind all others: a text may be long.
    """

    def __init__(self, tokenizer: Any, after: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._given = list(after)
        self._held: list[int] = []

    def push(self, token: int) -> str:
        self._held.append(token)
        text = self._new()
        if not text or text.endswith(_UNKNOWN):
            return ""
        self._given, self._held = self._held, []
        return text

    def flush(self) -> str:
        return self._new()

    def _new(self) -> str:
        with makes_tokens("the model's tokenizer makes no text of its tokens", 0):
            before = self._tokenizer.decode(self._given)
            return self._tokenizer.decode(self._given + self._held)[len(before) :]


class UntilStop:
    """Passes text on up to the first of some strings, which may come in pieces.

    Attributes:
        is_over: One of them has come.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.is_over = False

    def push(self, text: str) -> str:
        """Take more text; return what can be passed on."""
        self._held += text
        found = [place for place in (self._held.find(stop) for stop in self._stops) if place >= 0]
        if found:
            self.is_over = True
            passed, self._held = self._held[: min(found)], ""
            return passed
        kept = max((self._begun(stop) for stop in self._stops), default=0)
        passed, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return passed

    def flush(self) -> str:
        """Return what was held back, now that nothing follows."""
        passed, self._held = self._held, ""
        return passed

    def _begun(self, stop: str) -> int:
        """How many characters at the end are the beginning of a string."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)


def tokens_of(source: ModelSource, model: StageModule, *, is_templated: bool = False) -> Tokens:
    """Return what the tokens of a model mean.

    Args:
        model: Of the source, in one piece.
        is_templated: A chat template has written the text, with all tokens that belong around it.

    Raises:
        ConfigError: It has no tokenizer that can be read, or that of another model.
        OSError: A file cannot be read.
    """
    if source.tokenizer is None:
        data = source.config.data
        if data.tokenizer is not None:
            raise ConfigError(
                f"{source.folder} was trained with data.tokenizer = {data.tokenizer}, whose files are neither there "
                f"nor kept on this host: take those from the host of the run's client to {source.folder / TOKENIZER}"
            )
        if not source.is_bytes:
            raise ConfigError(
                f"{source.folder} has no {TOKENIZER_FILE}, and its tokens are no bytes: put the files of its tokenizer "
                "there, which AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers writes"
            )
        return ByteTokens()
    whole = model.assembled
    ends = ends_of(whole) if isinstance(whole, Part) and not source.has_tokenizer_of_run else ()
    # Training puts no token before a text; what is from elsewhere may.
    adds_tokens = source.config.data.tokenizer is None and not is_templated
    tokens = FileTokens(source.tokenizer, ends, adds_tokens=adds_tokens)
    known = model.output_spec.shape[-1]
    if tokens.vocabulary > known:
        raise ConfigError(
            f"the tokenizer in {source.tokenizer} has {tokens.vocabulary} tokens, and the model knows {known}: it is "
            "that of another model; take the folder as it was written"
        )
    return tokens
