"""What has been received stays as it is, however much more arrives, and its memory is used again when it is gone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.integration.transport.samples import ALICE, BOB, MIB, over_tcp, step, take, tensor

from shoal.transport.base import Received
from shoal.wire.messages import Traffic
from shoal.wire.messages.step import Forward


@pytest.mark.parametrize("carrier", ["unix", "tcp"])
async def test_a_held_tensor_never_changes_when_more_arrive(host: Any, carrier: str) -> None:
    a, b = await host(ALICE), await host(BOB)
    a.introduce(over_tcp(b) if carrier == "tcp" else b.hop)
    held: dict[int, Received] = {}
    places: set[int] = set()
    for number in range(1, 25):
        a.post(b.peer_id, Forward(step(number), 0), [tensor(2 * MIB, number)], Traffic.ACTIVATIONS)
        (event,) = (e for e in await take(b, 1 if number > 1 else 2) if isinstance(e, Received))
        places.add(np.frombuffer(event.tensors[0].data, dtype=np.uint8).ctypes.data)
        if number % 8 == 0:
            held[number] = event
        del event
    assert all(event.tensors[0].data == tensor(2 * MIB, number).data for number, event in held.items())
    assert len(places) < 10


async def test_tensors_are_received_into_the_memory_that_was_asked_for(host: Any) -> None:
    a, b = await host(ALICE), await host(BOB)
    a.introduce(b.hop)
    made: list[Any] = []

    def own(num_bytes: int) -> Any:
        made.append(np.empty(num_bytes, dtype=np.uint8))
        return made[-1]

    b.receive_into(own)
    a.post(b.peer_id, Forward(step(1), 0), [tensor(2 * MIB, 1)], Traffic.ACTIVATIONS)
    [event] = [event for event in await take(b, 2) if isinstance(event, Received)]
    [memory] = made
    assert np.frombuffer(event.tensors[0].data, dtype=np.uint8).ctypes.data == memory.ctypes.data
    assert event.tensors[0].data == tensor(2 * MIB, 1).data
