"""Documents of the Hugging Face hub, and texts that shoal carries."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from shoal.data.documents import Documents, RowReader, TextPiece, Unreadable

_ROWS: Final = 1024


class TableDocuments(Documents):
    """The documents of a table of `datasets`, which lies on this host.

    Args:
        table: A `datasets.Dataset`.
    """

    def __init__(self, table: Any, reader: RowReader, name: str) -> None:
        self._table = table
        self._reader = reader
        self._name = name
        self.identity = f"{name} {' '.join(reader.columns)} {getattr(table, '_fingerprint', '')}"

    def __iter__(self) -> Iterator[TextPiece | Unreadable]:
        total = len(self._table)
        for start in range(0, total, _ROWS):
            rows: Mapping[str, Sequence[object]] = self._table[list(range(start, min(start + _ROWS, total)))]
            names = [column for column in self._reader.columns if column in rows]
            number = start
            for values in zip(*(rows[name] for name in names), strict=True):
                yield self._reader.take(dict(zip(names, values, strict=True)), f"{self._name}:{number}")
                number += 1
            self.share = number / total


class StreamDocuments(Documents):
    """The documents of a data set of the hub, of which only the beginning is fetched.

    Args:
        stream: A `datasets.IterableDataset`.
        version: What the hub calls what it has now.
    """

    share = None

    def __init__(self, stream: Any, reader: RowReader, name: str, version: str) -> None:
        self._stream = stream
        self._reader = reader
        self._name = name
        self.identity = f"{name} {' '.join(reader.columns)} {version}"

    def __iter__(self) -> Iterator[TextPiece | Unreadable]:
        for number, row in enumerate(self._stream):
            yield self._reader.take({self._reader.column: None, **row}, f"{self._name}:{number}")


class TextDocuments(Documents):
    """Texts in memory."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self.identity = hashlib.sha256("\0".join(texts).encode()).hexdigest()

    def __iter__(self) -> Iterator[TextPiece | Unreadable]:
        for text in self._texts:
            yield TextPiece(text)
        self.share = 1.0
