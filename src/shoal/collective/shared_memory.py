"""Vectors that the other members of one host read where they are: nothing is copied, nothing is sent.

A member's vectors lie in an anonymous file (memfd) that it maps and others open as `/proc/<pid>/fd/<n>`: nothing has a
name that a killed process could leave behind, and the memory of a dead one lives as long as somebody has it mapped. The
file's size is sealed, so that reading can never fault. The process is that which the kernel names at the other end of
the Unix socket, and the file has to have the number that the message says: neither a path nor a file of another
process can be smuggled in.

Life of the memory of one member:

    free --vectors()--> written --lend()--> lent --take_back()--> free --rest()--> gone
                                              '--- never taken back (an operation was cancelled) ---> retired

Lent memory may be read by others at any time, so whoever needs vectors while it is lent gets a new file. The old one
stays open, for those that are late, until an operation in which everybody takes part has ended: then nobody follows the
old one any more.

Where there is no memfd (macOS), vectors are ordinary memory and everything is sent: its owner might cut a file without
seals while another member adds from it, which would kill that one.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId
from shoal.runtime.sealed_memory import has_memfd, sealed_memfd
from shoal.wire.messages.collective import SharedVector

_ALIGNMENT_BYTES = 4096


class _Segment:
    """One anonymous file of a sealed size, mapped."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_loans = 0
        self.descriptor = sealed_memfd("shoal-vectors", num_bytes)
        self.inode = os.fstat(self.descriptor).st_ino
        # The mapping goes with the last tensor over it.
        self.bytes_B = torch.frombuffer(mmap.mmap(self.descriptor, num_bytes), dtype=torch.uint8)

    def offset_of(self, values_N: Tensor) -> int | None:
        """Where a vector begins in this segment, or None if it does not lie in it."""
        offset = values_N.data_ptr() - self.bytes_B.data_ptr()
        return offset if offset >= 0 and offset + values_N.nbytes <= self.num_bytes else None

    def close(self) -> None:
        """Let nobody open it any more; who has it mapped keeps it."""
        os.close(self.descriptor)


class SharedMemory:
    """What one member lends to others, and what it has mapped of theirs; kept from operation to operation.

    Several operations may run at a time on vectors of one call. `vectors` may be written by any thread, everything else
    is for the event loop's.
    """

    def __init__(self) -> None:
        self._segment: _Segment | None = None
        self._retired: _Segment | None = None
        self._mapped: dict[PeerId, tuple[int, int, Tensor]] = {}

    def vectors(self, kinds: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Return vectors with arbitrary values, one for each number of elements and dtype.

        They are the same memory as those of the call before, unless that is still lent.
        """
        sizes = [count * dtype.itemsize for count, dtype in kinds]
        starts = [0]
        for size in sizes:
            starts.append(-(-(starts[-1] + size) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        if not has_memfd() or starts[-1] == 0:
            return [torch.empty(count, dtype=dtype) for count, dtype in kinds]
        segment = self._segment_of(starts[-1])
        return [
            segment.bytes_B[start : start + size].view(dtype)
            for start, size, (_, dtype) in zip(starts[:-1], sizes, kinds, strict=True)
        ]

    def reference(self, values_N: Tensor) -> SharedVector | None:
        """Return how others find a vector; None if it lies elsewhere."""
        segment = self._segment
        offset = None if segment is None else segment.offset_of(values_N)
        return None if segment is None or offset is None else SharedVector(segment.descriptor, segment.inode, offset)

    @property
    def is_lent(self) -> bool:
        """Whether others may read the vectors, for all that is known here."""
        return self._segment is not None and self._segment.num_loans > 0

    def lend(self) -> _Segment | None:
        """Others may read the vectors from now on; returns what `take_back` wants."""
        if self._segment is not None:
            self._segment.num_loans += 1
        return self._segment

    def take_back(self, loan: _Segment | None, has_heard_everyone: bool = True) -> None:
        """Nobody reads them any more for one operation.

        Args:
            loan: What `lend` has returned to it.
            has_heard_everyone: No other member can be at an earlier group.
        """
        if loan is not None:
            loan.num_loans -= 1
            if has_heard_everyone and loan is self._segment:
                self._close_retired()

    def look(self, peer: PeerId, process: int | None, vector: SharedVector, num_elements: int, like: Tensor) -> Tensor:
        """Return another member's vector. It must not be written, and its values change when its owner changes them.

        Args:
            process: The peer's process, as the kernel proves it; None: not known.
            vector: The place that the peer has named.
            like: A vector of the expected dtype.

        Raises:
            RemoteProtocolError: There is no such memory.
        """
        if process is None:
            raise RemoteProtocolError(f"{peer} refers to memory of this host and is not known to be on it")
        known = self._mapped.get(peer)
        if known is None or known[:2] != (process, vector.inode):
            self._mapped.pop(peer, None)
            known = (process, vector.inode, _map(peer, process, vector))
            self._mapped[peer] = known
        num_bytes = num_elements * like.element_size()
        start, size = vector.offset_bytes, known[2].numel()
        if start < 0 or start % _ALIGNMENT_BYTES or start + num_bytes > size:
            raise RemoteProtocolError(f"{peer} refers to bytes {start} to {start + num_bytes} of {size}")
        return known[2][start : start + num_bytes].view(like.dtype)

    def rest(self) -> None:
        """Nothing is needed for a while: let go of what nobody can be reading, and of what is mapped of others."""
        self._mapped.clear()
        if self._segment is not None and not self.is_lent:
            self._segment.close()
            self._segment = None

    def forget_others(self, members: Iterable[PeerId]) -> None:
        """Let go of what is mapped of anyone else."""
        kept = set(members)
        self._mapped = {peer: mapped for peer, mapped in self._mapped.items() if peer in kept}

    def close(self) -> None:
        """Let go of everything."""
        self._close_retired()
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        self._mapped.clear()

    def _segment_of(self, num_bytes: int) -> _Segment:
        segment = self._segment
        if segment is not None and self.is_lent:
            self._close_retired()
            self._retired, segment = segment, None
        elif segment is not None and segment.num_bytes < num_bytes:
            segment.close()
            segment = None
        self._segment = segment or _Segment(num_bytes)
        return self._segment

    def _close_retired(self) -> None:
        if self._retired is not None:
            self._retired.close()
            self._retired = None


def _map(peer: PeerId, process: int, vector: SharedVector) -> Tensor:
    """Map the whole segment of another process for reading.

    Raises:
        RemoteProtocolError: It is no sealed segment, or another one.
    """
    if not has_memfd():
        raise RemoteProtocolError(f"{peer} refers to shared memory, which this system does not have")
    path = f"/proc/{process}/fd/{vector.descriptor}"
    try:
        # Whatever else it may be, opening it must not wait.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise RemoteProtocolError(f"{path} of {peer} cannot be opened: {error}") from error
    try:
        found = os.fstat(descriptor)
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as error:
            raise RemoteProtocolError(f"{path} of {peer} is not shared memory: {error}") from error
        if found.st_ino != vector.inode or not seals & fcntl.F_SEAL_SHRINK or found.st_size == 0:
            raise RemoteProtocolError(f"{path} of {peer} is not the memory that it speaks of")
        try:
            view = mmap.mmap(descriptor, found.st_size, prot=mmap.PROT_READ)
        except (OSError, ValueError, OverflowError) as error:
            raise RemoteProtocolError(f"{path} of {peer} cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)
    with warnings.catch_warnings():
        # torch warns that it cannot keep anyone from writing; nobody does.
        warnings.simplefilter("ignore")
        return torch.frombuffer(view, dtype=torch.uint8)
