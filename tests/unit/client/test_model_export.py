"""A model that cannot be left fails no run: the reason is said."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.set_clock import SetClock
from tests.unit.checkpoint.checkpoints import open_record, signed_record
from tests.unit.client.noted import NotedLedger
from torch import nn

from shoal.checkpoint.model_layout import StageLayout
from shoal.client import model_export
from shoal.client.model_export import ModelExport
from shoal.events.run import ModelMissing
from shoal.runtime import memory
from shoal.wire.messages.round import StageHashes


class Exports:
    """A finished run of one stage, whose state is fetched as told."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, log_dir: Path, fetched: BaseException | None = None, deaths: int = 0
    ) -> None:
        signed = signed_record(4, [StageHashes("", "", "")])
        monkeypatch.setattr(model_export, "last_record", lambda _: (open_record(signed), signed))
        monkeypatch.setattr(model_export, "stage_layouts", lambda _: [StageLayout.of(nn.Linear(3, 2))])

        async def fetch(*_: object) -> None:
            if fetched is not None:
                raise fetched

        self.ledger = NotedLedger()
        parts: Any = (SimpleNamespace(fetch=fetch, fetched_bytes=0), SimpleNamespace(state=lambda *_: None))
        config: Any = None
        self.export = ModelExport(config, "run", log_dir, *parts, SetClock(), self.ledger, deaths)

    async def reason(self) -> str:
        """Have it left, and return why it is not."""
        await self.export.leave()
        [said] = [event for event in self.ledger.noted if isinstance(event, ModelMissing)]
        assert (self.export.left.folder, self.export.left.reason) == (None, said.reason)
        return said.reason


async def test_a_stage_that_does_not_fit_into_memory_is_not_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: 1)
    exports = Exports(monkeypatch, tmp_path, AssertionError("it is fetched"))
    assert "the client's host has 0 MB of free memory, it needs" in await exports.reason()


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
    ids=["of Python", "of a device", "of torch"],
)
async def test_memory_that_ends_meanwhile_is_the_reason(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "memory" in await Exports(monkeypatch, tmp_path, error).reason()


async def test_another_error_of_torch_is_a_defect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.RaisesGroup(RuntimeError, flatten_subgroups=True):
        await Exports(monkeypatch, tmp_path, RuntimeError("size mismatch")).export.leave()


async def test_a_third_client_does_not_try_what_has_killed_two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    exports = Exports(monkeypatch, tmp_path, AssertionError("it is fetched"), deaths=2)
    assert await exports.reason() == "2 clients were killed while they fetched it, mostly for want of memory"
    [said, do] = exports.ledger.said
    assert said.startswith("no model is left: 2 clients were killed")
    assert "shoal export" in do
    once = Exports(monkeypatch, tmp_path, MemoryError(), deaths=1)
    assert await once.reason() == "the client's host has no memory left"
