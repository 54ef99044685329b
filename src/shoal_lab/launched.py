"""Starts real commands as a user would, and sees from outside what they do: output, log files, processes, leftovers.

Every run gets a tag in its environment, which all its processes inherit, and a runtime directory of its own, so that
other runs on this machine are not mistaken for it. It is looked at from outside only, through /proc and its files.
Those tell nobody when they change: so `until` looks again and again.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from shoal.clock import Deadline, SystemClock
from shoal.errors import InvariantViolation, RunFailed
from shoal.runtime.process_control import kill
from shoal.runtime.process_info import command_line, descendants, has_environment, read_stat, with_environment
from shoal_lab.event_log import EventLog
from shoal_lab.parents_death import end_with_parent

_Value = TypeVar("_Value")

START_S = 300.0
"""A start takes 6 s on an idle machine; the machine may be shared."""
END_S = 300.0
"""For what takes seconds on an idle machine and has to end somehow; it judges nothing."""
_LOOK_S = 0.05
_LOOK_AROUND_S = 0.5
_OUTPUT_CHARACTERS = 2000
"""Of what a run has printed last, in an error."""


def until(holds: Callable[[], _Value | None], within_s: float, what: str) -> _Value:
    """Return the first true value of `holds`.

    Raises:
        RunFailed: there is none in time.
    """
    deadline = Deadline.after(SystemClock(), within_s)
    pause = threading.Event()
    while True:
        value = holds()
        if value:
            return value
        if deadline.expired():
            raise RunFailed(f"{what}: not within {within_s} s")
        pause.wait(_LOOK_S)


@dataclass(eq=False, repr=False)
class Launched:
    """One running command.

    Attributes:
        directory: for its logs, output, cache and temporary files.
        command: what Python runs: a script with its arguments, or a module behind -m.
        runtime_dir: for its sockets; removed in the end.
        prefix: the command that runs Python; empty: none.
        environment: added to this process's.
        cwd: this process's if None.
    """

    directory: Path
    flags: Sequence[str]
    command: Sequence[str] = ("-m", "shoal", "run-local")
    runtime_dir: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="sh", dir="/tmp")))
    prefix: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    cwd: Path | None = None

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.log_root = self.directory / "logs"
        self.temporary_dir = self.directory / "tmp"
        self.temporary_dir.mkdir(exist_ok=True)
        self._output = self.directory / "output.txt"
        self._tag = ("TAG_OF_LAUNCHED_RUN", secrets.token_hex(8))
        self._shm_before, self._tmp_before = _names("/dev/shm"), _names("/tmp")
        self._seen: set[int] = set()
        self._next_look = Deadline.after(SystemClock(), 0.0)
        self._logs: dict[Path, EventLog] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; `close` ends it, also where an interruption comes before it is known which process it is."""
        environment = os.environ | {
            self._tag[0]: self._tag[1],
            "XDG_RUNTIME_DIR": str(self.runtime_dir),
            "XDG_CACHE_HOME": str(self.directory / "cache"),
            "TMPDIR": str(self.temporary_dir),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "160",
            "PYTHONUNBUFFERED": "1",
            **self.environment,
        }
        with self._output.open("wb") as output:
            self._process = self.spawn(environment, output)

    @property
    def arguments(self) -> list[str]:
        """What Python is given."""
        return [*self.command, *self.flags, f"--log-dir={self.log_root}"]

    def spawn(self, environment: Mapping[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start the process, in a session of its own, and return it.

        Args:
            environment: all of it.
            output: gets its output and its errors.

        Raises:
            OSError: the system refuses another process.
        """
        return subprocess.Popen(
            [*self.prefix, sys.executable, *self.arguments],
            cwd=self.cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Whoever observes a run may be killed: then nobody is left to end it.
            preexec_fn=end_with_parent(signal.SIGTERM),
        )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The launcher."""
        if self._process is None:
            raise InvariantViolation("the command has not been started")
        return self._process

    def require_running(self) -> None:
        """Go on only while it runs.

        Raises:
            RunFailed: it has ended.
        """
        if (code := self.process.poll()) is not None:
            raise RunFailed(f"the run has ended with exit code {code}:\n{self.output[-_OUTPUT_CHARACTERS:]}")

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._output.read_text()

    @property
    def log_dir(self) -> Path | None:
        """The run's own directory, once there is one; the newest, where the same folder has those of earlier runs."""
        # Their names begin with the time.
        return max((path for path in self.log_root.glob("*-*") if not path.is_symlink()), default=None)

    def require_log_dir(self) -> Path:
        """Return the run's own directory.

        Raises:
            RunFailed: there is none.
        """
        if (found := self.log_dir) is None:
            raise RunFailed(f"the run has no log folder:\n{self.output[-_OUTPUT_CHARACTERS:]}")
        return found

    def log(self, process: str) -> EventLog:
        """Return the log of a role in the run's own directory, which there has to be."""
        path = self.require_log_dir() / f"{process}.log"
        return self._logs.setdefault(path, EventLog(path))

    def events(self, process: str, name: str) -> list[dict[str, Any]]:
        """Return the log lines of a role that carry this event; none while there is no such log."""
        return [] if self.log_dir is None else self.log(process).named(name)

    def saw(self, process: str, name: str, within_s: float = START_S, **fields: object) -> dict[str, Any]:
        """Wait for an event with these fields."""

        def found() -> list[dict[str, Any]]:
            # Of whoever comes and goes meanwhile something may be left; to look is dear.
            if self._next_look.expired():
                self.processes()
                self._next_look = Deadline.after(SystemClock(), _LOOK_AROUND_S)
            if not self._matching(process, name, fields):
                self.require_running()
            return self._matching(process, name, fields)

        return until(found, within_s, f"{process}: {name} {fields}")[0]

    def _matching(self, process: str, name: str, fields: dict[str, object]) -> list[dict[str, Any]]:
        events = self.events(process, name)
        return [event for event in events if all(event.get(key) == value for key, value in fields.items())]

    def processes(self) -> set[int]:
        """Return the living processes of the run: whoever carries its tag, and whoever descends from the launcher."""
        tagged = set(with_environment("=".join(self._tag)))
        if self._process is not None:
            tagged |= {stat.pid for stat in descendants(self._process.pid) if stat.state != "Z"}
        self._seen |= tagged
        return tagged - {os.getpid()}

    def pid_of(self, role: str) -> int:
        """Return the process that was started last for a role such as "server:1"."""
        return self._matching("launcher", "role.started", {"role": role})[-1]["pid"]

    def living_pid_of(self, role: str) -> int:
        """Return the same if that process lives; its number may be somebody else's by now.

        Raises:
            ProcessLookupError: it does not.
        """
        pid = self.pid_of(role)
        if not has_environment(pid, "=".join(self._tag)):
            raise ProcessLookupError(f"{role} does not run")
        return pid

    def fork_server(self) -> int:
        """Return the process that forks the next role: the parent of the last one, unless it has died since.

        Raises:
            ProcessLookupError: it has, and the next one is not there yet: then the launcher is the parent.
        """
        restarted = self.events("launcher", "fork_server.restarted")
        if restarted:
            return restarted[-1]["pid"]
        stat = read_stat(self.events("launcher", "role.started")[-1]["pid"])
        if stat is None or stat.parent_pid == self.process.pid:
            raise ProcessLookupError("there is no fork server now")
        return stat.parent_pid

    def interrupt(self) -> None:
        """Press Ctrl-C: the terminal signals the launcher's process group, which is the launcher alone."""
        self.processes()
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        """Send SIGKILL to the launcher alone."""
        self.processes()
        self.process.kill()

    def lose_host(self) -> None:
        """Kill every process of the run at once, as when its machine is gone."""
        until(self._all_killed, END_S, "the end of what was killed")
        self.process.wait()

    def ends(self, within_s: float) -> int:
        """Wait for the launcher to end and return its exit code.

        Raises:
            RunFailed: it has not ended in time.
        """
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired as error:
            raise RunFailed(f"the run has not ended within {within_s} s") from error

    def leftovers(self, within_s: float = END_S) -> list[str]:
        """Wait until nothing of the run is left, and return what still is after that time."""

        def left() -> list[str]:
            processes = [f"process {pid} {' '.join(command_line(pid))}" for pid in self.processes()]
            sockets = [str(path) for path in self.runtime_dir.glob("shoal-*/*") if path.is_dir()]
            # Other programs may use shared memory meanwhile; ours have our name or the number of a process of the run.
            pids = {str(pid) for pid in self._seen}
            shared = [n for n in _names("/dev/shm") - self._shm_before if "shoal" in n or _numbers(n) & pids]
            # The run was told to put its temporary files elsewhere; not every program listens.
            files = [str(path) for path in self.temporary_dir.rglob("*") if not path.is_dir()]
            files += [name for name in _names("/tmp") - self._tmp_before if _numbers(name) & pids]
            return [*processes, *sockets, *shared, *files]

        deadline = Deadline.after(SystemClock(), within_s)
        while found := left():
            if deadline.expired():
                return found
            threading.Event().wait(_LOOK_S)
        return []

    def leaves_nothing(self, within_s: float = END_S) -> None:
        """Wait until nothing of the run is left.

        Raises:
            RunFailed: something still is; it says what.
        """
        if found := self.leftovers(within_s):
            raise RunFailed(f"left after {within_s} s: {found}\n{self.output}")

    def summary(self) -> dict[str, Any]:
        """Return the run's summary.json."""
        return json.loads((self.require_log_dir() / "summary.json").read_text())

    def close(self) -> None:
        """End whatever a failed test, or an interrupted measurement, has left running."""
        until(self._all_killed, END_S, "the end of what was killed")
        if self._process is not None:
            self._process.wait()
        shutil.rmtree(self.runtime_dir, ignore_errors=True)

    def _all_killed(self) -> bool:
        """Kill what is left, also what was being forked at the last look; returns whether nothing was."""
        processes = self.processes()
        for pid in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP)  # nobody notices that the others are gone
        for pid in processes:
            kill(pid)
        return not processes


@contextlib.contextmanager
def launched(directory: Path, *flags: str, **options: Any) -> Generator[Launched]:
    """Start a command with these flags, `shoal run-local` by default, and leave nothing of it, whatever happens."""
    run = Launched(directory, flags, **options)
    try:
        run.start()
        yield run
    finally:
        run.close()


def _names(directory: str) -> set[str]:
    return {path.name for path in Path(directory).iterdir()}


def _numbers(name: str) -> set[str]:
    return set("".join(c if c.isdigit() else " " for c in name).split())
