"""Ten thousand tensors there and back between two processes leave nothing behind: no memory, no thread, no file."""

from __future__ import annotations

import os
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.integration.transport.samples import ALICE, CHILD, step, take, tensor

from shoal.transport.base import PeerUp, Received
from shoal.wire.messages import Hop, Traffic
from shoal.wire.messages.step import Forward
from shoal.wire.tensors import WireTensor

pytestmark = pytest.mark.slow

TRANSFERS = 10_000
SIZES = (64, 1000, 20_000, 70_000, 300_000, 300_000, 1_000_000, 4_000_000)
IN_FLIGHT = len(SIZES)
SAMPLES = 20


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_open(pid: int) -> tuple[int, int]:
    """Return how many threads and files a process has."""
    return len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("carrier", ["unix:", "tcp:"])
async def test_memory_threads_and_files_stay_as_they_are_over_ten_thousand_transfers(
    host: Any, folder: Path, carrier: str
) -> None:
    script = Path(__file__).with_name("peer_process.py")
    command = [sys.executable, str(script), str(folder / "child.sock")]
    async with await anyio.open_process(command, stderr=None) as child:
        assert child.stdout is not None
        try:
            _, *addresses = (await child.stdout.receive()).decode().split()
            a = await host(ALICE)
            a.introduce(Hop(CHILD.peer_id, tuple(address for address in addresses if address.startswith(carrier))))
            rng = random.Random(0)
            whole = tensor(4_000_000)
            pids = (os.getpid(), child.pid)
            rss: list[tuple[int, ...]] = []
            opened: list[tuple[tuple[int, int], ...]] = []
            for number in range(0, TRANSFERS, IN_FLIGHT):
                batch = rng.sample(SIZES, IN_FLIGHT)
                for place, size in enumerate(batch):
                    sent = WireTensor("uint8", (size,), whole.data[:size])
                    a.post(CHILD.peer_id, Forward(step(place), 0), [sent], Traffic.ACTIVATIONS)
                events = await take(a, len(batch) + (number == 0))
                received = [event for event in events if not isinstance(event, PeerUp)]
                assert all(isinstance(event, Received) for event in received)
                assert [event.tensors[0].num_bytes for event in received if isinstance(event, Received)] == batch
                del events, received
                if number % (TRANSFERS // SAMPLES) < IN_FLIGHT:
                    rss.append(tuple(map(rss_bytes, pids)))
                    opened.append(tuple(map(num_open, pids)))
        finally:
            child.kill()
    assert len(set(opened[SAMPLES // 2 :])) == 1
    for ours in zip(*rss[SAMPLES // 2 :], strict=True):
        quarter = len(ours) // 2
        growth = statistics.median(ours[-quarter:]) / statistics.median(ours[:quarter])
        assert growth <= 1.01, ours
