"""Where servers compute, and which devices are refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.baseline import run_baseline_locally
from shoal.cli.devices import device_of_server, devices_of_servers, has_gpu_driver, name_of_gpu, unused_gpus
from shoal.config import load_config
from shoal.errors import ConfigError
from shoal.server.visible_gpus import VisibleGpus

TWO = VisibleGpus("2.11.0+cu130", ("NVIDIA H200", "NVIDIA T4"), ("CUDA_VISIBLE_DEVICES=1,0",))
NONE = VisibleGpus("2.11.0+cpu", reason="it is built for CPUs alone")
ONE_STEP = ["--model-pipeline.stages=1", "--diloco.outer-steps=1", "--diloco.inner-steps=1"]
HIDDEN = VisibleGpus("2.11.0+cu130", (), ("CUDA_VISIBLE_DEVICES=",))


def _on_host(monkeypatch: pytest.MonkeyPatch, *, gpus: VisibleGpus | None, has_driver: bool = True) -> None:
    """Pretend that this is such a host; with None for GPUs, asking torch fails the test."""

    def ask() -> VisibleGpus:
        assert gpus is not None, "torch is asked, and that takes seconds"
        return gpus

    monkeypatch.setattr("shoal.cli.devices.visible_gpus", ask)
    monkeypatch.setattr("shoal.cli.devices.has_gpu_driver", lambda: has_driver)


@pytest.mark.parametrize("name", ["nvidia0", "nvidiactl", "nvhost-gpu", "kfd", "dxg"])
def test_drivers_for_gpus_are_known_by_their_device_files(name: str, tmp_path: Path) -> None:
    (tmp_path / "null").touch()
    assert not has_gpu_driver(tmp_path)
    (tmp_path / name).touch()
    assert has_gpu_driver(tmp_path)


def test_servers_are_spread_over_gpus_and_use_the_cpu_where_there_are_none() -> None:
    assert [device_of_server("auto", index, num_gpus=2) for index in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert device_of_server("auto", 1, num_gpus=0) == "cpu"
    assert device_of_server("cpu", 1, num_gpus=2) == "cpu"
    assert device_of_server("cuda", 1, num_gpus=2) == "cuda:0"
    assert device_of_server("cuda:1", 0, num_gpus=2) == "cuda:1"


@pytest.mark.parametrize(
    ("device", "gpus", "found"),
    [
        ("cuda:2", TWO, r"2 GPUs \(cuda:0 NVIDIA H200, cuda:1 NVIDIA T4\) with CUDA_VISIBLE_DEVICES=1,0"),
        ("cuda:1", VisibleGpus("2.11.0+rocm6.4", ("AMD Instinct MI300X",)), r"1 GPU \(cuda:0 AMD Instinct MI300X\)"),
        ("cuda", NONE, r"no GPU \(it is built for CPUs alone\)"),
        ("cuda:0", HIDDEN, r"no GPU with CUDA_VISIBLE_DEVICES="),
    ],
)
def test_a_device_that_torch_does_not_see_is_refused_with_those_that_it_sees(
    device: str, gpus: VisibleGpus, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on_host(monkeypatch, gpus=gpus)
    config = load_config(None, ["--num-servers=2", "--device", f"cpu,{device}"], {})
    with pytest.raises(ConfigError, match=f"^device = {device}: torch {gpus.torch[:6]}.* sees {found}; use --device"):
        devices_of_servers(config)


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cuda:1,cpu,auto", ["cuda:1", "cpu", "cuda:0"]), ("auto", ["cuda:0", "cuda:1", "cuda:0"]), ("cpu", ["cpu"] * 3)],
)
def test_each_server_may_have_a_device_of_its_own(
    device: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _on_host(monkeypatch, gpus=TWO)
    assert devices_of_servers(load_config(None, [f"--device={device}", "--num-servers=3"], {})) == expected


def test_the_gpus_of_amd_are_used_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    _on_host(monkeypatch, gpus=VisibleGpus("2.11.0+rocm6.4", ("AMD Instinct MI300X",)))
    assert devices_of_servers(load_config(None, ["--num-servers=2"], {})) == ["cuda:0", "cuda:0"]
    assert name_of_gpu("cuda:0") == "AMD Instinct MI300X"


APPLE = VisibleGpus("2.11.0", mps="Apple GPU")


def test_the_gpu_of_a_mac_is_used_by_who_names_it_and_not_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    _on_host(monkeypatch, gpus=APPLE)
    assert devices_of_servers(load_config(None, ["--device=mps,cpu", "--num-servers=2"], {})) == ["mps", "cpu"]
    assert name_of_gpu("mps") == "Apple GPU"
    assert devices_of_servers(load_config(None, ["--num-servers=2"], {})) == ["cpu", "cpu"]
    with pytest.raises(ConfigError, match=r"^device = cuda: torch 2.11.0 sees 1 GPU \(mps Apple GPU\); use --device"):
        devices_of_servers(load_config(None, ["--device=cuda", "--num-servers=2"], {}))
    _on_host(monkeypatch, gpus=TWO)
    with pytest.raises(ConfigError, match=r"^device = mps: torch 2.11.0\+cu130 sees 2 GPUs"):
        devices_of_servers(load_config(None, ["--device=mps", "--num-servers=2"], {}))


def test_rocm_is_what_torch_calls_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    _on_host(monkeypatch, gpus=VisibleGpus("2.11.0+rocm6.4", ("AMD Instinct MI300X", "AMD Instinct MI300X")))
    flags = ["--device=rocm:1,rocm", "--num-servers=2"]
    assert devices_of_servers(load_config(None, flags, {})) == ["cuda:1", "cuda:0"]


def test_gpus_that_are_hidden_from_torch_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    _on_host(monkeypatch, gpus=HIDDEN)
    config = load_config(None, ["--num-servers=2"], {})
    assert devices_of_servers(config) == ["cpu", "cpu"]
    assert unused_gpus(config) is None, "somebody wants it so"


@pytest.mark.parametrize(("device", "has_driver"), [("auto", False), ("cpu", True)])
def test_a_start_on_the_cpu_does_not_wait_for_torch(
    device: str, has_driver: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on_host(monkeypatch, gpus=None, has_driver=has_driver)
    config = load_config(None, [f"--device={device}", "--num-servers=2"], {})
    assert devices_of_servers(config) == ["cpu", "cpu"]
    assert name_of_gpu("cpu") is None
    assert unused_gpus(config) is None


def test_a_gpu_that_torch_cannot_use_is_no_silent_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    _on_host(monkeypatch, gpus=NONE)
    config = load_config(None, ["--num-servers=2"], {})
    assert devices_of_servers(config) == ["cpu", "cpu"]
    assert (unused_gpus(config) or "").endswith("torch 2.11.0+cpu sees no GPU (it is built for CPUs alone)")


def test_the_plain_loop_computes_on_the_configured_device(monkeypatch: pytest.MonkeyPatch) -> None:
    # The only other device that each torch has: it takes shapes for values, so the first loss cannot be read.
    monkeypatch.setattr("shoal.cli.baseline.profiled_device", lambda _config: "meta")
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="meta tensors"), flatten_subgroups=True):
        run_baseline_locally(load_config(None, ONE_STEP, {}))


def test_the_plain_loop_refuses_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    _on_host(monkeypatch, gpus=NONE)
    with pytest.raises(ConfigError, match=r"device = cuda:1: torch 2.11.0\+cpu sees no GPU"):
        run_baseline_locally(load_config(None, ["--device=cuda:1", *ONE_STEP], {}))


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
