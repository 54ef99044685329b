"""Rows that can only be read one after the other, from one of them on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, cast

from shoal.errors import SampleError, ShoalError


def rows_after(rows: Iterable[object], name: str, start: int) -> Iterator[object]:
    """Yield rows from one of them on.

    Raises:
        SampleError: One cannot be read, and so none behind it.
    """
    number = start
    try:
        skip = getattr(rows, "skip", None)
        # What a stream of `datasets` skips it need not decode.
        items = iter(cast("Any", skip(start)) if callable(skip) and start else rows)
        for row in items if callable(skip) else islice(items, start, None):
            yield row
            number += 1
    except (ShoalError, MemoryError):
        raise
    except Exception as error:
        raise SampleError(
            f"row {number} of data.dataset_name = {name} cannot be read, and so none behind it: "
            f"{type(error).__name__}: {error}; --resume goes on there"
        ) from error
