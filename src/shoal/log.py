"""Logging of a process: JSON lines in a file of bounded size, one readable line on a terminal.

Call sites write `logger.info("round.decided", extra={"round": 3})`: the message is the name of an event, the fields are
its values. Both outputs show the same events.
"""

from __future__ import annotations

import json
import logging
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TextIO

from shoal.clock import utc_iso

MAX_FILE_BYTES = 8 * 2**20
NUM_OLD_FILES = 2

# What every record carries by itself; everything else was given as a field.
_OWN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_COLOURS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[31;1m"}
_NO_COLOUR = "\x1b[0m"


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields that the call gave with `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _OWN_ATTRIBUTES}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, process, logger, event, then the fields."""

    def __init__(self, process: str) -> None:
        """Name the process, e.g. `server_0`."""
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        line: dict[str, Any] = {
            "time": utc_iso(record.created),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "event": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        # A field may be any object: its text is better than a lost line.
        return json.dumps(line, default=str, ensure_ascii=False)


class TerminalFormatter(logging.Formatter):
    """`12:00:03 WARNING server_0 peer.lost peer=12D3... reason=closed`, coloured where the terminal shows colours."""

    def __init__(self, process: str, *, coloured: bool) -> None:
        """Name the process and say whether escape codes may be written."""
        super().__init__()
        self._process = process
        self._coloured = coloured

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text; a traceback follows on lines of its own."""
        fields = "".join(f" {name}={value}" for name, value in fields_of(record).items())
        clock = utc_iso(record.created)[11:19]
        text = f"{clock} {record.levelname} {self._process} {record.getMessage()}{fields}"
        colour = _COLOURS.get(record.levelno)
        if self._coloured and colour is not None:
            text = f"{colour}{text}{_NO_COLOUR}"
        return text + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at that moment, so that a live display which replaces it stays whole."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure(process: str, log_dir: Path | None, level: int | str = logging.INFO, *, terminal: bool = False) -> None:
    """Set up logging for this process; what was set up before is closed and replaced.

    Args:
        process: `<role>_<n>`; the file is `log_dir/<process>.log`.
        log_dir: folder of the run's logs, made if it is missing; None writes no file.
        level: the least severe level of shoal's own events; other libraries show warnings and worse.
        terminal: whether to write to standard error as well.
    """
    handlers: list[logging.Handler] = []
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
        path = log_dir / f"{process}.log"
        file = RotatingFileHandler(path, maxBytes=MAX_FILE_BYTES, backupCount=NUM_OLD_FILES, encoding="utf-8")
        file.setFormatter(JsonFormatter(process))
        handlers.append(file)
    if terminal:
        stderr = _StderrHandler()
        stderr.setFormatter(TerminalFormatter(process, coloured=sys.stderr.isatty()))
        handlers.append(stderr)
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    for handler in handlers or [logging.NullHandler()]:
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("shoal").setLevel(level)
    logging.captureWarnings(True)
