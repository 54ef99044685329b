"""Where caches are: in the user's own folder for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.runtime.user_cache import user_cache


def test_the_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache("compiled", {"XDG_CACHE_HOME": "/x"}) == Path("/x/shoal/compiled")
    for given in ({}, {"XDG_CACHE_HOME": "relative"}):
        assert user_cache("compiled", given) == tmp_path / ".cache/shoal/compiled"
