"""The data server and its trainers over an in-process network: who gets which samples, and when."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.lowlevel import checkpoint
from tests.unit.data.host import SERVER, Host, Numbers, host, key, labels_of, settle, train_passes
from tests.windows import leased, num_free, num_preparing

from shoal.data import server
from shoal.data.feed import Feed, LeasedBatch
from shoal.data.fields import Fields
from shoal.data.source import Array, DataSet, Indices
from shoal.swarm.sample_ranges import count
from shoal.transport.base import Received
from shoal.wire.messages.base import SampleRange, StepRange
from shoal.wire.messages.feed import (
    BatchesAwaited,
    DataHello,
    HoldoutInfo,
    PauseLeases,
    PlanRound,
    RecordSamples,
    ReleaseTrainer,
)


@pytest.mark.parametrize(("num_slots", "deterministic"), [(1, True), (2, True), (3, True), (1, False)])
async def test_each_sample_is_trained_exactly_once_per_pass_although_batches_do_not_divide_it(
    num_slots: int, deterministic: bool
) -> None:
    # A pass of 10 samples is 3 batches of 4, 4 and 2; 12 * num_slots batches are 4 * num_slots passes.
    async with host(10, 4, deterministic=deterministic) as at:
        got = await train_passes(at, num_slots, rounds=4, inner_steps=3)
    seen = Counter(label for batches in got.values() for batch in batches for label in batch)
    assert seen == Counter(dict.fromkeys(range(10), 4 * num_slots))
    sizes = Counter(len(batch) for batches in got.values() for batch in batches)
    assert sizes == {4: 8 * num_slots, 2: 4 * num_slots}


async def test_each_sample_is_trained_exactly_once_per_pass_whatever_the_shares() -> None:
    async with host(10, 4, deterministic=False) as at:
        got = await train_passes(at, num_slots=3, rounds=4, inner_steps=3)
        await settle(lambda: leased(at.service.table) == {})
        recorded = at.service.table.recorded
    seen = Counter(label for batches in got.values() for batch in batches for label in batch)
    assert seen.total() == count(recorded)
    assert all((item.start, item.stop) == (0, 10) for item in recorded[:-1])
    assert recorded[-1].start == 0
    assert max(seen.values()) - min(seen.values()) <= 1


async def test_a_fast_trainers_batch_is_larger_than_a_place() -> None:
    async with host(400, 64, deterministic=False) as at:
        at.tell(PlanRound(1, 2, StepRange(0, 2), (30.0, 10.0)))
        fast, slow = at.trainer(0), at.trainer(1)
        held = [await fast.lease(1, 0), await slow.lease(1, 0), await fast.lease(1, 1)]
        labels = [labels_of(batch) for batch in held if batch is not None]
        assert [len(each) for each in labels][:2] == [96, 32]
        assert len({*labels[0], *labels[1], *labels[2]}) == sum(map(len, labels))
        assert held[0] is not None
        # Until what is prepared ahead has its places.
        await anyio.wait_all_tasks_blocked()
        await settle(lambda: not at.service.preparer._preparing)
        before = num_free(at.service.pool)
        fast.acknowledge(key(0, 0), held[0], committed=True)
        await settle(lambda: num_free(at.service.pool) == before + 2)


async def test_who_uses_several_batches_at_a_time_finds_as_many_ready() -> None:
    class InMemory(Numbers):
        in_memory = True  # so that no thread prepares what comes after the first batches

    source = InMemory(400)
    async with host(batch=4, dataset=DataSet("numbers", source, source, num_classes=400), num_places=128) as at:
        at.tell(PlanRound(1, 1, StepRange(0, 100)))
        feed = at.trainer(0)
        held: list[LeasedBatch | None] = []

        async def lease(step: int) -> None:
            held.append(await feed.lease(1, step))

        async with anyio.create_task_group() as group:
            for step in range(5):
                group.start_soon(lease, step)
        assert len(held) == 5
        await settle(lambda: num_preparing(at.service.preparer) == 0)
        await anyio.wait_all_tasks_blocked()
        assert num_free(at.service.pool) == 128 - 5 - 6
        at.tell(PlanRound(2, 1, StepRange(100, 200)))
        await anyio.wait_all_tasks_blocked()
        assert num_free(at.service.pool) == 128 - 5 - 2


async def test_two_runs_with_one_seed_give_every_trainer_the_same_batches_and_another_seed_others() -> None:
    runs: list[dict[int, list[tuple[int, ...]]]] = []
    for seed in (1, 1, 2):
        async with host(50, 4, seed=seed) as at:
            runs.append(await train_passes(at, num_slots=2, rounds=3, inner_steps=4))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


async def test_the_baseline_reads_what_the_only_trainer_of_a_run_is_given() -> None:
    async with host(10, 4) as at:
        trained = (await train_passes(at, num_slots=1, rounds=2, inner_steps=3))[0]
        baseline = at.trainer(-1)
        read = [await baseline.read_train(number) for number in range(6)]
        assert [tuple(labels_of(batch)) for batch in read] == trained
        assert read[2].samples == (SampleRange(0, 8, 10),)


async def test_a_lease_of_a_round_that_is_not_planned_yet_waits_for_the_plan() -> None:
    async with host() as at:
        feed = at.trainer(0)
        await feed.hello()
        got: list[LeasedBatch | None] = []

        async def ask() -> None:
            got.append(await feed.lease(1, 0))

        at.group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        assert got == []
        at.tell(PlanRound(1, 1, StepRange(0, 1)))
        await settle(lambda: bool(got))
        assert got[0] is not None
        assert await feed.lease(1, 1) is None


async def test_in_a_pause_who_asks_waits_and_gets_its_batch_when_the_run_goes_on() -> None:
    async with host(20, 4) as at, anyio.create_task_group() as group:
        first, second = at.trainer(0), at.trainer(1)
        at.tell(PlanRound(1, 2, StepRange(0, 2)))
        held = await first.lease(1, 0)
        assert held is not None
        at.tell(PauseLeases(True))
        got: list[LeasedBatch | None] = []

        async def ask() -> None:
            got.append(await second.lease(1, 0))

        group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        assert (got, len(at.service._early)) == ([], 1)
        first.note(key(0, 0), (), held)
        first.acknowledge(key(0, 0), held, committed=True)
        await settle(lambda: any(lease.done for lease in at.service.table._leases.values()))
        at.tell(PauseLeases(False))
        await settle(lambda: bool(got))
        assert got[0] is not None
        assert set(labels_of(got[0])).isdisjoint(labels_of(held))


async def test_a_dead_trainers_batch_and_its_memory_stay_until_it_is_released() -> None:
    async with host(num_places=4) as at:
        at.tell(PlanRound(1, 1, StepRange(0, 1)))
        batch = await at.trainer(0).lease(1, 0)
        assert batch is not None
        before = batch.fields.labels.tolist()
        at.network.kill(at.endpoints[0].peer_id)
        successor = at.trainer(0, generation=2)
        assert await successor.lease(1, 0) is None
        reader = at.trainer(-1)
        for start in range(0, 150, 50):
            reader.give_back(await reader.read_holdout(start, start + 50))
        assert batch.fields.labels.tolist() == before
        at.tell(ReleaseTrainer(0, 1, 1, (), (), {}, complete=True))
        again = await successor.lease(1, 0)
        assert again is not None
        assert again.samples == batch.samples


async def test_what_a_lost_reader_holds_is_free_at_once() -> None:
    async with host(num_places=2) as at:
        reader = at.trainer(-1)
        for start in (0, 50):
            await reader.read_holdout(start, start + 50)
        assert num_free(at.service.pool) == 0
        at.network.kill(at.endpoints[-1].peer_id)
        other = at.trainer(-1)
        assert labels_of(await other.read_holdout(100, 102)) == [1100, 1101]


async def test_who_finds_no_free_place_waits_until_one_is_given_back() -> None:
    async with host(num_places=2) as at:
        first, second = at.trainer(-1), at.trainer(-2)
        held = [await first.read_holdout(number, number + 1) for number in range(2)]
        got: list[LeasedBatch] = []

        async def read() -> None:
            got.append(await second.read_holdout(7, 9))

        at.group.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        assert got == []
        first.give_back(held[0])
        await settle(lambda: bool(got))
        assert labels_of(got[0]) == [1007, 1008]
        assert labels_of(held[1]) == [1001]


async def test_batches_prepared_ahead_make_room_for_what_somebody_waits_for() -> None:
    async with host(num_places=2) as at:
        await settle(lambda: num_free(at.service.pool) == 0)
        reader = at.trainer(-1)
        assert labels_of(await reader.read_holdout(0, 2)) == [1000, 1001]


async def test_the_next_batches_are_prepared_before_they_are_asked_for() -> None:
    async with host() as at:
        await settle(lambda: num_free(at.service.pool) == 14)
        at.tell(PlanRound(1, 3, StepRange(0, 2)))
        await settle(lambda: num_free(at.service.pool) == 12)


async def test_a_server_at_rest_does_nothing() -> None:
    async with host() as at:
        at.tell(PlanRound(1, 1, StepRange(0, 2)))
        feed = at.trainer(0)
        assert await feed.lease(1, 0) is not None
        # Its threads are done as well: places are taken before they are filled.
        await settle(lambda: num_free(at.service.pool) == 13 and num_preparing(at.service.preparer) == 0)
        await anyio.wait_all_tasks_blocked()
        turns = 0
        upcoming = at.service.table.upcoming

        def count_turns(limit: int) -> object:
            nonlocal turns
            turns += 1
            return upcoming(limit)

        at.service.table.upcoming = count_turns  # type: ignore[method-assign,assignment]
        for _ in range(50):
            await checkpoint()
        assert turns == 0
        await feed.hello()
        await anyio.wait_all_tasks_blocked()
        assert turns == 1


async def test_a_late_message_does_not_touch_the_next_batch_of_the_same_trainer() -> None:
    async with host(20, 4, num_places=1) as at:
        at.tell(PlanRound(1, 1, StepRange(0, 1)))
        feed = at.trainer(0)
        old = await feed.lease(1, 0)
        assert old is not None
        at.tell(RecordSamples(1, old.samples))
        at.tell(PlanRound(2, 1, StepRange(0, 1)))
        new = await feed.lease(2, 0)
        assert new is not None
        feed.acknowledge(key(0, 0), old, committed=True)
        feed.give_back(old)
        before = new.fields.labels.tolist()
        got: list[LeasedBatch] = []

        async def read() -> None:
            got.append(await feed.read_holdout(0, 4))

        at.group.start_soon(read)
        await feed.hello()
        await anyio.wait_all_tasks_blocked()
        assert got == []
        assert new.fields.labels.tolist() == before
        feed.give_back(new)
        await settle(lambda: bool(got))


async def test_a_batch_whose_asker_was_cancelled_goes_to_the_next_one() -> None:
    async with host(num_places=2) as at:
        at.tell(PlanRound(1, 1, StepRange(0, 1)))
        feed = at.trainer(0)
        await feed.hello()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(feed.lease, 1, 0)
                await checkpoint()
                scope.cancel()
        await feed.hello()
        await settle(lambda: leased(at.service.table) == {})
        assert await feed.lease(1, 0) is not None


# -- samples that do not come


class Withheld(Numbers):
    """Numbers on a disk that gives nothing until it is let."""

    def __init__(self) -> None:
        super().__init__(40)
        self.is_given = threading.Event()
        self.num_withheld = 0

    def read_into(self, indices: Indices, batch: Fields[Array]) -> None:
        if not self.is_given.is_set():
            self.num_withheld += 1
            self.is_given.wait()
        super().read_into(indices, batch)


@asynccontextmanager
async def withheld() -> AsyncIterator[tuple[Host, Withheld, list[object]]]:
    """A host with such a disk, and what its client is told."""
    source, told = Withheld(), list[object]()

    async def hear(at: Host) -> None:
        async for event in at.client.events():
            if isinstance(event, Received):
                told.append(event.message)

    async with host(dataset=DataSet("withheld", source, Numbers(8), num_classes=2000)) as at:
        at.group.start_soon(hear, at)
        try:
            yield at, source, told
        finally:
            source.is_given.set()


async def test_the_client_hears_that_nobody_can_train_for_want_of_samples_and_that_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "LATE_S", 0.0)
    async with withheld() as (at, source, told):
        at.tell(PlanRound(1, 1, StepRange(0, 2)))
        at.group.start_soon(at.trainer(0).lease, 1, 0)
        await settle(lambda: told == [BatchesAwaited(True)])
        # A client that was started again knows nothing of it.
        at.client.post(SERVER, DataHello(-1))
        await settle(lambda: len(told) == 3)
        assert isinstance(told[1], HoldoutInfo)
        assert told[2] == BatchesAwaited(True)
        source.is_given.set()
        await settle(lambda: len(told) == 4)
        assert told[3] == BatchesAwaited(False)


async def test_the_end_of_a_round_is_no_end_of_waiting_for_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LATE_S", 3600.0)
    async with withheld() as (at, _, told):
        feed = at.trainer(0)
        at.tell(PlanRound(1, 1, StepRange(0, 2)))
        at.group.start_soon(feed.lease, 1, 0)
        await settle(lambda: bool(at.service._waiters))
        since_s = at.service._awaited_since_s
        at.tell(RecordSamples(1, ()))
        at.tell(PlanRound(2, 1, StepRange(2, 4)))
        await settle(lambda: not at.service._waiters)
        at.group.start_soon(feed.lease, 2, 2)
        await settle(lambda: bool(at.service._waiters))
        assert since_s is not None
        assert at.service._awaited_since_s == since_s
        assert told == [], "not yet"


async def test_while_one_trains_another_one_that_waits_holds_no_round_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LATE_S", 0.0)
    async with withheld() as (at, source, told):
        source.is_given.set()
        at.tell(PlanRound(1, 2, StepRange(0, 40)))
        assert await at.trainer(0).lease(1, 0) is not None
        source.is_given.clear()
        await anyio.wait_all_tasks_blocked()
        told.clear()

        async def train(feed: Feed) -> None:
            for number in range(40):
                batch = await feed.lease(1, number)
                assert batch is not None
                feed.note(key(1, number), (), batch)
                feed.acknowledge(key(1, number), batch, committed=True)

        at.group.start_soon(train, at.trainer(1))
        # What was prepared ahead is trained first.
        await settle(lambda: bool(source.num_withheld and at.service._waiters))
        await anyio.wait_all_tasks_blocked()
        assert told == []
