"""Memory that others may read: what is refused, what is kept, and what is left behind."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest
import torch
from tests.linux_calls import needs

from shoal.collective.shared_memory import SharedMemory
from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId
from shoal.runtime.linux_calls import LinuxCall
from shoal.wire.messages.collective import SharedVector

pytestmark = needs(LinuxCall.MEMFD, "vectors are sent")
P, ME = PeerId("P"), os.getpid()
KINDS = [(1000, torch.float32), (10, torch.int64)]
LIKE = torch.empty(0)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("shoal-vectors")


def reference(memory: SharedMemory, values: torch.Tensor) -> SharedVector:
    found = memory.reference(values)
    assert found is not None
    return found


def test_a_vector_is_seen_where_it_is_also_after_its_owner_has_closed_it() -> None:
    owner, reader = SharedMemory(), SharedMemory()
    floats, integers = owner.vectors(KINDS)
    floats.fill_(3.0)
    seen = reader.look(P, ME, reference(owner, floats), 1000, floats)
    counts = reader.look(P, ME, reference(owner, integers), 10, integers)
    integers.fill_(7)
    assert counts.tolist() == [7] * 10
    floats[5] = 4.0
    owner.close()
    assert seen[4:7].tolist() == [3.0, 4.0, 3.0]
    reader.close()


def test_memory_is_used_again_and_no_file_stays_open() -> None:
    before = open_files()
    memory, reader = SharedMemory(), SharedMemory()
    places = set()
    for _ in range(5):
        floats, _ = memory.vectors(KINDS)
        loan = memory.lend()
        reader.look(P, ME, reference(memory, floats), 1000, floats)
        places.add(floats.data_ptr())
        memory.take_back(loan)
        del loan
    assert len(places) == 1
    memory.close()
    reader.close()
    del floats, _
    assert open_files() == before


def test_what_rests_is_gone_unless_somebody_may_be_reading_it() -> None:
    before, mapped = open_files(), mappings()
    memory, reader = SharedMemory(), SharedMemory()
    floats, _ = memory.vectors(KINDS)
    loan = memory.lend()
    reader.look(P, ME, reference(memory, floats), 1000, floats)
    memory.rest()
    assert memory.reference(floats) is not None, "it is lent"
    memory.take_back(loan)
    for each in (memory, reader):
        each.rest()
    del floats, _, loan
    assert (open_files(), mappings()) == (before, mapped)
    floats, _ = memory.vectors(KINDS)
    assert memory.reference(floats) is not None, "it begins anew"
    memory.close()
    reader.close()


def test_lent_memory_that_nobody_gave_back_is_left_as_it_is() -> None:
    before = open_files()
    owner, reader = SharedMemory(), SharedMemory()
    for epoch in range(4):
        floats, _ = owner.vectors(KINDS)
        floats.fill_(epoch)
        where = reference(owner, floats)
        seen = reader.look(P, ME, where, 1000, floats)
        owner.lend()  # and the ring is cancelled
        [following, _] = owner.vectors(KINDS)
        following.fill_(99.0)
        assert seen.unique().tolist() == [epoch]
        # Who is late can still open it.
        late = SharedMemory()
        assert late.look(P, ME, where, 1000, floats).unique().tolist() == [epoch]
        late.close()
    reader.close()
    del floats, _, following, seen
    # A mapping has a file of its own beside the segment's; one older segment is kept, not three.
    assert open_files() - before == 4
    loan = owner.lend()
    owner.take_back(loan, has_heard_everyone=False)
    del loan
    assert open_files() - before == 4
    owner.take_back(owner.lend())
    assert open_files() - before == 2
    owner.close()
    assert open_files() == before


def test_memory_that_two_operations_have_lent_is_free_when_both_have_ended() -> None:
    memory = SharedMemory()
    [floats, _] = memory.vectors(KINDS)
    first, second = memory.lend(), memory.lend()
    memory.take_back(second)
    assert memory.is_lent
    [other, _] = memory.vectors(KINDS)
    assert other.data_ptr() != floats.data_ptr()
    loan = memory.lend()
    memory.take_back(first)
    assert memory.is_lent, "this was the memory of before"
    memory.take_back(loan)
    assert not memory.is_lent
    assert memory.vectors(KINDS)[0].data_ptr() == other.data_ptr()
    memory.close()


def test_vectors_elsewhere_and_without_elements_are_not_shared() -> None:
    memory = SharedMemory()
    assert memory.reference(torch.zeros(3)) is None
    [empty] = memory.vectors([(0, torch.float32)])
    assert empty.numel() == 0
    memory.close()


@pytest.mark.parametrize("offset_bytes", [-4096, 1, 4096 * 2, 1 << 60])
def test_bytes_outside_the_segment_are_refused(offset_bytes: int) -> None:
    owner = SharedMemory()
    floats, _ = owner.vectors(KINDS)
    where = reference(owner, floats)
    with pytest.raises(RemoteProtocolError, match="refers to bytes"):
        SharedMemory().look(P, ME, SharedVector(where.descriptor, where.inode, offset_bytes), 1000, floats)
    with pytest.raises(RemoteProtocolError, match="refers to bytes"):
        SharedMemory().look(P, ME, where, 3000, floats)
    owner.close()


def test_whoever_is_not_proven_to_be_on_this_host_cannot_refer_to_its_memory() -> None:
    owner = SharedMemory()
    floats, _ = owner.vectors(KINDS)
    with pytest.raises(RemoteProtocolError, match="not known to be on it"):
        SharedMemory().look(P, None, reference(owner, floats), 1000, floats)
    owner.close()


def test_another_file_than_the_one_that_is_named_is_refused() -> None:
    owner, other = SharedMemory(), SharedMemory()
    floats, _ = owner.vectors(KINDS)
    others, _ = other.vectors(KINDS)
    mixed = SharedVector(reference(owner, floats).descriptor, reference(other, others).inode, 0)
    with pytest.raises(RemoteProtocolError, match="not the memory"):
        SharedMemory().look(P, ME, mixed, 1000, floats)
    owner.close()
    other.close()


def test_files_that_are_no_sealed_memory_are_refused() -> None:
    before = open_files()
    read_end, write_end = os.pipe()
    unsealed = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 8192)
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryFile() as file, ours, theirs:
        file.truncate(8192)
        for descriptor in (read_end, unsealed, file.fileno(), ours.fileno(), 12345, -1, 1 << 70):
            try:
                inode = os.fstat(descriptor).st_ino
            except (OSError, OverflowError):
                inode = 1
            with pytest.raises(RemoteProtocolError):
                SharedMemory().look(P, ME, SharedVector(descriptor, inode, 0), 10, LIKE)
    for descriptor in (read_end, write_end, unsealed):
        os.close(descriptor)
    assert open_files() == before


def test_what_is_mapped_of_others_goes_when_they_go() -> None:
    owner, reader = SharedMemory(), SharedMemory()
    floats, _ = owner.vectors(KINDS)
    reader.look(P, ME, reference(owner, floats), 1000, floats)
    before = mappings()
    reader.forget_others([PeerId("another")])
    assert before - mappings() == 1
    owner.close()
