"""The plain loop alone begins where a run of the same configuration does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.checkpoint.test_start_weights import SEQ_LEN, saved

from shoal.cli.baseline import train_baseline
from shoal.config import Config


@pytest.mark.parametrize("lora", [None, {"r": 2, "alpha": 4}], ids=["whole", "adapters"])
@pytest.mark.parametrize("stages", [1, 2])
def test_it_begins_with_the_weights_of_model_pretrained(
    stages: int, lora: dict[str, Any] | None, tmp_path: Path
) -> None:
    theirs = saved(tmp_path / "theirs")
    config = Config.model_validate(
        {
            "data": {"seq_len": SEQ_LEN, "max_documents": 2},
            "model": {"family": "hf", "name_or_path": str(tmp_path / "theirs"), "pretrained": True},
            "lora": lora,
            "model_pipeline": {"stages": stages, "microbatches": 1},
            "diloco": {
                "inner_steps": 1,
                "outer_steps": 1,
                "batch_size_per_step": 1,
                "inner_optim": {"adam_lr": 1e-12, "adam_weight_decay": 0.0},
            },
        }
    )
    loop = train_baseline(config, lambda _: None)
    found = {name.partition("units.")[2]: value for stage in loop.stages for name, value in stage.state_dict().items()}
    [embedding] = [value for name, value in found.items() if name.endswith("embed_tokens.weight")]
    assert torch.allclose(embedding, theirs.get_input_embeddings().weight, atol=1e-6)
    [head] = [value for name, value in found.items() if name.endswith("lm_head.weight")]
    assert torch.allclose(head, theirs.get_output_embeddings().weight, atol=1e-6)
