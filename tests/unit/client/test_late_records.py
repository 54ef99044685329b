"""A record that takes its time: of a round that does not end, and on a disk that does not answer."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import anyio
import pytest
from tests.unit.client.noted import NotedLedger

from shoal.averaging.coordinator import RoundOutcome
from shoal.client import last_words
from shoal.client.rounds import RoundLoop
from shoal.events.run import RoundNotWritten, RoundSlow


class _Slow:
    """A coordinator that finishes a round at the third time it is asked to."""

    def __init__(self) -> None:
        self.asked = 0

    async def finish_round(self, round: int) -> int:
        self.asked += 1
        if self.asked < 3:
            await anyio.sleep_forever()
        return round


@pytest.mark.parametrize("missing", [(), (1,)])
async def test_a_round_that_does_not_end_in_time_is_waited_for_and_said_unless_a_stage_has_nobody(
    missing: tuple[int, ...],
) -> None:
    ledger = NotedLedger()
    rounds = SimpleNamespace(
        _config=SimpleNamespace(diloco=SimpleNamespace(averaging_timeout_s=0.01)),
        _coordinator=_Slow(),
        _stages=SimpleNamespace(missing=missing),
        _ledger=ledger,
    )
    assert await RoundLoop._finished(cast(RoundLoop, rounds), 7) == 7
    assert ledger.noted == ([] if missing else [RoundSlow(7, 0.01)] * 2)


async def test_a_client_that_ends_does_not_wait_for_a_disk_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(last_words, "follows", lambda *_: answers.wait() and False)
    monkeypatch.setattr(last_words, "_PATIENCE_S", 0.01)
    ledger, standing = NotedLedger(), SimpleNamespace(record=SimpleNamespace(round=5), signed=None)
    try:
        assert not await last_words.write_last(cast(RoundOutcome, standing), tmp_path, ledger)
    finally:
        answers.set()
    assert ledger.noted == [RoundNotWritten(5, 0.01)]
