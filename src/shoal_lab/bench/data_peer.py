"""The processes of the benchmark `data`: seat 0 is a data server as in a run, seat 1 leases its batches.

Each batch size has a data server of its own, with endpoint, pool and leases; they share process and samples, and only
one of them has anything to do at a time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import numpy as np
from anyio.from_thread import start_blocking_portal
from numpy.typing import NDArray

from shoal.clock import SystemClock
from shoal.data.feed import Feed
from shoal.data.fields import Fields
from shoal.data.server import DataService
from shoal.data.source import Array, ArraySpec, DataSet, Indices, KnownSamples
from shoal.errors import RemoteError
from shoal.ids import PeerId, RunId, StepKey
from shoal.swarm.lease import MAX_PLANNED_BATCHES
from shoal.transport.dispatch import dispatch
from shoal.transport.peers import StreamEndpoint
from shoal.transport.unix import open_unix_endpoint
from shoal.wire.messages.base import Hop, StepRange
from shoal.wire.messages.feed import PlanRound
from shoal_lab.bench.data_samples import BATCHES, MEASURED_S, gigabytes_per_s, make_samples, use
from shoal_lab.bench.peer import Calls, Seat

LEASES_IN_FLIGHT = 4
"""Batches that the consumer has asked for and not acknowledged; a DataLoader prefetches two for each worker."""

_RUN = RunId("benchmark")
_ROUND = 1


class InMemorySource(KnownSamples):
    """Samples that lie in two arrays; a batch is gathered straight into its place."""

    def __init__(self, samples: NDArray[np.float32], classes: NDArray[np.int64]) -> None:
        fields = Fields(ArraySpec("float32", samples.shape[1:]), ArraySpec("int64", ()))
        super().__init__(fields, len(classes), in_memory=True)
        self._samples, self._classes = samples, classes

    def read_into(self, indices: Indices, batch: Fields[Array]) -> None:
        # With mode "raise", the default, numpy gathers into a buffer of its own first.
        np.take(self._samples, indices, axis=0, out=batch.inputs, mode="clip")
        np.take(self._classes, indices, out=batch.labels, mode="clip")


class Consumer:
    """Leases from one data server."""

    def __init__(self, endpoint: StreamEndpoint, feed: Feed, batch_samples: int) -> None:
        self._endpoint = endpoint
        self._feed = feed
        self._batch_samples = batch_samples
        self._step = 0

    async def consume(self) -> float:
        """Use batches for a while, and return the rate in GB/s."""
        clock = SystemClock()
        # Once would do; a plan that stands already changes nothing.
        self._endpoint.post(
            _peer("data_server", self._batch_samples), PlanRound(_ROUND, 1, StepRange(0, MAX_PLANNED_BATCHES))
        )
        first_step, start_s = self._step, clock.now_s()

        async def use_next_ones() -> None:
            while clock.now_s() - start_s < MEASURED_S:
                self._step += 1
                step = self._step - 1
                batch = await self._feed.lease(_ROUND, step)
                if batch is None:
                    raise RemoteError(f"the data server has no batch for step {step}")
                use(batch.fields.inputs.view(np.float32), batch.fields.labels.view(np.int64))
                self._feed.acknowledge(StepKey(0, 1, step, 0), batch, committed=True)

        async with anyio.create_task_group() as group:
            for _ in range(LEASES_IN_FLIGHT):
                group.start_soon(use_next_ones)
        return gigabytes_per_s(self._step - first_step, self._batch_samples, clock.now_s() - start_s)


@contextmanager
def main(seat: Seat) -> Generator[Calls, None, None]:
    """Offer `consume(batch_samples)`: the rate in GB/s at the consumer, nothing at the data server."""
    directory = Path(str(seat.arguments["directory"]))
    with start_blocking_portal(backend_options={"use_uvloop": True}) as portal:
        if seat.index == 0:

            def wait(batch_samples: int) -> float:
                return 0.0

            with portal.wrap_async_context_manager(_data_servers(directory)):
                yield {"consume": wait}
        else:
            with portal.wrap_async_context_manager(_consumers(directory)) as consumers:

                def consume(batch_samples: int) -> float:
                    return portal.call(consumers[batch_samples].consume)

                yield {"consume": consume}


@asynccontextmanager
async def _data_servers(directory: Path) -> AsyncGenerator[None]:
    samples = InMemorySource(*make_samples())
    dataset = DataSet("benchmark", samples, samples, num_classes=samples.num_samples)
    async with anyio.create_task_group() as group:
        for batch_samples in BATCHES.values():
            group.start_soon(_serve, dataset, directory, batch_samples)
        yield
        group.cancel_scope.cancel()


async def _serve(dataset: DataSet, directory: Path, batch_samples: int) -> None:
    async with _endpoint(directory, "data_server", batch_samples) as endpoint:
        service = DataService(
            endpoint=endpoint,
            dataset=dataset,
            samples_per_step=batch_samples,
            seed=0,
            deterministic=True,
            num_workers=0,
            opening=None,
            client=_peer("trainer", batch_samples),
        )
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(service.run)
                group.start_soon(dispatch, endpoint, (service,))
        finally:
            service.close()


@asynccontextmanager
async def _consumers(directory: Path) -> AsyncGenerator[dict[int, Consumer]]:
    consumers: dict[int, Consumer] = {}
    async with anyio.create_task_group() as group:
        for batch_samples in BATCHES.values():
            group.start_soon(_connect, directory, batch_samples, consumers)
        yield consumers
        group.cancel_scope.cancel()


async def _connect(directory: Path, batch_samples: int, consumers: dict[int, Consumer]) -> None:
    """Be the trainer, and the client that plans its round."""
    address = f"unix:{_socket(directory, 'data_server', batch_samples)}"
    data_server = Hop(_peer("data_server", batch_samples), (address,))
    async with _endpoint(directory, "trainer", batch_samples) as endpoint:
        feed = Feed(endpoint=endpoint, data_server=data_server, trainer=0, generation=1)
        consumers[batch_samples] = Consumer(endpoint, feed, batch_samples)
        await dispatch(endpoint, (feed,))


def _endpoint(directory: Path, role: str, batch_samples: int) -> StreamEndpoint:
    return open_unix_endpoint(
        peer_id=_peer(role, batch_samples),
        run_id=_RUN,
        role=role,
        path=_socket(directory, role, batch_samples),
    )


def _peer(role: str, batch_samples: int) -> PeerId:
    return PeerId(f"{role}-{batch_samples}")


def _socket(directory: Path, role: str, batch_samples: int) -> Path:
    return directory / f"{role}-{batch_samples}.sock"
