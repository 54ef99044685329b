"""The reference: blocking sockets over loopback, nothing encrypted, received into a buffer that is there already."""

from __future__ import annotations

import socket
import struct
from contextlib import ExitStack
from typing import Final, Self

import numpy as np

from shoal.clock import SystemClock
from shoal_lab.bench.link import linked_port
from shoal_lab.bench.measure import percentile
from shoal_lab.bench.transport_rendezvous import Rendezvous

_SMALL_BYTES: Final = 64
_TIME: Final = struct.Struct("<d")


class RawEnd:
    """One end of one connection, which is made in the first call and kept."""

    def __init__(self, rendezvous: Rendezvous, link: str | None) -> None:
        """Connect nothing yet.

        Args:
            link: between the ends; None: loopback alone.
        """
        self._rendezvous = rendezvous
        self._link = link
        self._linked = ExitStack()
        self._receives = rendezvous.is_first
        self._connected: socket.socket | None = None
        self._clock = SystemClock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connected is not None:
            self._connected.close()
        self._linked.close()

    def rate(self, size_bytes: int, count: int) -> float | None:
        """Send so many buffers; return GB/s at the sender."""
        sock, buffer = self._socket(), np.ones(size_bytes, dtype=np.uint8).data
        if self._receives:
            for number in range(count + 1):
                _receive(sock, buffer)
                if number in (0, count):
                    sock.sendall(b"!")
            return None
        sock.sendall(buffer)
        sock.recv(1)
        begun_s = self._clock.now_s()
        for _ in range(count):
            sock.sendall(buffer)
        sock.recv(1)
        return size_bytes * count / 1e9 / (self._clock.now_s() - begun_s)

    def round_trip(self, count: int) -> float | None:
        """Send 64 bytes there and back so often; return the mean in microseconds."""
        sock, buffer = self._socket(), memoryview(bytearray(_SMALL_BYTES))
        begun_s = self._clock.now_s()
        for _ in range(count):
            if self._receives:
                _receive(sock, buffer)
                sock.sendall(buffer)
            else:
                sock.sendall(buffer)
                _receive(sock, buffer)
        return None if self._receives else (self._clock.now_s() - begun_s) / count * 1e6

    def waiting(self, size_bytes: int, count: int) -> float | None:
        """Say 64 bytes just after a large buffer; return the 99th percentile of how long they took, in ms."""
        sock = self._socket()
        large, small = memoryview(bytearray(size_bytes)), memoryview(bytearray(_SMALL_BYTES))
        took_ms: list[float] = []
        for _ in range(count):
            if self._receives:
                _receive(sock, large)
                _receive(sock, small)
                took_ms.append((self._clock.now_s() - _TIME.unpack_from(small)[0]) * 1e3)
            else:
                _TIME.pack_into(small, 0, self._clock.now_s())
                sock.sendall(large)
                sock.sendall(small)
        return percentile(took_ms, 0.99) if self._receives else None

    def _socket(self) -> socket.socket:
        if self._connected is None:
            if self._receives:
                with socket.create_server(("127.0.0.1", 0)) as listener:
                    port = int(listener.getsockname()[1])
                    self._rendezvous.share("raw", str(self._linked.enter_context(linked_port(self._link, port))))
                    self._connected, _ = listener.accept()
            else:
                port = int(self._rendezvous.share("raw", ""))
                self._connected = socket.create_connection(("127.0.0.1", port))
            self._connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._connected


def _receive(sock: socket.socket, buffer: memoryview) -> None:
    filled = 0
    while filled < len(buffer):
        num_bytes = sock.recv_into(buffer[filled:])
        if not num_bytes:
            raise ConnectionError("the other process of the benchmark has closed its socket")
        filled += num_bytes
