"""Blocking sockets that say whatever a test wants: over TCP (TLS once `secure` was called), or to a Unix socket."""

from __future__ import annotations

import socket
import ssl

import anyio.to_thread
from tests.integration.transport.samples import KEY, RUN, port_of

from shoal.identity import Identity
from shoal.ids import PeerId, RunId
from shoal.transport.peers import StreamEndpoint
from shoal.transport.tls import tls_contexts
from shoal.wire.handshake import PROTOCOL_VERSION, HandshakeDecoder, Hello, Refusal, encode_handshake

TIMEOUT_S = 60.0


class Stranger:
    """Somebody who has connected."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(TIMEOUT_S)
        self.socket = connected

    @classmethod
    def over_tcp(cls, target: StreamEndpoint, source: str = "127.0.0.1") -> Stranger:
        return cls(socket.create_connection(("127.0.0.1", port_of(target)), source_address=(source, 0)))

    @classmethod
    def on_this_host(cls, target: StreamEndpoint) -> Stranger:
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(target.addresses[0].rpartition(":")[2])
        return cls(connected)

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

    async def greet(
        self,
        peer: PeerId,
        *,
        run: RunId = RUN,
        version: int = PROTOCOL_VERSION,
        connection: int = 2,
        previous: int = 0,
    ) -> Hello | Refusal:
        await self.say(encode_handshake(Hello(run, peer, "test", (), 1, connection, previous), version))
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
