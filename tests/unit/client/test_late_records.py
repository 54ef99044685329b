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
from shoal.client.model_export import ModelExport
from shoal.client.round_ending import RoundEnding
from shoal.client.round_training import RoundTraining
from shoal.events.run import EvaluationIncomplete, ModelFetching, RoundNotWritten, RoundSlow


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
    ending = SimpleNamespace(
        _config=SimpleNamespace(diloco=SimpleNamespace(averaging_timeout_s=0.01)),
        _coordinator=_Slow(),
        _stages=SimpleNamespace(missing=missing),
        _ledger=ledger,
    )
    assert await RoundEnding._finished(cast(RoundEnding, ending), 7) == 7
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
    export = SimpleNamespace(_clock=_Ticks(), _fetch=SimpleNamespace(fetched_bytes=25), _ledger=ledger)
    with anyio.move_on_after(0.1):
        await ModelExport._say(cast(ModelExport, export), 100)
    assert ledger.noted == [ModelFetching(0.25, 100)] * 3


async def test_an_evaluation_that_lost_its_trainers_is_repeated_a_few_times_and_each_time_said() -> None:
    ledger, trained = NotedLedger(), list[int]()
    ledger.totals.num_holdout = 5

    async def train(round: int, *_: object) -> None:
        trained.append(round)

    training = SimpleNamespace(
        _config=SimpleNamespace(diloco=SimpleNamespace(total_steps=8)),
        train=train,
        _ledger=ledger,
        _reports=SimpleNamespace(progress=SimpleNamespace(eval_losses={})),
    )
    await RoundTraining.evaluate_last(cast(RoundTraining, training), 4, None)
    assert trained == [4, 4, 4]
    assert ledger.noted == [EvaluationIncomplete(3)] * 3
