"""The content of a snapshot on its way: sent a chunk at a time, put together, and hashed as it comes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from shoal.codec.raw import to_wire
from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages import Traffic
from shoal.wire.messages.snapshot import OfferSnapshot, Snapshot, SnapshotChunk

CHUNK_BYTES = 1 << 18


class Incoming:
    """A content on its way, or here.

    Args:
        snapshot: Its size is allocated at once.
    """

    def __init__(self, snapshot: Snapshot, offer: OfferSnapshot) -> None:
        self.snapshot = snapshot
        self.offer = offer
        self.content = torch.empty(snapshot.num_bytes, dtype=torch.uint8)
        self._memory = to_wire(self.content).data
        self._num_bytes = 0
        self._hash = hashlib.sha256()

    def add(self, event: Received) -> bool:
        """Take the next part; returns whether it was the last one.

        Raises:
            RemoteProtocolError: It is none, or more than was said.
        """
        tensor = event.tensors[0]
        end = self._num_bytes + tensor.num_bytes
        if tensor.dtype != "uint8" or not tensor.num_bytes or end > self.snapshot.num_bytes:
            raise RemoteProtocolError(
                f"{event.peer} sends {end} bytes ({tensor.dtype}) of a snapshot of {self.snapshot.num_bytes}"
            )
        self._memory[self._num_bytes : end] = tensor.data
        self._hash.update(tensor.data)
        self._num_bytes = end
        return end == self.snapshot.num_bytes

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of what has come."""
        return self._hash.hexdigest()


async def send_content(
    endpoint: Endpoint, peer: PeerId, digest: str, content: Tensor, is_wanted: Callable[[], bool]
) -> None:
    """Send a content. Each chunk waits until the one before has left, so a step's tensor waits for one chunk at most.

    Args:
        content: Bytes; must not change any more.
        is_wanted: Asked before each chunk.
    """
    for start in range(0, content.numel(), CHUNK_BYTES):
        if not is_wanted():
            return
        chunk = to_wire(content[start : start + CHUNK_BYTES])
        endpoint.post(peer, SnapshotChunk(digest), (chunk,), Traffic.STATE)
        await endpoint.flushed(peer)
