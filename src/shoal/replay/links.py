"""Tensors between the processes of one replay: a socket for each two of them, and a thread that empties it.

Whoever sends never waits for whoever receives: what has arrived is kept until it is asked for, under the name that both
know. So no two processes wait until the other one has read.

    frame    length of the head (u32), head (msgpack: name, note, types and shapes of tensors), tensors
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from shoal.codec.raw import from_wire, to_wire
from shoal.errors import ConnectionLost
from shoal.wire.tensors import WireTensor, empty_bytes, tensor_bytes

_LENGTH = struct.Struct("<I")

Name = tuple[int, ...]
"""Of a parcel: no two between the same two processes have the same one."""


class _Head(msgspec.Struct, frozen=True):
    name: Name
    note: Any
    tensors: tuple[tuple[str, tuple[int, ...]], ...]


class TensorParcel(NamedTuple):
    """What one process has sent to another: `note` is what msgpack can carry; the tensors are the receiver's own."""

    note: Any
    tensors: list[Tensor]


class ProcessLink:
    """One end.

    Args:
        connection: to the other process; it is closed with this process.
    """

    def __init__(self, connection: socket.socket, process: int) -> None:
        self._socket = connection
        self._process = process
        self._arrived: SimpleQueue[tuple[Name, TensorParcel] | None] = SimpleQueue()
        self._kept: dict[Name, TensorParcel] = {}
        threading.Thread(target=self._read, name=f"link-{process}", daemon=True).start()

    def send(self, name: Name, note: object = None, tensors: Sequence[Tensor] = ()) -> None:
        """Send a parcel.

        Raises:
            ConnectionLost: The other process has ended.
        """
        wires = [to_wire(tensor) for tensor in tensors]
        head = msgspec.msgpack.encode(_Head(name, note, tuple((wire.dtype, wire.shape) for wire in wires)))
        try:
            self._socket.sendall(_LENGTH.pack(len(head)) + head)
            for wire in wires:
                self._socket.sendall(wire.data)
        except OSError as error:
            raise self._lost() from error

    def receive(self, name: Name) -> TensorParcel:
        """Wait for a parcel.

        Raises:
            ConnectionLost: The other process has ended.
        """
        while name not in self._kept:
            arrived = self._arrived.get()
            if arrived is None:
                raise self._lost()
            self._kept[arrived[0]] = arrived[1]
        return self._kept.pop(name)

    def _lost(self) -> ConnectionLost:
        return ConnectionLost(f"process {self._process} of the replay has ended before it was through")

    # ---- on a thread of its own

    def _read(self) -> None:
        # What ends the socket ends the replay, and whoever waits here says so.
        with suppress(OSError, EOFError):
            while True:
                (head_bytes,) = _LENGTH.unpack(self._bytes(_LENGTH.size))
                head = msgspec.msgpack.decode(self._bytes(head_bytes), type=_Head)
                wires = [
                    WireTensor(dtype, shape, self._bytes(tensor_bytes(dtype, shape))) for dtype, shape in head.tensors
                ]
                self._arrived.put((head.name, TensorParcel(head.note, [from_wire(wire) for wire in wires])))
        self._arrived.put(None)

    def _bytes(self, number: int) -> memoryview:
        """Read so many, into memory of their own."""
        found = empty_bytes(number)
        done = 0
        while done < number:
            count = self._socket.recv_into(found[done:])
            if not count:
                raise EOFError
            done += count
        return found


class Crew:
    """The processes of a replay, as one of them sees the others.

    Args:
        homes: the process of each generation of the run.
        process: this process's number.
        links: to all other processes; empty where there is only one.
    """

    def __init__(self, homes: Sequence[int], process: int = 0, links: Mapping[int, ProcessLink] | None = None) -> None:
        self._homes = homes
        self.process = process
        self.links = links or {}

    def home(self, generation: int) -> int:
        """The process that computes a generation."""
        return self._homes[generation]

    def is_mine(self, generation: int) -> bool:
        """Whether this process does."""
        return self._homes[generation] == self.process
