"""The in-process network keeps the rules of a real one."""

from __future__ import annotations

import pytest

from shoal.errors import ConfigError, LocalProtocolError
from shoal.ids import PeerId, StepKey
from shoal.transport.base import PeerLost, PeerUp, Received, TransportEvent
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork
from shoal.wire.messages import Hop, Message, Traffic
from shoal.wire.messages.control import Heartbeat
from shoal.wire.messages.step import Forward, Opened
from shoal.wire.tensors import WireTensor

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def key(number: int) -> StepKey:
    return StepKey(0, 0, number, 0)


def pair(*, encode: bool = True) -> tuple[MemoryNetwork, MemoryEndpoint, MemoryEndpoint]:
    network = MemoryNetwork(encode=encode)
    a, b = network.endpoint(A), network.endpoint(B)
    a.introduce(b.hop)
    return network, a, b


async def take(endpoint: MemoryEndpoint, count: int) -> list[TransportEvent]:
    events = endpoint.events()
    return [await anext(events) for _ in range(count)]


async def test_messages_of_a_pair_arrive_in_order_after_the_peer_is_up() -> None:
    _, a, b = pair()
    for number in range(3):
        a.post(B, Opened(key(number)))
    assert await take(b, 4) == [PeerUp(A), *(Received(A, Opened(key(n))) for n in range(3))]
    b.post(A, Opened(key(9)))
    assert await take(a, 2) == [PeerUp(B), Received(B, Opened(key(9)))]


async def test_with_a_seed_control_messages_overtake_tensors_and_nothing_else_overtakes() -> None:
    network = MemoryNetwork(seed=1)
    a, b, c = (network.endpoint(peer) for peer in (A, B, C))
    for sender in (a, c):
        sender.introduce(b.hop)
    orders = set[tuple[int, ...]]()
    for number in range(30):
        a.post(B, Opened(key(2 * number)))
        a.post(B, Forward(key(0), 0), [WireTensor("uint8", (1,), memoryview(bytearray(1)))])
        a.post(B, Opened(key(2 * number + 1)))
        a.post(B, Forward(key(0), 1), [WireTensor("uint8", (1,), memoryview(bytearray(1)))])
        c.post(B, Opened(key(99)))
        events = await take(b, 5 if number else 7)
        ours = [event.message for event in events if isinstance(event, Received) and event.peer == A]
        assert [message for message in ours if isinstance(message, Forward)] == [Forward(key(0), 0), Forward(key(0), 1)]
        assert [message for message in ours if isinstance(message, Opened)] == [
            Opened(key(2 * number)),
            Opened(key(2 * number + 1)),
        ]
        assert isinstance(ours[0], Opened)
        orders.add(tuple(place for place, message in enumerate(ours) if isinstance(message, Forward)))
    assert orders == {(1, 3), (2, 3)}


@pytest.mark.parametrize("encode", [True, False])
@pytest.mark.parametrize("target", [A, B])
async def test_tensors_arrive_as_copies_also_at_the_sender_itself(encode: bool, target: PeerId) -> None:
    _, a, b = pair(encode=encode)
    source = bytearray(b"abcd")
    a.post(target, Forward(key(0), 1), [WireTensor("uint8", (4,), memoryview(source))])
    source[:] = b"xxxx"
    received = (await take(a if target == A else b, 1 if target == A else 2))[-1]
    assert isinstance(received, Received)
    assert bytes(received.tensors[0].data) == b"abcd"


async def test_sent_bytes_are_counted_by_traffic_and_not_on_loopback() -> None:
    _, a, _b = pair()
    a.post(B, Forward(key(0), 1), [WireTensor("uint8", (1000,), memoryview(bytearray(1000)))], Traffic.ACTIVATIONS)
    a.post(B, Opened(key(0)))
    a.post(A, Opened(key(0)))
    assert 1000 < a.sent_bytes[Traffic.ACTIVATIONS] < 1100
    assert 0 < a.sent_bytes[Traffic.CONTROL] < 60


async def test_an_unknown_or_absent_peer_is_reported_lost_once_until_the_consumer_knows() -> None:
    _, a, _ = pair()
    for _ in range(3):
        a.post(C, Opened(key(0)))
    a.introduce(Hop(C, ("memory:c",)))
    a.post(A, Opened(key(1)))
    assert await take(a, 2) == [PeerLost(C, "no known address"), Received(A, Opened(key(1)))]
    a.post(C, Opened(key(0)))
    assert await take(a, 1) == [PeerLost(C, "no answer at memory:c")]


async def test_a_cut_is_one_loss_at_each_end_and_healing_lets_a_new_connection_be_made() -> None:
    network, a, b = pair()
    a.post(B, Opened(key(0)))
    network.cut(A, B)
    a.post(B, Opened(key(1)))
    assert await take(a, 2) == [PeerUp(B), PeerLost(B, "cut")]
    assert await take(b, 3) == [PeerUp(A), Received(A, Opened(key(0))), PeerLost(A, "cut")]
    a.post(B, Opened(key(2)))
    assert await take(a, 1) == [PeerLost(B, "no answer at memory:b")]
    network.heal(A, B)
    a.post(B, Opened(key(3)))
    assert await take(b, 2) == [PeerUp(A), Received(A, Opened(key(3)))]


async def test_a_killed_peer_is_lost_by_all_and_sees_and_sends_nothing_more() -> None:
    network, a, b = pair()
    c = network.endpoint(C)
    b.post(A, Opened(key(0)))
    c.introduce(b.hop)
    c.post(B, Opened(key(0)))
    a.post(B, Opened(key(0)))
    network.kill(B)
    assert (await take(a, 2))[-1] == PeerLost(B, "killed")
    assert (await take(c, 2))[-1] == PeerLost(B, "killed")
    b.post(A, Opened(key(5)))
    b.introduce(c.hop)
    b.post(C, Opened(key(5)))
    assert [event async for event in b.events()] == []
    assert (a.peers, c.peers) == (frozenset(), frozenset())
    again = network.endpoint(B)
    a.post(B, Opened(key(6)))
    assert await take(again, 2) == [PeerUp(A), Received(A, Opened(key(6)))]


async def test_a_fault_can_be_placed_at_a_message() -> None:
    network, a, _b = pair()

    def kill_at_two(sender: PeerId, receiver: PeerId, message: Message) -> None:
        if (sender, receiver, message) == (A, B, Opened(key(2))):
            network.kill(B)

    network.before_delivery = kill_at_two
    for number in range(4):
        a.post(B, Opened(key(number)))
    assert await take(a, 2) == [PeerUp(B), PeerLost(B, "killed")]
    assert a.counters["transport.dropped"] == 2


async def test_closing_and_disconnecting_are_losses_too() -> None:
    _, a, b = pair()
    a.post(B, Opened(key(0)))
    b.disconnect(A, "told to")
    b.disconnect(A, "told to")
    assert (await take(a, 2))[-1] == PeerLost(B, "told to")
    a.post(B, Opened(key(0)))
    await b.aclose()
    await b.aclose()
    assert (await take(a, 2))[-1] == PeerLost(B, "closed")


async def test_what_breaks_the_schema_breaks_here_too() -> None:
    network, a, _ = pair()
    with pytest.raises(LocalProtocolError):
        a.post(B, Forward(key(0), 1))
    with pytest.raises(ConfigError):
        network.endpoint(B)


async def test_heartbeats_are_not_passed_up() -> None:
    _, a, b = pair()
    a.post(B, Heartbeat())
    a.post(B, Opened(key(0)))
    assert await take(b, 2) == [PeerUp(A), Received(A, Opened(key(0)))]
