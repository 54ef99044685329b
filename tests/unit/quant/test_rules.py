"""Which rule counts for a module, and rules that none answers to."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from shoal.config import load_config
from shoal.config.quant import QuantConfig, QuantScheme
from shoal.config.schema import Config
from shoal.errors import ConfigError
from shoal.model.meta import units_of
from shoal.quant.coverage import require_quantisable
from shoal.quant.rules import plan_module

_BITS = {bits: QuantScheme(num_bits=bits) for bits in (3, 4, 5, 6, 8)}

_TIED = {
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
}


def _weights(rules: list[dict[str, object]], path: str, kind: str = "Linear", stage: int = 1) -> QuantScheme | None:
    config = QuantConfig.model_validate({"base": {"weight_quant": {"num_bits": 8}}, "rules": rules})
    return plan_module(config, path, kind, stage).weight


def _bits(bits: int, **conditions: object) -> dict[str, object]:
    return {**conditions, "weight_quant": {"num_bits": bits}}


def test_the_more_specific_rule_wins_wherever_it_stands() -> None:
    narrow = _bits(3, name_patterns=["block_0.mlp.up"])
    wide = _bits(4, name_patterns=["block_*"])
    of_type = _bits(5, class_names=["Linear"])
    of_stage = _bits(6, stages=[1])
    # From the most specific to the least; each wins over all that follow it, in any order.
    ranked = [narrow, wide, of_type, of_stage]
    for position, rule in enumerate(ranked):
        expected = QuantScheme.model_validate(rule["weight_quant"])
        below = ranked[position:]
        assert _weights(below, "block_0.mlp.up") == expected
        assert _weights(below[::-1], "block_0.mlp.up") == expected
    assert _weights(ranked, "block_1.mlp.up") == _BITS[4]
    assert _weights(ranked, "head.logits") == _BITS[5]
    assert _weights(ranked, "stem.conv", "Conv2d") == _BITS[6]
    assert _weights(ranked, "stem.conv", "Conv2d", stage=0) == _BITS[8]


def test_of_equally_specific_rules_the_last_one_wins() -> None:
    rules = [_bits(3, name_patterns=["block_0.*"]), _bits(4, name_patterns=["block_0.*"])]
    assert _weights(rules, "block_0.conv1") == _BITS[4]


def test_only_the_pattern_that_matches_makes_a_rule_specific() -> None:
    rules = [_bits(3, name_patterns=["a_very_long_name_of_another_module", "*"]), _bits(4, name_patterns=["block_*"])]
    assert _weights(rules, "block_0.conv1") == _BITS[4]


def test_what_a_specific_rule_leaves_open_a_wider_one_decides() -> None:
    config = QuantConfig.model_validate(
        {
            "rules": [
                {"class_names": ["Conv2d"], "weight_quant": "off", "activation_quant": {"num_bits": 4}},
                {"name_patterns": ["stem.*"], "activation_quant": "off"},
            ]
        }
    )
    plan = plan_module(config, "stem.conv", "Conv2d", 0)
    assert (plan.weight, plan.activation) == (None, None)
    plan = plan_module(config, "block_0.conv", "Conv2d", 0)
    assert (plan.weight, plan.activation) == (None, _BITS[4])


def _gpt(*rules: dict[str, object]) -> Config:
    small = {"num_layers": 2, "hidden_size": 16, "num_heads": 2}
    values = {"model": small, "data": {"seq_len": 8}, "model_pipeline": {"stages": 2}, "quant": {"rules": list(rules)}}
    return load_config(None, values, {})


def test_rules_that_no_module_answers_to_are_refused_all_at_once_with_what_comes_nearest() -> None:
    config = _gpt(
        _bits(4, name_patterns=["block_*"]),
        _bits(4, name_patterns=["block_0.mlp.upp"]),
        _bits(4, class_names=["Conv2d"]),
        _bits(4, name_patterns=["block_0*"], stages=[1]),
    )
    with pytest.raises(ConfigError) as caught:
        require_quantisable(config.quant, units_of(config))
    lines = str(caught.value).splitlines()
    assert [line.split(" ")[0] for line in lines] == ["quant.rules[1]", "quant.rules[2]", "quant.rules[3]"]
    paths = [
        f"block_0.{name}"
        for unit, _, module in units_of(config)
        if unit == "block_0"
        for name, _ in module.named_modules()
    ]
    assert any(path in lines[0] for path in paths if path != "block_0.")


@pytest.mark.parametrize(
    "quant",
    [
        {"base": {"weight_quant": "off", "activation_quant": "off"}},
        {"rules": [{"name_patterns": ["*"], "weight_quant": "off", "activation_quant": "off"}]},
    ],
    ids=["by the base", "by a rule"],
)
def test_a_section_that_quantises_nothing_is_refused(quant: dict[str, object]) -> None:
    config = load_config(None, {**_gpt().model_dump(mode="json"), "quant": quant}, {})
    with pytest.raises(ConfigError, match=r"no module of this model is quantised.*--disable-quant"):
        require_quantisable(config.quant, units_of(config))
    inputs_too = {**quant, "rules": [*quant.get("rules", []), _bits(4, name_patterns=["block_1.mlp.up"])]}  # type: ignore[misc]
    config = load_config(None, {**_gpt().model_dump(mode="json"), "quant": inputs_too}, {})
    require_quantisable(config.quant, units_of(config))


def test_a_rule_that_says_nothing_is_refused() -> None:
    config = _gpt({"name_patterns": ["block_0.*"]})
    with pytest.raises(ConfigError, match=r"quant\.rules\[0\] \(name_patterns.*says nothing"):
        require_quantisable(config.quant, units_of(config))


def test_a_rule_for_modules_that_cannot_be_quantised_is_refused() -> None:
    config = _gpt(_bits(4, class_names=["LayerNorm"]))
    with pytest.raises(ConfigError, match="which is a LayerNorm; only Linear, Conv1D, Conv2d, Embedding"):
        require_quantisable(config.quant, units_of(config))


@pytest.mark.parametrize("stages", [1, 2])
def test_a_weight_that_is_tied_is_not_quantised(stages: int) -> None:
    def of_tied(quant: Mapping[str, object]) -> Config:
        model = {"family": "hf", "extra": _TIED}
        sections = {"model": model, "data": {"seq_len": 8}, "model_pipeline": {"stages": stages}, "quant": quant}
        return load_config(None, sections, {})

    config = of_tied({})
    with pytest.raises(ConfigError, match=r"the weight of head\.lm_head is tied"):
        require_quantisable(config.quant, units_of(config))
    for quant in (
        {"base": {"weight_quant": "off"}},
        {"rules": [{"name_patterns": ["head.lm_head"], "weight_quant": "off"}]},
    ):
        config = of_tied(quant)
        require_quantisable(config.quant, units_of(config))


def test_rules_that_match_and_no_rules_are_fine() -> None:
    config = _gpt(_bits(4, name_patterns=["head*"]), _bits(4, stages=[0]))
    require_quantisable(config.quant, units_of(config))
    require_quantisable(None, ())
