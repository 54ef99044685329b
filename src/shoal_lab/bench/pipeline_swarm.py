"""A swarm that the benchmark `pipeline` measures: started as a user starts it, trained in bursts of a few steps.

    launcher -> all roles         between bursts the data server is held (SIGSTOP): the trainer gets no batch, and
       ^                          everyone waits as for slow data, with nothing begun
       '-- burst: the data server goes on; its log tells the end of each step; then it is held again

Nothing else is stopped, and nothing at all while steps run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from shoal.clock import SystemClock
from shoal.errors import RemoteError
from shoal.runtime.process_info import command_line, cpu_s, descendants, thread_cpu_s
from shoal_lab.bench.peer import Calls, Seat
from shoal_lab.event_log import logged_below, time_of

_TIMEOUT_S = 90.0
_LOOK_S = 0.1
_STILL_S = 0.25
"""So long no server has computed anything when all steps are over: longer than anything between two operations."""
_GRACE_S = 10.0
_WARMUP_STEPS = 1
"""At least: the one after it has begun by then."""

# A held data server must not be taken for a dead one.
_HELD = ("--health.deadline-s=1000000",)
_SWARM = ("--servers.replicas=1", "--wandb=false", "--log-level=debug")


@contextmanager
def main(seat: Seat) -> Generator[Calls, None, None]:
    """Start a swarm with the flags in `seat`, and offer bursts of it."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        flags = [*seat.arguments["flags"], *_SWARM, *_HELD, f"--log-dir={folder}"]
        launcher = subprocess.Popen(
            [sys.executable, "-m", "shoal", "run-local", *flags], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        swarm = BenchmarkSwarm(launcher, Path(folder))

        def burst(num_steps: int) -> dict[str, Any]:
            return anyio.run(swarm.burst, num_steps)

        try:
            anyio.run(swarm.start)
            yield {"burst": burst}
        finally:
            swarm.end()


@dataclass(frozen=True, slots=True)
class _CpuUsage:
    """CPU seconds up to now: of all processes, and of the busiest thread of each server, which is the device's."""

    all_s: float
    device_s: dict[int, float]


class BenchmarkSwarm:
    """A running launcher with all that it has started."""

    def __init__(self, launcher: subprocess.Popen[bytes], log_root: Path) -> None:
        """Take over a launcher that has just been started and logs below `log_root`."""
        self._launcher = launcher
        self._log_root = log_root
        self._clock = SystemClock()
        self._data_server = -1
        self._servers: dict[int, int] = {}

    async def start(self) -> None:
        """Return when the first steps are done and the data server is held.

        Raises:
            RemoteError: the launcher has ended.
        """
        with anyio.fail_after(_TIMEOUT_S):
            await self._until(lambda: len(self._steps()) >= _WARMUP_STEPS)
            titles = {stat.pid: command_line(stat.pid) for stat in descendants(self._launcher.pid)}
            roles = {title[0].removeprefix("shoal:"): pid for pid, title in titles.items() if title}
            self._data_server = roles["data_server:0"]
            self._servers = {
                event["stage"]: roles[event["process"].replace("_", ":")]
                for event in logged_below(self._log_root, "server_*.log")
                if event["event"] == "server.ready"
            }
            self._hold(True)
            await self._still()

    async def burst(self, num_steps: int) -> dict[str, Any]:
        """Train some steps.

        Returns:
            "step_s", the mean seconds of a step; "num_steps" of this burst and "steps" since the start; "cpu_s", the
            CPU seconds of all processes, and "device_s", those of each stage's device thread, in the burst.
        """
        with anyio.fail_after(_TIMEOUT_S):
            before, begun = self._usage(), len(self._steps())
            begun_unix_s = self._clock.unix_s()
            self._hold(False)
            # The last step has its batch when the one before it is over.
            await self._until(lambda: len(self._steps()) >= begun + num_steps - 1)
            self._hold(True)
            after = await self._usage_after(begun + num_steps)
            await self._still()
        steps = self._steps()
        ends_unix_s = steps[begun:]
        return {
            # The trainer has waited for its batch, so the first step begins at once; each next one when that has ended.
            "step_s": (ends_unix_s[-1] - begun_unix_s) / len(ends_unix_s),
            "num_steps": len(ends_unix_s),
            "steps": len(steps),
            "cpu_s": after.all_s - before.all_s,
            "device_s": [after.device_s[stage] - before.device_s[stage] for stage in sorted(self._servers)],
        }

    def end(self) -> None:
        """End the launcher, and with it everything."""
        self._hold(False)
        self._launcher.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(_GRACE_S)
        self._launcher.kill()
        self._launcher.wait()

    def _hold(self, held: bool) -> None:
        if self._data_server >= 0:
            with suppress(ProcessLookupError):
                os.kill(self._data_server, signal.SIGSTOP if held else signal.SIGCONT)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._launcher.poll() is not None:
                raise RemoteError(f"the swarm has ended early, with exit code {self._launcher.returncode}")
            await self._clock.sleep_s(_LOOK_S)

    async def _usage_after(self, num_steps: int) -> _CpuUsage:
        """Return what was used when so many steps are done, or none is under way: the last batch may be held."""
        async with anyio.create_task_group() as tasks:

            async def end_when_still() -> None:
                await self._still()
                tasks.cancel_scope.cancel()

            tasks.start_soon(end_when_still)
            await self._until(lambda: len(self._steps()) >= num_steps)
            tasks.cancel_scope.cancel()
        return self._usage()

    async def _still(self) -> None:
        """Return when no server computes any more."""
        last = self._usage().device_s
        while True:
            await self._clock.sleep_s(_STILL_S)
            now = self._usage().device_s
            if now == last:
                return
            last = now

    def _usage(self) -> _CpuUsage:
        pids = [self._launcher.pid, *(stat.pid for stat in descendants(self._launcher.pid))]
        return _CpuUsage(
            all_s=sum(map(cpu_s, pids)),
            device_s={stage: max(thread_cpu_s(pid), default=0.0) for stage, pid in self._servers.items()},
        )

    def _steps(self) -> list[float]:
        """Return when each step up to now was committed, in seconds of the wall clock."""
        return [
            time_of(event)
            for event in logged_below(self._log_root, "trainer_*.log")
            if event["event"] == "step.committed"
        ]
