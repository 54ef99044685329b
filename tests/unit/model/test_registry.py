"""Families by name, native and of one's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal.config import Config
from shoal.config.model import NATIVE_FAMILIES as CONFIGURED_FAMILIES
from shoal.errors import ConfigError, MisfitError
from shoal.model.gpt import GptFamily
from shoal.model.hf.described import OF_TRANSFORMERS
from shoal.model.meta import build_without_values
from shoal.model.own_errors import asked
from shoal.model.registry import NATIVE_FAMILIES, family_class, load_family
from shoal.model.resnet import ResNetFamily
from shoal.model.stage import build_stage, initial_unit

_OWN_FAMILY = """
from shoal.model.gpt import GptFamily, GptShape
from shoal.model.stage import Family, TensorSpec

class Tiny(GptFamily):
    @classmethod
    def from_config(cls, model, data):
        return cls(GptShape(data.seq_len, model.extra["width"], 1, 1))

class Located(Tiny):
    def context_specs(self):
        return {"lengths": self.label_spec(), "positions": self.label_spec()}

class Unfinished(Family):
    pass

class Misread(Tiny):
    @classmethod
    def from_config(cls, model, data):
        return cls(GptShape(data.seq_len, int(model.extra["name"]), 1, 1))

class Forgotten(Tiny):
    @classmethod
    def from_config(cls, model, data):
        cls(GptShape(data.seq_len, 8, 1, 1))

class Misspelt(Tiny):
    def input_spec(self):
        return TensorSpec("long", (128,))

    def label_spec(self):
        return TensorSpec("int64", 128)

    def boundary_spec(self, index):
        return self.no_such[index]

    def unit_costs(self):
        return [1.0]

class Uncounted(Tiny):
    def num_units(self):
        return 3

class Unbuilt(Tiny):
    def build_unit(self, index):
        return super().build_unit(index) if index == 0 else self.layers[index]

class Built(Tiny):
    def build_unit(self, index):
        super().build_unit(index)

class Unrelated:
    pass

not_a_class = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    name = f"own_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{name}.py").write_text(_OWN_FAMILY)
    (tmp_path / f"{name}_broken.py").write_text("import there_is_no_such_module")
    (tmp_path / f"{name}_raising.py").write_text("\n1 / 0")
    (tmp_path / f"{name}_misspelt.py").write_text("\nx = = 1")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_family_of_ones_own_that_mixes_conversations_is_refused(own_module: str) -> None:
    data = {"messages_column": "messages", "tokenizer": "mine"}
    config = Config.model_validate({"model": {"family": f"{own_module}:Tiny", "extra": {"width": 8}}, "data": data})
    with pytest.raises(ConfigError, match=r"messages packs .* does not see them apart: its context_specs have no pos"):
        load_family(config.model, config.data)


@pytest.mark.parametrize("data", [{}, {"messages_column": "messages", "tokenizer": "mine"}])
def test_a_family_that_wants_what_no_sample_has_is_refused(own_module: str, data: dict[str, str]) -> None:
    model = {"family": f"{own_module}:Located", "extra": {"width": 8}}
    config = Config.model_validate({"model": model, "data": data})
    wanted = "lengths" if data else "lengths, positions"
    with pytest.raises(ConfigError, match=f"context_specs want {wanted} of each sample, which .* does not give"):
        load_family(config.model, config.data)


def test_every_configurable_family_is_there() -> None:
    assert tuple(NATIVE_FAMILIES) == CONFIGURED_FAMILIES


def test_the_configuration_decides_the_sizes() -> None:
    config = Config.model_validate({"model": {"num_layers": 3, "hidden_size": 8, "num_heads": 2, "dropout": 0.1}})
    family = load_family(config.model, config.data)
    assert isinstance(family, GptFamily)
    assert (family.shape.width, family.shape.num_layers, family.shape.dropout, family.num_units) == (8, 3, 0.1, 5)
    config = Config.model_validate(
        {"model": {"family": "resnet50", "stem": "imagenet"}, "data": {"task_type": "cv", "img_size": 64}}
    )
    family = load_family(config.model, config.data)
    assert isinstance(family, ResNetFamily)
    assert (family.shape.bottleneck, family.num_units) == (True, 18)
    assert family.boundary_spec(0).shape == (64, 16, 16)


@pytest.mark.parametrize("name", [name for name in CONFIGURED_FAMILIES if name not in OF_TRANSFORMERS])
def test_every_family_can_be_cut_as_often_as_the_configuration_allows(name: str) -> None:
    task = {"gpt": "llm", "biggan": "image_gen"}.get(name, "cv")
    config = Config.model_validate({"model": {"family": name}, "data": {"task_type": task}})
    assert config.model.max_stages is not None
    assert config.model.max_stages <= load_family(config.model, config.data).num_units


def test_a_family_of_ones_own_is_found_and_reads_its_own_options(own_module: str) -> None:
    config = Config.model_validate({"model": {"family": f"{own_module}:Tiny", "extra": {"width": 6}}})
    family = load_family(config.model, config.data)
    stage = build_stage(family, 0, 1, seed=1)
    assert stage.output_spec.shape == (128, 256)
    assert stage.family_name == config.model.family
    assert build_stage(load_family(Config().model, Config().data), 0, 2, seed=1).family_name == ""
    assert family.boundary_spec(0).shape == (128, 6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet34", "choose gpt, mlp, resnet18"),
        ("no.such.module:Class", "cannot import no.such.module"),
        ("{own}:Missing", "has no Missing; check the part after the colon$"),
        ("{own}:unfinnished", r"has no unfinnished; did you mean Unfinished\?$"),
        ("{own}:Unrelated", "not a subclass"),
        ("{own}:not_a_class", "not a subclass"),
        ("{own}:Unfinished", "does not define .*build_unit.*loss"),
        (
            "{own}_broken:Tiny",
            r"no module named 'there_is_no_such_module', imported by \S+/{own}_broken\.py line 1\); is it installed",
        ),
        ("{own}_raising:Tiny", r"when it is imported, raises ZeroDivisionError: .* \(\S+/{own}_raising\.py line 2\)"),
        (
            "{own}_misspelt:Tiny",
            r"cannot import {own}_misspelt .*: invalid syntax \(\S+/{own}_misspelt\.py line 2\); mend it there$",
        ),
        ("{own}:Tiny()", "not of the form"),
        ("os; os:system", "not of the form"),
    ],
)
def test_what_is_no_family_is_refused_with_what_to_do(own_module: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match="(?i)" + message.replace("{own}", own_module)):
        family_class(name.format(own=own_module))


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        (
            "Misread",
            [r"from_config of {own}:Misread raises ValueError: invalid .*'wide' \(\S+/{own}\.py line \d+\); m"],
        ),
        ("Forgotten", [r"from_config of {own}:Forgotten gives None, and has to give the family"]),
        ("Uncounted", [r"num_units of {own}:Uncounted is <bound method .*, and has to be a whole number"]),
        (
            "Misspelt",
            [
                r"input_spec\(\) of {own}:Misspelt gives the type 'long', and has to give one of float32, ",
                r"label_spec\(\) of {own}:Misspelt gives the shape 128, and has to give a tuple",
                r"boundary_spec\(0\) of {own}:Misspelt raises AttributeError: .*'no_such' \(\S+/{own}\.py line \d+\)",
                r"boundary_spec\(2\) of {own}:Misspelt raises AttributeError",
                r"unit_costs of Misspelt gives \[1\.0\]: it has to give one number of 0 or more for each of its 3",
            ],
        ),
    ],
)
def test_a_family_that_says_what_it_must_not_is_refused_with_all_of_it(
    own_module: str, name: str, messages: list[str]
) -> None:
    model = {"family": f"{own_module}:{name}", "extra": {"width": 8, "name": "wide"}}
    config = Config.model_validate({"model": model})
    with pytest.raises(MisfitError) as refused:
        load_family(config.model, config.data)
    for message in messages:
        assert re.search(message.replace("{own}", own_module), str(refused.value))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Unbuilt", r"build_unit\(1\) of {own}:Unbuilt raises AttributeError: .*'layers' \(\S+/{own}\.py line \d+\); "),
        ("Built", r"build_unit\(1\) of {own}:Built gives None, and has to give a torch\.nn\.Module"),
    ],
)
def test_a_unit_that_cannot_be_built_is_refused_also_without_memory(own_module: str, name: str, message: str) -> None:
    config = Config.model_validate({"model": {"family": f"{own_module}:{name}", "extra": {"width": 8}}})
    family = load_family(config.model, config.data)
    for build in (initial_unit, build_without_values):
        with pytest.raises(MisfitError, match=message.replace("{own}", own_module)):
            build(family, 1, 0)


def test_what_a_family_of_shoals_own_raises_is_a_bug_and_stays_one() -> None:
    with pytest.raises(KeyError), asked(GptFamily, "build_unit(1)"):
        raise KeyError("hidden")
