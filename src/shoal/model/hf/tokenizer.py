"""Which tokenizer a run has: its files, found by name where the run begins, and kept on each host by their hash.

    folder | hub | trained  -> read once, checked, kept under its hash in the user's cache -> data.tokenizer_hash
    data.tokenizer_hash     -> who makes tokens of text, and who writes a model: the same files, or an error

The hash is that of tokenizer.json and of the token that ends a document, and where there is a chat template of all
files, since it writes tokens that others name: they decide what the tokens of a text or of a conversation are.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from shoal.config.training import trained_size
from shoal.errors import MALFORMED, ConfigError, StorageError
from shoal.file_thread import said_and_remedy
from shoal.model.hf.repository import INSTALL, Repository
from shoal.runtime.inside import places_of, require_inside
from shoal.runtime.own_limits import CPU_TIME, Timer, ends_after
from shoal.runtime.user_cache import keep, user_cache

if TYPE_CHECKING:
    from shoal.config.schema import Config

TOKENIZER_FILE: Final = "tokenizer.json"
SETTINGS: Final = "tokenizer_config.json"
TEMPLATE: Final = "chat_template.jinja"
FILES: Final = (TOKENIZER_FILE, SETTINGS, "special_tokens_map.json", TEMPLATE)
"""Of a tokenizer, as transformers names them; all but the first may be absent."""
GENERATION: Final = "generation_config.json"
"""Of a model: which tokens end its answers. It is kept beside the tokenizer, and is no part of it."""
_KEPT: Final = (*FILES, GENERATION)
_FACTS: Final = "shoal.json"
COMPUTES: Final[Timer] = CPU_TIME
"""Ends a process whose tokenizer computes without end, see `makes_tokens`: a chat template has the other timer."""
_LEAST_S: Final = 120.0
_SLOWEST_BYTES_PER_S: Final = 20_000
"""Of text, a hundredth of what a slow tokenizer makes tokens of."""
_PARTS: Final = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_ENDS: Final = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""The token that ends a document, of a tokenizer that does not say which one does."""


class TokenizerFacts(msgspec.Struct, frozen=True):
    """What is known of a tokenizer without reading it.

    Attributes:
        vocabulary: Tokens are 0..vocabulary-1.
        end: The token that ends a document; None: it has none.
    """

    vocabulary: int
    end: int | None


@dataclass(frozen=True)
class KeptTokenizer:
    """A tokenizer on this host.

    Attributes:
        folder: Holds those of `FILES` that it has, and `GENERATION` if the run begins from the model that it is of.
    """

    folder: Path
    hash: str
    facts: TokenizerFacts

    @property
    def files(self) -> dict[str, bytes]:
        """What its folder holds, by name.

        Raises:
            OSError: One cannot be read.
        """
        return {name: (self.folder / name).read_bytes() for name in _KEPT if (self.folder / name).is_file()}


def kept_tokenizer(hash: str | None) -> KeptTokenizer | None:
    """Return the tokenizer with this hash if this host has it, as it was put there. None has no hash."""
    if hash is None:
        return None
    folder = _folder(hash)
    try:
        facts = msgspec.json.decode((folder / _FACTS).read_bytes(), type=TokenizerFacts)
        kept = KeptTokenizer(folder, hash, facts)
        return kept if _hash(kept.files, facts.end) == hash else None
    except (OSError, KeyError, *MALFORMED):
        return None


def keep_tokenizer(files: Mapping[str, bytes], name: str) -> KeptTokenizer:
    """Check a tokenizer, and put its files where this host keeps them.

    Args:
        name: For messages.

    Raises:
        ConfigError: The package tokenizers is not installed, or does not read this tokenizer.
        StorageError: The user's cache cannot be written.
    """
    content = files[TOKENIZER_FILE]
    numbers: dict[str, int] = read_tokenizer(content, f"data.tokenizer = {name}").get_vocab(with_added_tokens=True)
    if not numbers:
        raise ConfigError(f"data.tokenizer = {name}: it has no tokens; give another one")
    facts = TokenizerFacts(max(numbers.values()) + 1, end_of_document(files))
    hash = _hash(files, facts.end)
    folder = _folder(hash)
    try:
        for file, written in files.items():
            keep(folder / file, written)
        keep(folder / _FACTS, msgspec.json.encode(facts))
    except OSError as error:
        raise StorageError(f"cannot keep the tokenizer in {folder} {said_and_remedy(error, folder)}") from error
    return KeptTokenizer(folder, hash, facts)


def read_tokenizer(content: bytes, what: str) -> Any:
    """Return a `tokenizers.Tokenizer` that neither fills up what it is given nor cuts it.

    Args:
        content: Of a tokenizer.json.
        what: It is, for messages.

    Raises:
        ConfigError: The package is not installed, or does not read it.
    """
    package = tokenizers_package(what)
    with gives_up(f"{what} is no tokenizer: its {TOKENIZER_FILE} cannot be read"):
        tokenizer = package.Tokenizer.from_buffer(content)
    # Whoever saved it may have prepared samples of one length.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextmanager
def gives_up(meaning: str) -> Generator[None]:
    """Make one error of all that the package tokenizers raises: also of a panic, which is no `Exception`, and which
    what stands in a tokenizer.json can bring about in any call.

    Args:
        meaning: What it means to the user.

    Raises:
        ConfigError: The package has given up.
    """
    try:
        yield
    except MemoryError:
        raise  # another time there may be enough
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{meaning} ({error}); give another one") from error


@contextmanager
def makes_tokens(meaning: str, num_bytes: int) -> Generator[None]:
    """End this process where the package tokenizers computes without end on so much text, as a regular expression of a
    tokenizer.json may, which nothing else interrupts: by `COMPUTES`. All else as `gives_up`.

    Raises:
        ConfigError: The package has given up.
    """
    with gives_up(meaning), ends_after(_LEAST_S + num_bytes / _SLOWEST_BYTES_PER_S, COMPUTES):
        yield


def endless_tokenizer(name: str, text: str) -> ConfigError:
    """Return what to say of a tokenizer that the process was ended for which has run it.

    Args:
        text: What it was to make tokens of.
    """
    return ConfigError(
        f"the tokenizer {name} computes without end on {text}, and was given up: a regular expression in its "
        f"{TOKENIZER_FILE} may take hours on a short text; name another one"
    )


def has_patterns(content: bytes) -> bool:
    """Whether a tokenizer.json has regular expressions of its own, beside those that the package brings."""
    found = _object(content)
    return any(b'"Regex"' in msgspec.json.encode(found.get(part)) for part in _PARTS)


def tokenizers_package(what: str) -> Any:
    """Return the package `tokenizers`.

    Args:
        what: Needs it, for messages.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise ConfigError(f"{what} needs the package tokenizers, which is not here: {INSTALL}") from error


def named_tokenizer(config: Config) -> KeptTokenizer:
    """Return the tokenizer that `data.tokenizer` names by a folder or on the hub, from there.

    Raises:
        ConfigError: There is none, or it cannot be read.
        StorageError: The user's cache cannot be written.
    """
    model, name = config.model, config.data.tokenizer or ""
    is_of_model = name == model.name_or_path
    repository = Repository(name, (model.commit or model.revision) if is_of_model else None, key="data.tokenizer")
    found = {TOKENIZER_FILE: repository.path(TOKENIZER_FILE)}
    others = _KEPT[1:] if is_of_model else FILES[1:]
    found |= {file: path for file in others if (path := repository.path_if_any(file)) is not None}
    if repository.folder is not None:
        require_own(found.values(), repository.folder)
    try:
        files = {file: path.read_bytes() for file, path in found.items()}
    except OSError as error:
        raise ConfigError(f"data.tokenizer = {name}: {error.filename} cannot be read ({error.strerror})") from error
    return keep_tokenizer(files, name)


def require_own(files: Iterable[Path], folder: Path) -> None:
    """Refuse files of a tokenizer that lead out of its folder: they go on to whoever is given the model.

    Raises:
        ConfigError: one does.
    """
    places = places_of(folder)
    for path in files:
        require_inside(path, places, "its tokenizer")


def require_hash(found: KeptTokenizer, config: Config) -> KeptTokenizer:
    """Return what was found, if it is the tokenizer of the run.

    Raises:
        ConfigError: It is another one.
    """
    data = config.data
    if data.tokenizer_hash not in (None, found.hash):
        is_trained = trained_size(data.tokenizer) is not None
        why = "the text or the package tokenizers is not what it was" if is_trained else "its files are others"
        raise ConfigError(
            f"data.tokenizer = {data.tokenizer} is not the tokenizer that the run began with ({found.hash[:12]}, not "
            f"{data.tokenizer_hash[:12] if data.tokenizer_hash else ''}): {why}; bring those from the host that began "
            f"it, which keeps them in {_folder(data.tokenizer_hash or '')}"
        )
    return found


def _folder(hash: str) -> Path:
    return user_cache("tokenizers") / hash[:32]


def _hash(files: Mapping[str, bytes], end: int | None) -> str:
    has_template = TEMPLATE in files or "chat_template" in _object(files.get(SETTINGS, b"{}"))
    parts = [files.get(name, b"") for name in (FILES if has_template else (TOKENIZER_FILE,))]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts) + f"end {end}".encode()).hexdigest()


def end_of_document(files: Mapping[str, bytes]) -> int | None:
    """Return the token that ends a document, of the files of a tokenizer by name; None: it has none.

    It is the one that the settings call `eos_token`, or one that has a usual name.
    """
    said = _object(files.get(SETTINGS, b"{}")).get("eos_token")
    named: object = cast("dict[str, Any]", said).get("content") if isinstance(said, dict) else said
    numbers = _added(files[TOKENIZER_FILE])
    return next((numbers[name] for name in (named, *_ENDS) if isinstance(name, str) and name in numbers), None)


def _added(content: bytes) -> dict[str, int]:
    """Return the tokens that stand for no text, which a tokenizer.json lists beside the others."""
    found = _object(content).get("added_tokens")
    listed = cast("list[Any]", found) if isinstance(found, list) else []
    tokens = [cast("dict[str, Any]", each) for each in listed if isinstance(each, dict)]
    return {str(token.get("content")): token["id"] for token in tokens if isinstance(token.get("id"), int)}


def _object(content: bytes) -> dict[str, Any]:
    try:
        found: object = msgspec.json.decode(content)
    except MALFORMED:
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
