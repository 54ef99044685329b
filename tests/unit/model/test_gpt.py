"""The byte-level transformer."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.config import Config
from shoal.errors import ConfigError
from shoal.model.gpt import GptFamily, GptShape
from shoal.model.registry import load_family
from shoal.model.stage import build_stage

FAMILY = GptFamily(GptShape(seq_len=16, width=32, num_layers=2, num_heads=4))


def test_no_token_sees_a_later_one() -> None:
    model = build_stage(FAMILY, 0, 1, seed=1, dtype=torch.float64)
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 9] = 200
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(dim=2).all()


def test_an_untrained_model_knows_nothing_about_the_next_byte() -> None:
    model = build_stage(FAMILY, 0, 1, seed=1)
    tokens = torch.randint(256, (8, 16), generator=torch.Generator().manual_seed(0))
    assert model.loss(model(tokens), tokens.roll(-1, 1)).item() == pytest.approx(math.log(256), abs=0.1)


def test_the_loss_is_the_mean_over_all_tokens() -> None:
    logits = torch.randn(2, 3, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, 3], [4, 5, 6]])
    by_hand = -sum(logits[b, t].log_softmax(0)[labels[b, t]] for b in range(2) for t in range(3)) / 6
    torch.testing.assert_close(FAMILY.loss(logits, labels), by_hand, rtol=0, atol=1e-12)


def test_projections_into_the_residual_stream_start_smaller() -> None:
    block = build_stage(GptFamily(GptShape(16, 256, 8, 4)), 0, 1, seed=1).units["block_3"]
    assert block.get_parameter("mlp.up.weight").std().item() == pytest.approx(0.02, rel=0.02)
    assert block.get_parameter("mlp.down.weight").std().item() == pytest.approx(0.005, rel=0.02)


def test_a_width_that_the_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of the heads"):
        GptShape(seq_len=16, width=30, num_layers=1, num_heads=4)


@pytest.mark.parametrize("mlp_ratio", [1, 3])
def test_the_feed_forward_part_is_as_wide_as_configured(mlp_ratio: int) -> None:
    config = Config.model_validate({"model": {"hidden_size": 32, "num_heads": 2, "mlp_ratio": mlp_ratio}})
    family = load_family(config.model, config.data)
    block = build_stage(family, 0, 1, seed=1).units["block_0"]
    assert block.get_parameter("mlp.up.weight").shape == (mlp_ratio * 32, 32)
    assert block.get_parameter("mlp.down.weight").shape == (32, mlp_ratio * 32)


def test_gelu_new_is_the_approximation_by_tanh_of_openai() -> None:
    config = Config.model_validate({"model": {"hidden_size": 32, "num_heads": 2, "activation": "gelu_new"}})
    mlp = build_stage(load_family(config.model, config.data), 0, 1, seed=1, dtype=torch.float64).units["block_0"].mlp
    hidden = torch.randn(2, 3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    up = mlp.up(hidden)
    by_hand = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    torch.testing.assert_close(mlp(hidden), mlp.down(by_hand), rtol=0, atol=1e-14)
    assert not torch.equal(mlp(hidden), mlp.down(torch.nn.functional.gelu(up)))
