"""Which tests a tier runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests import tiers
from tests.tiers import (
    COMMIT_SHARE,
    QUICK_SHARE,
    SEEDS,
    SHARE,
    is_sample,
    is_thorough,
    long_tests,
    pytest_collection_modifyitems,
)


class Item:
    """A test as pytest hands it over, as far as tiers look at it."""

    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator, tier: str = "all") -> None:
        self.nodeid = nodeid
        self.marks = [mark.mark for mark in marks]
        self.config = config(tier)
        if "[" in nodeid:
            self.callspec = SimpleNamespace(id=nodeid.partition("[")[2].removesuffix("]"))

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)


def config(tier: str, *arguments: str) -> Any:
    left_out: list[Item] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    return SimpleNamespace(getoption=lambda name: tier, hook=hook, args=arguments, left_out=left_out)


def kept(tier: str, items: list[Item]) -> list[str]:
    given, settings = list(items), config(tier)
    pytest_collection_modifyitems(settings, given)  # type: ignore[arg-type]
    assert {*given, *settings.left_out} == set(items)
    return [item.nodeid for item in given]


def some() -> list[Item]:
    usual = pytest.mark.usual("b")
    return [
        Item("tests/unit/test_x.py::test_unit"),
        Item("tests/unit/test_x.py::test_long", pytest.mark.slow),
        Item("tests/integration/test_y.py::test_moments[a]", usual),
        Item("tests/integration/test_y.py::test_moments[b]", usual),
        Item("tests/e2e/test_z.py::test_run"),
    ]


def test_all_of_them_is_everything_and_what_is_not_usual_is_slow() -> None:
    items = some()
    assert kept("all", items) == [item.nodeid for item in items]
    slow = [item.nodeid.partition("::")[2] for item in items if item.get_closest_marker("slow")]
    assert slow == ["test_long", "test_moments[a]"]


def test_usual_leaves_out_what_is_slow() -> None:
    assert [name.partition("::")[2] for name in kept("usual", some())] == ["test_unit", "test_moments[b]", "test_run"]


LONG = "tests/unit/test_x.py::test_of_all"


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "LISTED", frozenset([LONG]))


@pytest.mark.usefixtures("listed")
@pytest.mark.parametrize("test", [LONG, f"{SEEDS}::test_seeds"])
def test_of_long_ones_and_of_seeds_usual_has_its_share_and_checks_one_in_five_of_these_thoroughly(test: str) -> None:
    long = [Item(f"{test}[{number}]", tier="usual") for number in range(2000)]
    found = set(kept("usual", [*some(), *long])[3:])
    assert found == {item.nodeid for item in long if is_sample(item)}  # type: ignore[arg-type]
    assert 0.7 < len(found) * SHARE / 2000 < 1.3
    thorough = [item for item in long if item.nodeid in found and is_thorough(item)]  # type: ignore[arg-type]
    assert 0.1 < len(thorough) / len(found) < 0.3
    assert len(kept("all", long)) == 2000


def test_each_commit_has_what_is_usual_and_its_own_third_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = [Item(f"tests/e2e/test_z.py::test_run[{number}]", pytest.mark.slow) for number in range(1000)]
    commits = [f"{number:040x}" for number in range(20)]
    found: list[set[str]] = []
    for commit in commits:
        monkeypatch.setattr(tiers, "present_commit", lambda commit=commit: commit)
        found.append(set(kept("commit", [*some(), *slow])))
        assert found[-1] == set(kept("commit", [*some(), *slow])), "who runs it again has the same ones"
        assert {*kept("usual", some())} <= found[-1]
        assert 0.8 < len(found[-1]) * COMMIT_SHARE / 1000 < 1.2
    assert len(set.union(*found)) > 990, "what one commit leaves out others have"
    monkeypatch.setattr(tiers, "present_commit", lambda: "")
    with pytest.raises(pytest.UsageError, match="--tier=all"):
        kept("commit", slow)


@pytest.mark.usefixtures("listed")
def test_quick_has_units_that_are_not_long_and_one_of_sixteen_simulations() -> None:
    units = [Item(f"tests/unit/test_x.py::test_{number}") for number in range(10)]
    long = Item(LONG)
    simulations = [Item(f"tests/simulation/test_worlds.py::test_seeds[{number}]") for number in range(1000)]
    found = kept("quick", [*units, long, *simulations])
    assert found[:10] == [item.nodeid for item in units]
    sample = [item for item in simulations if is_sample(item, QUICK_SHARE)]  # type: ignore[arg-type]
    assert found[10:] == [item.nodeid for item in sample]
    assert 0.5 < len(sample) * QUICK_SHARE / 1000 < 1.5


def test_what_takes_long_on_average_is_listed_without_seeds_and_whole_swarms() -> None:
    said = """
    0.31s call     tests/unit/test_x.py::test_one
    0.20s setup    tests/unit/test_x.py::test_two[a b]
    0.25s call     tests/unit/test_x.py::test_two[a b]
    0.10s call     tests/unit/test_x.py::test_two[c]
    0.20s call     tests/unit/test_x.py::test_three
    9.00s call     tests/simulation/test_worlds.py::test_seeds[1]
    9.00s call     tests/e2e/test_run.py::test_run
    3.00s of something else
    """
    assert list(long_tests(said.splitlines(), 0.3)) == ["tests/unit/test_x.py::test_one"]
    assert list(long_tests(said.splitlines(), 0.2)) == [
        "tests/unit/test_x.py::test_one",
        "tests/unit/test_x.py::test_two",
    ]


def test_what_is_listed_is_there() -> None:
    for listed in tiers.LISTED:
        path, _, name = listed.partition("::")
        source = Path(path)
        assert source.is_file(), listed
        assert f"def {name.rpartition('::')[2]}(" in source.read_text(), listed


def test_what_is_checked_everywhere_is_checked_in_one_test_of_five_where_not_all_is_run() -> None:
    names = [f"tests/integration/cluster/test_faults.py::test_moments[{number}]" for number in range(100)]
    for tier in ("all", "commit"):
        assert all(is_thorough(Item(name, tier=tier)) for name in names)  # type: ignore[arg-type]
    thorough = [name for name in names if is_thorough(Item(name, tier="usual"))]  # type: ignore[arg-type]
    assert 5 < len(thorough) < 40


@pytest.mark.parametrize("names", [("c",), ("b", "c"), ()])
def test_a_variant_that_is_named_and_does_not_exist_is_an_error(names: tuple[str, ...]) -> None:
    mark = pytest.mark.usual(*names)
    items = [Item(f"tests/unit/test_x.py::test_it[{variant}]", mark) for variant in "ab"]
    with pytest.raises(pytest.UsageError, match="test_it"):
        kept("usual", items)
    # Who asks for one variant has the others not collected.
    pytest_collection_modifyitems(config("all", "tests/unit/test_x.py::test_it[a]"), items)  # type: ignore[arg-type]
