"""Endpoints over emulated links: slow, late, lossy, wrong, silent in one direction, and cut."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest
from tests.alongside import alongside
from tests.integration.transport.samples import ALICE, BOB, KEY, MIB, RUN, port_of, step, take, tensor

from shoal.errors import Offence
from shoal.transport.base import PeerLost, PeerUp, Received
from shoal.transport.endpoint import open_endpoint
from shoal.transport.limits import TransportLimits
from shoal.transport.losses import Loss
from shoal.transport.peers import StreamEndpoint
from shoal.wire.messages import Hop, Traffic
from shoal.wire.messages.step import Forward, Opened
from shoal_lab.faults.link import PERFECT, Direction, LinkConditions
from shoal_lab.faults.link_grammar import parse_link
from shoal_lab.faults.link_proxy import LinkProxy

BOTH = (Direction.OUTWARD, Direction.INWARD)


class Linked(NamedTuple):
    """`a` has dialled `b` through the proxy and is dialled by nobody; both PeerUp are taken."""

    a: StreamEndpoint
    b: StreamEndpoint
    proxy: LinkProxy


Linker = Callable[..., Awaitable[Linked]]


@pytest.fixture
async def linked(host: Any) -> AsyncIterator[Linker]:
    async with AsyncExitStack() as stack:

        async def link(text: str = "", *, heartbeat_s: float = 0.05, deadline_s: float = 0.5) -> Linked:
            limits = TransportLimits(heartbeat_s=heartbeat_s, deadline_s=deadline_s)
            a, b = await host(ALICE, limits=limits, tcp=None), await host(BOB, limits=limits)
            between = parse_link(text) if text else PERFECT
            proxy = await stack.enter_async_context(LinkProxy(("127.0.0.1", port_of(b)), between))
            a.introduce(Hop(b.peer_id, (proxy.address,)))
            await greet(a, b)
            return Linked(a, b, proxy)

        yield link


async def greet(a: StreamEndpoint, b: StreamEndpoint) -> None:
    """Connect `a` with `b` by a message."""
    a.post(b.peer_id, Opened(step()))
    assert await take(b, 2) == [PeerUp(a.peer_id), Received(a.peer_id, Opened(step()))]
    assert await take(a, 1) == [PeerUp(b.peer_id)]


async def lost(endpoint: StreamEndpoint) -> PeerLost:
    """Return the loss that is the endpoint's next event."""
    (event,) = await take(endpoint, 1)
    assert isinstance(event, PeerLost)
    return event


def losses(endpoint: StreamEndpoint, cause: Loss) -> int:
    return endpoint.metrics.counter("transport.lost", cause=cause.value).value


async def exchange(a: StreamEndpoint, b: StreamEndpoint, num_bytes: int) -> None:
    """Send a tensor both ways at once and take both."""
    for number, (one, other) in enumerate(((a, b), (b, a))):
        one.post(other.peer_id, Forward(step(number), 0), [tensor(num_bytes, number + 1)], Traffic.ACTIVATIONS)
    for number, (one, other) in enumerate(((b, a), (a, b))):
        (received,) = await take(one, 1)
        assert isinstance(received, Received), received
        assert (received.peer, received.message) == (other.peer_id, Forward(step(number), 0))
        assert np.array_equal(received.tensors[0].data, np.full(num_bytes, number + 1, dtype=np.uint8))


@pytest.mark.parametrize("link", ["20mbit,150ms", "20mbit,150ms,jitter=40ms,loss=0.2%,seed=1"])
async def test_tensors_that_fill_a_slow_link_for_longer_than_the_deadline_make_nobody_suspect(
    linked: Linker, link: str
) -> None:
    a, b, proxy = await linked(link, heartbeat_s=0.1, deadline_s=1.0)
    await exchange(a, b, 3_000_000)
    assert (a.counters["transport.lost"], b.counters["transport.lost"]) == (0, 0)
    assert all(proxy.taken_bytes(direction) > 3_000_000 for direction in Direction)


@pytest.mark.slow
async def test_a_link_that_is_full_for_half_a_minute_makes_nobody_suspect(linked: Linker) -> None:
    a, b, _ = await linked("20mbit,150ms,jitter=40ms,loss=1%", heartbeat_s=0.25, deadline_s=2.0)
    for _ in range(3):
        await exchange(a, b, 20_000_000)
    assert (a.counters["transport.lost"], b.counters["transport.lost"]) == (0, 0)


@pytest.mark.parametrize("direction", BOTH)
async def test_a_flipped_bit_is_noticed_counted_and_never_delivered(linked: Linker, direction: Direction) -> None:
    a, b, proxy = await linked("200mbit,4ms,seed=5")
    one, other = (a, b) if direction is Direction.OUTWARD else (b, a)
    proxy.change(LinkConditions(bytes_per_flip=100_000), direction)
    for microbatch in range(3):
        one.post(other.peer_id, Forward(step(), microbatch), [tensor(MIB)], Traffic.ACTIVATIONS)
    assert (await lost(other)).reason.startswith("TLS: ")
    assert other.metrics.counter("transport.refused", offence=Offence.TLS.value).value == 1
    assert proxy.model(direction).num_flipped >= 1
    await lost(one)
    proxy.change(PERFECT.outward)
    await greet(a, b)
    await exchange(a, b, MIB)
    assert (a.counters["transport.lost"], b.counters["transport.lost"]) == (1, 1)


@pytest.mark.parametrize("direction", BOTH)
async def test_a_link_that_swallows_one_direction_is_given_up_by_who_hears_nothing(
    linked: Linker, direction: Direction
) -> None:
    a, b, proxy = await linked("10ms")
    deaf, mute = (b, a) if direction is Direction.OUTWARD else (a, b)
    proxy.drop(direction)
    assert (await lost(deaf)).reason.startswith("silent for ")
    assert await lost(mute) == PeerLost(deaf.peer_id, "connection closed by the peer")
    assert losses(deaf, Loss.SILENT) == losses(mute, Loss.CLOSED) == 1
    proxy.heal()
    await greet(a, b)
    assert (a.counters["transport.lost"], b.counters["transport.lost"]) == (1, 1)


async def test_a_stall_that_is_shorter_than_the_deadline_costs_nothing_but_the_time(linked: Linker) -> None:
    a, b, proxy = await linked("10ms", deadline_s=5.0)
    proxy.hold()
    a.post(b.peer_id, Forward(step(), 0), [tensor(MIB)])
    with anyio.move_on_after(0.6) as waiting:
        await anext(b.events())
    assert waiting.cancelled_caught
    proxy.heal()
    (received,) = await take(b, 1)
    assert isinstance(received, Received)
    await exchange(a, b, MIB)
    assert (a.counters["transport.lost"], b.counters["transport.lost"]) == (0, 0)


@pytest.mark.parametrize("how", ["closed", "reset"])
async def test_a_cut_within_a_tensor_is_one_loss_on_both_sides_and_can_be_dialled_anew(
    linked: Linker, how: str
) -> None:
    a, b, proxy = await linked("100mbit,10ms", deadline_s=5.0)
    for microbatch in range(2):
        a.post(b.peer_id, Forward(step(), microbatch), [tensor(4 * MIB)])
    await proxy.taken(Direction.OUTWARD, 2 * MIB)
    proxy.cut(reset=how == "reset")
    for one, other in ((a, b), (b, a)):
        assert (await lost(one)).peer == other.peer_id
        assert losses(one, Loss.CLOSED) == 1
    # Nobody can be reached meanwhile, and that is a loss of its own.
    a.post(b.peer_id, Opened(step()))
    assert (await lost(a)).peer == b.peer_id
    assert losses(a, Loss.UNREACHABLE) == 1
    proxy.heal()
    await greet(a, b)
    await exchange(a, b, MIB)
    assert (a.counters["transport.lost"], b.counters["transport.lost"]) == (2, 1)
    assert a.counters["transport.reconnected"] == b.counters["transport.reconnected"] == 1


async def test_a_link_that_is_out_for_longer_than_the_deadline_is_lost_on_both_sides_and_comes_back(
    linked: Linker,
) -> None:
    a, b, proxy = await linked("20mbit,20ms")
    a.post(b.peer_id, Forward(step(), 0), [tensor(4 * MIB)])
    await proxy.taken(Direction.OUTWARD, MIB)
    proxy.hold()
    for one in (a, b):
        assert (await lost(one)).reason.startswith("silent for ")
    proxy.heal()
    await greet(a, b)
    await exchange(a, b, MIB // 4)
    assert losses(a, Loss.SILENT) == losses(b, Loss.SILENT) == 1
    assert (a.counters["transport.lost"], b.counters["transport.lost"]) == (1, 1)


async def test_the_kernel_holds_little_of_a_tensor_that_waits_for_a_slow_link(linked: Linker) -> None:
    a, b, proxy = await linked("20mbit,150ms", heartbeat_s=0.1, deadline_s=5.0)
    a.post(b.peer_id, Forward(step(), 0), [tensor(4 * MIB)], Traffic.ACTIVATIONS)
    await proxy.taken(Direction.OUTWARD, MIB // 2)
    # The rest is still here, where something that matters more can go before it.
    assert a._peers[b.peer_id].queued_bytes > 3 * MIB - MIB // 4


async def test_a_peer_whose_host_is_gone_without_a_word_is_noticed_and_its_successor_is_heard_at_once(
    linked: Linker, folder: Path
) -> None:
    a, b, proxy = await linked("10ms")
    # Half-open: what either side sends is lost from now on, the end of the connection too.
    proxy.drop()
    a.post(b.peer_id, Opened(step(7)))
    await b.aclose()
    assert (await lost(a)).reason.startswith("silent for ")
    assert losses(a, Loss.SILENT) == 1
    limits = TransportLimits(heartbeat_s=0.05, deadline_s=0.5)
    port, path = port_of(b), folder / "successor.sock"
    opened = open_endpoint(
        identity=BOB, run_id=RUN, role="test", unix_path=path, swarm_key=KEY, tcp=("127.0.0.1", port), limits=limits
    )
    async with opened as again:
        proxy.heal()
        # What was said to the one before is never delivered to it.
        await greet(a, again)
        assert (a.counters["transport.lost"], again.counters["transport.lost"]) == (1, 0)


async def test_a_link_that_flaps_once_a_second_makes_nobody_suspect_and_loses_nothing(linked: Linker) -> None:
    a, b, proxy = await linked("20mbit,20ms", heartbeat_s=0.25, deadline_s=2.0)

    async def flap() -> None:
        while True:
            await anyio.sleep(0.5)
            proxy.hold()
            await anyio.sleep(0.5)
            proxy.heal()

    async with alongside(flap):
        for _ in range(3):
            await exchange(a, b, 2 * MIB)
    assert (a.counters["transport.lost"], b.counters["transport.lost"]) == (0, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_two_minutes_of_tensors_over_10_mbit_and_200_ms_make_nobody_suspect(linked: Linker) -> None:
    a, b, _ = await linked("10mbit,200ms,jitter=20ms,loss=0.1%,seed=2", heartbeat_s=0.25, deadline_s=2.0)
    began_s = anyio.current_time()
    while anyio.current_time() < began_s + 120.0:
        await exchange(a, b, 5_000_000)
        # Idle for a while as well: then heartbeats alone say that somebody is there.
        await anyio.sleep(3.0)
    assert (a.counters["transport.lost"], b.counters["transport.lost"]) == (0, 0)
