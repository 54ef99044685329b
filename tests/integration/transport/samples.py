"""Peers, tensors and waits that the tests of Unix sockets share."""

from __future__ import annotations

import anyio
import numpy as np

from shoal.ids import PeerId, RunId, StepKey
from shoal.transport.base import TransportEvent
from shoal.transport.peers import StreamEndpoint
from shoal.wire.tensors import WireTensor

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
RUN = RunId("run")
MIB = 1 << 20


def key(number: int = 0) -> StepKey:
    return StepKey(0, 0, number, 0)


def tensor(num_bytes: int, fill: int = 1) -> WireTensor:
    return WireTensor("uint8", (num_bytes,), np.full(num_bytes, fill, dtype=np.uint8).data)


async def take(endpoint: StreamEndpoint, count: int) -> list[TransportEvent]:
    events = endpoint.events()
    with anyio.fail_after(20):
        return [await anext(events) for _ in range(count)]
