"""Rings of real processes over Unix sockets and shared memory: a death in the middle, and a thousand rounds."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.collective.ring_member import contribution
from tests.linux_calls import needs
from tests.reference.diloco import ring_sum

from shoal.runtime.linux_calls import LinuxCall
from shoal_lab.bench.peers import PeerProcesses

pytestmark = needs(LinuxCall.MEMFD, "members share no memory")
SCRIPT = Path(__file__).with_name("ring_member.py")


@pytest.mark.parametrize("victim", [0, 2])
def test_members_go_on_without_one_that_was_killed_in_the_ring(tmp_path: Path, victim: int) -> None:
    num_members = 4
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    members = [
        subprocess.Popen(
            [*command, str(index), str(num_members), str(victim)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(num_members)
    ]
    try:
        for member in members:
            assert member.stdout is not None
            assert member.stdout.readline() == "ready\n"
        outputs = [""] * num_members
        for member in members:
            assert member.stdin is not None
            member.stdin.write("go\n")
            member.stdin.flush()
        for index, member in enumerate(members):
            outputs[index], _ = member.communicate(timeout=240)
    finally:
        for member in members:
            member.kill()
            member.communicate()
    survivors = [index for index in range(num_members) if index != victim]
    expected = ring_sum([contribution(index) for index in survivors])
    assert members[victim].returncode == -signal.SIGKILL
    assert {outputs[index].strip() for index in survivors} == {hashlib.sha256(expected.numpy().tobytes()).hexdigest()}
    assert all(members[index].returncode == 0 for index in survivors)


def usage(pid: int) -> tuple[int, int, int, int]:
    """Bytes in memory, threads, open files, and shared segments among these."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    files = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return (
        int(fields["VmRSS"].split()[0]) * 1024,
        int(fields["Threads"]),
        len(files),
        sum("shoal-vectors" in file for file in files),
    )


@pytest.mark.slow
def test_a_thousand_rounds_take_no_more_memory_threads_or_files(tmp_path: Path) -> None:
    with PeerProcesses("shoal_lab.bench.ring_peer:main", 3, {"folder": str(tmp_path)}) as peers:
        peers.call("meet")
        for _ in range(50):
            peers.call("ours", 1_000_000, 10)
        before = [usage(pid) for pid in peers.pids]
        for _ in range(50):
            peers.call("ours", 1_000_000, 10)
        for old, new in zip(before, [usage(pid) for pid in peers.pids], strict=True):
            assert new[0] <= old[0] * 1.01
            assert new[1:] == old[1:]
            # The own segment and its mapping, and the mapping of the one neighbour that is read.
            assert new[3] == 3
