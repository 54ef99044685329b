"""Which tests a call runs: `--tier=quick`, `usual` (as `make test` does) or `all`, which is what pytest does unasked.

Left out of `usual` is what is marked `slow`, and of a test with many variants those that its mark does not name:

    @pytest.mark.usual("Open-9", "CommitRecord-5")     # the other moments tell the same rule
    @pytest.mark.parametrize(("kind", "after"), MOMENTS, ids=...)

Of whole swarms, DHTs and seeds of simulations, whose tests are long and many, one in five of those without such a mark
is usual, and one in five of those marked `long`, which take more than half a second. `quick` has units but for the
long ones, and one simulation in ten.
Which ones stay depends on a test's name alone, so they are the same everywhere.
"""

from __future__ import annotations

import zlib
from collections import defaultdict

import pytest

SHARE = 5
"""Where not everything is run, one in this many is."""
QUICK_SHARE = 10
"""The same for simulations in `quick`."""
LONG = ("tests/integration/cluster/", "tests/integration/control/", "tests/simulation/test_worlds.py")
"""Whole swarms, DHTs and seeds: more than half of the time of all tests but those of tests/e2e."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--tier`."""
    parser.addoption("--tier", choices=("quick", "usual", "all"), default="all", help="which tests to run")


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
    if item.nodeid.startswith(LONG):
        return not is_sample(item)
    return item.get_closest_marker("long") is not None and not is_sample(item)


def is_thorough(item: pytest.Item) -> bool:
    """Return whether a test is to check what is checked everywhere in `all`, and in one test of five otherwise."""
    # Not those of `is_sample`: else all long tests that are usual would be.
    return item.config.getoption("--tier") == "all" or _number(item) // SHARE % SHARE == 0


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
    kept = [item for item in items if item.get_closest_marker("slow") is None and not _is_left_to_all(item)]
    if tier == "quick":
        kept = [item for item in kept if _is_quick(item)]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


def _is_quick(item: pytest.Item) -> bool:
    if item.get_closest_marker("long") is not None:
        return False
    return item.nodeid.startswith("tests/unit/") or is_sample(item, QUICK_SHARE)


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
            test = item.nodeid.partition("[")[0]
            variants[test].add(_variant(item))
            named[test] = set(usual.args)
    for test, names in named.items():
        if not names or not names <= variants[test]:
            raise pytest.UsageError(f"{test} is marked usual({names - variants[test]}), and has {variants[test]}")
