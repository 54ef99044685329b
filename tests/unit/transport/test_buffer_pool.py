"""Memory of received tensors is used again, but never while anybody can see it."""

from __future__ import annotations

import threading

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.windows import idle_bytes

from shoal.codec.raw import from_wire
from shoal.transport.buffer_pool import MIN_POOLED_BYTES, BufferPool
from shoal.wire.tensors import WireTensor

SIZE = 1 << 20


def address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


def test_memory_is_handed_out_again_when_its_last_view_is_gone() -> None:
    pool = BufferPool(4 * SIZE)
    first = pool.allocate(SIZE)
    where = address(first)
    part = first[10:20]
    del first
    second = pool.allocate(SIZE)
    assert address(second) != where
    assert idle_bytes(pool) == 0
    del part
    assert idle_bytes(pool) == SIZE
    third = pool.allocate(SIZE - 1)
    assert address(third) == where
    assert len(third) == SIZE - 1
    assert not third.readonly


def test_new_memory_is_of_the_kind_that_was_asked_for() -> None:
    pool, made = BufferPool(4 * SIZE), list[np.ndarray]()

    def own(num_bytes: int) -> np.ndarray:
        made.append(np.empty(num_bytes, dtype=np.uint8))
        return made[-1]

    pool.memory = own
    for _ in range(3):
        where = address(pool.allocate(SIZE))
        assert [each.ctypes.data for each in made] == [where], "made once, and used again"


def test_a_torch_tensor_keeps_the_memory_that_it_was_made_of() -> None:
    pool = BufferPool(4 * SIZE)
    held = from_wire(WireTensor("float32", (SIZE // 4,), pool.allocate(SIZE)))[5:]
    held.fill_(7.0)
    viewed = np.frombuffer(pool.allocate(SIZE), dtype=np.float32)[:100]
    viewed[:] = 8.0
    for _ in range(4):
        pool.allocate(SIZE)[:] = bytes(SIZE)
    assert torch.all(held == 7.0)
    assert np.all(viewed == 8.0)


def test_memory_may_be_dropped_on_another_thread() -> None:
    pool = BufferPool(4 * SIZE)
    held = [pool.allocate(SIZE)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert idle_bytes(pool) == SIZE


def test_no_more_is_kept_than_allowed_and_nothing_of_small_tensors() -> None:
    pool = BufferPool(2 * SIZE)
    held = [pool.allocate(SIZE) for _ in range(5)]
    del held
    assert idle_bytes(pool) == 2 * SIZE
    small = pool.allocate(MIN_POOLED_BYTES - 1)
    del small
    assert idle_bytes(pool) == 2 * SIZE


def test_what_is_not_needed_between_two_trims_is_freed() -> None:
    pool = BufferPool(8 * SIZE)
    held = [pool.allocate(SIZE) for _ in range(5)]
    del held
    pool.trim()
    assert idle_bytes(pool) == 5 * SIZE
    for _ in range(10):
        two = [pool.allocate(SIZE) for _ in range(2)]
        del two
    pool.trim()
    assert idle_bytes(pool) == 2 * SIZE
    pool.trim()
    assert idle_bytes(pool) == 0


@given(st.integers(MIN_POOLED_BYTES, 1 << 31))
def test_a_lease_wastes_a_quarter_of_its_memory_at_most(num_bytes: int) -> None:
    from shoal.transport.buffer_pool import _size_for

    assert num_bytes <= _size_for(num_bytes) <= num_bytes * 1.25


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([70_000, 80_000, 200_000])), max_size=60))
def test_a_held_tensor_never_changes_whatever_else_arrives_and_goes(turns: list[tuple[int, int]]) -> None:
    pool = BufferPool(500_000)
    held: dict[int, tuple[memoryview, int]] = {}
    for number, (place, num_bytes) in enumerate(turns):
        memory = pool.allocate(num_bytes)
        np.frombuffer(memory, dtype=np.uint8)[:] = number
        held[place] = (memory, number)
        del memory
        assert all(np.all(np.frombuffer(kept, dtype=np.uint8) == fill) for kept, fill in held.values())
        assert idle_bytes(pool) <= 500_000
