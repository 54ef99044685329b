"""How a machine is known again."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.namespaces import lan
from tests.e2e.needs import needs_namespaces

from shoal.runtime import hardware
from shoal.runtime.hardware import (
    lasting_machine_name,
    machine_name,
    num_usable_cores,
    processor_name,
    usable_processors,
)

_SAY_NAME = "from shoal.runtime.hardware import machine_name; print(machine_name())"


def _machine(root: Path, machine_id: str, boot_id: str, network: str) -> str:
    for path, text in (("etc/machine-id", machine_id), ("proc/sys/kernel/random/boot_id", boot_id)):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    link = root / "proc/self/ns/net"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(network)
    return machine_name(root)


def test_a_machine_is_known_by_its_id_its_boot_and_its_network_and_tells_none_of_them(tmp_path: Path) -> None:
    known = _machine(tmp_path, "m" * 32, "b" * 36, "net:[1]")
    assert _machine(tmp_path, "m" * 32, "b" * 36, "net:[1]") == known
    others = {
        _machine(tmp_path, "n" * 32, "b" * 36, "net:[1]"),
        _machine(tmp_path, "m" * 32, "c" * 36, "net:[1]"),
        _machine(tmp_path, "m" * 32, "b" * 36, "net:[2]"),
    }
    assert len({known, *others}) == 4
    assert re.fullmatch(r"[0-9a-f]{16}", known)


def test_a_machine_keeps_one_name_when_it_is_started_again_and_a_copy_of_its_disk_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc").mkdir()
    machine_id = tmp_path / "etc/machine-id"
    machine_id.write_text("a" * 32)
    name = lasting_machine_name(tmp_path)
    assert name == lasting_machine_name(tmp_path)
    machine_id.write_text("b" * 32)
    copied = lasting_machine_name(tmp_path)
    machine_id.unlink()
    assert len({name, copied, lasting_machine_name(tmp_path)}) == 3
    machine_id.write_text("a" * 32)
    monkeypatch.setattr(platform, "node", lambda: "another")
    assert lasting_machine_name(tmp_path) not in (name, "")


def test_a_system_that_tells_nothing_has_a_name_all_the_same(tmp_path: Path) -> None:
    assert machine_name(tmp_path) == machine_name(tmp_path) != machine_name()


@needs_namespaces
def test_processes_of_one_host_agree_and_hosts_with_one_address_differ() -> None:
    def name(*prefix: str) -> str:
        return subprocess.run(
            [*prefix, sys.executable, "-c", _SAY_NAME], capture_output=True, text=True, check=True, env=os.environ
        ).stdout.strip()

    with lan("left", "right") as network:
        names = []
        for host in ("left", "right"):
            network.add_home(host, "192.168.1.5")
            inside = ("ip", "netns", "exec", network.namespace(host))
            assert name(*inside) == name(*inside)
            names.append(name(*inside))
    assert len({*names, name()}) == 3
    assert name() == machine_name()


def test_an_arm_processor_is_named_by_the_numbers_of_its_design(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n")
    assert processor_name(tmp_path) == f"{platform.machine()} 0x41 0xd0c"
    assert processor_name(tmp_path / "nowhere") == platform.machine()


@pytest.mark.usefixtures("portable")
def test_where_nobody_says_on_which_processors_a_process_may_run_it_may_on_all() -> None:
    assert usable_processors() == set(range(os.cpu_count() or 1))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hardware, "usable_processors", lambda: {0, 1, 2, 3})
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
