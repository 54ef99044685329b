"""What is read from /proc, or asked of psutil, checked on this process and on one child."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shoal.runtime import process_info

pytestmark = pytest.mark.usefixtures("either_way")


@pytest.fixture
def child() -> Iterator[int]:
    program = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "SHOAL_TEST_MARK": "here"},
        start_new_session=True,
    ) as process:
        # Until it has said something, it may be in the middle of its exec.
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def test_a_child_is_a_descendant_with_its_own_session(child: int) -> None:
    found = {stat.pid: stat for stat in process_info.descendants(os.getpid())}
    assert found[child].parent_pid == os.getpid()
    assert found[child].session == child


def test_a_name_with_spaces_and_parentheses_does_not_confuse_the_fields() -> None:
    before = process_info.read_stat(os.getpid())
    with open("/proc/self/comm", "r+") as comm:
        name = comm.read().strip()
    try:
        with open("/proc/self/comm", "w") as comm:
            comm.write("a) S 1 (b")
        assert process_info.read_stat(os.getpid()) == before
    finally:
        with open("/proc/self/comm", "w") as comm:
            comm.write(name)


def test_memory_of_a_tree_is_that_of_its_processes() -> None:
    usage = process_info.tree_usage(os.getpid())
    assert usage.num_processes == 1
    assert usage.pss_bytes == pytest.approx(process_info.pss_bytes(os.getpid()), rel=0.05)
    assert 1 << 20 < usage.pss_bytes < 4 << 30


def test_a_tree_counts_its_children(child: int) -> None:
    assert process_info.tree_usage(os.getpid()).num_processes >= 2
    assert child in {stat.pid for stat in process_info.descendants(os.getpid())}


def test_the_environment_of_a_process_can_be_asked_for_one_entry(child: int) -> None:
    assert process_info.has_environment(child, "SHOAL_TEST_MARK=here")
    assert not process_info.has_environment(child, "SHOAL_TEST_MARK=her")
    assert not process_info.has_environment(child, ""), "the zeros at its end are no entries"


def test_age_grows_from_the_start_of_the_process(child: int) -> None:
    assert 0 <= process_info.process_age_s(child) < process_info.process_age_s(os.getpid()) < 3600 * 24


def test_processor_time_grows_with_what_is_computed_and_is_that_of_all_threads() -> None:
    before_s = process_info.cpu_s(os.getpid())
    while process_info.cpu_s(os.getpid()) < before_s + 0.05:
        sum(range(100_000))
    # Threads that have ended count for the process alone.
    assert 0.05 <= sum(process_info.thread_cpu_s(os.getpid())) <= process_info.cpu_s(os.getpid()) + 0.01


def test_nothing_is_known_of_a_process_that_does_not_exist() -> None:
    pid = 2**22 + 1  # Above the largest number that Linux gives out.
    assert process_info.read_stat(pid) is None
    assert process_info.pss_bytes(pid) == 0
    assert process_info.process_age_s(pid) == 0.0
    assert process_info.descendants(pid) == []
    assert process_info.cpu_s(pid) == 0.0
    assert process_info.thread_cpu_s(pid) == []
    assert not process_info.has_environment(pid, "A=B")
