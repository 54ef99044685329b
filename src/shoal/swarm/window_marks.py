"""What tells the windows of a stream that a run has trained on from those that another host reads later.

marks    | the stream: what is held out | window 0 | window 1 | ...        eight bytes each
           '------- each is of a SHA-256 of all up to it -------'

A mark is the beginning of what the stream's manifest has for a window (`data.stream_store`), which hashes everything
before that as well. So two readings that differ in one mark differ in all that follow, and the first of these says in
which window. A record has only the marks of windows that were trained on: what else was read has changed no model.
"""

from __future__ import annotations

from typing import Final

_MARK_BYTES: Final = 8

MAX_WINDOWS: Final = (1 << 17) - 1
"""Of more windows of a run, those behind these have no marks: a record has a bound."""


def mark_of(chain: str) -> bytes:
    """Return the mark of what was read up to somewhere, of which this is the SHA-256 (hex)."""
    return bytes.fromhex(chain)[:_MARK_BYTES]


def num_windows(marks: bytes) -> int:
    """Return of how many windows these are."""
    return max(0, len(marks) // _MARK_BYTES - 1)


def up_to(marks: bytes, windows: int) -> bytes:
    """Return the marks of the stream and its first windows; nothing of no window."""
    return marks[: (min(windows, MAX_WINDOWS) + 1) * _MARK_BYTES] if windows else b""


def first_difference(one: bytes, other: bytes) -> int | None:
    """Return the first window in which two readings differ, as far as both go.

    Returns:
        -1: they differ before the first window; None: nowhere.
    """
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return None
    # The last bytes differ if any do, so this finds one.
    differ = (at for at in range(0, length, _MARK_BYTES) if one[at : at + _MARK_BYTES] != other[at : at + _MARK_BYTES])
    return next(differ) // _MARK_BYTES - 1


def longer(recorded: bytes, read: bytes) -> bytes:
    """Return the marks of a reading that goes on from what is recorded; else, or where it is not so far, these."""
    return read if read.startswith(recorded) else recorded
