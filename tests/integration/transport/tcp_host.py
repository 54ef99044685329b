"""What tests over TCP share: endpoints of hosts that see each other's TCP addresses only, and strangers."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread
import numpy as np

from shoal.identity import Identity
from shoal.ids import PeerId, RunId, StepKey
from shoal.transport.base import TransportEvent
from shoal.transport.limits import TransportLimits
from shoal.transport.peers import StreamEndpoint
from shoal.transport.tls import tls_contexts
from shoal.wire.handshake import HandshakeDecoder, Hello, Refusal, encode_handshake
from shoal.wire.messages import Hop
from shoal.wire.tensors import WireTensor

RUN = RunId("run")
KEY = b"k" * 32
ALICE, BOB, CAROL = Identity(b"a" * 32), Identity(b"b" * 32), Identity(b"c" * 32)
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
    with anyio.fail_after(30):
        return [await anext(events) for _ in range(count)]


class TcpStranger:
    """A blocking TCP socket, under TLS once `secure` was called, that says whatever a test wants."""

    def __init__(self, target: StreamEndpoint) -> None:
        self.socket: socket.socket = socket.create_connection(("127.0.0.1", port_of(target)), timeout=10)

    async def secure(self, identity: Identity, key: bytes = KEY) -> None:
        context = tls_contexts(identity, key).client
        self.socket = await anyio.to_thread.run_sync(context.wrap_socket, self.socket)

    async def say(self, raw: bytes) -> None:
        await anyio.to_thread.run_sync(self.socket.sendall, raw)

    async def hear(self) -> Hello | Refusal:
        decoder = HandshakeDecoder()
        while True:
            raw = await anyio.to_thread.run_sync(self.socket.recv, len(decoder.get_buffer()))
            assert raw, "closed without a word"
            decoder.get_buffer()[: len(raw)] = raw
            said = decoder.advance(len(raw))
            if said is not None:
                return said

    async def greet(self, peer: PeerId, version: int = 1) -> Hello | Refusal:
        await self.say(encode_handshake(Hello(RUN, peer, "test", (), 1, 2, 0), version))
        return await self.hear()

    async def is_closed(self) -> bool:
        """Whether the other side closes, whatever it says before."""
        try:
            while await anyio.to_thread.run_sync(self.socket.recv, 4096):
                pass
        except (ConnectionError, ssl.SSLError):
            pass
        except TimeoutError:
            return False
        return True
