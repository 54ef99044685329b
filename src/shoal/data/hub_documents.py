"""Documents of the Hugging Face hub, and texts that shoal carries."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

from shoal.data.documents import Documents, RowReader, TextPiece, Unreadable
from shoal.data.rows import rows_after

_ROWS: Final = 1024


class TableDocuments(Documents):
    """The documents of a table of `datasets`, which lies on this host.

    Args:
        table: A `datasets.Dataset`.
    """

    def __init__(self, table: Any, reader: RowReader, name: str) -> None:
        self._table = table.select_columns(reader.columns_among(table.column_names))
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
    """The documents of rows that are fetched as they are read.

    Args:
        rows: Gives them from the first one on, whenever it is called, as a `datasets.IterableDataset`.
        version: What the hub calls what it has now.
    """

    share = None

    def __init__(self, rows: Callable[[], Iterable[object]], reader: RowReader, name: str, version: str = "") -> None:
        self._rows = rows
        self._reader = reader
        self._name = name
        self.identity = f"{name} {' '.join(reader.columns)} {version}"

    def __iter__(self) -> Iterator[TextPiece | Unreadable]:
        return self.after(0)

    def after(self, rows: int) -> Iterator[TextPiece | Unreadable]:
        for number, row in enumerate(rows_after(self._rows(), self._name, rows), rows):
            where = f"{self._name}:{number}"
            named = cast("Mapping[str, Any]", row) if isinstance(row, Mapping) else {self._reader.column: row}
            yield self._reader.take({self._reader.column: None, **named}, where)


class TextDocuments(Documents):
    """Texts in memory."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self.identity = hashlib.sha256("\0".join(texts).encode()).hexdigest()

    def __iter__(self) -> Iterator[TextPiece | Unreadable]:
        for text in self._texts:
            yield TextPiece(text)
        self.share = 1.0
