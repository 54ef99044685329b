"""Documents of the Hugging Face hub, and texts that shoal carries."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

from shoal.data.documents import Documents, TextPiece, Unreadable, pieces_of

_ROWS: Final = 1024


class TableDocuments(Documents):
    """The documents of a table of `datasets`, which lies on this host.

    Args:
        table: A `datasets.Dataset`.
    """

    def __init__(self, table: Any, column: str, name: str) -> None:
        self._table = table
        self._column = column
        self._name = name
        self.identity = f"{name} {column} {getattr(table, '_fingerprint', '')}"

    def __iter__(self) -> Iterator[TextPiece | Unreadable]:
        total = len(self._table)
        for start in range(0, total, _ROWS):
            rows: Sequence[object] = self._table[list(range(start, min(start + _ROWS, total)))][self._column]
            for number, value in enumerate(rows, start):
                yield pieces_of(value, f"{self._name}:{number}")
            self.share = (start + len(rows)) / total


class StreamDocuments(Documents):
    """The documents of a data set of the hub, of which only the beginning is fetched.

    Args:
        stream: A `datasets.IterableDataset`.
        version: What the hub calls what it has now.
    """

    share = None

    def __init__(self, stream: Any, column: str, name: str, version: str) -> None:
        self._stream = stream
        self._column = column
        self._name = name
        self.identity = f"{name} {column} {version}"

    def __iter__(self) -> Iterator[TextPiece | Unreadable]:
        for number, row in enumerate(self._stream):
            yield pieces_of(row.get(self._column), f"{self._name}:{number}")


class TextDocuments(Documents):
    """Texts in memory."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self.identity = hashlib.sha256("\0".join(texts).encode()).hexdigest()

    def __iter__(self) -> Iterator[TextPiece | Unreadable]:
        for text in self._texts:
            yield TextPiece(text)
        self.share = 1.0
