"""Fork servers import the roles of these tests as the tests do."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def roles_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
