"""Logging of a process: JSON lines in a file of bounded size, or text on standard error.

Call sites write `emit(logger, RoundRecorded(...))`, see `events.base`: the message is the name of an event, the fields
are its values. Both outputs show the same events.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from shoal.clock import Clock, SystemClock, utc_iso
from shoal.events.base import Event, level_name
from shoal.file_thread import FileThread, number_of, remedy, said_by_disk
from shoal.ids import PeerId

MAX_FILE_BYTES = 8 * 2**20
NUM_OLD_FILES = 2
_MAX_WAITING = 10_000
"""So many lines of a file may wait for its disk."""
_MAX_FOREIGN_CHARACTERS = 1000
_WINDOW_S, _LINES = 10.0, 25  # in a window of time, what strangers can cause writes no more lines than that

# What every record carries by itself; everything else was given as a field.
_OWN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


_name_of: Callable[[PeerId], str] | None = None


def name_peers(name_of: Callable[[PeerId], str] | None) -> None:
    """From now on say, as `who`, what the `peer` of a line is called. None: this process does not know that."""
    global _name_of
    _name_of = name_of


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields that the call gave with `extra`, and `who` beside `peer`; see `name_peers`."""
    fields: dict[str, Any] = {}
    for name, value in vars(record).items():
        if name in _OWN_ATTRIBUTES:
            continue
        fields[name] = value
        # Whoever says themselves who it is knows better.
        if name == "peer" and _name_of is not None and isinstance(value, str) and value:
            fields.setdefault("who", _name_of(PeerId(value)))
    return fields


@dataclass(eq=False, repr=False)
class FloodGate:
    """Logs what strangers can cause, so that none of them fills the log or hides what others do.

    In a window of time each source has a few lines, and all sources together somewhat more. What is left out is counted
    in the next line that is written (`left_out`).

    Attributes:
        lines_of_source: the most for one source in a window.
        lines: for all sources in a window.
    """

    logger: logging.Logger
    clock: Clock = field(default_factory=SystemClock)
    _: KW_ONLY
    window_s: float = _WINDOW_S
    lines_of_source: int = 5
    lines: int = _LINES

    def __post_init__(self) -> None:
        self._began_s = self.clock.now_s()
        self._written: Counter[str] = Counter()  # by source: never more of them than lines
        self._left_out = 0

    def emit(self, event: Event, source: str) -> None:
        """Log an event, if there is still room for one of this source."""
        now_s = self.clock.now_s()
        if now_s - self._began_s >= self.window_s:
            self._began_s, self._written = now_s, Counter()
        if self._written.total() >= self.lines or self._written[source] >= self.lines_of_source:
            self._left_out += 1
            return
        self._written[source] += 1
        fields = event.fields()
        if self._left_out:
            fields["left_out"], self._left_out = self._left_out, 0
        self.logger.log(event.level, event.name, extra=fields)


class _OtherLibraries(logging.Filter):
    """Lets each library but ours write a bounded number of lines, each of bounded length: strangers in the DHT can make
    hivemind warn."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = SystemClock()
        self._began_s = self._clock.now_s()
        self._written: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        library = record.name.partition(".")[0]
        if library == __package__:
            return True
        now_s = self._clock.now_s()
        if now_s - self._began_s >= _WINDOW_S:
            self._began_s, self._written = now_s, Counter()
        self._written[library] += 1
        if self._written[library] > _LINES:
            return False
        # hivemind logs requests as they came; a stranger's may have megabytes.
        record.msg, record.args = record.getMessage()[:_MAX_FOREIGN_CHARACTERS], ()
        return True


def without_nan(value: Any) -> Any:
    """Return the value with null for each number that is not finite: JSON has none."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {name: without_nan(item) for name, item in cast("dict[Any, Any]", value).items()}
        case list() | tuple():
            return [without_nan(item) for item in cast("list[Any]", value)]
        case _:
            return value


def json_line(values: dict[str, Any]) -> str:
    """Return values as one JSON object, without a line break."""
    # A field may be any object: its text is better than a lost line.
    try:
        return json.dumps(values, default=str, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(without_nan(values), default=str, ensure_ascii=False, allow_nan=False)


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
            "level": level_name(record.levelno),
            "process": self._process,
            "logger": record.name,
            "event": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json_line(line)


class TerminalFormatter(logging.Formatter):
    """`12:00:03 WARNING server_0 peer.lost peer=12D3... reason=closed`."""

    def __init__(self, process: str) -> None:
        """Name the process."""
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text; a traceback follows on lines of its own."""
        fields = "".join(f" {name}={value}" for name, value in fields_of(record).items())
        clock = utc_iso(record.created)[11:19]
        text = f"{clock} {level_name(record.levelno)} {self._process} {record.getMessage()}{fields}"
        return text + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


_OF_OTHER_DISKS: Final = frozenset({errno.ESTALE, errno.EIO})
"""What is said of a file whose disk was away, and may be there again by the next line: it has to be opened anew."""


class LinesFile:
    """A file of lines beside the logs: bounded as they are, each line there at once, and no line worth a process.

    Where the disk does not answer, lines wait for it in memory, and those that are too many are lost.

    Attributes:
        failure: why the last line could not be written (`number_of`); what is written until it can is lost. 0: it was.
    """

    def __init__(self, path: Path, *, max_bytes: int | None = None) -> None:
        """Remember the path: the file is opened for its first line, and its folder made if it is missing.

        Args:
            max_bytes: of the file, `MAX_FILE_BYTES` if None; `NUM_OLD_FILES` full ones are kept.
        """
        self._path = path
        self._max_bytes = max_bytes or MAX_FILE_BYTES
        self._thread = FileThread(f"lines of {path.name}", self._say_that_it_hangs, path=path)
        self._descriptor: int | None = None
        self._size_bytes = 0
        self._is_within_line = False
        self.failure = 0

    @property
    def hangs(self) -> bool:
        """Whether lines wait for a disk that does not answer."""
        return self._thread.hangs

    def open(self) -> None:
        """Open the file before its first line, so that it is there without one."""
        self._thread.do(lambda: self._try(self._open))

    def write(self, line: str) -> None:
        """Append a line; where that fails, standard error says so once."""
        if self._thread.num_waiting < _MAX_WAITING:
            content = f"{line}\n".encode(errors="backslashreplace")
            self._thread.do(lambda: self._try(lambda: self._append(content)))

    def close(self) -> None:
        """Close the file; another line opens it again."""
        self._thread.do(lambda: self._try(self._close))
        self._thread.end()

    # -- in the thread

    def _try(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            if not self.failure:
                follows = f"{remedy(error, self._path)}; the run goes on without this log"
                _say_unwritable(self._path, said_by_disk(error, self._path), follows)
            self.failure = number_of(error)
            if error.errno in _OF_OTHER_DISKS:
                with suppress(OSError):
                    self._close()
        else:
            self.failure = 0

    def _append(self, content: bytes) -> None:
        if self._descriptor is not None and self._size_bytes + len(content) > self._max_bytes and self._size_bytes:
            self._close()
            self._keep_full()
        descriptor = self._open()
        left = memoryview(b"\n" + content if self._is_within_line else content)
        while left:
            written = os.write(descriptor, left)
            self._size_bytes += written
            left = left[written:]
            self._is_within_line = bool(left)

    def _open(self) -> int:
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._is_within_line = _ends_within_a_line(self._path)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self._size_bytes = os.fstat(self._descriptor).st_size
        return self._descriptor

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _keep_full(self) -> None:
        for number in range(NUM_OLD_FILES, 0, -1):
            newer = self._path if number == 1 else _old_file(self._path, number - 1)
            with suppress(FileNotFoundError):
                newer.replace(_old_file(self._path, number))

    # --

    def _say_that_it_hangs(self) -> None:
        # Standard error may be a file on the same disk.
        say = partial(_say_unwritable, self._path, "the disk does not answer", "what is written there waits for it")
        with suppress(RuntimeError):  # no thread is left, and nobody is to be kept for that
            threading.Thread(target=say, name=f"said of {self._path.name}", daemon=True).start()


class _FileHandler(logging.Handler):
    """Writes each record as a line of a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.file = LinesFile(path)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - a field may be any object, and no line is worth what it tells of
            self.handleError(record)
        else:
            self.file.write(line)

    def close(self) -> None:
        self.file.close()
        super().close()


def failure() -> int:
    """Return why the log of this process cannot be written (`file_thread.number_of`); 0: it can."""
    files = [handler.file for handler in logging.getLogger().handlers if isinstance(handler, _FileHandler)]
    hangs = errno.ETIMEDOUT if any(file.hangs for file in files) else 0
    return hangs or next((file.failure for file in files if file.failure), 0)


def _ends_within_a_line(path: Path) -> bool:
    """Whether whoever wrote there was killed while it did: the next line would be lost with that half."""
    if not path.is_file():
        return False  # a device, which takes lines as it likes
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        return file.read(1) not in (b"", b"\n")


def old_files(path: Path) -> list[Path]:
    """What a `LinesFile` has kept of earlier lines, the oldest first."""
    numbered = (_old_file(path, number) for number in range(NUM_OLD_FILES, 0, -1))
    return [each for each in numbered if each.exists()]


def _old_file(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def written_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a `LinesFile`, the oldest that it has kept first.

    Raises:
        OSError: they cannot be read.
    """
    with ExitStack() as stack:
        files: list[BinaryIO] = []
        # All are opened before any is read, the newest first: what is renamed meanwhile is met twice, and never missed.
        for each in (path, *reversed(old_files(path))):
            with suppress(FileNotFoundError):
                file = stack.enter_context(each.open("rb"))
                if not any(os.path.sameopenfile(file.fileno(), other.fileno()) for other in files):
                    files.append(file)
        for file in reversed(files):
            yield from file


def _say_unwritable(path: Path, reason: str, follows: str) -> None:
    # Standard error may be a file on the same disk.
    with suppress(OSError):
        sys.stderr.write(f"shoal: cannot write {path} ({reason}): {follows}\n")
        sys.stderr.flush()


def configure(process: str, log_dir: Path | None, level: int | str = logging.INFO, *, terminal: bool = False) -> None:
    """Set up logging for this process. An earlier set-up is closed and replaced.

    Args:
        process: `<role>_<n>`; the file is `log_dir/<process>.log`.
        log_dir: folder of the run's logs, made if it is missing; None writes no file. If a file cannot be written, a
            line on standard error says so and the process goes on; nor does it wait for a disk that does not answer.
        level: the least severe level of shoal's own events, by name in any case or by number; other libraries show
            warnings and worse.
        terminal: also write to standard error.
    """
    handlers: list[logging.Handler] = []
    if log_dir is not None:
        file = _FileHandler(log_dir / f"{process}.log")
        file.setFormatter(JsonFormatter(process))
        file.file.open()
        handlers.append(file)
    if terminal:
        stderr = logging.StreamHandler()
        stderr.setFormatter(TerminalFormatter(process))
        handlers.append(stderr)
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    for handler in handlers or [logging.NullHandler()]:
        handler.addFilter(_OtherLibraries())
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("shoal").setLevel(level.upper() if isinstance(level, str) else level)
    logging.captureWarnings(True)
