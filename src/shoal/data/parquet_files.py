"""Parquet files, of which a small one may say that it unpacks to a large one."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from shoal.errors import ConfigError

_MOST_UNPACKED_BYTES: Final = 1 << 30
"""Of a row group; more is taken from a file that has bytes to show for it."""
_MOST_TIMES: Final = 1000
"""What is packed may be so many times as large as its bytes: text is 2 to 20 times, and rows that are all alike 100."""


def open_parquet(path: Path | str, columns: Collection[str] | None = None, content: Any = None) -> Any:
    """Open a file, after what it says of the sizes of its row groups was looked at; nothing is unpacked for that.

    Args:
        path: for messages, and where there is no `content` to be opened.
        columns: those that will be read; None: all.
        content: the file, opened for reading, of which the end alone is read here.

    Returns:
        A `pyarrow.parquet.ParquetFile`.

    Raises:
        ConfigError: pyarrow is not installed, it is no such file, or it unpacks to what no such file holds.
    """
    try:
        package = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(f"{path}: to read parquet needs the package pyarrow: pip install 'shoal[hf]'") from error
    try:
        file: Any = package.ParquetFile(path if content is None else content)
    except Exception as error:
        raise ConfigError(f"{path} is no parquet file ({error}); mend it or leave it out") from error
    try:
        _require_small(path, file.metadata, columns)
    except BaseException:  # whatever it is: nobody else has the file
        file.close()
        raise
    return file


def _require_small(path: Path | str, metadata: Any, columns: Collection[str] | None) -> None:
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        parts = [group.column(each) for each in range(group.num_columns)]
        read = [part for part in parts if columns is None or part.path_in_schema.partition(".")[0] in columns]
        unpacked = sum(abs(part.total_uncompressed_size) for part in read)
        packed = sum(max(0, part.total_compressed_size) for part in read)
        if unpacked > max(_MOST_UNPACKED_BYTES, _MOST_TIMES * packed):
            raise ConfigError(
                f"{path}: row group {number} unpacks from {packed} bytes to {unpacked}, more than {_MOST_TIMES} times "
                "as many, and is not read; leave the file out, or write it anew in smaller row groups if it is yours"
            )
