"""A trainer's parts have what the configuration says."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.clock import SystemClock
from shoal.config import Config
from shoal.ids import PeerId
from shoal.trainer import loop
from shoal.transport.memory import MemoryNetwork
from shoal.wire.messages.base import Hop


def test_a_step_may_be_silent_as_long_as_a_forward_and_a_backward_pass_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[dict[str, Any]] = []

    def driver(**options: Any) -> None:
        given.append(options)

    monkeypatch.setattr(loop, "StepDriver", driver)
    config = Config.model_validate({"model_pipeline": {"forward_timeout_s": 3.0, "backward_timeout_s": 4.5}})
    endpoint = MemoryNetwork().endpoint(PeerId("trainer"))
    hop = Hop(PeerId("other"), ("memory:other",))
    loop.Trainer(
        config=config, endpoint=endpoint, slot=0, generation=1, client=hop, data_server=hop, clock=SystemClock()
    )
    [options] = given
    assert options["step_timeout_s"] == 7.5
