"""Peers, endpoints, tensors and waits that the tests of transports share."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from shoal.identity import Identity
from shoal.ids import PeerId, RunId, StepKey
from shoal.transport.base import TransportEvent
from shoal.transport.limits import TransportLimits
from shoal.transport.peers import StreamEndpoint
from shoal.wire.messages import Hop
from shoal.wire.tensors import WireTensor

RUN = RunId("run")
KEY = b"k" * 32
A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
ALICE, BOB, CAROL = Identity(b"a" * 32), Identity(b"b" * 32), Identity(b"c" * 32)
CHILD = Identity(b"child".ljust(32, b"\0"))
"""The peer that `peer_process.py` is."""
MIB = 1 << 20


class HostOpener(Protocol):
    async def __call__(
        self,
        identity: Identity,
        *,
        key: bytes = ...,
        limits: TransportLimits = ...,
        tcp: tuple[str, int] | None = ...,
        path: Path | None = ...,
        max_upload_mbit: float | None = ...,
    ) -> StreamEndpoint: ...


def step(number: int = 0) -> StepKey:
    return StepKey(0, 0, number, 0)


def tensor(num_bytes: int, fill: int = 1) -> WireTensor:
    return WireTensor("uint8", (num_bytes,), np.full(num_bytes, fill, dtype=np.uint8).data)


def over_tcp(endpoint: StreamEndpoint) -> Hop:
    """Return how the endpoint is seen from another host."""
    return Hop(endpoint.peer_id, tuple(a for a in endpoint.addresses if a.startswith("tcp:")))


def port_of(endpoint: StreamEndpoint) -> int:
    return int(over_tcp(endpoint).addresses[0].rpartition(":")[2])


async def take(endpoint: StreamEndpoint, count: int) -> list[TransportEvent]:
    events = endpoint.events()
    return [await anext(events) for _ in range(count)]
