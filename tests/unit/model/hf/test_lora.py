"""Adapters on a cut model: they train as peft's own on the uncut one, bit by bit, and the model under them stays."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from tests.unit.checkpoint.folders import make_config
from tests.unit.model.hf.families import TOKENS, own_class, values_of
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW

from shoal.checkpoint.start_weights import StartWeights, prepared
from shoal.config import Config
from shoal.config.diloco import InnerOptimConfig
from shoal.errors import ConfigError, WeightsMissing
from shoal.model.hf.family import HfFamily
from shoal.model.hf.lora import lora_of
from shoal.model.registry import load_family
from shoal.model.stage import StageModule, build_stage
from shoal.optim.flat import trained_parameters
from shoal.trainer.baseline import PlainLoop

# Of peft, when it wraps a model of a newer transformers.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

_STEPS, _SEED, _LR = 10, 7, 1e-2
_PREFIX = "base_model.model."


def config_of(kind: str = "qwen3", stages: int = 3, model: dict[str, Any] | None = None, **lora: Any) -> Config:
    # Dropout of the model itself draws in each stage anew.
    no_dropout = {name: 0.0 for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop") if kind == "gpt2"}
    values = values_of(kind, vocab_size=256, **no_dropout)
    return make_config(
        run={"seed": _SEED},
        model={"family": "hf", "extra": values, **(model or {})},
        data={"seq_len": TOKENS},
        model_pipeline={"stages": stages, "microbatches": 1},
        lora={"r": 4, "alpha": 8, **lora},
    )


def family_of(config: Config) -> HfFamily:
    return cast("HfFamily", load_family(config.model, config.data))


def stages_of(config: Config) -> list[StageModule]:
    family = family_of(config)
    prepare = prepared(config, family)
    return [build_stage(family, s, config.num_stages, seed=_SEED, prepare=prepare) for s in range(config.num_stages)]


def peft_on_the_uncut_model(peft: ModuleType, config: Config, stages: list[StageModule]) -> tuple[Any, dict[str, str]]:
    """peft's own model with the initial values of our adapters, and its names of what we train."""
    assert config.lora is not None
    family, own = family_of(config), config.lora
    theirs, _ = own_class(family, torch.float32)
    lora = lora_of(config, family)
    assert lora is not None
    settings = peft.LoraConfig(
        r=own.r,
        lora_alpha=cast("int", own.alpha),
        lora_dropout=own.dropout,
        target_modules="all-linear" if own.targets == ("all-linear",) else list(own.targets),
        fan_in_fan_out=config.model.extra["model_type"] == "gpt2",
    )
    # As `from_pretrained` does: constants stay as they are.
    for parameter in theirs.parameters():
        parameter.data = parameter.data.to(getattr(torch, own.base_dtype))
    model: Any = peft.get_peft_model(theirs, settings)
    numbers = {family.unit_name(index): index for index in range(family.num_units)}
    names: dict[str, str] = {}
    for stage in stages:
        for name, parameter in trained_parameters(stage):
            unit, _, inner = name.removeprefix("units.").partition(".")
            names[name] = _PREFIX + family.whole_names(numbers[unit], [inner])[0]
            with torch.no_grad():
                model.get_parameter(names[name]).copy_(parameter)
    return model, names


def _batches() -> Iterator[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(_STEPS):
        tokens = torch.randint(3, 97, (2, 2, TOKENS + 1), generator=generator)
        yield [(each[:, :-1], each[:, 1:]) for each in tokens]


@pytest.mark.usual("qwen3", "qwen3-bfloat16")
@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("qwen3", {}),
        ("qwen3", {"base_dtype": "bfloat16"}),
        ("llama", {"targets": ["q_proj", "v_proj"], "r": 2}),
        ("gpt2", {"targets": ["c_attn"]}),
    ],
    ids=["qwen3", "qwen3-bfloat16", "llama-q-v", "gpt2"],
)
def test_ten_steps_over_three_stages_have_the_bits_of_peft_on_the_uncut_model(
    kind: str, lora: dict[str, Any], peft: ModuleType
) -> None:
    config = config_of(kind, **lora)
    stages = stages_of(config)
    frozen = {name: p.clone() for stage in stages for name, p in stage.named_parameters() if not p.requires_grad}
    theirs, names = peft_on_the_uncut_model(peft, config, stages)
    theirs.train()
    loop = PlainLoop(stages, InnerOptimConfig(adam_weight_decay=0.1), None, _SEED, 0)
    optimizer = AdamW(
        [p for p in theirs.parameters() if p.requires_grad], lr=_LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    assert sorted(names.values()) == sorted(name for name, p in theirs.named_parameters() if p.requires_grad)
    losses: list[float] = []
    for number, microbatches in enumerate(_batches()):
        optimizer.zero_grad()
        expected = 0.0
        for inputs, labels in microbatches:
            logits = theirs(input_ids=inputs, use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()) * 0.5
            loss.backward()
            expected += loss.item()
        optimizer.step()
        found, _ = loop.step(microbatches, number, _LR)
        assert found == expected, number
        losses.append(found)
    assert losses[-1] != losses[0]
    ours = {name: p for stage in stages for name, p in trained_parameters(stage)}
    assert [name for name, p in ours.items() if not torch.equal(p, theirs.get_parameter(names[name]))] == []
    now = {name: p for stage in stages for name, p in stage.named_parameters() if not p.requires_grad}
    assert [name for name, p in now.items() if p.dtype != frozen[name].dtype or not torch.equal(p, frozen[name])] == []


def test_initial_values_belong_to_the_seed_and_the_unit_whatever_the_cut() -> None:
    whole, cut = (dict(trained_parameters(torch.nn.ModuleList(stages_of(config_of(stages=n))))) for n in (1, 4))
    values = [{name.partition(".")[2]: p for name, p in named.items()} for named in (whole, cut)]
    assert values[0].keys() == values[1].keys()
    assert all(torch.equal(p, values[1][name]) for name, p in values[0].items())
    lower = [p for name, p in values[0].items() if name.endswith("q_proj.lora_A.default.weight")]
    assert len(lower) == 4
    assert not torch.equal(lower[0], lower[1])
    other = config_of(stages=1).model_copy(update={"run": config_of().run.model_copy(update={"seed": 8})})
    others = dict(trained_parameters(stages_of(other)[0]))
    name = "units.block_0.self_attn.q_proj.lora_A.default.weight"
    assert not torch.equal(others[name], values[0][name])


@pytest.mark.parametrize(
    ("kind", "targets", "reason"),
    [
        ("qwen3", ["q_pro"], "no layer has a module q_pro\nlinear modules of the layers are: mlp.down_proj, "),
        ("qwen3", ["q_proj", "lm_head"], "lm_head is lm_head, and only modules of the layers get adapters"),
        ("qwen3", ["mlp"], "mlp is a Qwen3MLP, and only linear modules get adapters"),
    ],
)
def test_a_target_that_can_have_no_adapter_is_named_with_those_that_can(
    kind: str, targets: list[str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=r"lora\.targets: " + reason.replace(".", r"\.")):
        stages_of(config_of(kind, targets=targets))


def test_only_models_of_transformers_get_adapters_and_none_beside_quantisation() -> None:
    with pytest.raises(ValueError, match=r"lora: only models of transformers get adapters, and model\.family is gpt"):
        make_config(lora={})
    values = config_of().model_dump()
    with pytest.raises(ValueError, match="lora and quant: modules with an adapter are not quantised"):
        Config.model_validate({**values, "quant": {}})
    with pytest.raises(ValueError, match="all-linear are all that there are"):
        config_of(targets=["all-linear", "q_proj"])


def test_random_weights_under_adapters_are_compared_with_the_run_s_before_a_step() -> None:
    config = config_of()
    assert config.lacks_weights
    weights = StartWeights(config).digests()
    known = config.model_copy(update={"model": config.model.model_copy(update={"weights": weights})})
    assert not known.lacks_weights
    stages_of(known)
    other = ("0" * 32, *weights[1:])
    known = config.model_copy(update={"model": config.model.model_copy(update={"weights": other})})
    with pytest.raises(WeightsMissing, match=r"^embedding of run\.seed = 7 on this host: .* other random weights"):
        stages_of(known)


def test_dropout_draws_for_adapters_alone_and_none_is_left_in_evaluation() -> None:
    stage = stages_of(config_of(stages=1, dropout=0.5))[0]
    with torch.no_grad():
        for name, parameter in trained_parameters(stage):
            if "lora_B" in name:
                parameter.fill_(0.1)
    tokens = torch.arange(TOKENS)[None]
    one, two = stage(tokens), stage(tokens)
    assert not torch.equal(one, two)
    stage.eval()
    assert torch.equal(stage(tokens), stage(tokens))


def test_merged_adapters_compute_the_same_as_before_up_to_rounding() -> None:
    config = config_of(stages=1)
    stage, lora = stages_of(config)[0].eval(), lora_of(config, family_of(config))
    assert lora is not None
    with torch.no_grad():
        for _, parameter in trained_parameters(stage):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.05)
    tokens = torch.arange(TOKENS)[None]
    before = stage(tokens)
    for index, unit in enumerate(stage.units.values()):
        lora.merge(index, unit)
    assert not any("lora" in name for name, _ in stage.named_parameters())
    # What computes holds the layers, and their modules are others now.
    torch.testing.assert_close(stage(tokens), before, rtol=1e-4, atol=1e-5)
