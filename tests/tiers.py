"""Which tests a call runs: `--tier=quick`, `usual` (as `make test` does) or `all`, which is what pytest does unasked.

Left out of `usual` is what is marked `slow`, and of a test with many variants those that its mark does not name:

    @pytest.mark.usual("Open-9", "CommitRecord-5")     # the other moments tell the same rule
    @pytest.mark.parametrize(("kind", "after"), MOMENTS, ids=...)

One in forty of the long tests is usual: of those that tests/long.txt names, and of the seeds of simulations, which are
many. `quick` has units but for the long ones and those of tests/not_quick.txt, and one simulation in forty. Which
ones stay depends on a test's name alone, so they are the same everywhere. `commit` (`make test-all`, and so continuous
integration) has what is usual, and of all the rest one in three: here the present commit decides as well, so that each
has its own third.

The lists are measured, on a machine that does nothing else:

    pytest -n 4 --ignore=tests/e2e --durations=0 --durations-min=0.01 > times.txt
    python -m tests.tiers times.txt 0.3 > tests/long.txt     # what takes longer than that, in seconds
    python -m tests.tiers times.txt 0.04 | comm -13 tests/long.txt - | grep ^tests/unit > tests/not_quick.txt
"""

from __future__ import annotations

import re
import statistics
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from tests.commit import present_commit

SHARE = 40
"""Of long tests, `usual` has one in so many."""
THOROUGH_SHARE = 5
"""Where not everything is checked thoroughly, one in so many is."""
QUICK_SHARE = 40
"""The same for simulations in `quick`; a multiple, since those are a part of these."""
COMMIT_SHARE = 3
"""Of what is not usual, `commit` has one in so many."""
SEEDS = "tests/simulation/test_worlds.py"
"""Which schedule a seed stands for changes with each draw in its world, so none of them is named."""


def _listed(name: str) -> frozenset[str]:
    return frozenset((Path(__file__).parent / name).read_text().splitlines())


LISTED = _listed("long.txt")
"""The long tests, with all their variants."""
NOT_QUICK = _listed("not_quick.txt")
"""The units that are not long, and yet too long for the inner loop."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--tier`."""
    parser.addoption("--tier", choices=("quick", "usual", "commit", "all"), default="all", help="which tests to run")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say whose half of the long tests is run."""
    if config.getoption("--tier") != "commit":
        return None
    return f"long tests: one in {COMMIT_SHARE}, by commit {_required_commit()[:7]}; --tier=all has all of them"


def _required_commit() -> str:
    if commit := present_commit():
        return commit
    raise pytest.UsageError("--tier=commit needs a commit: call it in a clone of the repository, or take --tier=all")


def is_of_commit(item: pytest.Item, commit: str) -> bool:
    """Return whether a test that is not usual is among those of a commit."""
    return zlib.crc32(f"{commit} {item.nodeid}".encode()) % COMMIT_SHARE == 0


def is_sample(item: pytest.Item, share: int = SHARE) -> bool:
    """Return whether a test is among the one in so many."""
    return _number(item) % share == 0


def _number(item: pytest.Item) -> int:
    """A number that depends on a test's name alone."""
    return zlib.crc32(item.nodeid.encode())


def _is_left_to_all(item: pytest.Item) -> bool:
    """Return whether a test is one of many long ones that `usual` leaves out."""
    if item.get_closest_marker("usual") is not None:
        return False  # its mark says which of its variants are usual
    return is_long(item) and not is_sample(item)


def is_long(item: pytest.Item) -> bool:
    """Return whether a test takes long, or is one of the many seeds."""
    return _function(item.nodeid) in LISTED or item.nodeid.startswith(SEEDS)


def _function(nodeid: str) -> str:
    """A test without its variant."""
    return nodeid.partition("[")[0]


def is_thorough(item: pytest.Item) -> bool:
    """Return whether a test is to check what everyone checks in `all` and `commit`, and else one test of five."""
    # Not those of `is_sample`: else all long tests that are usual would be.
    return item.config.getoption("--tier") in ("all", "commit") or _number(item) // SHARE % THOROUGH_SHARE == 0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is not usual as slow, and leave out what is not of the tier."""
    if not any("::" in argument for argument in config.args):
        _check_names(items)
    for item in items:
        usual = item.get_closest_marker("usual")
        if usual is not None and _variant(item) not in usual.args:
            item.add_marker(pytest.mark.slow)
    tier = config.getoption("--tier")
    if tier == "all":
        return
    if tier == "commit":
        commit = _required_commit()
        kept = [item for item in items if _is_usual(item) or is_of_commit(item, commit)]
    else:
        kept = [item for item in items if _is_usual(item)]
    if tier == "quick":
        kept = [item for item in kept if _is_quick(item)]
    if len(kept) < len(items):
        are_kept = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in are_kept])
        items[:] = kept


def _is_usual(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is None and not _is_left_to_all(item)


def _is_quick(item: pytest.Item) -> bool:
    if item.nodeid.startswith("tests/simulation/"):
        return is_sample(item, QUICK_SHARE)
    return not is_long(item) and _function(item.nodeid) not in NOT_QUICK


def _variant(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return "" if callspec is None else callspec.id


def _check_names(items: list[pytest.Item]) -> None:
    """Refuse a mark that names a variant that its test does not have."""
    variants: defaultdict[str, set[str]] = defaultdict(set)
    named: dict[str, set[str]] = {}
    for item in items:
        usual = item.get_closest_marker("usual")
        if usual is not None:
            test = _function(item.nodeid)
            variants[test].add(_variant(item))
            named[test] = set(usual.args)
    for test, names in named.items():
        if not names or not names <= variants[test]:
            raise pytest.UsageError(f"{test} is marked usual({names - variants[test]}), and has {variants[test]}")


def long_tests(lines: Iterable[str], seconds: float) -> Iterator[str]:
    """Yield the tests whose variants take longer than that on average, from what pytest says of durations."""
    times: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        if found := re.match(r"([0-9.]+)s (?:setup|call|teardown) +(tests/.+)", line.strip()):
            times[found[2]] += float(found[1])
    variants: defaultdict[str, list[float]] = defaultdict(list)
    for nodeid, time in times.items():
        variants[_function(nodeid)].append(time)
    for function, each in sorted(variants.items()):
        if statistics.mean(each) > seconds and not function.startswith((SEEDS, "tests/e2e/")):
            yield function


if __name__ == "__main__":
    print("\n".join(long_tests(Path(sys.argv[1]).read_text().splitlines(), float(sys.argv[2]))))
