"""Limits that a process sets itself, in this one, and taken back again."""

from __future__ import annotations

import resource

import pytest
from tests.linux_calls import needs

from shoal.runtime import own_limits
from shoal.runtime.linux_calls import LinuxCall
from shoal.runtime.own_limits import within_more_memory

MIB = 1 << 20


@needs(LinuxCall.PROC, "nobody knows what a process has")
def test_a_part_of_a_process_takes_so_much_more_memory_and_what_follows_as_ever() -> None:
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    with within_more_memory(128 * MIB):
        assert len(bytearray(32 * MIB)) == 32 * MIB
        with pytest.raises(MemoryError):
            bytearray(512 * MIB)
    assert resource.getrlimit(resource.RLIMIT_DATA) == limits
    assert len(bytearray(512 * MIB)) == 512 * MIB


@needs(LinuxCall.PROC, "nobody knows what a process has")
def test_it_takes_no_more_than_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_limits, "free_memory_bytes", lambda: 128 * MIB)
    with within_more_memory(1 << 40), pytest.raises(MemoryError):
        bytearray(256 * MIB)


def test_where_nobody_knows_what_a_process_has_there_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_limits, "own_data_bytes", lambda: 0)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    with within_more_memory(1):
        assert resource.getrlimit(resource.RLIMIT_DATA) == limits
