"""Data workers: the same batches whoever prepares them; one that dies is replaced; none outlives its data server."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import numpy as np
import pytest
from tests.alongside import until
from tests.integration.data.sources import Trap, trapped
from tests.unit.data.host import Host, host, settle
from tests.windows import num_free

from shoal.clock import SystemClock
from shoal.data import workers
from shoal.data.preparation import SLOW_S
from shoal.data.workers import MAX_DEATHS, DataWorkers
from shoal.errors import ConfigError, SampleError
from shoal.wire.messages.base import StepRange
from shoal.wire.messages.feed import PlanRound, RecordSamples

MODULE = "tests.integration.data.orphaned_workers"
STEPS = 4


class FastClock(SystemClock):
    """A second of it is over in ten milliseconds."""

    def __init__(self) -> None:
        self.slept_s = 0.0

    def now_s(self) -> float:
        return self.slept_s

    async def sleep_s(self, duration_s: float) -> None:
        await super().sleep_s(duration_s / 100)
        self.slept_s += duration_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FastClock:
    """That of data workers."""
    clock = FastClock()
    monkeypatch.setattr(workers, "SystemClock", lambda: clock)
    return clock


def said(caplog: pytest.LogCaptureFixture, name: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.getMessage() == name]


async def all_batches(at: Host, num_slots: int = 2) -> list[bytes]:
    """Return the bytes of two rounds (more than two passes of 50 samples) and of held-out samples."""
    feeds = [at.trainer(slot) for slot in range(num_slots)]
    seen: list[bytes] = []
    for round_number in (1, 2):
        at.tell(PlanRound(round_number, num_slots, StepRange(0, STEPS)))
        recorded = []
        for step in range(STEPS):
            for feed in feeds:
                batch = await feed.lease(round_number, step)
                assert batch is not None
                seen.append(batch.fields.inputs.tobytes() + batch.fields.labels.tobytes())
                recorded += batch.samples
        at.tell(RecordSamples(round_number, tuple(recorded)))
    held_out = await feeds[0].read_holdout(3, 20)
    return [*seen, held_out.fields.inputs.tobytes() + held_out.fields.labels.tobytes()]


async def test_batches_have_the_same_bits_and_order_with_no_one_and_three_workers() -> None:
    runs: list[list[bytes]] = []
    for num_workers in (0, 1, 3):
        trap = Trap()
        async with host(batch=7, seed=5, dataset=trapped(trap), num_workers=num_workers, opening=trap.opening()) as at:
            runs.append(await all_batches(at))
    assert runs[0] == runs[1]
    assert runs[0] == runs[2]
    assert len(set(runs[0])) == len(runs[0])


@pytest.mark.parametrize("num_workers", [0, 2])
async def test_a_batch_that_takes_several_places_is_whole(num_workers: int) -> None:
    trap = Trap(num_samples=400)
    async with host(
        batch=64, dataset=trapped(trap), num_workers=num_workers, opening=trap.opening(), deterministic=False
    ) as at:
        at.tell(PlanRound(1, 2, StepRange(0, 2), (30.0, 10.0)))
        held = [await at.trainer(slot).lease(1, 0) for slot in (0, 1)]
        for batch, num_samples in zip(held, (96, 32), strict=True):
            assert batch is not None
            assert len(set(batch.fields.labels.tolist())) == num_samples
            assert np.array_equal(batch.fields.inputs, batch.fields.labels[:, None] + np.arange(5, dtype=np.float32))


@pytest.mark.parametrize("num_workers", [1, 3])
async def test_a_batch_whose_worker_is_killed_is_prepared_anew_and_seen_once(num_workers: int, tmp_path: Path) -> None:
    undisturbed = Trap()
    async with host(batch=7, seed=5, dataset=trapped(undisturbed)) as at:
        expected = await all_batches(at)
    once = tmp_path / "once"
    once.touch()
    trap = Trap(kills=11, once=str(once))
    async with host(batch=7, seed=5, dataset=trapped(trap), num_workers=num_workers, opening=trap.opening()) as at:
        assert await all_batches(at) == expected
    assert not once.exists()


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.usefixtures("clock")
async def test_a_worker_that_stands_still_is_killed_and_its_batch_prepared_anew_however_often(
    num_workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed = Trap()
    async with host(batch=7, seed=5, dataset=trapped(undisturbed)) as at:
        expected = await all_batches(at)
    left = tmp_path / "left"
    left.write_text(str(MAX_DEATHS + 1))
    trap = Trap(stops=11, left=str(left))
    async with host(batch=7, seed=5, dataset=trapped(trap), num_workers=num_workers, opening=trap.opening()) as at:
        assert await all_batches(at) == expected
    assert left.read_text() == "0"
    stopped = said(caplog, "data_process.stopped")
    assert len(stopped) == MAX_DEATHS + 1
    assert {record.levelno for record in stopped} == {logging.WARNING}


@pytest.mark.usefixtures("clock")
async def test_a_worker_that_stands_still_while_it_opens_the_data_set_is_killed_too_and_others_open_it(
    tmp_path: Path,
) -> None:
    left = tmp_path / "left"
    left.write_text(str(MAX_DEATHS + 1))
    trap = Trap(unopened="stop", left=str(left))
    async with host(batch=7, dataset=trapped(trap), num_workers=1, opening=trap.opening()) as at:
        at.tell(PlanRound(1, 1, StepRange(0, STEPS)))
        assert await at.trainer(0).lease(1, 0) is not None
    assert left.read_text() == "0"


async def test_of_a_batch_that_takes_long_it_is_said_once_who_prepares_it(
    clock: FastClock, caplog: pytest.LogCaptureFixture
) -> None:
    trap = Trap(hangs=2)
    async with host(batch=50, dataset=trapped(trap), num_workers=1, opening=trap.opening()) as at:
        await until(lambda: said(caplog, "data_worker.slow"))
        at_s = clock.slept_s
        await until(lambda: clock.slept_s > at_s + 3 * SLOW_S)
        preparation = at.service.preparation
        assert isinstance(preparation, DataWorkers)
        [slow] = said(caplog, "data_worker.slow")
        assert (slow.levelno, [slow.__dict__["pid"]]) == (logging.WARNING, preparation.pids)
        assert slow.__dict__["seconds"] > SLOW_S
    assert not said(caplog, "data_process.stopped")


async def test_idle_workers_that_are_killed_are_replaced() -> None:
    trap = Trap()
    async with host(batch=7, dataset=trapped(trap), num_workers=2, opening=trap.opening()) as at:
        feed = at.trainer(0)
        at.tell(PlanRound(1, 1, StepRange(0, STEPS)))
        assert await feed.lease(1, 0) is not None
        await settle(lambda: num_free(at.service.pool) == 13)
        preparation = at.service.preparation
        assert isinstance(preparation, DataWorkers)
        before = set(preparation.pids)
        assert before
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        # Two batches lie ready; the others need workers.
        for step in range(1, STEPS):
            assert await feed.lease(1, step) is not None
        assert set(preparation.pids) - before


@pytest.mark.parametrize("num_workers", [0, 2])
async def test_a_sample_that_cannot_be_prepared_is_named(num_workers: int) -> None:
    trap = Trap(fails=33)
    with pytest.raises(ExceptionGroup) as caught:
        async with host(batch=50, dataset=trapped(trap), num_workers=num_workers, opening=trap.opening()):
            await anyio.sleep_forever()
    assert caught.group_contains(SampleError, match=r"training sample 33 of .* trapped .* ValueError: broken picture")


async def test_a_batch_that_kills_every_worker_ends_the_data_server_with_its_samples() -> None:
    trap = Trap(kills=2)
    with pytest.raises(ExceptionGroup) as caught:
        async with host(batch=50, dataset=trapped(trap), num_workers=2, opening=trap.opening()):
            await anyio.sleep_forever()
    assert caught.group_contains(SampleError, match=rf"{MAX_DEATHS} data workers died over one batch .* SIGKILL")


@pytest.mark.parametrize(("unopened", "message"), [("error", "trapped is gone"), ("kill", "died in a row")])
async def test_workers_that_cannot_open_the_data_set_end_the_data_server(unopened: str, message: str) -> None:
    trap = Trap(unopened=unopened)
    with pytest.raises(ExceptionGroup) as caught:
        async with host(dataset=trapped(trap), num_workers=1, opening=trap.opening()):
            await anyio.sleep_forever()
    assert caught.group_contains(ConfigError, match=message)


async def test_a_worker_that_finds_another_data_set_ends_the_data_server() -> None:
    opening = Trap(num_samples=49).opening()
    with pytest.raises(ExceptionGroup) as caught:
        async with host(dataset=trapped(Trap()), num_workers=1, opening=opening):
            await anyio.sleep_forever()
    assert caught.group_contains(ConfigError, match="must not change during a run")


@pytest.fixture
def orphaned() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def test_workers_end_when_their_data_server_is_killed_also_in_the_middle_of_a_job(
    orphaned: subprocess.Popen[str],
) -> None:
    assert orphaned.stdout is not None
    pids: list[int] = json.loads(orphaned.stdout.readline())
    assert len(pids) == 2
    pidfds = [os.pidfd_open(pid) for pid in pids]
    orphaned.kill()
    try:
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], 60)[0]
    finally:
        for pidfd in pidfds:
            os.close(pidfd)
