"""A model of transformers as a family: what the configuration says of it, its units, its stages."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from tests.unit.model.hf.families import EXACT, TOKENS, family_of, own_class, values_of
from torch import Tensor

from shoal.config import Config
from shoal.config.shared import adopt_shared, shared_configuration
from shoal.errors import ConfigError
from shoal.model.hf.described import with_hf_config
from shoal.model.hf.family import HfFamily
from shoal.model.hf.skeleton import Part
from shoal.model.registry import load_family
from shoal.model.stage import StageModule, build_stage
from shoal.optim.flat import state_buffers
from shoal.quant.apply import apply_quant

QWEN = {**values_of("qwen3"), "vocab_size": 256}


def _config(*, stages: int = 1, data: dict[str, Any] | None = None, **model: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"family": "hf", **model},
            "data": {"seq_len": TOKENS, **(data or {})},
            "model_pipeline": {"stages": stages},
        }
    )


def _load(**model: Any) -> HfFamily:
    config = _config(**model)
    return cast("HfFamily", load_family(config.model, config.data))


def _folder(path: Path, **values: Any) -> Path:
    path.mkdir()
    content = {**QWEN, "architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16", **values}
    (path / "config.json").write_text(json.dumps(content))
    return path


def test_the_config_of_a_folder_says_the_sizes_and_extra_replaces_some_of_them(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "qwen")
    family = _load(name_or_path=str(folder), extra={"num_hidden_layers": 2, "hidden_size": 16})
    assert (family.num_units, family.config.model_type, family.config.num_attention_heads) == (4, "qwen3", 4)
    stage = build_stage(family, 0, 1, seed=1)
    assert stage.output_spec.shape == (TOKENS, 256)
    assert {p.dtype for p in stage.parameters()} == {torch.float32}
    assert family.boundary_spec(0).shape == (TOKENS, 16)


def test_a_run_knows_its_model_where_the_folder_is_not(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "qwen")
    config = _config(name_or_path=str(folder))
    config = config.model_copy(update={"model": with_hf_config(config.model)})
    shared = shared_configuration(config)
    shutil.rmtree(folder)
    for model in ({}, {"name_or_path": str(folder)}):
        host = Config.model_validate({"model": {"family": "hf", **model}})
        adopted = adopt_shared(host, {f"model.{key}": "a file" for key in model}, shared)
        assert load_family(adopted.model, adopted.data).num_units == 6
    with pytest.raises(ConfigError, match="no such folder"):
        load_family(Config.model_validate({"model": {"family": "hf", "name_or_path": str(folder)}}).model, config.data)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({}, r"model\.name_or_path .*or its kind by model\.extra"),
        ({"extra": {"model_type": "qwen33"}}, r"knows no such model; did you mean .*qwen3"),
        ({"extra": {**QWEN, "num_layer": 3}}, r"model\.extra\.num_layer: a qwen3 .* did you mean num_hidden_layers"),
        ({"extra": {**QWEN, "vocab_size": 255}}, r"255 tokens.*set model\.extra\.vocab_size to 256"),
        ({"extra": {**QWEN, "max_position_embeddings": 8}}, r"data\.seq_len = 12 is more than the 8 positions"),
        (
            {"extra": {**QWEN, "hidden_size": "wide"}},
            r"model\.extra and config\.json do not describe a qwen3.*hidden_size",
        ),
        ({"extra": {**QWEN, "dtype": "bfloat16"}}, r"model\.extra\.dtype means nothing"),
        ({"extra": {**QWEN, "auto_map": {}}}, r"model\.extra\.auto_map means nothing"),
        ({"extra": {"model_type": "gemma3"}}, "gemma3 of transformers has no vocab_size"),
        ({"extra": {**QWEN, "num_hidden_layers": 0}}, "no num_hidden_layers"),
        ({"extra": {**QWEN, "attn_implementation": "flash_attention_2"}}, "code of somebody on the hub"),
        ({"extra": {**QWEN, "sub": [{"attn_implementation": "a/b"}]}}, "code of somebody on the hub"),
        ({"extra": {**QWEN, "rope_theta": {"__float__": "abc"}}}, "do not describe a qwen3"),
        ({"extra": {**QWEN, "attn_implementation": "somebody/kernel"}}, "code of somebody on the hub"),
        ({"extra": {**QWEN, "_attn_implementation": "somebody/kernel"}}, "code of somebody on the hub"),
        ({"hf_config": {**QWEN, "experts_implementation": "somebody/kernel"}}, "code of somebody on the hub"),
        ({"extra": {**QWEN, "text_config": {"attn_implementation": "somebody/kernel"}}}, "code of somebody on the hub"),
        ({"name_or_path": "./nowhere"}, r"model\.name_or_path = \./nowhere: there is no such folder"),
    ],
)
def test_what_describes_no_model_is_refused_with_what_to_do(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _load(**model)


def test_code_that_a_config_names_is_not_looked_at(tmp_path: Path) -> None:
    code = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    folder = _folder(tmp_path / "qwen", auto_map=code)
    (folder / "theirs.py").write_text("raise SystemExit('executed')")
    for model in ({"name_or_path": str(folder)}, {"hf_config": {**QWEN, "auto_map": code}}):
        family = _load(**model)
        assert not hasattr(family.config, "auto_map")
        build_stage(family, 0, 1, seed=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        ("{", "cannot be read"),
        (800 * '{"a":' + "1" + 800 * "}", "cannot be read"),
        ("{}", "names no model_type"),
    ],
)
def test_a_folder_without_a_config_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        _load(name_or_path=str(tmp_path))


def test_without_transformers_or_with_an_old_one_the_user_hears_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'shoal\[hf\]'"):
        _load(extra=QWEN)
    monkeypatch.setattr("shoal.model.hf.library.transformers_version", lambda: "5.8.1")
    with pytest.raises(ConfigError, match=r"needs transformers 5\.9 or newer.*5\.8\.1.*pip install"):
        _load(extra=QWEN)


def test_a_model_of_the_hub_is_asked_for_and_what_the_hub_says_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _folder(tmp_path / "qwen")
    asked: list[tuple[str, str]] = []

    def download(name: str, file: str, revision: str | None) -> str:
        assert revision is None
        asked.append((name, file))
        if name == "someone/missing":
            raise OSError("404: no such repository")
        return str(folder / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert _load(name_or_path="someone/qwen").num_units == 6
    with pytest.raises(ConfigError, match=r"someone/missing.*404"):
        _load(name_or_path="someone/missing")
    assert asked == [("someone/qwen", "config.json"), ("someone/missing", "config.json")]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"family": "hf", "hidden_size": 64}, r"model\.hidden_size = 64: means nothing to model\.family = hf"),
        ({"family": "hf", "vocab_size": 300}, r"model\.vocab_size = 300: means nothing"),
        (
            {"family": "gpt", "tie": False},
            r"model\.tie = False: means nothing to model\.family = gpt, only the family hf",
        ),
        ({"family": "gpt", "name_or_path": "x"}, r"model\.name_or_path = 'x': means nothing"),
        ({"family": "gpt", "hf_config": {}}, r"model\.hf_config = {}: means nothing"),
    ],
)
def test_a_key_of_another_family_is_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config.model_validate({"model": model})


@pytest.mark.usual("qwen3", "falcon_h1")
@pytest.mark.parametrize("kind", EXACT)
def test_names_and_initial_values_do_not_depend_on_the_cut(kind: str) -> None:
    family = family_of(kind)
    whole = dict(build_stage(family, 0, 1, seed=7).named_parameters())
    parts = {
        name: parameter
        for stage in range(family.num_units)
        for name, parameter in build_stage(family, stage, family.num_units, seed=7).named_parameters()
    }
    assert list(parts) == list(whole)
    assert [name for name in whole if not torch.equal(parts[name], whole[name])] == []
    assert {name.split(".")[1] for name in whole} == {family.unit_name(i) for i in range(family.num_units)}


def test_masks_and_rotary_embeddings_are_computed_once_in_a_stage(
    transformers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = transformers.models.llama.modeling_llama
    calls: list[str] = []
    for owner, name in ((module, "create_causal_mask"), (module.LlamaRotaryEmbedding, "forward")):
        original = getattr(owner, name)

        def counted(*args: Any, original: Any = original, name: str = name, **named: Any) -> Any:
            calls.append(name)
            return original(*args, **named)

        monkeypatch.setattr(owner, name, counted)
    stage = build_stage(family_of("llama"), 0, 2, seed=7, cut=[4, 2])
    stage(torch.ones(1, TOKENS, dtype=torch.int64))
    assert sorted(calls) == ["create_causal_mask", "forward"]


def test_rotary_frequencies_stay_float32_are_no_state_and_go_where_the_stage_goes() -> None:
    stage = build_stage(family_of("llama"), 1, 2, seed=7, dtype=torch.bfloat16)
    rotary = cast("Part", stage.assembled).model.model.rotary_emb
    expected = own_class(family_of("llama"), torch.float32)[0].model.rotary_emb.inv_freq
    assert torch.equal(rotary.inv_freq, expected)
    assert list(state_buffers(stage)) == []
    assert stage.double().to("cpu", torch.bfloat16).assembled is not None
    assert torch.equal(rotary.inv_freq, expected)
    stage.to("meta")
    assert rotary.inv_freq.is_meta
    assert rotary.inv_freq.dtype == torch.float32
    modules = list(stage.modules())
    assert len(modules) == len({id(module) for module in modules})


def test_constants_of_a_head_go_where_the_stage_that_hosts_it_goes() -> None:
    stage = build_stage(_tied(), 0, 2, seed=7)
    assert stage.head is not None
    rotary = cast("Part", stage.head.assembled).model.model.rotary_emb
    assert not rotary.inv_freq.is_meta
    stage.to("meta")
    assert rotary.inv_freq.is_meta
    assert list(state_buffers(stage)) == []


def test_the_mode_of_a_stage_is_that_of_the_model_that_it_runs() -> None:
    stage = build_stage(family_of("llama"), 1, 2, seed=7)
    model = cast("Part", stage.assembled).model
    assert model.training
    assert not any(module.training for module in (stage.eval(), *model.modules())[1:])
    assert all(module.training for module in (stage.train(), *model.modules())[1:])


def test_quantised_weights_are_those_that_a_stage_computes_with() -> None:
    config = Config.model_validate(
        {"quant": {"base": {"activation_quant": "off"}}, "model": {"family": "hf", "extra": QWEN}}
    )
    plain, quantised = (build_stage(family_of("qwen3"), 0, 2, seed=7) for _ in range(2))
    apply_quant(quantised, config.quant)
    tokens = torch.ones(1, TOKENS, dtype=torch.int64)
    assert not torch.equal(plain(tokens), quantised(tokens))
    assert "units.block_0.mlp.up_proj.parametrizations.weight.original" in dict(quantised.named_parameters())


def _tied(**model: Any) -> HfFamily:
    return _load(extra={**QWEN, "tie_word_embeddings": True}, **model)


@pytest.mark.usefixtures("user_caches")
def test_tied_embeddings_train_in_one_stage_as_one_parameter() -> None:
    family = _tied()
    stage = build_stage(family, 0, 1, seed=7)
    theirs, _ = own_class(family, torch.float32)
    assert [name for name, _ in stage.named_parameters() if "lm_head" in name] == []
    tokens = torch.randint(3, 256, (2, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    stage.loss(stage(tokens[:, :-1]), tokens[:, 1:]).backward()
    family.loss(theirs(input_ids=tokens[:, :-1], use_cache=False).logits, tokens[:, 1:]).backward()
    found = cast("Tensor", stage.get_parameter("units.embedding.embed_tokens.weight").grad)
    assert torch.equal(found, theirs.model.embed_tokens.weight.grad)
    assert family.exactness_problem() is None


def test_the_first_stage_has_both_ends_of_tied_embeddings_unless_they_are_untied() -> None:
    for tied in (_tied(), _load(extra=QWEN, tie=True)):
        first, last = (build_stage(tied, stage, 2, seed=7) for stage in range(2))
        assert first.is_wrapped
        assert last.is_wrapped
        assert not last.has_loss
        assert list(first.units)[-1] == "head"
        assert first.head is not None
        names = [name for stage in (first, last) for name, _ in stage.named_parameters()]
        assert [name for name in names if "lm_head" in name] == []
        assert len(names) == len(set(names))
        shared = first.get_parameter("units.embedding.embed_tokens.weight")
        assert any(parameter is shared for parameter in first.head.parameters())
    untied = build_stage(_tied(tie=False), 1, 2, seed=7)
    assert untied.is_last
    assert "units.head.lm_head.weight" in dict(untied.named_parameters())


@pytest.mark.parametrize("mode", [True, False])
def test_the_mode_of_a_stage_is_that_of_the_head_that_it_hosts(mode: bool) -> None:
    stage = build_stage(_tied(), 0, 2, seed=7).train(not mode).train(mode)
    assert stage.head is not None
    assert {module.training for module in (*stage.modules(), *stage.head.modules())} == {mode}


@pytest.mark.parametrize(("cut", "message"), [([1, 5], "give it 2 units"), ([2, 1], "add up"), ([1] * 6, "1 to 5")])
def test_a_cut_that_parts_tied_embeddings_is_refused(cut: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_stage(_tied(), 0, len(cut), seed=7, cut=cut)


def test_a_model_of_other_parts_is_refused(transformers: ModuleType) -> None:
    with pytest.raises(ConfigError, match=r"cannot be cut|no causal language model"):
        build_stage(_load(extra={"model_type": "t5"}), 0, 2, seed=7)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen3", "num_hidden_layers"),
        ("gpt2", "n_layer"),
        ("mixtral", "num_local_experts"),
        ("gpt2", "num_labels"),
    ],
)
def test_a_model_of_layers_or_experts_without_end_is_refused_before_they_are_listed(
    kind: str, name: str, transformers: ModuleType
) -> None:
    with pytest.raises(ConfigError, match=rf"describe a {kind} with {name} = {1 << 40}, and 4096 are the most"):
        _load(extra={**values_of(kind), name: 1 << 40})


def test_a_config_within_another_has_no_layers_without_end_either(transformers: ModuleType) -> None:
    with pytest.raises(ConfigError, match=rf"describe a gemma3 with num_hidden_layers = {1 << 40}, and 4096 are"):
        _load(extra={"model_type": "gemma3", "text_config": {"num_hidden_layers": 1 << 40}})


def test_costs_count_experts_for_as_many_as_a_token_takes() -> None:
    dense, experts = family_of("llama"), family_of("mixtral")
    assert len(dense.unit_costs()) == dense.num_units
    few, many = (HfFamily(values_of("mixtral", num_experts_per_tok=n), TOKENS).unit_costs()[1] for n in (1, 4))
    assert few < experts.unit_costs()[1] < many


def test_native_runs_and_the_help_import_no_transformers() -> None:
    code = (
        "import sys\n"
        "from shoal.config import Config\n"
        "from shoal.model.registry import load_family\n"
        "import shoal.cli.app, shoal.cli.cuts, shoal.server.service\n"
        "config = Config()\n"
        "load_family(config.model, config.data).exactness_problem()\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_the_launcher_reads_the_config_without_torch_and_without_transformers(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "qwen")
    code = (
        "import sys\n"
        "from shoal.cli.cuts import is_settled, with_known_cut\n"
        "from shoal.config import load_config\n"
        f"config = load_config(None, {{'model': {{'family': 'hf', 'name_or_path': {str(folder)!r}}}}}, {{}})\n"
        "config = with_known_cut(config)\n"
        "assert config.model.hf_config['hidden_size'] == 32 and not is_settled(config)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def _stages(kind: str, **named: Any) -> list[StageModule]:
    return [build_stage(family_of(kind), stage, 2, seed=7, **named) for stage in range(2)]


def test_under_autocast_a_stage_computes_in_bfloat16_and_keeps_gradients_in_float32() -> None:
    head, tail = _stages("qwen3", autocast=torch.bfloat16)
    sent = head(torch.ones(2, TOKENS, dtype=torch.int64))
    assert sent.dtype == torch.bfloat16
    received = sent.detach().requires_grad_()
    tail.loss(tail(received), torch.ones(2, TOKENS, dtype=torch.int64)).backward()
    sent.backward(cast("Tensor", received.grad))
    assert {p.grad.dtype for stage in (head, tail) for p in stage.parameters() if p.grad is not None} == {torch.float32}


def test_an_infinity_in_a_config_json_is_one_whichever_way_it_travels(tmp_path: Path) -> None:
    values = {**values_of("falcon_h1", vocab_size=256), "time_step_limit": [0.0, float("inf")]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = with_hf_config(Config.model_validate({"model": {"family": "hf", "name_or_path": str(tmp_path)}}).model)
    travelled = type(model).model_validate_json(model.model_dump_json())
    assert travelled == model
    assert tuple(HfFamily(travelled.hf_config or {}, 12).config.time_step_limit) == (0.0, float("inf"))
