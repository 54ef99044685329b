"""A data server that has nothing to do: its process is looked at while a trainer is connected that asks for nothing."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
from tests.integration.data.spec import RUN, spec

from shoal.config import Config
from shoal.data.feed import Feed
from shoal.identity import Identity
from shoal.ids import StepKey
from shoal.transport.dispatch import dispatch
from shoal.transport.unix import open_unix_endpoint
from shoal.wire.messages.base import Hop
from shoal.wire.messages.feed import PlanRound

pytestmark = pytest.mark.anyio

IDLE_S = 2.0
# Heartbeats of the only connection, four a second: ours and the peer's. Counters that are looked at every two seconds,
# and the turn of the loop that follows a timer.
MAX_WAKEUPS_PER_S = 16
MAX_CPU_SHARE = 0.02
MAX_LOOKS = 10


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
                    ready = json.loads(lines.readline())
                    assert ready["event"] == "ready", ready
                    yield process.pid, msgspec.convert(ready["hop"], Hop)
                ours.sendall(b'{"stop": "graceful"}\n')
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


async def used_in_idle_s(pid: int) -> tuple[float, int]:
    """Return the CPU time and the wake-ups of the next `IDLE_S`."""
    cpu_before_s, wakeups_before = cpu_s(pid), num_wakeups(pid)
    with anyio.move_on_after(IDLE_S):
        await anyio.sleep_forever()
    return cpu_s(pid) - cpu_before_s, num_wakeups(pid) - wakeups_before


@pytest.mark.parametrize("num_workers", [0, 2])
async def test_an_idle_data_server_uses_no_cpu_and_wakes_only_for_heartbeats(tmp_path: Path, num_workers: int) -> None:
    peer = Identity.generate().peer_id
    endpoint = open_unix_endpoint(peer_id=peer, run_id=RUN, role="trainer", path=tmp_path / "t.sock")
    config = Config.model_validate({"data": {"seq_len": 64, "num_workers": num_workers}})
    num_looks = 1
    with data_server(spec(tmp_path, peer, config)) as (pid, hop), anyio.fail_after(100):
        async with endpoint, anyio.create_task_group() as group:
            feed = Feed(endpoint=endpoint, data_server=hop, trainer=0, incarnation=1)
            group.start_soon(dispatch, endpoint, (feed,))
            endpoint.post(hop.peer, PlanRound(1, 1, 10))
            for step in range(2):
                batch = await feed.lease(1, step)
                assert batch is not None
                feed.acknowledge(StepKey(0, 1, step, 0), batch, committed=True)
            # What follows the last message has been done when this is answered.
            await feed.hello()
            used_s, wakeups = await used_in_idle_s(pid)
            while (used_s >= MAX_CPU_SHARE * IDLE_S or wakeups >= MAX_WAKEUPS_PER_S * IDLE_S) and num_looks < MAX_LOOKS:
                # A worker that was not needed until now may still be starting.
                used_s, wakeups = await used_in_idle_s(pid)
                num_looks += 1
            group.cancel_scope.cancel()
    assert used_s < MAX_CPU_SHARE * IDLE_S, f"{used_s * 1e3 / IDLE_S:.2f} ms of CPU time a second"
    assert wakeups < MAX_WAKEUPS_PER_S * IDLE_S, f"{wakeups / IDLE_S:.1f} wake-ups a second"
