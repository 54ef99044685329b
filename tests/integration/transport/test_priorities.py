"""Control messages on a connection that is full of tensors: over a Unix socket and over TCP under TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integration.transport.samples import MIB, step, take, tensor

from shoal.transport.base import PeerLost, Received
from shoal.wire.messages import Traffic
from shoal.wire.messages.step import Abort, Forward


async def test_a_control_message_overtakes_a_large_tensor_and_the_tensor_arrives_whole(ends: Any) -> None:
    a, b = ends
    large = tensor(64 * MIB, 7)
    a.post(b.peer_id, Forward(step(1), 0), [large], Traffic.ACTIVATIONS)
    for number in range(3):
        a.post(b.peer_id, Abort(step(number)))
    first, second, third, last = await take(b, 4)
    assert [first, second, third] == [Received(a.peer_id, Abort(step(number))) for number in range(3)]
    assert isinstance(last, Received)
    assert last.message == Forward(step(1), 0)
    assert last.tensors[0].data == large.data


async def test_a_message_in_the_class_of_the_tensors_before_it_comes_after_them(ends: Any) -> None:
    a, b = ends
    a.post(b.peer_id, Forward(step(1), 0), [tensor(8 * MIB)], Traffic.ACTIVATIONS)
    a.post(b.peer_id, Abort(step(1)), (), Traffic.ACTIVATIONS)
    events = await take(b, 2)
    assert [event.message for event in events if isinstance(event, Received)] == [Forward(step(1), 0), Abort(step(1))]


async def test_tensors_both_ways_and_control_messages_among_them_all_arrive(ends: Any) -> None:
    a, b = ends
    for number in range(40):
        for one, other in ((a, b), (b, a)):
            one.post(other.peer_id, Forward(step(number), 0), [tensor(number * 40_000, number)], Traffic.ACTIVATIONS)
            one.post(other.peer_id, Abort(step(number)))
    for one in (a, b):
        events = [event for event in await take(one, 80) if isinstance(event, Received)]
        forwards = [event for event in events if event.tensors]
        assert [event.message for event in forwards] == [Forward(step(number), 0) for number in range(40)]
        assert all(event.tensors[0].data == tensor(n * 40_000, n).data for n, event in enumerate(forwards))
        assert [event.message for event in events if not event.tensors] == [Abort(step(n)) for n in range(40)]


async def test_what_waits_behind_a_tensor_when_the_peer_is_lost_is_dropped_with_it(ends: Any, folder: Path) -> None:
    a, b = ends
    a.post(b.peer_id, Forward(step(1), 0), [tensor(64 * MIB)], Traffic.ACTIVATIONS)
    a.disconnect(b.peer_id, "told to")
    await a.flushed(b.peer_id)
    assert await take(a, 1) == [PeerLost(b.peer_id, "told to")]
    (lost,) = await take(b, 1)
    assert isinstance(lost, PeerLost)
    assert lost.peer == a.peer_id
    # It notices while it reads, or at its next heartbeat.
    assert lost.reason.startswith(("connection closed by the peer within a frame", "connection failed: "))
