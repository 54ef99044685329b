"""The data server and its trainers over an in-process network: who gets which samples, and whose memory is whose."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import numpy as np
import pytest
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from shoal.data.feed import Feed, LeasedBatch
from shoal.data.server import DataService
from shoal.data.source import Array, ArraySpec, DataSet, Indices, Source
from shoal.errors import ConnectionLost, RemoteError, RemoteProtocolError
from shoal.ids import PeerId, StepKey
from shoal.transport.base import Received
from shoal.transport.dispatch import dispatch
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork
from shoal.wire.messages import Message
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.feed import (
    Acknowledge,
    BatchReady,
    Lease,
    NoBatch,
    PlanRound,
    RecordSamples,
    ReleaseTrainer,
    TensorPlace,
)

pytestmark = pytest.mark.anyio

CLIENT = PeerId("client")
SERVER = PeerId("data")


class Numbers(Source):
    """Sample i is (i, i, i) with label `first` + i."""

    inputs = ArraySpec("float32", (3,))
    labels = ArraySpec("int64", ())

    def __init__(self, num_samples: int, first: int = 0) -> None:
        self._num_samples, self._first = num_samples, first

    @property
    def num_samples(self) -> int:
        return self._num_samples

    def read_into(self, indices: Indices, inputs: Array, labels: Array) -> None:
        inputs[...] = indices[:, None]
        labels[...] = indices + self._first


@dataclass
class Host:
    """A data server, its client, and trainers."""

    network: MemoryNetwork
    group: TaskGroup
    service: DataService
    endpoint: MemoryEndpoint
    client: MemoryEndpoint
    endpoints: dict[int, MemoryEndpoint] = field(default_factory=dict[int, MemoryEndpoint])
    _next_peer: int = 0

    def tell(self, message: Message) -> None:
        self.client.post(SERVER, message)

    def trainer(self, slot: int, incarnation: int = 1) -> Feed:
        self._next_peer += 1
        endpoint = self.network.endpoint(PeerId(f"trainer-{slot}-{self._next_peer}"))
        feed = Feed(endpoint=endpoint, data_server=self.endpoint.hop, trainer=slot, incarnation=incarnation)
        self.group.start_soon(dispatch, endpoint, (feed,))
        self.endpoints[slot] = endpoint
        return feed


@asynccontextmanager
async def host(
    num_samples: int = 10, batch: int = 4, *, seed: int = 0, deterministic: bool = True, num_places: int = 16
) -> AsyncIterator[Host]:
    network = MemoryNetwork()
    endpoint, client = network.endpoint(SERVER), network.endpoint(CLIENT)
    client.introduce(endpoint.hop)
    service = DataService(
        endpoint=endpoint,
        dataset=DataSet("numbers", Numbers(num_samples), Numbers(150, first=1000), num_classes=2000),
        samples_per_step=batch,
        seed=seed,
        deterministic=deterministic,
        num_workers=1,
        client=CLIENT,
        num_places=num_places,
    )
    try:
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(service.run)
                group.start_soon(dispatch, endpoint, (service,))
                yield Host(network, group, service, endpoint, client)
                group.cancel_scope.cancel()
    finally:
        service.close()


def labels_of(batch: LeasedBatch) -> list[int]:
    assert np.array_equal(batch.inputs[:, 0], batch.labels.astype(np.float32) % 1000)
    return batch.labels.tolist()


def key(slot: int, number: int, incarnation: int = 1) -> StepKey:
    return StepKey(slot, incarnation, number, 0)


async def settle(holds: Callable[[], bool]) -> None:
    """Let the other tasks work until `holds` is true."""
    with anyio.fail_after(5):
        while not holds():
            await anyio.wait_all_tasks_blocked()
            await checkpoint()


async def train_round(feed: Feed, slot: int, round_number: int, steps: int) -> list[tuple[int, ...]]:
    batches: list[tuple[int, ...]] = []
    for step in range(steps):
        batch = await feed.lease(round_number, step)
        assert batch is not None
        name = key(slot, (round_number - 1) * steps + step)
        feed.note(name, batch, ())
        batches.append(tuple(labels_of(batch)))
        feed.acknowledge(name, batch, committed=True)
    return batches


async def train_passes(at: Host, num_slots: int, rounds: int, inner_steps: int) -> dict[int, list[tuple[int, ...]]]:
    """Train `rounds` rounds on `num_slots` trainers; return the labels of each trainer's batches."""
    feeds = [at.trainer(slot) for slot in range(num_slots)]
    got: dict[int, list[tuple[int, ...]]] = {slot: [] for slot in range(num_slots)}

    async def work(slot: int, round_number: int) -> None:
        got[slot] += await train_round(feeds[slot], slot, round_number, inner_steps)

    for round_number in range(1, rounds + 1):
        at.tell(PlanRound(round_number, num_slots, inner_steps))
        async with anyio.create_task_group() as group:
            for slot in range(num_slots):
                group.start_soon(work, slot, round_number)
        samples = tuple(item for held in at.service.table.leased.values() for item in held.samples)
        at.tell(RecordSamples(round_number, samples))
    return got


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("num_slots", [1, 2, 3])
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
        at.tell(PlanRound(1, 1, 1))
        await settle(lambda: bool(got))
        assert got[0] is not None
        assert await feed.lease(1, 1) is None


async def test_a_dead_trainers_batch_and_its_memory_stay_until_it_is_released() -> None:
    async with host(num_places=4) as at:
        at.tell(PlanRound(1, 1, 1))
        batch = await at.trainer(0).lease(1, 0)
        assert batch is not None
        before = batch.labels.tolist()
        at.network.kill(at.endpoints[0].peer_id)
        successor = at.trainer(0, incarnation=2)
        assert await successor.lease(1, 0) is None
        reader = at.trainer(-1)
        for start in range(0, 150, 50):
            reader.give_back(await reader.read_holdout(start, start + 50))
        assert batch.labels.tolist() == before
        at.tell(ReleaseTrainer(0, 1, ()))
        again = await successor.lease(1, 0)
        assert again is not None
        assert again.samples == batch.samples


async def test_what_a_lost_reader_holds_is_free_at_once() -> None:
    async with host(num_places=2) as at:
        reader = at.trainer(-1)
        for start in (0, 50):
            await reader.read_holdout(start, start + 50)
        assert at.service.pool.num_free == 0
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
        await settle(lambda: at.service.pool.num_free == 0)
        reader = at.trainer(-1)
        with anyio.fail_after(5):
            assert labels_of(await reader.read_holdout(0, 2)) == [1000, 1001]


async def test_the_next_batches_are_prepared_before_they_are_asked_for() -> None:
    async with host() as at:
        await settle(lambda: at.service.pool.num_free == 14)
        at.tell(PlanRound(1, 3, 2))
        await settle(lambda: at.service.pool.num_free == 12)


async def test_a_server_at_rest_does_nothing() -> None:
    async with host() as at:
        at.tell(PlanRound(1, 1, 2))
        feed = at.trainer(0)
        assert await feed.lease(1, 0) is not None
        await anyio.wait_all_tasks_blocked()
        await settle(lambda: at.service.pool.num_free == 13)
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
        at.tell(PlanRound(1, 1, 1))
        feed = at.trainer(0)
        old = await feed.lease(1, 0)
        assert old is not None
        at.tell(RecordSamples(1, old.samples))
        at.tell(PlanRound(2, 1, 1))
        new = await feed.lease(2, 0)
        assert new is not None
        feed.acknowledge(key(0, 0), old, committed=True)
        feed.give_back(old)
        before = new.labels.tolist()
        got: list[LeasedBatch] = []

        async def read() -> None:
            got.append(await feed.read_holdout(0, 4))

        at.group.start_soon(read)
        await feed.hello()
        await anyio.wait_all_tasks_blocked()
        assert got == []
        assert new.labels.tolist() == before
        feed.give_back(new)
        await settle(lambda: bool(got))


async def test_a_batch_whose_asker_was_cancelled_goes_to_the_next_one() -> None:
    async with host(num_places=2) as at:
        at.tell(PlanRound(1, 1, 1))
        feed = at.trainer(0)
        await feed.hello()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(feed.lease, 1, 0)
                await checkpoint()
                scope.cancel()
        await feed.hello()
        await settle(lambda: at.service.table.leased == {})
        assert await feed.lease(1, 0) is not None


async def test_held_out_samples_come_in_order_and_each_place_is_given_back() -> None:
    async with host(num_places=2) as at:
        feed = at.trainer(0)
        info = await feed.hello()
        assert (info.num_train, info.num_holdout, info.max_read_samples) == (10, 150, 64)
        got: list[int] = []
        async for batch in feed.holdout(10, 150):
            assert batch.samples == ()
            got += labels_of(batch)
        assert got == list(range(1010, 1150))
        await feed.hello()
        await settle(lambda: at.service.pool.num_free == 0)  # both places hold batches prepared ahead


@pytest.mark.parametrize(("start", "stop"), [(0, 65), (-1, 1), (3, 3), (149, 151)])
async def test_a_read_outside_the_data_or_larger_than_a_place_is_refused(start: int, stop: int) -> None:
    async with host() as at:
        with pytest.raises(RemoteError, match="cannot be read"):
            await at.trainer(0).read_holdout(start, stop)


async def test_only_the_client_may_plan() -> None:
    async with host() as at:
        feed = at.trainer(0)
        await feed.hello()
        for message in (PlanRound(1, 1, 1), RecordSamples(1, ()), ReleaseTrainer(0, 1, ())):
            with pytest.raises(RemoteProtocolError, match="not the client"):
                at.service.receive(Received(at.endpoints[0].peer_id, message))
        assert at.service.table.planned_round == 0


async def test_a_trainer_that_waits_learns_that_the_data_server_is_gone() -> None:
    async with host() as at:
        feed = at.trainer(0)
        await feed.hello()
        errors: list[ConnectionLost] = []

        async def ask() -> None:
            with pytest.raises(ConnectionLost) as caught:
                await feed.lease(1, 0)
            errors.append(caught.value)

        at.group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        at.network.kill(SERVER)
        await settle(lambda: bool(errors))


async def test_the_view_of_a_batch_is_shared_read_only_memory() -> None:
    async with host() as at:
        at.tell(PlanRound(1, 1, 1))
        batch = await at.trainer(0).lease(1, 0)
        assert batch is not None
        with pytest.raises(ValueError, match="read-only"):
            batch.inputs[0, 0] = 1.0
        at.service.pool.memory(0)[:4] = 0
        at.service.pool.memory(1)[:4] = 0
        assert batch.inputs[0, 0] == 0.0
        assert sum(part.num_samples for part in batch.cut(3)) == 4


@pytest.mark.parametrize(
    "place",
    [
        TensorPlace("float32", (2, 3), 1 << 40),
        TensorPlace("float32", (3, 3), 0),
        TensorPlace("float128", (2, 3), 0),
        TensorPlace("float32", (2, -3), 0),
        TensorPlace("float32", (2, 3), -64),
    ],
)
async def test_an_offer_that_cannot_be_true_is_refused(place: TensorPlace) -> None:
    async with host() as at:
        pool = at.service.pool
        at.service.receive = lambda event: True  # type: ignore[method-assign]
        feed = at.trainer(0)
        failed: list[str] = []

        async def ask() -> None:
            with pytest.raises(RemoteProtocolError) as caught:
                await feed.lease(1, 0)
            failed.append(str(caught.value))

        at.group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        good = TensorPlace("int64", (2,), 0)
        at.endpoint.post(at.endpoints[0].peer_id, BatchReady(0, pool.path, pool.num_bytes, 0, place, good, (), 2))
        await settle(lambda: bool(failed))
        assert "data server offers" in failed[0]


async def test_answers_from_anybody_else_are_refused() -> None:
    async with host() as at:
        feed = at.trainer(0)
        with pytest.raises(RemoteProtocolError, match="not the data server"):
            feed.receive(Received(CLIENT, NoBatch(0, "")))
        assert not feed.receive(Received(SERVER, Lease(0, 0, 1, 1, 0)))
        assert not at.service.receive(Received(CLIENT, NoBatch(0, "")))
        assert at.service.receive(Received(CLIENT, Acknowledge(key(0, 0), 99, committed=True)))
