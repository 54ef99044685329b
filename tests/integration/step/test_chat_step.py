"""Fine-tuning on conversations over a real pipeline: a prompt moves nothing, each token of an answer does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.data.corpora import make_tokens_here
from tests.unit.data.test_packed_texts import config, opened, turns
from torch import Tensor, nn

from shoal.model.hf.family import HfFamily
from shoal.model.stage import StageModule

MakeSwarm = Callable[..., Any]
T, STAGES = 96, 3
VALUES = {
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}


class HeadWatch:
    """Keeps the gradients of logits (B, T, V), or of each chunk of them, in the order of the backwards."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []

    def __call__(self, stage: StageModule) -> None:
        """Watch the head of a stage, if it has one; a `prepare` of the swarm."""
        for module in stage.modules():
            if isinstance(module, nn.Linear) and module.out_features == VALUES["vocab_size"]:
                module.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self.gradients.append)


def batch(tmp_path: Path) -> list[tuple[Tensor, ...]]:
    """Two microbatches of two samples, in each of which several conversations share the tokens."""
    train = opened(config(tmp_path, [turns(number) for number in range(60)])).train
    samples = train.read(np.arange(4))
    tensors = (torch.from_numpy(array.astype(np.int64)) for array in samples.everything)
    return list(zip(*(tensor.split(2) for tensor in tensors), strict=True))


def is_answered(inputs: Tensor, positions: Tensor) -> Tensor:
    """By the text alone, (B, T): the next token is one of an answer, or its end."""
    found = torch.zeros(inputs.shape, dtype=torch.bool)
    for row, tokens in enumerate(inputs.tolist()):
        text, is_inside = bytes(tokens).decode("latin-1"), False
        for place, character in enumerate(text):
            if character == "\x03" or positions[row, place] == 0:
                is_inside = False
            elif text.endswith("<assistant>", 0, place + 1):
                is_inside = True
            found[row, place] = is_inside
    return found


@pytest.mark.parametrize("chunk", [None, T], ids=["whole", "in chunks"])
async def test_logits_at_prompts_have_no_gradient_at_all_and_those_of_answers_have_one(
    make_swarm: MakeSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int | None
) -> None:
    make_tokens_here(monkeypatch)
    batches = batch(tmp_path)
    watch = HeadWatch()
    family = HfFamily(VALUES, T, packs=True, loss_chunk=chunk)
    async with make_swarm(family, STAGES, prepare=watch) as swarm:
        await swarm.train(batches, 0, 1e-2)
    gradients = torch.cat([gradient.reshape(-1, T, VALUES["vocab_size"]) for gradient in watch.gradients])
    inputs, _, positions = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    has_gradient = (gradients != 0).any(dim=-1)
    answered = is_answered(inputs, positions)
    assert torch.equal(has_gradient, answered), "of the tokens before those of answers, and of no other"
    assert 0.1 < answered.float().mean() < 0.9
