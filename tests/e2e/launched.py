"""Starts the real scripts as a user would, and sees from outside what they do: output, log files, processes, leftovers.

Every run gets a tag in its environment, which all its processes inherit, and a runtime directory of its own, so that
other runs on this machine are not mistaken for it.
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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.runtime.process_info import descendants, has_environment, read_stat

ROOT = Path(__file__).parents[2]
SMALL = (
    "--no-wandb",
    "--model.hidden-size=48",
    "--data.seq-len=64",
    "--data.holdout-fraction=0.02",
    "--diloco.inner-steps=4",
    "--diloco.outer-steps=2",
    "--diloco.batch-size-per-step=4",
)
ENDLESS = (*SMALL, "--diloco.outer-steps=10000")
START_S = 90.0
"""A start takes 6 s on an idle machine; the tests' machine is shared."""
END_S = 90.0
"""For what takes seconds on an idle machine and has to end somehow; it judges nothing."""
ALL_GONE_S = 5.0
"""The promise: how long after Ctrl-C, or a kill of the launcher, something of a run may be left."""


def until(holds: Callable[[], Any], within_s: float, what: str) -> Any:
    """Return the first true value of `holds`; fails the test if there is none in time."""
    deadline_s = time.monotonic() + within_s
    pause = threading.Event()
    while True:
        value = holds()
        if value:
            return value
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{what}: not within {within_s} s")
        pause.wait(0.02)


@dataclass(eq=False)
class Launched:
    """One running script."""

    directory: Path
    flags: Sequence[str]
    command: Sequence[str] = ("run_local.py",)
    runtime_dir: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="sh", dir="/tmp")))
    prefix: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.log_root = self.directory / "logs"
        self.temporary_dir = self.directory / "tmp"
        self.temporary_dir.mkdir(exist_ok=True)
        self._output = self.directory / "output.txt"
        self._name, self._value = "TAG_OF_TEST_RUN", secrets.token_hex(8)
        self._shm_before, self._tmp_before = _names("/dev/shm"), _names("/tmp")
        self._seen: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; `close` ends it, also where an interruption comes before it is known which process it is."""
        environment = os.environ | {
            self._name: self._value,
            "XDG_RUNTIME_DIR": str(self.runtime_dir),
            "XDG_CACHE_HOME": str(self.directory / "cache"),
            "TMPDIR": str(self.temporary_dir),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "160",
            "PYTHONUNBUFFERED": "1",
            **self.environment,
        }
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [*self.prefix, sys.executable, *self.command, *self.flags, f"--log-dir={self.log_root}"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The launcher."""
        assert self._process is not None, "not started"
        return self._process

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._output.read_text()

    @property
    def log_dir(self) -> Path | None:
        """The run's own directory, once there is one."""
        found = [path for path in self.log_root.glob("*-*") if not path.is_symlink()]
        return found[0] if found else None

    def events(self, process: str, name: str) -> list[dict[str, Any]]:
        """Return the log lines of a role that carry this event; none while there is no such log."""
        path = None if self.log_dir is None else self.log_dir / f"{process}.log"
        if path is None or not path.exists():
            return []
        # The last line may be half written.
        lines = path.read_text().rpartition("\n")[0].splitlines()
        return [line for line in map(json.loads, lines) if line["event"] == name]

    def saw(self, process: str, name: str, within_s: float = START_S, **fields: object) -> dict[str, Any]:
        """Wait for an event with these fields."""

        def found() -> list[dict[str, Any]]:
            self.processes()
            assert self.process.poll() is None or self._matching(process, name, fields), self.output
            return self._matching(process, name, fields)

        return until(found, within_s, f"{process}: {name} {fields}")[0]

    def _matching(self, process: str, name: str, fields: dict[str, object]) -> list[dict[str, Any]]:
        events = self.events(process, name)
        return [event for event in events if all(event.get(key) == value for key, value in fields.items())]

    def processes(self) -> set[int]:
        """Return the living processes of the run: whoever carries its tag, and whoever descends from the launcher."""
        entry = f"{self._name}={self._value}"
        tagged = {pid for pid in _pids() if has_environment(pid, entry)}
        if self._process is not None:
            tagged |= {stat.pid for stat in descendants(self._process.pid) if stat.state != "Z"}
        self._seen |= tagged
        return tagged - {os.getpid()}

    def pid_of(self, role: str) -> int:
        """Return the process that was started last for a role such as "server:1"."""
        return self._matching("launcher", "role.started", {"role": role})[-1]["pid"]

    def fork_server(self) -> int:
        """Return the process that forks the next role: the parent of the last one, unless it has died since."""
        restarted = self.events("launcher", "fork_server.restarted")
        if restarted:
            return restarted[-1]["pid"]
        stat = read_stat(self.events("launcher", "role.started")[-1]["pid"])
        assert stat is not None
        return stat.parent_pid

    def interrupt(self) -> None:
        """Press Ctrl-C: the terminal signals the launcher's process group, which is the launcher alone."""
        self.processes()
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        """Send SIGKILL to the launcher alone."""
        self.processes()
        self.process.kill()

    def ends(self, within_s: float) -> int:
        """Wait for the launcher to end and return its exit code."""
        return self.process.wait(within_s)

    def leaves_nothing(self, within_s: float = ALL_GONE_S) -> None:
        """Wait until nothing of the run is left; fails the test, and says what is, if that takes longer."""

        def left() -> list[str]:
            processes = [f"process {pid} {_command_of(pid)}" for pid in self.processes()]
            sockets = [str(path) for path in self.runtime_dir.glob("shoal-*/*") if path.is_dir()]
            # Other programs may use shared memory meanwhile; ours have our name or the number of a process of the run.
            pids = {str(pid) for pid in self._seen}
            shared = [n for n in _names("/dev/shm") - self._shm_before if "shoal" in n or _numbers(n) & pids]
            # The run was told to put its temporary files elsewhere; not every program listens.
            files = [str(path) for path in self.temporary_dir.rglob("*") if not path.is_dir()]
            files += [name for name in _names("/tmp") - self._tmp_before if _numbers(name) & pids]
            return [*processes, *sockets, *shared, *files]

        deadline_s = time.monotonic() + within_s
        while found := left():
            assert time.monotonic() < deadline_s, f"left after {within_s} s: {found}\n{self.output}"
            threading.Event().wait(0.02)

    def summary(self) -> dict[str, Any]:
        """Return the run's summary.json."""
        assert self.log_dir is not None
        return json.loads((self.log_dir / "summary.json").read_text())

    def close(self) -> None:
        """End whatever a failed test, or an interrupted benchmark, has left running."""
        until(self._all_killed, END_S, "the end of what was killed")
        if self._process is not None:
            self._process.wait()
        shutil.rmtree(self.runtime_dir, ignore_errors=True)

    def _all_killed(self) -> bool:
        """Kill what is left, also what was being forked at the last look; returns whether nothing was."""
        processes = self.processes()
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not processes


@contextlib.contextmanager
def launched(directory: Path, *flags: str, **options: Any) -> Iterator[Launched]:
    """Start `run_local.py` with these flags, and leave nothing of it, however the test ends."""
    run = Launched(directory, flags, **options)
    try:
        run.start()
        yield run
    finally:
        run.close()


def completed(directory: Path, *flags: str, within_s: float = 150.0) -> Launched:
    """Run `run_local.py` to its end, which has to be a good one."""
    with launched(directory, *flags) as run:
        code = run.ends(within_s)
        assert code == 0, run.output
        run.leaves_nothing()
        return run


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return "gone"


def _names(directory: str) -> set[str]:
    return {path.name for path in Path(directory).iterdir()}


def _numbers(name: str) -> set[str]:
    return set("".join(c if c.isdigit() else " " for c in name).split())
