"""A data server and its trainers over an in-process network, for the tests of both ends of the feed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import numpy as np
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint
from tests.windows import leased

from shoal.data.feed import Feed, LeasedBatch
from shoal.data.fields import Fields
from shoal.data.server import DataService
from shoal.data.source import Array, ArraySpec, DataSet, Indices, Source
from shoal.data.worker_messages import Opening
from shoal.ids import PeerId, StepKey
from shoal.transport.dispatch import dispatch
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork
from shoal.wire.messages import Message
from shoal.wire.messages.base import StepRange
from shoal.wire.messages.feed import PlanRound, RecordSamples

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

    def read_into(self, indices: Indices, batch: Fields[Array]) -> None:
        batch.inputs[...] = indices[:, None]
        batch.labels[...] = indices + self._first


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

    def trainer(self, slot: int, generation: int = 1) -> Feed:
        self._next_peer += 1
        endpoint = self.network.endpoint(PeerId(f"trainer-{slot}-{self._next_peer}"))
        feed = Feed(endpoint=endpoint, data_server=self.endpoint.hop, trainer=slot, generation=generation)
        self.group.start_soon(dispatch, endpoint, (feed,))
        self.endpoints[slot] = endpoint
        return feed


@asynccontextmanager
async def host(
    num_samples: int = 10,
    batch: int = 4,
    *,
    seed: int = 0,
    deterministic: bool = True,
    num_places: int = 16,
    dataset: DataSet | None = None,
    num_workers: int = 0,
    opening: Opening | None = None,
) -> AsyncIterator[Host]:
    network = MemoryNetwork()
    endpoint, client = network.endpoint(SERVER), network.endpoint(CLIENT)
    client.introduce(endpoint.hop)
    service = DataService(
        endpoint=endpoint,
        dataset=dataset or DataSet("numbers", Numbers(num_samples), Numbers(150, first=1000), num_classes=2000),
        samples_per_step=batch,
        seed=seed,
        deterministic=deterministic,
        num_workers=num_workers,
        opening=opening,
        client=CLIENT,
        num_places=num_places,
    )
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(service.run)
            group.start_soon(dispatch, endpoint, (service,))
            yield Host(network, group, service, endpoint, client)
            group.cancel_scope.cancel()
    finally:
        service.close()


def labels_of(batch: LeasedBatch) -> list[int]:
    assert np.array_equal(batch.fields.inputs[:, 0], batch.fields.labels.astype(np.float32) % 1000)
    return batch.fields.labels.tolist()


def key(slot: int, number: int, generation: int = 1) -> StepKey:
    return StepKey(slot, generation, number, 0)


async def settle(holds: Callable[[], bool]) -> None:
    """Let the other tasks work until `holds` is true."""
    while not holds():
        await anyio.wait_all_tasks_blocked()
        await checkpoint()


def steps_of(round_number: int, inner_steps: int) -> StepRange:
    """The steps of a round, by the numbers that production gives them."""
    return StepRange((round_number - 1) * inner_steps, round_number * inner_steps)


async def train_round(feed: Feed, slot: int, round_number: int, steps: int) -> list[tuple[int, ...]]:
    batches: list[tuple[int, ...]] = []
    for number in steps_of(round_number, steps).numbers:
        batch = await feed.lease(round_number, number)
        assert batch is not None
        name = key(slot, number)
        feed.note(name, (), batch)
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
        at.tell(PlanRound(round_number, num_slots, steps_of(round_number, inner_steps)))
        async with anyio.create_task_group() as group:
            for slot in range(num_slots):
                group.start_soon(work, slot, round_number)
        samples = tuple(item for held in leased(at.service.table).values() for item in held.samples)
        at.tell(RecordSamples(round_number, samples))
    return got
