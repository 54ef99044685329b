"""What is asked of a GPU: torch's answers are stood in for, since no machine of the tests has one of each kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.errors import ConfigError
from shoal.model.device_calls import name_of, random_state, synchronise, wide
from shoal.model.seeding import seeded
from shoal.pipeline.torch_device import device_initialiser, torch_device
from shoal.server.memory import ServerMemory, server_memory

MPS, CUDA, CPU = torch.device("mps"), torch.device("cuda:1"), torch.device("cpu")


class _Mps:
    """In place of torch.mps: its random numbers are those of a generator of the CPU."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.get_rng_state, self.set_rng_state = self.generator.get_state, self.generator.set_state
        self.manual_seed = self.generator.manual_seed
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1

    def recommended_max_memory(self) -> int:
        return 12 << 30


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> _Mps:
    """A torch that has a GPU of Apple."""
    stand_in = _Mps()
    monkeypatch.setattr(torch, "mps", stand_in)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    return stand_in


def test_what_a_gpu_of_apple_draws_follows_from_the_seed_and_goes_on_afterwards(mps: _Mps) -> None:
    before = mps.generator.get_state()
    with seeded(7, MPS):
        first = torch.rand(3, generator=mps.generator)
    with seeded(7, MPS):
        assert torch.equal(torch.rand(3, generator=mps.generator), first)
    assert torch.equal(mps.generator.get_state(), before)
    assert random_state(CPU) is None


def test_the_generator_of_a_gpu_of_nvidia_or_amd_is_that_of_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = (torch.Generator(), torch.Generator())
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    with seeded(7, CUDA):
        assert generators[1].initial_seed() == 7
        assert generators[0].initial_seed() != 7


def test_each_kind_is_waited_for_and_named_as_torch_has_it(mps: _Mps, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    for device in (MPS, CUDA, CPU):
        synchronise(device)
    assert (waited, mps.waited) == ([CUDA], 1)
    assert [name_of(device) for device in (MPS, CUDA, CPU)] == ["Apple GPU", "GPU 1", None]


def test_a_device_that_torch_does_not_see_is_refused(mps: _Mps, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_device("mps") == MPS
    device_initialiser("mps", 1)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^device = mps: this torch \(.*\) sees no GPU of Apple; use --device cpu$"):
        device_initialiser("mps", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^device = cuda:1: this torch"):
        torch_device("cuda:1")


def test_a_gpu_of_apple_has_its_share_of_the_host_s_memory_and_none_of_its_own(mps: _Mps) -> None:
    gib = 1 << 30
    assert server_memory("mps", 8 * gib, 1, None) == ServerMemory(8 * gib)
    assert server_memory("mps", 16 * gib, 1, None) == ServerMemory(12 * gib), "so much the GPU may have"
    assert server_memory("mps", 16 * gib, 2, None) == ServerMemory(6 * gib)
    assert server_memory("mps", 0, 1, 4 * gib) == ServerMemory(4 * gib)


class _OfApple:
    """A tensor there, which refuses float64 as torch does."""

    device = SimpleNamespace(type="mps")

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def double(self) -> Any:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")

    def cpu(self) -> torch.Tensor:
        return self.value


def test_what_a_gpu_of_apple_has_becomes_float64_on_the_cpu() -> None:
    value = torch.tensor([1.5, 2.0])
    assert torch.equal(wide(_OfApple(value)), value.double())  # type: ignore[arg-type]
    assert wide(value).dtype == torch.float64
