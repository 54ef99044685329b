"""The role that finds out what units cost, with a profile that somebody else has made."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shoal.config import Config, config_to_json
from shoal.control.role_start import ProfilerSpec
from shoal.model.profile import Profile
from shoal.runtime.launcher_messages import CostsFound
from shoal.server import profiler
from shoal.server.unit_costs import UnitCosts


async def test_what_was_estimated_for_lack_of_time_and_what_is_odd_is_logged_and_the_costs_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="shoal")
    found = UnitCosts(
        costs=[1.0, 2.0],
        source="measured",
        names=["a", "b"],
        is_tied=False,
        warnings=["b is odd"],
        profile=Profile((1.0, 2.0), num_estimated=1, elapsed_s=0.5),
    )
    monkeypatch.setattr(profiler, "unit_costs", lambda *_, **__: found)
    monkeypatch.setattr(profiler, "log", SimpleNamespace(configure=lambda *_: None))
    told: list[CostsFound] = []
    control: Any = SimpleNamespace(tell=told.append)
    spec = ProfilerSpec(config_json=config_to_json(Config()), log_dir=str(tmp_path), device="cpu", measure=True)
    await profiler.main(msgspec.msgpack.encode(spec), control)
    assert told == [CostsFound([1.0, 2.0], "measured", 0.5, ["b is odd"], False, None)]
    assert caplog.messages == ["unit_costs.estimated", "unit_costs.problem", "unit_costs.known"]
