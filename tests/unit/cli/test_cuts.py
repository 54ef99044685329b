"""The cut of a run: by hand, by the family's own figures, by an earlier measurement, or by a profiler."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from shoal.cli.cuts import has_cut, is_settled, profiled_device, with_known_cut, with_profiled_cut
from shoal.cli.host import SwarmHost
from shoal.config import Config
from shoal.errors import ConfigError, RemoteError
from shoal.model.costs import static_costs
from shoal.model.hf.described import OF_TRANSFORMERS
from shoal.model.registry import NATIVE_FAMILIES, load_family
from shoal.runtime.launcher_messages import CostsFound, RoleFailed
from shoal.runtime.role_handle import RoleHandle
from shoal.runtime.role_spec import ExitStatus, RoleSpec
from shoal.server.cost_cache import CostCache, cost_key

OWN = {"model": {"family": "somebody.models:Theirs"}, "model_pipeline": {"stages": 2}}
SKEWED = [1.0, 1.0, 1.0, 1.0, 1.0, 9.0]
"""What the units of a gpt with four blocks cost; the family's own figures would cut it in the middle."""


def _config(*, deterministic: bool = False, **sections: dict[str, Any]) -> Config:
    values: dict[str, Any] = {"model_pipeline": {"stages": 2}, "device": "cpu", **sections}
    return Config.model_validate({**values, "run": {"deterministic": deterministic}})


def _known(config: Config, folder: Path) -> tuple[int, ...] | None:
    return with_known_cut(config, CostCache(folder)).model_pipeline.cut


def test_a_cut_by_hand_stays_and_one_stage_needs_none(tmp_path: Path) -> None:
    CostCache(tmp_path).store(cost_key(_config(), "cpu"), SKEWED)
    assert _known(_config(model_pipeline={"cut": [2, 4]}), tmp_path) == (2, 4)
    whole = _config(model_pipeline={"stages": 1})
    assert _known(whole, tmp_path) is None
    assert has_cut(whole)


def test_a_deterministic_run_is_cut_by_the_familys_own_figures_whatever_was_measured(tmp_path: Path) -> None:
    for deterministic in (True, False):
        CostCache(tmp_path).store(cost_key(_config(deterministic=deterministic), "cpu"), SKEWED)
    assert _known(_config(deterministic=True), tmp_path) == (3, 3)


def test_what_was_measured_before_decides_at_once(tmp_path: Path) -> None:
    assert _known(_config(), tmp_path) is None
    CostCache(tmp_path).store(cost_key(_config(), "cpu"), SKEWED)
    assert _known(_config(), tmp_path) == (5, 1)
    assert _known(_config(servers={"threads": 2}), tmp_path) is None


def test_a_measurement_of_another_number_of_units_does_not_count(tmp_path: Path) -> None:
    CostCache(tmp_path).store(cost_key(_config(), "cpu"), SKEWED[1:])
    assert _known(_config(), tmp_path) is None


@pytest.mark.parametrize("deterministic", [True, False])
def test_only_a_profiler_knows_somebodys_own_family(tmp_path: Path, deterministic: bool) -> None:
    config = _config(deterministic=deterministic, **OWN)
    CostCache(tmp_path).store(cost_key(config, "cpu"), SKEWED)
    assert not has_cut(with_known_cut(config, CostCache(tmp_path)))


@pytest.mark.parametrize("family", [name for name in NATIVE_FAMILIES if name not in OF_TRANSFORMERS])
@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
def test_the_launcher_knows_the_figures_of_the_native_families(family: str, stem: str) -> None:
    task = {"gpt": "llm", "biggan": "image_gen"}.get(family, "cv")
    img_size = 32 if family == "biggan" else 33
    stages = {"model_pipeline": {"stages": 1}} if family == "biggan" else {}
    config = _config(model={"family": family, "stem": stem}, data={"task_type": task, "img_size": img_size}, **stages)
    built = load_family(config.model, config.data)
    costs = built.unit_costs()
    assert static_costs(config.model, config.data) == costs
    assert len(costs) == built.num_units == config.model.num_units
    assert all(cost > 0 for cost in costs)


def test_the_launcher_cuts_without_torch() -> None:
    code = (
        "import sys\n"
        "from shoal.cli.cuts import with_known_cut\n"
        "from shoal.config import load_config\n"
        "config = load_config(None, {'run': {'deterministic': True}, 'model_pipeline': {'stages': 2}}, {})\n"
        "assert with_known_cut(config).model_pipeline.cut == (3, 3)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


class Host:
    """Starts profilers that say what they are told to, in their order."""

    def __init__(self, *scripts: Mapping[str, Any] | int) -> None:
        self.scripts = list(scripts)
        self.asked: list[bool] = []

    async def start_profiler(self, device: str, *, measure: bool) -> RoleHandle:
        assert device == "cpu"
        self.asked.append(measure)
        handle = RoleHandle(RoleSpec("profiler", 0, "nowhere:main"))
        script = self.scripts.pop(0)
        if isinstance(script, int):
            if script == 2:
                handle.deliver(RoleFailed("model.family: there is no such family"))
            handle.finish(ExitStatus(script))
        else:
            handle.deliver(CostsFound(**{"elapsed_s": 0.5, "warnings": [], "is_tied": False, **script}))
            handle.finish(ExitStatus(0))
        return handle


async def _profiled(
    config: Config, *scripts: Mapping[str, Any] | int
) -> tuple[tuple[int, ...] | None, Host, list[str]]:
    host, notices = Host(*scripts), list[str]()
    found = await with_profiled_cut(config, cast("SwarmHost", host), notices.append)
    return found.model_pipeline.cut, host, notices


async def test_the_profilers_costs_decide_the_cut_and_the_user_hears_it() -> None:
    cut, host, notices = await _profiled(_config(), {"costs": SKEWED, "source": "measured"})
    assert (cut, host.asked) == ((5, 1), [True])
    assert notices == ["measured what the units of the model cost in 0.50 s: 5 + 1 units a stage"]


async def test_a_model_of_transformers_is_proven_by_a_profiler_also_where_its_cut_is_known() -> None:
    config = _config(model={"family": "hf", "extra": {"model_type": "qwen3"}}, model_pipeline={"cut": [5, 1]})
    known = with_known_cut(config)
    assert has_cut(known)
    assert not is_settled(known)
    cut, host, notices = await _profiled(known, {"costs": [1.0] * 6, "source": "static"})
    assert (cut, host.asked, notices) == ((5, 1), [False], [])
    with pytest.raises(ConfigError, match="there is no such family"):
        await _profiled(known, 2)
    assert is_settled(_config(model_pipeline={"cut": [5, 1]}))


async def test_what_the_weights_hash_to_is_part_of_the_configuration() -> None:
    model = {"family": "hf", "name_or_path": "./qwen", "hf_config": {"model_type": "qwen3"}, "pretrained": True}
    config = _config(model=model, model_pipeline={"cut": [5, 1]})
    weights = [f"{unit:032x}" for unit in range(6)]
    told = {"costs": [1.0] * 6, "source": "static", "weights": weights}
    found = await with_profiled_cut(config, cast("SwarmHost", Host(told)), print)
    assert found.model.weights == tuple(weights)


async def test_warnings_of_the_profiler_reach_the_user() -> None:
    told = {"costs": [1.0] * 6, "source": "static", "warnings": ["could not be measured"]}
    cut, _, notices = await _profiled(_config(), told)
    assert (cut, notices) == ((3, 3), ["cut of the model: could not be measured"])


async def test_a_deterministic_run_has_nothing_measured() -> None:
    _, host, notices = await _profiled(_config(deterministic=True, **OWN), {"costs": [1.0] * 6, "source": "static"})
    assert (host.asked, notices) == ([False], [])


async def test_after_a_profiler_that_was_killed_the_familys_own_figures_decide() -> None:
    cut, host, notices = await _profiled(_config(), -9, {"costs": [1.0] * 6, "source": "static"})
    assert (cut, host.asked) == ((3, 3), [True, False])
    assert "SIGKILL" in notices[0]


async def test_a_profiler_that_dies_again_ends_the_run() -> None:
    with pytest.raises(RemoteError, match="SIGKILL"):
        await _profiled(_config(), -9, -9)


async def test_a_model_that_does_not_fit_is_an_error_of_the_user() -> None:
    with pytest.raises(ConfigError, match="there is no such family"):
        await _profiled(_config(**OWN), 2)
    with pytest.raises(ConfigError, match="6 units"):
        await _profiled(_config(**{**OWN, "model_pipeline": {"stages": 7}}), {"costs": SKEWED, "source": "measured"})


def test_units_are_measured_where_the_first_server_computes() -> None:
    assert profiled_device(_config()) == "cpu"
    with pytest.raises(ConfigError, match=r"device = cuda:99: torch .* sees "):
        profiled_device(_config().model_copy(update={"device": "cuda:99"}))
