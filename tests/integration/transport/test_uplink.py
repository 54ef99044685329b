"""A capped endpoint: tensors to other hosts are held back, control messages and peers of this host are not."""

from __future__ import annotations

from typing import Any

from tests.integration.transport.samples import ALICE, BOB, MIB, over_tcp, step, take, tensor

from shoal.transport.base import PeerUp, Received
from shoal.wire.messages import Traffic
from shoal.wire.messages.step import Abort, Forward

MBIT = 0.08
"""10 kB/s."""


async def test_tensors_to_other_hosts_are_held_back_and_control_messages_are_not(host: Any) -> None:
    capped, b = await host(ALICE, max_upload_mbit=MBIT), await host(BOB)
    capped.introduce(over_tcp(b))
    capped.post(b.peer_id, Forward(step(0), 0), [tensor(8 * MIB)], Traffic.ACTIVATIONS)
    for number in range(200):
        capped.post(b.peer_id, Abort(step(number)))
    events = await take(b, 201)
    assert events == [PeerUp(capped.peer_id), *(Received(capped.peer_id, Abort(step(n))) for n in range(200))]
    # The tensor takes a quarter of an hour.
    capped.disconnect(b.peer_id, "enough")


async def test_a_held_tensor_arrives_whole_piece_by_piece(host: Any) -> None:
    capped, b = await host(ALICE, max_upload_mbit=MBIT), await host(BOB)
    capped.introduce(over_tcp(b))
    sent = tensor(9000, 5)
    capped.post(b.peer_id, Forward(step(0), 0), [sent], Traffic.ACTIVATIONS)
    capped.post(b.peer_id, Forward(step(1), 0), [sent], Traffic.ACTIVATIONS)
    _, *received = await take(b, 3)
    assert [event.tensors[0].data for event in received if isinstance(event, Received)] == [sent.data] * 2


async def test_peers_of_this_host_are_not_held_back(host: Any) -> None:
    capped, b = await host(ALICE, max_upload_mbit=MBIT), await host(BOB)
    capped.introduce(b.hop)
    capped.post(b.peer_id, Forward(step(0), 0), [tensor(32 * MIB)], Traffic.ACTIVATIONS)
    _, received = await take(b, 2)
    assert isinstance(received, Received)
