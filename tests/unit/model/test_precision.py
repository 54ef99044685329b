"""Which devices can do what `data.precision` says."""

from __future__ import annotations

import pytest
import torch

from shoal.errors import ConfigError
from shoal.model.precision import autocast_of

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


def test_full_precision_needs_nothing_of_a_device() -> None:
    assert autocast_of("32-true", CPU) is None
    assert autocast_of("32-true", GPU) is None


@pytest.mark.parametrize("supported", [True, False])
def test_a_gpu_without_bfloat16_is_refused_before_anything_is_built(
    supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_supported(including_emulation: bool = True) -> bool:
        return supported or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Tesla T4")
    assert autocast_of("bf16-mixed", CPU) == torch.bfloat16
    assert autocast_of("fp16-mixed", GPU) == autocast_of("fp16-mixed", CPU) == torch.float16
    if supported:
        assert autocast_of("bf16-mixed", GPU) == torch.bfloat16
        return
    with pytest.raises(ConfigError, match=r"cuda:0 \(Tesla T4\) has no bfloat16.*--device cpu.*fp16-mixed"):
        autocast_of("bf16-mixed", GPU)
