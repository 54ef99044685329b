"""A module of a stranger's, which leaves a file wherever it is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

NAME = "strangers_code"
"""Of the module; it has the class `X`."""


def lay_trap(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the module where it can be imported; returns the file that is there as soon as it was."""
    trace = folder / "it_has_run"
    (folder / f"{NAME}.py").write_text(f"from pathlib import Path\n\nPath({str(trace)!r}).touch()\n\n\nclass X: ...\n")
    monkeypatch.syspath_prepend(folder)
    return trace
