"""Where servers compute, and which devices are refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.devices import device_of_server, devices_of_servers, num_gpus
from shoal.config import load_config
from shoal.errors import ConfigError


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia0x"):
        (tmp_path / name).touch()
    assert num_gpus(tmp_path) == 3


def test_servers_are_spread_over_gpus_and_use_the_cpu_where_there_are_none() -> None:
    assert [device_of_server("auto", index, gpus=2) for index in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert device_of_server("auto", 1, gpus=0) == "cpu"
    assert device_of_server("cpu", 1, gpus=2) == "cpu"
    assert device_of_server("cuda", 1, gpus=2) == "cuda:0"
    assert device_of_server("cuda:1", 0, gpus=2) == "cuda:1"


@pytest.mark.parametrize(
    ("device", "gpus", "part"),
    [("cuda:7", 2, "2 GPU(s): cuda:0 to cuda:1"), ("cuda:0", 0, "no GPU"), ("cuda", 0, "no GPU")],
)
def test_a_device_that_is_not_there_is_refused(device: str, gpus: int, part: str) -> None:
    with pytest.raises(ConfigError, match=f"device = {device}: this machine has ") as refused:
        device_of_server(device, 0, gpus=gpus)
    assert part in str(refused.value)


def test_each_server_may_have_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cli.devices.num_gpus", lambda: 2)
    for device, expected in (
        ("cuda:1,cpu,auto", ["cuda:1", "cpu", "cuda:0"]),
        ("auto", ["cuda:0", "cuda:1", "cuda:0"]),
        ("cpu", ["cpu"] * 3),
    ):
        config = load_config(None, [f"--device={device}", "--num-servers=3"], {})
        assert devices_of_servers(config) == expected


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--device=cpu,cpu", r"device = cpu,cpu has 2 values, and this host has 3 servers: give one value for all"),
        ("--threads=1,2,3,4", r"servers\.threads = 1,2,3,4 has 4 values, and this host has 3 servers"),
        ("--nice=1,2", r"servers\.nice = 1,2 has 2 values, and this host has 3 servers"),
    ],
)
def test_values_for_another_number_of_servers_are_refused(flag: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        devices_of_servers(load_config(None, ["--num-servers=3", flag], {}))
