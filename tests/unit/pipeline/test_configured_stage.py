"""A stage as the configuration says it, on the device that it names."""

from __future__ import annotations

import logging

import pytest

from shoal.config import Config
from shoal.errors import ConfigError
from shoal.model.registry import load_family
from shoal.pipeline.configured_stage import configured_stage, tell_if_in_vain
from shoal.pipeline.torch_device import device_initialiser

CONFIG = Config()


def test_all_that_a_stage_computes_with_is_on_its_device() -> None:
    family = load_family(CONFIG.model, CONFIG.data)
    for name in ("cpu", "meta"):
        module = configured_stage(CONFIG, family, 0, name)
        assert {tensor.device.type for tensor in (*module.parameters(), *module.buffers())} == {name}


def test_a_gpu_that_is_not_there_is_an_error_of_the_user_before_its_thread_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device = cuda:0: this torch .* sees no GPU; use --device cpu"):
        device_initialiser("cuda:0", 1)


def test_a_server_says_if_no_microbatch_is_of_a_size_that_its_stage_was_compiled_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sections = {"diloco": {"batch_size_per_step": 20}, "model_pipeline": {"microbatches": 3, "compile": True}}
    compiled = Config.model_validate(sections)
    for config, cap in ((CONFIG, 1), (compiled, None), (compiled, 7), (compiled, 6)):
        tell_if_in_vain(config, 1, cap)
    assert not caplog.records, "microbatches of 7 samples, and a last one of 6"
    with caplog.at_level(logging.WARNING):
        tell_if_in_vain(compiled, 1, 5)
    [record] = caplog.records
    told = vars(record)
    assert (record.getMessage(), told["stage"], told["cap"], told["sizes"]) == (
        "stage.compiled_in_vain",
        1,
        5,
        [6, 7],
    )
