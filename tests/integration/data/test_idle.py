"""A data server that has nothing to do: its process is looked at while a trainer is connected that asks for nothing."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import anyio
import msgspec
import pytest
from tests.integration.data.spec import RUN, hop_of, spec

from shoal.config import Config
from shoal.data.feed import Feed
from shoal.identity import Identity
from shoal.ids import StepKey
from shoal.runtime.launcher_messages import RoleReady, StopRole
from shoal.transport.dispatch import dispatch
from shoal.transport.unix import open_unix_endpoint
from shoal.wire.messages.base import Hop, StepRange
from shoal.wire.messages.feed import PlanRound

LOOK_S = 1.0
NUM_LOOKS = 7
MAX_LOOKS_BEFORE = 60
# Heartbeats of the only connection, four a second: ours and the peer's. Counters that are looked at every two seconds,
# and the turn of the loop that follows a timer.
MAX_WAKEUPS_PER_S = 16
MAX_CPU_SHARE = 0.02


@contextmanager
def data_server(start: bytes) -> Iterator[tuple[int, Hop]]:
    """Run a data server; yield its process and where it is."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "tests.integration.data.idle_program", str(theirs.fileno())]
        with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(theirs.fileno(),)) as process:
            assert process.stdin is not None
            process.stdin.write(start)
            process.stdin.close()
            try:
                with ours.makefile("rb") as lines:
                    assert msgspec.json.decode(lines.readline(), type=RoleReady) == RoleReady()
                    yield process.pid, hop_of(start)
                ours.sendall(msgspec.json.encode(StopRole("")) + b"\n")
                process.wait(60)
            finally:
                process.kill()


def threads_of(pid: int) -> list[Path]:
    """Return the threads of a process and of its children, which are its data workers."""
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _words(task / "children")]
    return [task for each in (pid, *children) for task in Path(f"/proc/{each}/task").iterdir()]


def _words(path: Path) -> list[str]:
    return path.read_text().split()


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process and its data workers, user and system, to the nanosecond."""
    return sum(int(_words(thread / "schedstat")[0]) for thread in threads_of(pid)) / 1e9


def num_wakeups(pid: int) -> int:
    """Return how often a thread of the process or its data workers has gone to sleep."""
    lines = [line for thread in threads_of(pid) for line in (thread / "status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


@dataclass(frozen=True)
class Look:
    """What a process and its data workers have used in `LOOK_S`."""

    cpu_s: float
    wakeups: float

    @property
    def is_quiet(self) -> bool:
        return self.cpu_s < MAX_CPU_SHARE * LOOK_S and self.wakeups < MAX_WAKEUPS_PER_S * LOOK_S


async def look(pid: int) -> Look:
    """Wait for `LOOK_S`."""
    cpu_before_s, wakeups_before = cpu_s(pid), num_wakeups(pid)
    with anyio.move_on_after(LOOK_S):
        await anyio.sleep_forever()
    return Look(cpu_s(pid) - cpu_before_s, num_wakeups(pid) - wakeups_before)


def typical(looks: Sequence[Look]) -> Look:
    """What most looks have come to at most: what happens once, such as the collection of garbage, is not counted."""
    return Look(median(each.cpu_s for each in looks), median(each.wakeups for each in looks))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
async def test_an_idle_data_server_uses_no_cpu_and_wakes_only_for_heartbeats(tmp_path: Path, num_workers: int) -> None:
    peer = Identity.generate().peer_id
    endpoint = open_unix_endpoint(peer_id=peer, run_id=RUN, role="trainer", path=tmp_path / "t.sock")
    config = Config.model_validate({"data": {"seq_len": 64, "num_workers": num_workers}})
    with data_server(spec(tmp_path, peer, config)) as (pid, hop), anyio.fail_after(200):
        async with endpoint, anyio.create_task_group() as group:
            feed = Feed(endpoint=endpoint, data_server=hop, trainer=0, generation=1)
            group.start_soon(dispatch, endpoint, (feed,))
            endpoint.post(hop.peer, PlanRound(1, 1, StepRange(0, 10)))
            for step in range(2):
                batch = await feed.lease(1, step)
                assert batch is not None
                feed.acknowledge(StepKey(0, 1, step, 0), batch, committed=True)
            # What follows the last message has been done when this is answered.
            await feed.hello()
            # A worker that was not needed until now may still be starting, for as long as the machine is busy. That it
            # has once been quiet proves nothing yet.
            for _ in range(MAX_LOOKS_BEFORE):
                if (await look(pid)).is_quiet:
                    break
            found = typical([await look(pid) for _ in range(NUM_LOOKS)])
            group.cancel_scope.cancel()
    assert found.is_quiet, f"{found.cpu_s * 1e3:.2f} ms of CPU time and {found.wakeups} wake-ups a second"


def test_a_process_that_is_quiet_now_and_then_is_not_idle() -> None:
    busy, quiet = Look(0.5, 100), Look(0.001, 6)
    assert quiet.is_quiet
    assert typical([quiet] * 6 + [busy]).is_quiet
    assert not typical([busy] * 6 + [quiet]).is_quiet
    assert not Look(0.5, 6).is_quiet
    assert not Look(0.001, 100).is_quiet
