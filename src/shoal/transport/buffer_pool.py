"""Memory for received tensors, used again and again: fresh memory costs a page fault for each 4 KiB of a tensor.

    allocate --> leased (the consumer's view) -- last view gone, on any thread --> returned --> idle --> allocate
                                                                                  idle -- not needed --> freed

Who takes a tensor knows nothing of this: its memoryview, and whatever numpy or torch make of that, keep the lease
alive. Memory is handed out again only after the last of them is gone.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

from shoal.clock import Clock
from shoal.wire.tensors import empty_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MIN_POOLED_BYTES: Final = 64 * 1024
"""Smaller tensors get memory of their own, which the allocator has at hand."""

Memory: TypeAlias = "NDArray[np.uint8]"


def _usual_memory(num_bytes: int) -> Memory:
    """Return memory with arbitrary content."""
    import numpy as np  # where the first tensor is received: see wire.tensors

    return np.empty(num_bytes, dtype=np.uint8)


class BufferPool:
    """The memory of one endpoint's received tensors. All methods are called on one thread.

    Attributes:
        memory: Returns new memory of so many bytes; what it has returned before is used on.
    """

    def __init__(self, max_idle_bytes: int) -> None:
        """Start empty.

        Args:
            max_idle_bytes: the most that is kept for later tensors; leased memory is not limited here.
        """
        self.memory: Callable[[int], Memory] = _usual_memory
        self._max_idle_bytes = max_idle_bytes
        self._idle: dict[int, list[Memory]] = {}
        self._idle_bytes = 0
        self._unneeded: dict[int, int] = {}  # the fewest that were idle since the last `trim`, by size
        self._leases: dict[int, tuple[weakref.ref[Memory], Memory]] = {}
        self._returned: deque[Memory] = deque()  # filled by whatever thread drops the last view
        self._num_leases = 0

    @property
    def is_usual(self) -> bool:
        """Whether memory takes none of the host's before it is written to. Page-locked memory takes all at once."""
        return self.memory is _usual_memory

    def allocate(self, num_bytes: int) -> memoryview:
        """Return writable memory with arbitrary content, aligned for every element type, that the caller owns."""
        if num_bytes < MIN_POOLED_BYTES:
            return empty_bytes(num_bytes)
        self._collect()
        size = _size_for(num_bytes)
        idle = self._idle.get(size)
        if idle:
            memory = idle.pop()
            self._idle_bytes -= size
            self._unneeded[size] = min(self._unneeded[size], len(idle))
        else:
            memory = self.memory(size)
        lease = memory[:num_bytes]
        number = self._num_leases
        self._num_leases += 1

        def dropped(_: weakref.ref[Memory]) -> None:
            self._returned.append(self._leases.pop(number)[1])

        self._leases[number] = (weakref.ref(lease, dropped), memory)
        return lease.data

    def trim(self) -> None:
        """Free what was not needed since the last call; to be called now and then."""
        self._collect()
        for size, idle in list(self._idle.items()):
            num_unneeded = self._unneeded[size]
            del idle[:num_unneeded]
            self._idle_bytes -= num_unneeded * size
            self._unneeded[size] = len(idle)
            if not idle:
                del self._idle[size], self._unneeded[size]

    def _collect(self) -> None:
        """Make idle what has been returned, as far as there is room."""
        while self._returned:
            memory = self._returned.popleft()
            if self._idle_bytes + memory.nbytes <= self._max_idle_bytes:
                self._idle.setdefault(memory.nbytes, []).append(memory)
                self._unneeded.setdefault(memory.nbytes, 0)
                self._idle_bytes += memory.nbytes


async def keep_trimmed(pool: BufferPool, every_s: float, clock: Clock) -> None:
    """Trim a pool now and then, until cancelled."""
    while True:
        await clock.sleep_s(every_s)
        pool.trim()


def _size_for(num_bytes: int) -> int:
    """Return the size of the memory for so many bytes: of four sizes between two powers of two the next one."""
    step = 1 << max(num_bytes.bit_length() - 3, 0)
    return -(-num_bytes // step) * step
