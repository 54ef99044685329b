"""Stands in for the package `datasets`."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest


def use_in_place_of_datasets(monkeypatch: pytest.MonkeyPatch, hub: Any) -> None:
    """Have whoever imports the package get `hub`, which unpacks nothing."""
    monkeypatch.setitem(sys.modules, "datasets", hub)
    extract = SimpleNamespace(Extractor=SimpleNamespace(extractors={}))
    monkeypatch.setitem(sys.modules, "datasets.utils.extract", extract)  # type: ignore[arg-type]
