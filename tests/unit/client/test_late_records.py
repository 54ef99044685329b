"""What takes its time at the end: a record on a disk that does not answer, a model that is fetched."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import anyio
import pytest
from tests.unit.client.noted import NotedLedger

from shoal.averaging.coordinator import RoundOutcome
from shoal.client import round_records
from shoal.client.model_export import ModelExport
from shoal.events.run import ModelFetching, RoundNotWritten


async def test_a_client_that_ends_does_not_wait_for_a_disk_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(round_records, "follows", lambda *_: answers.wait() and False)
    monkeypatch.setattr(round_records, "_PATIENCE_S", 0.01)
    ledger, standing = NotedLedger(), SimpleNamespace(record=SimpleNamespace(round=5), signed=None)
    try:
        assert not await round_records.write_last(cast(RoundOutcome, standing), tmp_path, ledger)
    finally:
        answers.set()
    assert ledger.noted == [RoundNotWritten(5, 0.01)]


class _Ticks:
    """A clock of which three sleeps end."""

    def __init__(self) -> None:
        self.left = 3

    async def sleep_s(self, _: float) -> None:
        if not self.left:
            await anyio.sleep_forever()
        self.left -= 1


async def test_how_far_a_model_is_that_takes_long_to_fetch_is_said_again_and_again() -> None:
    ledger = NotedLedger()
    export = SimpleNamespace(clock=_Ticks(), fetch=SimpleNamespace(fetched_bytes=25), ledger=ledger)
    with anyio.move_on_after(0.1):
        await ModelExport._say(cast(ModelExport, export), 100)
    assert ledger.noted == [ModelFetching(0.25, 100)] * 3
