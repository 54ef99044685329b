"""Text into tokens, in batches, into the cache: what `data.tokenizer` and the documents of a split come to.

documents -> pieces of some MiB -> tokens, the end of each document behind it -> file -> (again)
          '-> unreadable: counted, the first ones named; too many end it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from shoal.clock import SystemClock
from shoal.config.schema import Config
from shoal.config.training import DataConfig
from shoal.data.documents import Documents, TextPiece, Unreadable
from shoal.data.remembered_tokens import RememberedTokens, cuts_of
from shoal.data.source import Array
from shoal.data.text import BYTE_VALUES
from shoal.data.token_cache import CachedTokens, TokenCache
from shoal.data.token_windows import token_dtype
from shoal.errors import ConfigError
from shoal.events.base import Event
from shoal.events.data import TokensAwaited, TokensBuilt, TokensDamaged, TokensProgress
from shoal.model.hf.tokenizer import TOKENIZER_FILE, KeptTokenizer, makes_tokens, read_tokenizer
from shoal.runtime.hardware import num_usable_cores

_BATCH_CHARACTERS: Final = 4 << 20
_SAY_EVERY_S: Final = 5.0
_NAMED: Final = 5
_MB: Final = 1e6
_FEW_CORES: Final = 6
"""On more of them the package's threads are faster together than one that remembers, though each is slower."""


class EncodedTexts(NamedTuple):
    """What pieces have become.

    Attributes:
        tokens: (n,).
        text_bytes: That they were made of.
        refused: Whole documents that have become nothing.
    """

    tokens: Array
    text_bytes: int
    refused: tuple[Unreadable, ...] = ()


class Encoder(Protocol):
    """Makes tokens of pieces.

    Attributes:
        identity: Another text for other tokens.
    """

    identity: str
    dtype: str

    @property
    def vocabulary(self) -> int:
        """Tokens so far are 0..vocabulary-1."""
        ...

    def encode(self, pieces: list[TextPiece]) -> EncodedTexts:
        """Return the tokens of pieces."""
        ...


class ByteEncoder:
    """Token i is the byte i, and a line's end is behind each document."""

    identity = "bytes"
    dtype = "uint8"
    vocabulary = BYTE_VALUES

    def encode(self, pieces: list[TextPiece]) -> EncodedTexts:
        text = "".join(f"{piece.content}\n" if piece.ends else str(piece.content) for piece in pieces).encode()
        return EncodedTexts(np.frombuffer(text, np.uint8), len(text))


class TokenizerEncoder:
    """The tokens of a tokenizer; behind each document is the one that ends it, if there is such a token.

    Raises:
        ConfigError: The package tokenizers is not installed.
        OSError: The tokenizer cannot be read.
    """

    def __init__(self, kept: KeptTokenizer) -> None:
        content = (kept.folder / TOKENIZER_FILE).read_bytes()
        self._name = f"the tokenizer in {kept.folder}"
        self._tokenizer: Any = read_tokenizer(content, self._name)
        self._end = kept.facts.end
        cuts = cuts_of(self._tokenizer) if num_usable_cores() <= _FEW_CORES else None
        self._remembered = None if cuts is None else RememberedTokens(self._tokenizer, cuts, self._end)
        self.vocabulary = kept.facts.vocabulary
        self.identity = kept.hash
        self.dtype = token_dtype(self.vocabulary)

    def encode(self, pieces: list[TextPiece]) -> EncodedTexts:
        """See `Encoder`; raises ConfigError where the package gives up, and ends the process where it never ends."""
        texts = [str(piece.content) for piece in pieces]
        num_bytes = sum(map(_num_bytes, texts))
        with makes_tokens(f"{self._name} makes no tokens of a text", num_bytes):
            return self._encoded(pieces, texts, num_bytes)

    def _encoded(self, pieces: list[TextPiece], texts: list[str], num_bytes: int) -> EncodedTexts:
        if self._remembered is not None:
            marked = [(text, piece.ends) for text, piece in zip(texts, pieces, strict=True)]
            return EncodedTexts(self._remembered.tokens(marked, self.dtype), num_bytes)
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        parts: list[Array] = []
        end = np.array([self._end], self.dtype) if self._end is not None else None
        for piece, encoding in zip(pieces, encodings, strict=True):
            parts.append(np.array(encoding.ids, self.dtype))
            if piece.ends and end is not None:
                parts.append(end)
        return EncodedTexts(np.concatenate(parts), num_bytes)


class GivenTokens:
    """Tokens that files hold.

    Args:
        limit: Tokens have to be less; None: nobody says what they may be.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = np.iinfo(np.int32).max + 1 if limit is None else limit
        self.dtype = token_dtype(self._limit)
        self.identity = f"tokens {self.dtype}"
        self.vocabulary = 1

    def encode(self, pieces: list[TextPiece]) -> EncodedTexts:
        """See `Encoder`.

        Raises:
            ConfigError: There is a token that the model or the tokenizer does not know.
        """
        tokens = np.concatenate([np.asarray(piece.content) for piece in pieces])
        if len(tokens):
            least, most = int(tokens.min()), int(tokens.max())
            if least < 0 or most >= self._limit:
                raise ConfigError(
                    f"the token files hold the token {least if least < 0 else most}, and the model or the tokenizer "
                    f"knows 0 to {self._limit - 1}: is data.token_dtype right, and the tokenizer theirs?"
                )
            self.vocabulary = max(self.vocabulary, most + 1)
        return EncodedTexts(tokens.astype(self.dtype), tokens.nbytes)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


class TokenBuilding:
    """Makes the tokens of one split, unless they are there."""

    def __init__(self, config: Config, documents: Documents, say: Callable[[Event], None]) -> None:
        self._data: DataConfig = config.data
        self._documents = documents
        self._say = say
        self._clock = SystemClock()

    def cache(self, encoder_identity: str) -> TokenCache:
        """Where the tokens are, or will be."""
        return cache_of(self._data, self._documents, encoder_identity)

    def run(self, encoder: Encoder) -> tuple[TokenCache, CachedTokens]:
        """Return what is there after all; another process may build it meanwhile.

        Raises:
            ConfigError: Too many documents cannot be read.
            StorageError: The tokens cannot be kept.
        """
        cache = self.cache(encoder.identity)
        with cache.locked(lambda lock: self._say(TokensAwaited(self._data.dataset_name, lock))):
            found = cache.find(lambda reason: self._say(TokensDamaged(reason)))
            return cache, found or self._build(cache, encoder)

    def _build(self, cache: TokenCache, encoder: Encoder) -> CachedTokens:
        begun_s = said_s = self._clock.now_s()
        tokens = text_bytes = 0
        reading = _Reading(self._documents, self._data.max_documents)
        with cache.begin() as file:
            while pieces := reading.batch():
                encoded = encoder.encode(pieces)
                for refused in encoded.refused:
                    reading.skip(refused)
                file.write(encoded.tokens.tobytes())
                tokens += len(encoded.tokens)
                text_bytes += encoded.text_bytes
                now_s = self._clock.now_s()
                if now_s - said_s >= _SAY_EVERY_S:
                    said_s = now_s
                    self._say(self._progress(text_bytes, now_s - begun_s))
            require_few_skipped(self._data, reading.documents, reading.skipped, reading.first_skipped)
            found = CachedTokens(
                dtype=encoder.dtype,
                vocabulary=encoder.vocabulary,
                num_tokens=tokens,
                text_bytes=text_bytes,
                documents=reading.documents,
                skipped=reading.skipped,
                first_skipped=tuple(reading.first_skipped),
                size_bytes=0,
                sha256="",
                modified_ns=0,
            )
            found = cache.finish(file, found)
        seconds = round(self._clock.now_s() - begun_s, 2)
        name = self._data.dataset_name
        self._say(TokensBuilt(name, tokens, text_bytes, reading.documents, seconds, str(cache.path)))
        return found

    def _progress(self, text_bytes: int, elapsed_s: float) -> TokensProgress:
        share = self._documents.share
        return TokensProgress(
            self._data.dataset_name,
            round(100 * share, 1) if share else None,
            round(text_bytes / _MB / max(elapsed_s, 1e-9), 1),
            round(elapsed_s * (1 - share) / share) if share else None,
        )


def cache_of(data: DataConfig, documents: Documents, encoder_identity: str) -> TokenCache:
    """Where the tokens of documents are, or will be."""
    return TokenCache(data, f"{documents.identity}\n{encoder_identity}\n{data.max_documents}")


def require_few_skipped(data: DataConfig, documents: int, skipped: int, first: list[str] | tuple[str, ...]) -> None:
    """Check that not too many documents could not be read.

    Raises:
        ConfigError: They are more than `data.max_bad_fraction`.
    """
    if skipped > data.max_bad_fraction * documents:
        raise ConfigError(
            f"{skipped} of {documents} documents of data.dataset_name = {data.dataset_name} cannot be read or "
            f"are none, more than data.max_bad_fraction = {data.max_bad_fraction}: {'; '.join(first)}; mend them, "
            "leave them out, or allow more"
        )


class _Reading:
    """Gathers pieces to batches, and counts.

    Attributes:
        documents: That were read or skipped.
        first_skipped: Where some of the skipped ones are.
    """

    def __init__(self, documents: Documents, most: int | None) -> None:
        self._items: Iterator[TextPiece | Unreadable] = iter(documents)
        self._most = most
        self.documents = self.skipped = 0
        self.first_skipped: list[str] = []

    def batch(self) -> list[TextPiece]:
        """Return the next pieces; none: there are no more."""
        pieces: list[TextPiece] = []
        size = 0
        while size < _BATCH_CHARACTERS and (self._most is None or self.documents < self._most):
            item = next(self._items, None)
            match item:
                case TextPiece(ends=ends):
                    pieces.append(item)
                    size += max(1, item.size)
                    self.documents += ends
                case Unreadable():
                    self.documents += item.documents
                    self.skip(item)
                case None:
                    break
        return pieces

    def skip(self, item: Unreadable) -> None:
        """Count documents that were read and are left out."""
        self.skipped += item.documents
        if len(self.first_skipped) < _NAMED:
            self.first_skipped.append(f"{item.where}: {item.reason}")


def first_text(documents: Documents, most_bytes: int, most_documents: int | None) -> Iterator[str]:
    """Yield the first pieces of text, as far as they have so many bytes."""
    left = most_bytes
    for item in islice(iter(documents), most_documents):
        if isinstance(item, TextPiece) and isinstance(item.content, str):
            yield item.content
            left -= _num_bytes(item.content)
            if left <= 0:
                return
