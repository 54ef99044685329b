"""The files that keep what units cost: what they depend on, who may read them, and what a damaged one does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shoal.config import Config
from shoal.server.cost_cache import CachedCosts, CostCache, cost_key

KEY = cost_key(Config(), "cpu")
COSTS_S = [0.5, 0.25]


@pytest.fixture
def cache(tmp_path: Path) -> CostCache:
    return CostCache(tmp_path / "deep" / "costs")


def test_what_was_stored_is_found_again(cache: CostCache) -> None:
    assert cache.load(KEY) == CachedCosts()
    assert cache.store(KEY, COSTS_S) is None
    assert cache.load(KEY, 2) == CachedCosts(COSTS_S)
    assert cache.store(KEY, [1.0, 2.0]) is None
    assert cache.load(KEY).costs_s == [1.0, 2.0]
    assert len(list(cache.folder.iterdir())) == 1, "nothing is left of writing it"


def test_only_the_owner_may_read_the_files(cache: CostCache) -> None:
    previous = os.umask(0)
    try:
        cache.store(KEY, COSTS_S)
    finally:
        os.umask(previous)
    assert cache.path(KEY).stat().st_mode & 0o777 == 0o600
    assert cache.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "other",
    [
        {"model": {"num_layers": 5}},
        {"model": {"extra": {"width": 3}}},
        {"data": {"seq_len": 64}},
        {"data": {"messages_column": "messages", "tokenizer": "chat"}, "model": {"family": "hf"}},
        {"diloco": {"batch_size_per_step": 32}},
        {"model_pipeline": {"microbatches": 2}},
        {"servers": {"threads": 2}},
    ],
    ids=str,
)
def test_another_model_or_microbatch_is_another_measurement(cache: CostCache, other: dict[str, Any]) -> None:
    cache.store(KEY, COSTS_S)
    assert cache.load(cost_key(Config.model_validate(other), "cpu")) == CachedCosts()


def test_another_device_machine_or_code_is_another_measurement(
    cache: CostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.store(KEY, COSTS_S)
    assert cache.load(cost_key(Config(), "cuda:0")) == CachedCosts()
    assert cache.load(cost_key(Config(), "cpu", code="abc")) == CachedCosts()
    on_gpu = cost_key(Config(), "cuda:0", gpu="NVIDIA H200")
    cache.store(on_gpu, COSTS_S)
    assert cache.load(on_gpu) == CachedCosts(COSTS_S)
    assert cache.load(cost_key(Config(), "cuda:0", gpu="NVIDIA T4")) == CachedCosts(), (
        "another one is visible as cuda:0"
    )
    for name in ("processor_name", "_torch_version"):
        with monkeypatch.context() as patch:
            patch.setattr(f"shoal.server.cost_cache.{name}", lambda: "another")
            assert cache.load(cost_key(Config(), "cpu")) == CachedCosts()


def test_what_costs_do_not_depend_on_is_not_asked_for(cache: CostCache) -> None:
    cache.store(KEY, COSTS_S)
    other = Config.model_validate({"run": {"seed": 7}, "diloco": {"inner_steps": 3}, "model_pipeline": {"stages": 3}})
    assert cache.load(cost_key(other, "cpu")).costs_s == COSTS_S


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no json",
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"key": {}, "costs_s": [0.5, 0.25]}',
        b"KEY, [0.5]",
        b"KEY, [0.5, -1.0]",
        b"KEY, [0.5, 1e999]",
        b"KEY, [0.0, 0.0]",
        b'KEY, ["a", "b"]',
        b"x" * 2_000_000,
    ],
    ids=range(11),
)
def test_a_damaged_file_is_named_and_not_used(cache: CostCache, content: bytes) -> None:
    cache.folder.mkdir(parents=True)
    if content.startswith(b"KEY"):
        costs = content.partition(b", ")[2]
        content = b'{"key": ' + json.dumps(KEY).encode() + b', "costs_s": ' + costs + b"}"
    cache.path(KEY).write_bytes(content)
    loaded = cache.load(KEY, 2)
    assert loaded.costs_s is None
    assert loaded.problem is not None
    assert str(cache.path(KEY)) in loaded.problem
    assert cache.store(KEY, COSTS_S) is None
    assert cache.load(KEY, 2).costs_s == COSTS_S


def test_a_folder_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = CostCache(tmp_path / "file" / "costs")
    problem = cache.store(KEY, COSTS_S)
    assert problem is not None
    assert "Not a directory" in problem
    assert cache.load(KEY).problem is not None


def test_the_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    usual = tmp_path / ".cache" / "shoal" / "unit_costs"
    assert CostCache.of_user({"XDG_CACHE_HOME": "/x"}).folder == Path("/x/shoal/unit_costs")
    assert CostCache.of_user({}).folder == usual
    assert CostCache.of_user({"XDG_CACHE_HOME": "relative"}).folder == usual
