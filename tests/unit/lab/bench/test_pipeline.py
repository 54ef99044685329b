"""How bursts of a swarm and the plain loop's rates become cases."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import pytest

from shoal.clock import SystemClock
from shoal.config.load import load_config
from shoal.errors import MachineBusy
from shoal_lab.bench import pipeline
from shoal_lab.bench.case import BenchmarkOptions
from shoal_lab.bench.pipeline_models import WORKLOADS, schedule_of
from shoal_lab.bench.pipeline_reference import PlainTraining


class _Peers(AbstractContextManager["_Peers"]):
    """Stands for the processes of a benchmark."""

    rates: ClassVar[Mapping[int, float]] = {1: 20.0, 2: 36.0}
    running: ClassVar[list[_Peers]] = []
    bursts: ClassVar[list[str]] = []
    schedules: ClassVar[dict[str, str]] = {}

    def __init__(self, target: str, num_peers: int, arguments: Mapping[str, Any], *, timeout_s: float) -> None:
        self._target, self._arguments = target, arguments
        assert num_peers == 1
        assert timeout_s > 0

    def __enter__(self) -> _Peers:
        _Peers.running.append(self)
        return self

    def __exit__(self, *_exception: object) -> None:
        _Peers.running.remove(self)

    @property
    def stages(self) -> str:
        return self._arguments["flags"][-1].partition("stages=")[2]

    def call(self, name: str, *args: object) -> list[Any]:
        if name == "burst":
            _Peers.bursts.append(self.stages)
            _Peers.schedules[self.stages] = self._arguments["flags"][-2].partition("schedule=")[2]
            stages = int(self.stages)
            return [{"step_s": 1.0, "num_steps": 4, "cpu_s": 8.0, "device_s": [3.0 + s for s in range(stages)]}]
        if name == "train":
            return [[self.rates[self._arguments["threads"]], 0.05]]
        return [1]


@pytest.fixture(autouse=True)
def peers(monkeypatch: pytest.MonkeyPatch) -> type[_Peers]:
    monkeypatch.setattr(pipeline, "PeerProcesses", _Peers)
    monkeypatch.setattr(_Peers, "running", [])
    monkeypatch.setattr(_Peers, "bursts", [])
    monkeypatch.setattr(_Peers, "schedules", {})
    return _Peers


def _figures(only: str, repeat: int = 1) -> dict[str, list[tuple[float, float | None]]]:
    with pipeline.open_cases(BenchmarkOptions(repeat=repeat, only=only)) as cases:
        return {
            case.name: [(case.ours(), None if case.reference is None else case.reference()) for _ in range(1 + repeat)]
            for case in cases
        }


def test_rate_cpu_and_busy_share_follow_from_a_burst_and_the_better_plain_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "num_usable_cores", lambda: 2)
    batch, microbatches = WORKLOADS["transformer"].batch, WORKLOADS["transformer"].microbatches
    # Each microbatch is three equal parts of work; the last stage waits for one of them, the first forward.
    theory = pytest.approx(100.0 * 3 * microbatches / (3 * microbatches + 1))
    assert {name: turns[1] for name, turns in _figures("transformer 2").items()} == {
        "plain loop transformer 2 stages": (batch, 36.0),
        "cpu per sample transformer 2 stages": (1e3 * 8.0 / 4 / batch, 50.0),
        "busy share transformer 2 stages stage 0": (75.0, theory),
        "busy share transformer 2 stages stage 1": (100.0, theory),
    }
    assert {turns[1][1] for name, turns in _figures("transformer 4").items() if "busy" in name} == {None}


def test_the_first_turn_stands_for_the_warm_up_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter([64.0, 32.0])

    def call(peers: _Peers, name: str, *args: object) -> list[Any]:
        found = told(peers, name, *args)
        return [found[0] | {"step_s": next(steps)}] if name == "burst" else found

    told = _Peers.call
    monkeypatch.setattr(_Peers, "call", call)
    rates = [ours for ours, _ in _figures("plain loop transformer 2", repeat=2)["plain loop transformer 2 stages"]]
    assert rates == [1.0, 1.0, 2.0]


def test_a_turn_measures_all_that_is_asked_for_and_serves_all_cases_of_its_model(peers: type[_Peers]) -> None:
    _figures("transformer", repeat=2)
    assert peers.bursts == ["2", "4"] * 2
    assert not peers.running


def test_only_one_model_is_there_at_a_time_and_only_swarms_that_are_asked_for(peers: type[_Peers]) -> None:
    with pipeline.open_cases(BenchmarkOptions(only="2 stages")) as cases:
        for case in cases:
            for _ in range(2):
                case.ours()
            assert len(peers.running) == 3, "a swarm, and the plain loop with one thread and with two"
    assert {name.split()[-2] for name in (case.name for case in cases) if "plain" in name} == {"2"}
    assert not peers.running


def test_bubbles_are_filled_where_every_stage_has_a_core(monkeypatch: pytest.MonkeyPatch, peers: type[_Peers]) -> None:
    monkeypatch.setattr(pipeline, "num_usable_cores", lambda: 3)
    _figures("transformer")
    assert peers.schedules == {"2": "zero_bubble", "4": "1f1b"}


@pytest.mark.parametrize("ignore_busy", [False, True])
def test_a_second_thread_that_brings_little_means_that_there_is_no_second_core(
    ignore_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Peers, "rates", {1: 20.0, 2: 25.0})
    refused = nullcontext() if ignore_busy else pytest.raises(MachineBusy, match=r"no second core.* resnet18 trained")
    options = BenchmarkOptions(only="plain loop resnet18 2", ignore_busy=ignore_busy)
    with refused, pipeline.open_cases(options) as [case]:
        for _ in range(2):
            case.ours()


@pytest.mark.parametrize("cores", [2, 4])
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_flags_of_a_workload_are_a_configuration_that_can_be_cut_into_four(name: str, cores: int) -> None:
    workload = WORKLOADS[name]
    swarm = [f"--model-pipeline.schedule={schedule_of(4, cores)}", "--model-pipeline.stages=4"]
    config = load_config(overrides=[*workload.all_flags, *swarm], env={})
    assert config.diloco.batch_size_per_step == workload.batch
    assert config.model_pipeline.microbatches == workload.microbatches


def test_the_plain_loop_trains_the_same_however_it_cuts_the_batch() -> None:
    flags = ["--model.hidden-size=16", "--model.num-heads=2", "--model.num-layers=1", "--data.seq-len=16"]
    config = load_config(overrides=[*flags, "--diloco.batch-size-per-step=8"], env={})
    losses: dict[int, list[float]] = {}
    for parts in (1, 4):
        loop = PlainTraining(config, SystemClock())
        loop.parts = parts
        losses[parts] = [loop.step() for _ in range(3)]
    assert losses[4] == pytest.approx(losses[1], rel=1e-4)
    assert losses[1][2] < losses[1][0]


def test_the_plain_loop_chooses_among_ways_that_it_has_tried() -> None:
    flags = ["--model.hidden-size=16", "--model.num-heads=2", "--model.num-layers=1", "--data.seq-len=16"]
    loop = PlainTraining(load_config(overrides=flags, env={}), SystemClock())
    assert loop.choose() in (1, 2, 4)
    rate, cpu_s = loop.train(2)
    assert rate > 0
    assert cpu_s >= 0, "counted in ticks of 10 ms"
