"""On a host: starts, ends and looks at its units. `python -m shoal.cli.remote.unit` takes a `Request` from standard
input, prints `Units` and is gone.

A unit has a folder, `~/.local/share/shoal/units/<name>`, with what it was started as (`unit.json`), its output
(`output.log`) and whatever it writes; its logs among them. It is a session of its own, which no terminal's end reaches,
or a service of the user's systemd.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Final

import anyio
import msgspec

import shoal
from shoal.cli.remote.probe import INSTALLED, NOTE, UNITS
from shoal.cli.remote.unit_messages import (
    AwaitPeers,
    LookAtUnits,
    Request,
    StartUnit,
    StopUnits,
    Unit,
    Units,
    UnitState,
)
from shoal.cli.remote.unit_starts import OUTPUT, service_name, start_service, start_session, systemctl
from shoal.clock import Deadline, SystemClock
from shoal.errors import MALFORMED, ConfigError
from shoal.file_thread import always_answers
from shoal.runtime.durable_files import put_whole
from shoal.runtime.process_info import read_stat

UNITS_DIR: Final = Path("~") / UNITS
INSTALLATIONS_DIR: Final = Path("~") / INSTALLED
_CODE: Final = "exit_code"
_LOOK_S: Final = 0.1
_BEGINS_S: Final = 1.0
"""So long after a start a program may not have begun."""
_TAIL_BYTES: Final = 64 * 1024
_clock = SystemClock()


class _Note(msgspec.Struct, frozen=True):
    """What a unit was started as, and where.

    Attributes:
        pid: of its session's first process; 0: systemd knows.
        started_s: tells that process from another one which has its number.
        host: empty: an earlier version does not say it.
    """

    unit: Unit
    since_unix_s: float
    pid: int
    started_s: float
    host: str = ""


async def answer(request: Request) -> Units:
    """Do what is asked.

    Raises:
        ConfigError: the unit cannot be started; the message is one for a person.
        OSError: nor can its folder be written.
    """
    match request:
        case StartUnit():
            return await _start(request)
        case StopUnits():
            return await _stop(request)
        case AwaitPeers():
            return await _await_peers(request)
        case LookAtUnits():
            units = tuple(_state(name, request.num_lines) for name in request.names or _all_names())
            return Units(units, version=shoal.__version__)


async def _start(request: StartUnit) -> Units:
    unit, note = request.unit, _note_of(request.unit.name)
    verb = "started"
    if note is not None and _is_running(note):
        if note.unit == unit:
            return Units((_state(unit.name, 1),))
        if not request.replaces:
            return Units((_state(unit.name, 1),), differs=True)
        await _end([unit.name], patience_s=20.0)
        verb = "started anew"
    folder = _folder(unit.name)
    if note is not None and note.host not in ("", platform.node()) and not always_answers(folder / NOTE):
        raise ConfigError(
            f"{folder} is that of {note.host}, which has the same home folder: what runs there would not be known any "
            f"more. Give each host a home of its own, or remove {folder / NOTE} if nothing runs there"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, text in unit.files.items():
        put_whole(folder / name, text.encode(), lasting=False)
    (folder / _CODE).unlink(missing_ok=True)
    since_unix_s = _clock.unix_s()
    pid = 0
    if request.by_systemd:
        start_service(unit, folder, request.this_time)
    else:
        pid = start_session((*unit.argv, *request.this_time), folder)
    stat = read_stat(pid) if pid else None
    started_s = 0.0 if stat is None else stat.started_s
    new = _Note(unit, since_unix_s, pid, started_s, platform.node())
    put_whole(folder / NOTE, msgspec.json.encode(new), lasting=False, private=True)
    _remove_unused_installations()
    return Units((_state(unit.name, 1),), changed=verb)


def _remove_unused_installations() -> None:
    """Remove what earlier versions have left beside the installation that this runs in, but for what units have."""
    own = Path(sys.prefix)
    if own.parent != INSTALLATIONS_DIR.expanduser():
        return
    notes = [note for name in _all_names() if (note := _note_of(name)) is not None]
    used = {own, *(Path(note.unit.argv[0]).parent.parent for note in notes)}
    # One that is not whole is just being made.
    for other in (path.parent for path in own.parent.glob("*/whole")):
        if other not in used:
            shutil.rmtree(other, ignore_errors=True)


async def _stop(request: StopUnits) -> Units:
    names = request.names or tuple(_all_names())
    was_running = [name for name in names if (note := _note_of(name)) is not None and _is_running(note)]
    killed = await _end(was_running, request.patience_s)
    words = [f"{name} was killed: it did not end" if name in killed else f"{name} has ended" for name in was_running]
    return Units(tuple(_state(name, 1) for name in names), changed="; ".join(words))


async def _end(names: Sequence[str], patience_s: float) -> list[str]:
    """End units, and return those that did not of themselves."""
    notes = {name: note for name in names if (note := _note_of(name)) is not None}
    for name, note in notes.items():
        if not note.pid:
            if note.unit.is_lasting:
                systemctl("disable", service_name(name))
            systemctl("stop", "--no-block", service_name(name))
    # What a shell has forked and is about to run hears of no interrupt; and who has only begun has nothing to lose.
    while young := [note for note in notes.values() if _is_young(note) and _is_running(note)]:
        for note in young:
            _signal(note, signal.SIGINT)
        await _clock.sleep_s(_LOOK_S)
    for _ in range(2):  # as who presses Ctrl-C a second time
        for note in notes.values():
            _signal(note, signal.SIGINT)
        await _wait(lambda: not any(map(_is_running, notes.values())), patience_s)
    late = [name for name, note in notes.items() if _is_running(note)]
    for name in late:
        _signal(notes[name], signal.SIGKILL)
        if not notes[name].pid:
            systemctl("kill", "--signal=SIGKILL", service_name(name))
    await _wait(lambda: not any(map(_is_running, notes.values())), patience_s)
    return late


def _is_young(note: _Note) -> bool:
    return bool(note.pid) and 0 <= _clock.unix_s() - note.since_unix_s < _BEGINS_S


def _signal(note: _Note, number: signal.Signals) -> None:
    if note.pid and _is_running(note):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(note.pid, number)


async def _await_peers(request: AwaitPeers) -> Units:
    note = _note_of(request.name)
    if note is None:
        raise ConfigError(f"no unit {request.name} was started here")
    folder = _folder(request.name)

    def is_known() -> bool:
        found = folder.glob("logs/*/initial_peers.txt")
        return any(path.stat().st_mtime >= note.since_unix_s - 1.0 for path in found)

    await _wait(lambda: is_known() or not _is_running(note), request.within_s)
    return Units((_state(request.name, 5),), changed="knows its addresses" if is_known() else "")


def _state(name: str, num_lines: int) -> UnitState:
    note = _note_of(name)
    if note is None:
        return UnitState(name, False, None, 0.0, 0)
    said = _last_lines(_folder(name) / OUTPUT, num_lines)
    is_running = _is_running(note)
    code = None if is_running else _code(note)
    has_given_up = not note.pid and note.unit.is_lasting and _shown(note, "ActiveState") == "failed"
    return UnitState(name, is_running, code, note.since_unix_s, note.pid, said, note.unit.digest(), has_given_up)


def _is_running(note: _Note) -> bool:
    if not note.pid:
        return _shown(note, "ActiveState") in ("active", "activating", "deactivating", "reloading")
    stat = read_stat(note.pid)
    return stat is not None and stat.state != "Z" and stat.started_s == note.started_s


def _code(note: _Note) -> int | None:
    if not note.pid:
        code = _shown(note, "ExecMainStatus")
        return int(code) if code.isdecimal() else None
    with contextlib.suppress(OSError, ValueError):
        return int((_folder(note.unit.name) / _CODE).read_text())
    return None


def _shown(note: _Note, name: str) -> str:
    return systemctl("show", f"--property={name}", "--value", service_name(note.unit.name)).strip()


def _last_lines(path: Path, number: int) -> tuple[str, ...]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return tuple(file.read().decode(errors="replace").splitlines()[-number:])
    except OSError:
        return ()


def _note_of(name: str) -> _Note | None:
    try:
        return msgspec.json.decode((_folder(name) / NOTE).read_bytes(), type=_Note)
    except FileNotFoundError:
        return None
    except MALFORMED as error:
        raise ConfigError(f"{_folder(name) / NOTE} is of another version: end what runs there and remove it") from error


def _all_names() -> list[str]:
    return sorted(path.parent.name for path in UNITS_DIR.expanduser().glob(f"*/{NOTE}"))


def _folder(name: str) -> Path:
    return UNITS_DIR.expanduser() / name


async def _wait(is_so: Callable[[], bool], within_s: float) -> None:
    deadline = Deadline.after(_clock, within_s)
    while not is_so() and not deadline.expired():
        await _clock.sleep_s(_LOOK_S)


@contextlib.contextmanager
def _locked(request: Request) -> Generator[None]:
    """Let one at a time change units: another operator may be at it."""
    if isinstance(request, LookAtUnits | AwaitPeers):
        yield
        return
    directory = UNITS_DIR.expanduser()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (directory / "lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Answer one request; return 1, with a line on standard error, if it cannot be done."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    os.umask(0o077)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with _locked(request):
            units = anyio.run(answer, request)
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(units))
    return 0


if __name__ == "__main__":
    sys.exit(main())
