"""What a machine says about itself, read from a file system made up for the test."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shoal.bench.machine import describe_machine, num_usable_cores


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    return tmp_path


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_where_nothing_is_known_each_allowed_processor_is_a_core(root: Path) -> None:
    assert num_usable_cores(root) == 4


def test_threads_of_one_core_count_once(root: Path) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        _write(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
    assert num_usable_cores(root) == 2


@pytest.mark.parametrize(("limit", "cores"), [("max 100000", 4), ("300000 100000", 3), ("50000 100000", 1)])
def test_a_control_group_may_allow_less(root: Path, limit: str, cores: int) -> None:
    _write(root / "sys/fs/cgroup/cpu.max", limit)
    assert num_usable_cores(root) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 4), ("200000", 2)])
def test_a_control_group_of_version_1_may_allow_less(root: Path, quota: str, cores: int) -> None:
    _write(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", quota)
    _write(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    assert num_usable_cores(root) == cores


def test_the_description_names_what_decides_about_speed_and_can_be_written_as_json() -> None:
    machine = json.loads(json.dumps(describe_machine()))
    assert machine["cores"] >= 1
    assert machine["memory_bytes"] > 0
    assert machine["torch"]
    assert {"processor", "kernel", "python", "load_1min"} <= machine.keys()
