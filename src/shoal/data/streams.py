"""Streams of samples: what can only be read from its beginning on, and does not say how much there is.

documents -> tokens -> samples of T tokens | rows -> samples; what cannot be read is left out

Where a sample was taken is a place: from there on the stream gives the same samples again, in whichever process,
without making those before it. That is all that is asked of a stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import msgspec
import numpy as np

from shoal.data.documents import Documents, TextPiece, Unreadable
from shoal.data.fields import Fields
from shoal.data.passing_errors import read_patiently
from shoal.data.rows import rows_after
from shoal.data.source import Array, ArraySpec
from shoal.data.tokenising import Encoder
from shoal.errors import ShoalError

_BATCH_CHARACTERS: Final = 256 << 10
"""A place lies in a batch, so that at most so much is made into tokens once more."""


class StreamPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a stream goes on.

    Attributes:
        row: So many rows, or pieces of text, come before.
        offset: So many tokens of the batch that begins with this row come before.
    """

    row: int = 0
    offset: int = 0


class Taken(NamedTuple):
    """A sample, and the place behind it."""

    sample: Fields[Array]
    then: StreamPlace


class RowsRead(NamedTuple):
    """So many rows of the stream have been read, those of them that could not be since this was said last."""

    rows: int
    unreadable: tuple[Unreadable, ...]


class SampleStream(ABC):
    """Samples of one kind, from any place on, to the end of the stream.

    Attributes:
        num_classes: Labels are 0..num_classes-1; for text this is the vocabulary.
        classes: What they are called, where they have names.
    """

    fields: Fields[ArraySpec]
    num_classes: int
    classes: tuple[str, ...] = ()

    @abstractmethod
    def take(self, start: StreamPlace) -> Iterator[Taken | RowsRead]:
        """Yield what there is from a place on.

        Raises:
            ConfigError, SampleError: It cannot be read, or a sample is not as it should be.
        """


class TokenStream(SampleStream):
    """The tokens of documents, cut into samples of T that follow one another; the label of each is the next one.

    What is left at the end of the stream, less than a sample and its last label, is left out.
    """

    def __init__(self, documents: Documents, encoder: Encoder, seq_len: int) -> None:
        self._documents = documents
        self._encoder = encoder
        self._seq_len = seq_len
        spec = ArraySpec(encoder.dtype, (seq_len,))
        self.fields = Fields(spec, spec)
        self.num_classes = encoder.vocabulary

    def take(self, start: StreamPlace) -> Iterator[Taken | RowsRead]:
        tokens = np.empty(0, self._encoder.dtype)
        # Where batches begin in `tokens`, and with which row.
        begins: list[int] = []
        rows: list[int] = []
        at = start.offset
        for row, batch in self._batches(start.row):
            encoded = self._encoder.encode(batch.pieces) if batch.pieces else None
            yield RowsRead(batch.stop, (*batch.unreadable, *(encoded.refused if encoded is not None else ())))
            if encoded is None:
                continue
            # Of what has been used, the batch in which the next sample begins is kept.
            if begins:
                begin = begins[at_of(begins, at)]
                rows, begins = rows[at_of(begins, at) :], [each - begin for each in begins[at_of(begins, at) :]]
                tokens, at = tokens[begin:], at - begin
            begins.append(len(tokens))
            rows.append(row)
            tokens = np.concatenate((tokens, encoded.tokens))
            while at + self._seq_len < len(tokens):
                sample = Fields(tokens[at : at + self._seq_len], tokens[at + 1 : at + self._seq_len + 1])
                at += self._seq_len
                found = at_of(begins, at)
                yield Taken(sample, StreamPlace(rows[found], at - begins[found]))

    def _batches(self, start: int) -> Iterator[tuple[int, _TextBatch]]:
        """Yield batches, and with which row each begins."""
        first, batch = start, _TextBatch()
        for row, item in enumerate(self._documents.after(start), start + 1):
            batch.stop = row
            if isinstance(item, Unreadable):
                batch.unreadable.append(item)
                continue
            batch.pieces.append(item)
            batch.size += max(1, item.size)
            if batch.size >= _BATCH_CHARACTERS:
                yield first, batch
                first, batch = row, _TextBatch()
        if batch.stop:
            yield first, batch


@dataclass
class _TextBatch:
    """Rows that are made into tokens together.

    Attributes:
        size: Characters or tokens.
        stop: The row behind the last one; 0: there is none.
    """

    pieces: list[TextPiece] = field(default_factory=list[TextPiece])
    unreadable: list[Unreadable] = field(default_factory=list[Unreadable])
    size: int = 0
    stop: int = 0


def at_of(begins: list[int], at: int) -> int:
    """Return which of the parts that begin there has a place; the last one also has what is behind its end."""
    return bisect_right(begins, at) - 1


@dataclass(eq=False)
class RowStream(SampleStream):
    """A sample in each row.

    Attributes:
        rows: Gives them from the first one on, whenever it is called.
        convert: Makes a sample of a row, of which it is told where it is.
    """

    rows: Callable[[], Iterable[object]]
    convert: Callable[[object, str], Fields[Array]]
    fields: Fields[ArraySpec]
    num_classes: int
    name: str
    classes: tuple[str, ...] = ()

    def take(self, start: StreamPlace) -> Iterator[Taken | RowsRead]:
        for number, row in enumerate(rows_after(self.rows(), self.name, start.row), start.row):
            where = f"{self.name}:{number}"
            try:
                sample = read_patiently(partial(self.convert, row, where), partial(str, where))
            except (ShoalError, MemoryError):
                raise
            except Exception as error:  # noqa: BLE001 - what a decoder raises is its own business
                yield RowsRead(number + 1, (Unreadable(where, f"{type(error).__name__}: {error}"),))
            else:
                yield Taken(sample, StreamPlace(number + 1))
