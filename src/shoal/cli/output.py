"""Standard streams that are closed, or that go away while the program runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence

# On a terminal a control character may do anything; a line's end and a tab may stay. What has no width, or turns the
# direction of a line, would show another text than there is.
_UNSEEN = (0xAD, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070), 0xFEFF)
_CONTROLS = {
    code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(0x7F, 0xA0), *_UNSEEN) if chr(code) not in "\n\t"
}
_ESCAPED = {code: f"\\u{code:04x}" for code in _CONTROLS if code >= 32}


def without_controls(text: str) -> str:
    """Return what a terminal may show of a text that somebody else has made."""
    return text.translate(_CONTROLS)


def on_one_line(text: str) -> str:
    """Return what a terminal may show of a text that somebody else has made, as one line."""
    return " ".join(without_controls(text).split())


def plain_json(text: str) -> str:
    """Return JSON as a terminal may show it: what it has in its texts is the same, and written as an escape."""
    return text.translate(_ESCAPED)


def table_lines(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the rows of a table, the first of which are its titles, as lines with aligned columns."""
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def minute_of(moment: str) -> str:
    """Return a moment of `shoal.clock.utc_iso` as a table has it."""
    return moment[:16].replace("T", " ")


def open_closed_streams() -> None:
    """Open descriptors 0 to 2 where the caller has closed them; call it before any other is opened.

    Otherwise a socket would get such a number, and a child process would take it for its standard input or output.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # Takes the lowest number that is free, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def lenient_stdout() -> None:
    """Print a question mark for a character that standard output has no way to write: texts have them from anywhere.

    Otherwise a run, or a command that shows one, would end with an error where the locale is not UTF-8, or where the
    name of a file is none of its characters.
    """
    reconfigure = getattr(sys.stdout, "reconfigure", None)  # what stands there for it may have none
    if reconfigure is not None and sys.stdout.errors == "strict":
        reconfigure(errors="replace")


def flush_stdout() -> None:
    """Write what is still buffered, now that somebody can still say that it cannot be written.

    Raises:
        OSError: standard output takes no more.
    """
    if sys.stdout is not None:  # so it is where the caller has closed it
        sys.stdout.flush()


def takes_output() -> bool:
    """Return whether standard output takes a line, by writing an empty one: a full disk refuses it like any other."""
    try:
        flush_stdout()
        os.write(1, b"\n")
    except OSError:
        return False
    return True


def discard_stdout() -> None:
    """Send what is printed from now on nowhere, because standard output takes no more (`| head`, a full disk).

    The interpreter flushes it once more at its end: there must be somewhere to flush to.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
