"""The trainer's end of the feed: held-out reads, refusals, and views that are shared read-only memory."""

from __future__ import annotations

from contextlib import closing

import anyio
import pytest
from tests.linux_calls import needs
from tests.unit.data.host import CLIENT, SERVER, host, key, labels_of, settle
from tests.windows import num_free

from shoal.data.feed import LeasedBatch
from shoal.data.microbatch import cut
from shoal.data.pool import Pool
from shoal.errors import ConnectionLost, RemoteError, RemoteProtocolError
from shoal.runtime.linux_calls import LinuxCall, has
from shoal.transport.base import Received
from shoal.wire.messages.base import SampleRange, StepRange
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
        await settle(lambda: num_free(at.service.pool) == 0)  # both places hold batches prepared ahead


@pytest.mark.parametrize(("start", "stop"), [(0, 65), (-1, 1), (3, 3), (149, 151)])
async def test_a_read_outside_the_data_or_larger_than_a_place_is_refused(start: int, stop: int) -> None:
    async with host() as at:
        with pytest.raises(RemoteError, match="cannot be read"):
            await at.trainer(0).read_holdout(start, stop)


async def test_only_the_client_may_plan() -> None:
    async with host() as at:
        feed = at.trainer(0)
        await feed.hello()
        for message in (
            PlanRound(1, 1, StepRange(0, 1)),
            RecordSamples(1, ()),
            ReleaseTrainer(0, 1, 1, (), (), {}, complete=True),
        ):
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


@needs(LinuxCall.MEMFD, "a batch is a copy")
async def test_the_view_of_a_batch_is_shared_read_only_memory() -> None:
    async with host() as at:
        at.tell(PlanRound(1, 1, StepRange(0, 1)))
        batch = await at.trainer(0).lease(1, 0)
        assert batch is not None
        with pytest.raises(ValueError, match="read-only"):
            batch.fields.inputs[0, 0] = 1.0
        at.service.pool.memory(0)[:4] = 0
        at.service.pool.memory(1)[:4] = 0
        assert batch.fields.inputs[0, 0] == 0.0
        assert sum(part.num_samples for part in cut(batch.fields, 3)) == 4


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
        at.endpoint.post(at.endpoints[0].peer_id, BatchReady(0, pool.path, pool.num_bytes, 0, place, good, (), 2, {}))
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


async def test_a_batch_is_that_of_the_data_server_that_has_sent_it_though_another_one_has_its_place_now() -> None:
    async with host() as at:
        at.service.receive = lambda event: True  # type: ignore[method-assign]
        feed = at.trainer(0)
        got: list[LeasedBatch | None] = []

        async def ask() -> None:
            got.append(await feed.lease(1, 0))

        at.group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        places = TensorPlace("float32", (2, 3), 0), TensorPlace("int64", (2,), 64)
        with closing(Pool(place_bytes=4096, num_places=1)) as pool:
            pool.memory(0)[64:] = 1
            ready = BatchReady(0, pool.path, pool.num_bytes, 7, *places, (SampleRange(0, 0, 2),), 2, {})
            feed.receive(Received(SERVER, ready))
            feed.peer_lost(SERVER)
        with closing(Pool(place_bytes=4096, num_places=1)) as other:
            # A file has a name of its own each time.
            assert other.path == pool.path or not has(LinuxCall.MEMFD)
            await settle(lambda: bool(got))
        assert got[0] is not None
        assert got[0].fields.labels.tolist() == [0x0101010101010101] * 2


async def test_a_pool_that_cannot_be_mapped_is_asked_for_again_and_then_named() -> None:
    async with host() as at:
        at.service.receive = lambda event: True  # type: ignore[method-assign]
        feed = at.trainer(0)
        failed: list[str] = []

        async def ask() -> None:
            with pytest.raises(ConnectionLost) as caught:
                await feed.lease(1, 0)
            failed.append(str(caught.value))

        at.group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        places = TensorPlace("float32", (2, 3), 0), TensorPlace("int64", (2,), 64)
        ready = BatchReady(0, "/proc/0/fd/99", 4096, 7, *places, (SampleRange(0, 0, 2),), 2, {})
        for _ in range(3):
            with pytest.raises(RemoteProtocolError, match="cannot be opened"):
                feed.receive(Received(SERVER, ready))
        assert not failed
        assert feed.receive(Received(SERVER, ready))
        await settle(lambda: bool(failed))
        assert "/proc/0/fd/99" in failed[0]
