"""What units cost: measured once, known from then on; by the family's own figures where it has to be repeatable."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.clock import SystemClock
from shoal.config import Config
from shoal.errors import ConfigError
from shoal.model.gpt import GptFamily
from shoal.model.stage import TensorSpec
from shoal.server.cost_cache import CostCache
from shoal.server.unit_costs import UnitCosts, unit_costs

SMALL = {"num_layers": 2, "hidden_size": 16, "num_heads": 2}
CONFIG = Config.model_validate({"model": SMALL, "data": {"seq_len": 8}})


class Alone(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("needs its neighbour")


class Sociable(GptFamily):
    """Its blocks do not run by themselves."""

    def build_unit(self, index: int) -> nn.Module:
        return Alone() if index == 1 else super().build_unit(index)


class Inexact(GptFamily):
    """It is not the same when it is cut."""

    def exactness_problem(self) -> str | None:
        return "it reads what another stage keeps"


class Wider(GptFamily):
    """Its blocks give another shape than it says."""

    def boundary_spec(self, index: int) -> TensorSpec:
        spec = super().boundary_spec(index)
        return replace(spec, shape=(*spec.shape, 1)) if index == 1 else spec


class Unreduced(GptFamily):
    """Its loss is one number for each sample."""

    def is_in_chunks(self, index: int) -> bool:
        return False

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        return super().loss(output, labels)[None]


class Recurrent(GptFamily):
    """Its blocks give what torch's recurrent layers give: a tensor and their state."""

    def build_unit(self, index: int) -> nn.Module:
        return nn.LSTM(16, 16, batch_first=True) if index == 1 else super().build_unit(index)


class Widening(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


class Double(GptFamily):
    """Its blocks give numbers of another type than it says."""

    def build_unit(self, index: int) -> nn.Module:
        return Widening() if index == 1 else super().build_unit(index)


class Counted(Unreduced):
    """Its loss is no tensor."""

    def loss(self, output: Tensor, labels: Tensor) -> Any:
        return super().loss(output, labels).item()


def _costs(cache: CostCache | None = None, config: Config = CONFIG, *, measure: bool = True) -> UnitCosts:
    return unit_costs(config, "cpu", SystemClock(), measure=measure, cache=cache)


def _own_family(name: str) -> Config:
    return CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"family": f"{__name__}:{name}"})})


def test_units_are_measured_once_and_known_from_then_on(tmp_path: Path) -> None:
    cache = CostCache(tmp_path)
    first = _costs(cache)
    assert (first.source, first.names, first.warnings) == ("measured", ["embedding", "block_0", "block_1", "head"], [])
    again = _costs(cache)
    assert (again.source, again.costs, again.warnings) == ("cached", first.costs, [])


def test_without_measuring_the_familys_own_figures_count(tmp_path: Path) -> None:
    cache = CostCache(tmp_path)
    _costs(cache)
    static = _costs(cache, measure=False)
    assert static.source == "static"
    assert static.costs == GptFamily.from_config(CONFIG.model, CONFIG.data).unit_costs()


def test_a_family_that_cannot_run_alone_is_cut_by_its_own_figures_with_one_warning(tmp_path: Path) -> None:
    cache = CostCache(tmp_path)
    found = _costs(cache, _own_family("Sociable"))
    assert found.source == "static"
    (warning,) = found.warnings
    assert re.search(r"\(block_0, \S+test_unit_costs\.py line \d+: KeyError: 'needs its neighbour'\)", warning)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Wider", r"block_0 gives a tensor of shape \(1, 8, 16\), and boundary_spec\(1\) says \(1, 8, 16, 1\)"),
        ("Unreduced", r"loss\(\) gives a tensor of shape \(1,\), and has to give one number"),
        ("Counted", r"loss\(\) gives a builtins\.float, and has to give one number, as a tensor"),
        ("Recurrent", r"block_0 gives a builtins\.tuple, and has to give one tensor"),
        ("Double", r"block_0 gives a tensor of float64, and boundary_spec\(1\) says float32"),
    ],
)
def test_a_family_that_no_server_could_train_is_refused(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        _costs(config=_own_family(name))


@pytest.mark.parametrize("measure", [True, False])
def test_a_model_that_must_not_be_cut_is_refused_before_anything_is_measured(tmp_path: Path, measure: bool) -> None:
    with pytest.raises(ConfigError, match="reads what another stage keeps"):
        _costs(CostCache(tmp_path), _own_family("Inexact"), measure=measure)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_measured_again_with_a_warning(tmp_path: Path) -> None:
    cache = CostCache(tmp_path)
    _costs(cache)
    (file,) = tmp_path.iterdir()
    file.write_text("{")
    found = _costs(cache)
    assert found.source == "measured"
    assert str(file) in found.warnings[0]
    assert _costs(cache).source == "cached"


def test_what_cannot_be_kept_is_only_worth_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = _costs(CostCache(tmp_path / "file"))
    assert found.source == "measured"
    assert any("cannot be kept" in warning for warning in found.warnings)


def test_other_code_of_somebodys_own_family_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "their_family.py"
    source = "from shoal.model.gpt import GptFamily\n\n\nclass Theirs(GptFamily):\n    pass\n"
    file.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    cache = CostCache(tmp_path / "costs")
    config = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"family": "their_family:Theirs"})})
    assert [_costs(cache, config).source for _ in range(2)] == ["measured", "cached"]
    file.write_text(source + "# changed\n")
    assert _costs(cache, config).source == "measured"


def test_so_is_a_family_whose_units_are_in_another_file_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_package").mkdir()
    units = tmp_path / "their_package" / "units.py"
    units.write_text("")
    (tmp_path / "their_package" / "family.py").write_text(
        "from shoal.model.gpt import GptFamily\nfrom their_package import units\nclass Theirs(GptFamily):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    cache = CostCache(tmp_path / "costs")
    model = CONFIG.model.model_copy(update={"family": "their_package.family:Theirs"})
    config = CONFIG.model_copy(update={"model": model})
    assert [_costs(cache, config).source for _ in range(2)] == ["measured", "cached"]
    units.write_text("WIDTH = 3\n")
    assert _costs(cache, config).source == "measured"


def test_a_gpu_that_is_not_there_is_an_error_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="sees no GPU"):
        unit_costs(CONFIG, "cuda:0", SystemClock(), measure=True)


def test_units_that_are_no_family_are_an_error_of_the_user() -> None:
    config: Any = _own_family("Missing")
    with pytest.raises(ConfigError, match="has no Missing"):
        _costs(config=config)
