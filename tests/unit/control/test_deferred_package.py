"""A package is executed when it is asked for something, not when a part of it is imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.control.deferred_package import defer_package


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Give a package that says when it is executed, with one part that needs nothing of it."""
    folder = tmp_path / "heavy_for_test"
    folder.mkdir()
    (folder / "__init__.py").write_text("from heavy_for_test.other import weight\nexecuted = True\n")
    (folder / "part").mkdir()
    # While a part is imported it is no attribute of the package.
    (folder / "part" / "__init__.py").write_text("import heavy_for_test.part.inner as inner\nlight = inner.light\n")
    (folder / "part" / "inner.py").write_text("light = 1\n")
    (folder / "other.py").write_text("weight = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder.name
    for name in [name for name in sys.modules if name.partition(".")[0] == folder.name]:
        del sys.modules[name]


def test_a_part_is_imported_without_the_package_and_the_rest_when_it_is_asked_for(package: str) -> None:
    defer_package(package)
    part = importlib.import_module(f"{package}.part")
    assert part.light == 1
    assert f"{package}.other" not in sys.modules
    whole = importlib.import_module(package)
    # Who goes through all modules, as `inspect` does, executes nothing.
    assert not hasattr(whole, "__wrapped__")
    assert f"{package}.other" not in sys.modules
    assert (whole.weight, whole.executed, whole.part) == (2, True, part)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = whole.nothing


def test_a_package_that_was_imported_before_and_one_that_is_not_there_are_left_alone(package: str) -> None:
    whole = importlib.import_module(package)
    defer_package(package)
    assert sys.modules[package] is whole
    assert whole.executed
    defer_package("no_such_package_for_test")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_package_for_test")
