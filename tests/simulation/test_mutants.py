"""The gate: whatever rule is left out, some promise is broken, within a bounded number of seeds."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator

import pytest
from tests.simulation.mutants import GATE_SEEDS, MODULES, MUTANTS, Mutant
from tests.simulation.rates import LEAST_PER_THOUSAND, MOST_SEEDS, known
from tests.simulation.safety import Broken
from tests.simulation.step.world import World

from shoal.swarm.step_replica import StepReplica


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default:none of the seeds:UserWarning")
@pytest.mark.parametrize("name", MUTANTS)
def test_leaving_a_rule_out_breaks_a_promise(name: str) -> None:
    mutant = MUTANTS[name]
    seeds = range(mutant.first_seed, mutant.first_seed + GATE_SEEDS)
    if mutant.noticed(seeds) is None:
        first = mutant.noticed(range(MOST_SEEDS))
        assert first is not None, f"no seed of {MOST_SEEDS} notices {name}"
        warnings.warn(f"none of the seeds {seeds} notices {name} any more: its first one is {first}", stacklevel=1)


def test_no_mutant_is_noticed_too_seldom() -> None:
    rates = {name: rate for name, rate in known().items() if name in MUTANTS and rate.is_known}
    seldom = {name: rate for name, rate in rates.items() if rate.per_thousand < LEAST_PER_THOUSAND}
    assert not seldom, f"{seldom}: give their worlds more of the faults that bring them out"


@pytest.mark.slow
def test_how_often_each_mutant_is_noticed_is_known() -> None:
    rates = known()
    unknown = [name for name in MUTANTS if name not in rates or not rates[name].is_known]
    assert not unknown, f"nobody knows how often {unknown} are noticed: python -m tests.simulation --rates"
    assert rates.keys() <= MUTANTS.keys(), (
        "there are rates of what is there no more: python -m tests.simulation --rates"
    )


def _classes() -> Iterator[type]:
    for module in MODULES:
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == module.__name__:
                yield value


def test_what_a_mutant_overrides_exists() -> None:
    lost = [
        f"{mutant.__module__}.{mutant.__qualname__}.{name}"
        for mutant in _classes()
        for name in vars(mutant)
        if not name.startswith("__")
        and not any(name in vars(base) or name in inspect.get_annotations(base) for base in mutant.__mro__[1:])
    ]
    assert not lost, f"{lost}: nothing of these names is there to be overridden, so nobody ever calls them"


def test_a_mutant_that_ends_with_an_error_of_its_own_is_not_taken_for_noticed() -> None:
    class CallsWhatHasMoved(StepReplica):
        def lost(self, peer: object, now_s: float) -> list[object]:
            raise AttributeError("'OpenStep' object has no attribute 'unanswered'")

    mutant = Mutant(lambda seed: World(seed, replica_class=CallsWhatHasMoved), 0)
    with pytest.raises(AttributeError, match="unanswered"):
        mutant.noticed(range(GATE_SEEDS))


def test_what_the_world_refuses_is_noticed() -> None:
    class Promise:
        def __init__(self, seed: int) -> None:
            self.seed = seed

        def run(self) -> None:
            if self.seed == 2:
                raise Broken("two is odd")

    assert Mutant(Promise, 0).noticed(range(5)) == 2  # type: ignore[arg-type]
    assert Mutant(Promise, 0).noticed(range(2)) is None  # type: ignore[arg-type]
