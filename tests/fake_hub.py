"""Stands in for the package `datasets`."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest


class FakeBuilder(SimpleNamespace):
    """Stands in for what reads files of text."""

    __module__ = "datasets.packaged_modules.text.text"


def use_in_place_of_datasets(monkeypatch: pytest.MonkeyPatch, hub: Any) -> None:
    """Have whoever imports the package get `hub`, which finds, unpacks and decodes nothing."""
    parts = {
        "datasets": hub,
        "datasets.data_files": SimpleNamespace(resolve_pattern=lambda *_: []),
        "datasets.packaged_modules.webdataset.webdataset": SimpleNamespace(WebDataset=SimpleNamespace(DECODERS={})),
        "datasets.utils.extract": SimpleNamespace(Extractor=SimpleNamespace(extractors={})),
    }
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, name, part)
