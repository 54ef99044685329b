"""Where servers compute, and which devices are refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.devices import device_of_server, num_gpus
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
