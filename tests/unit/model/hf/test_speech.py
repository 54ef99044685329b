"""The family wav2vec2: cut, it computes what transformers' own class does; its loss is CTC of what is no padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.config import Config
from shoal.errors import ConfigError
from shoal.model.hf import speech
from shoal.model.hf.described import is_before, transformers_version
from shoal.model.hf.speech import Wav2Vec2Family
from shoal.model.registry import load_family
from shoal.model.stage import build_stage

BASE: dict[str, Any] = {"model_type": "wav2vec2"}
LARGE: dict[str, Any] = {**BASE, "do_stable_layer_norm": True, "feat_extract_norm": "layer", "conv_bias": True}
EXTRA = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "conv_dim": [8] * 7, "vocab_size": 9}


def twin(values: dict[str, Any] = BASE) -> Wav2Vec2Family:
    return Wav2Vec2Family(values, 16_000, 8).twin()


def config(data: dict[str, Any] | None = None, extra: dict[str, Any] | None = None, **model: Any) -> Config:
    values = {"task_type": "speech", "dataset_name": "tones", "max_audio_s": 1.0, "max_characters": 8, **(data or {})}
    return Config.model_validate(
        {"data": values, "model": {"family": "wav2vec2", "extra": {**EXTRA, **(extra or {})}, **model}}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("values", [BASE, LARGE], ids=["base", "large"])
def test_stages_compute_the_bits_of_transformers_own_class_with_masks_of_lengths_and_dropout(
    values: dict[str, Any], dtype: torch.dtype
) -> None:
    family = Wav2Vec2Family(values, 16_000, 8)
    assert family.twin().difference(dtype) == ""
    if not is_before(transformers_version(), (5, 23)):
        dropping = family.twin(0.2)
        assert dropping.config.hidden_dropout == 0.2
        assert dropping.difference(dtype) == ""


@pytest.mark.parametrize("broken", ["_projected", "_mask"])
def test_a_model_that_would_be_computed_otherwise_is_not_trained(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    was = getattr(speech._Part, broken)

    def without_lengths(part: Any, *arguments: Any) -> Any:
        *before, lengths_B = arguments
        return was(part, *before, torch.full_like(lengths_B, 1 << 20))

    monkeypatch.setattr(speech._Part, broken, without_lengths)
    problem = Wav2Vec2Family(BASE, 16_000, 8).exactness_problem()
    assert problem is not None
    assert "cannot be cut exactly: in 1 stages the output is another one" in problem


def test_the_loss_is_that_of_transformers_over_the_characters_that_there_are() -> None:
    family = twin()
    stage = build_stage(family, 0, 1, seed=3).eval()
    generator = torch.Generator().manual_seed(5)
    audio_BT = torch.randn((2, family.input_spec().shape[0]), generator=generator)
    lengths_B = torch.tensor([audio_BT.shape[1], 3000])
    is_audio_BT = torch.arange(audio_BT.shape[1]) < lengths_B[:, None]
    labels_BS = torch.tensor([[3, 5, 5, 1], [2, 7, -100, -100]])
    theirs = family._modules.Wav2Vec2ForCTC(family.config).eval()
    theirs.load_state_dict(family.whole_state(stage))
    theirs.config.ctc_loss_reduction = "sum"
    expected = theirs(audio_BT * is_audio_BT, attention_mask=is_audio_BT.long(), labels=labels_BS).loss
    found = stage.loss(stage(audio_BT * is_audio_BT, lengths_B), labels_BS)
    torch.testing.assert_close(found * 6, expected, rtol=1e-6, atol=0)


def test_the_loss_counts_no_frame_of_padding_and_none_of_what_does_not_fit() -> None:
    family = twin()
    logits_BLV = torch.randn((1, 14, 12), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels_BS = torch.tensor([[2, 7, -100, -100]])
    whole = family.loss(logits_BLV[:, :9], labels_BS)
    padded = logits_BLV.clone()
    padded[:, 9:] = -30_000.0
    assert torch.equal(family.loss(padded, labels_BS), whole)
    by_hand = F.ctc_loss(logits_BLV[0, :9].log_softmax(-1)[:, None], labels_BS[:, :2], [9], [2], reduction="sum") / 2
    torch.testing.assert_close(whole, by_hand)
    # Two equal characters need a blank between: three frames.
    assert family.loss(logits_BLV[:, :2], torch.tensor([[4, 4, -100, -100]])) == 0


def test_values_of_a_clip_say_nothing_of_what_is_behind_it() -> None:
    family = twin(LARGE)
    stage = build_stage(family, 0, 1, seed=3).eval()
    audio_BT = torch.randn((1, family.input_spec().shape[0]), generator=torch.Generator().manual_seed(5))
    other = audio_BT.clone()
    other[:, 3000:] = 1.0
    lengths_B = torch.tensor([2500], dtype=torch.int32)
    with torch.no_grad():
        one, two = stage(audio_BT, lengths_B), stage(other, lengths_B)
    frames = int(family.frames(lengths_B))
    assert frames == 7
    assert torch.equal(one, two)
    assert one[0, frames:].eq(-30_000.0).all()


def test_specs_say_what_flows_between_the_units() -> None:
    family = load_family(config().model, config().data)
    stages = [build_stage(family, stage, family.num_units, seed=0) for stage in range(family.num_units)]
    x, lengths_B = torch.zeros((2, 16_000)), torch.tensor([16_000, 400])
    for index, stage in enumerate(stages):
        x = stage(x, lengths_B)
        assert tuple(x.shape[1:]) == family.boundary_spec(index).shape
    assert family.num_units == len(family.unit_costs()) == 5
    assert tuple(family.context_specs()) == config().data.context == ("lengths",)


@pytest.mark.parametrize(
    ("data", "extra", "model", "part"),
    [
        ({"max_audio_s": 0.02}, {}, {}, "data.max_audio_s: 320 samples of audio make no frame"),
        ({}, {"pad_token_id": 3}, {}, "the blank of CTC is 0"),
        ({}, {"add_adapter": True}, {}, "model.extra.add_adapter"),
        ({}, {"model_type": "hubert"}, {}, "is for the model_type wav2vec2"),
        ({}, {"hiden_size": 3}, {}, "did you mean hidden_size"),
    ],
)
def test_what_is_no_wav2vec2_is_refused(
    data: dict[str, Any], extra: dict[str, Any], model: dict[str, Any], part: str
) -> None:
    given = config(data, extra, **model)
    with pytest.raises(ConfigError, match=part):
        load_family(given.model, given.data)


def test_weights_to_begin_from_and_sizes_of_other_families_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="a wav2vec2 begins from random weights"):
        config(pretrained=True, name_or_path="facebook/wav2vec2-base")
    with pytest.raises(ValueError, match=r"means nothing to model\.family = wav2vec2"):
        config(hidden_size=64)


def test_a_family_of_ones_own_that_does_not_ask_for_lengths_is_refused() -> None:
    given = config()
    own = given.model.model_copy(update={"family": "shoal.model.gpt:GptFamily", "extra": {}})
    with pytest.raises(ConfigError, match="its context_specs have no lengths"):
        load_family(own, given.data)


_NO_DROPOUT = dict.fromkeys(("hidden_dropout", "attention_dropout", "feat_proj_dropout", "activation_dropout"), 0.0)


@pytest.mark.parametrize("values", [BASE, LARGE, {**BASE, **_NO_DROPOUT}], ids=["base", "large", "without dropout"])
def test_it_knows_what_its_units_keep_for_their_backward(values: dict[str, Any]) -> None:
    sizes = {"hidden_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 384}
    convolutions = {"conv_dim": [64] * 7, "num_conv_pos_embedding_groups": 4}
    family = Wav2Vec2Family({**values, **sizes, **convolutions}, 32_000, 64)
    x, lengths_B = torch.randn((4, 32_000)), torch.full((4,), 30_000)
    for index in range(family.num_units):
        unit = family.build_unit(index)
        compute = family.assemble(range(index, index + 1), nn.ModuleDict({family.unit_name(index): unit}))
        kept: dict[int, Tensor] = {}

        def pack(tensor: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        x = x.detach().requires_grad_(index > 0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = compute(x, lengths_B)
            if index == family.num_units - 1:
                family.loss(output, torch.ones((4, 64), dtype=torch.int64))
        kept[output.untyped_storage().data_ptr()] = output
        for tensor in (x, *unit.parameters(), *unit.buffers()):
            kept.pop(tensor.untyped_storage().data_ptr(), None)
        found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / 4
        assert found == pytest.approx(family.activation_bytes(index), rel=0.25), index
        x = output
