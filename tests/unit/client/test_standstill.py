"""When a run has failed because every server refuses a step, and when it has not."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from tests.alongside import alongside, until

from shoal.client import stage_watch
from shoal.client.stage_watch import PATIENCE_S, Standstill
from shoal.client.totals import RunTotals
from shoal.errors import ControlError, MisfitError
from shoal.runtime.waking import Signal
from shoal.swarm.round_boundary import RunTime


class Desk:
    """A client's reports, and the time of its run."""

    def __init__(self, patience_s: float = 0.001) -> None:
        self.refused_changed = Signal()
        self.refused_since_s: float | None = None
        self.refusal = "ValueError: odd number"
        self.mistake = ""
        self.time, self.totals = RunTime(), RunTotals(rounds=2)
        self.totals.time = self.time
        self.now_s = 0.0
        self.looks = 0
        ledger: Any = SimpleNamespace(run_s=self.run_s, totals=self.totals)
        reports: Any = self
        # What it waits for is the time of the run, which the test sets; in between it looks at once.
        self.watch = Standstill(reports, ledger, patience_s=patience_s)

    def run_s(self) -> float:
        self.looks += 1
        return self.now_s

    def refused(self, since_s: float | None) -> None:
        self.refused_since_s = since_s
        self.refused_changed.notify()

    async def looked(self) -> None:
        before = self.looks
        await until(lambda: self.looks > before)


async def test_a_step_that_stays_refused_while_none_is_committed_ends_the_run_with_the_reason() -> None:
    desk = Desk()
    desk.refused(0.0)
    desk.now_s = 1.0
    with pytest.raises(ControlError, match=r"no server can compute a step.*ValueError: odd number.*--resume goes on"):
        await desk.watch.run()


@pytest.mark.parametrize("mistake", ["", "TypeError: no shape"])
async def test_a_run_without_a_recorded_round_is_not_said_to_go_on_from_a_checkpoint(mistake: str) -> None:
    desk = Desk()
    desk.totals.rounds, desk.mistake, desk.now_s = 0, mistake, 1.0
    desk.refused(0.0)
    with pytest.raises((ControlError, MisfitError), match=r"Mend .*then start it again$"):
        await desk.watch.run()


async def test_while_the_run_is_paused_or_goes_on_it_has_not_failed() -> None:
    desk = Desk()
    async with alongside(desk.watch.run):
        await anyio.lowlevel.checkpoint()
        assert desk.looks == 0, "nothing is refused"
        desk.refused(0.0)
        await desk.looked()
        await desk.looked()  # its time stands still
        desk.now_s = 1.0
        desk.refused(1.0)  # a step was committed since
        await desk.looked()
        desk.refused(None)
        await anyio.lowlevel.checkpoint()
        desk.now_s = 9.0
        await anyio.lowlevel.checkpoint()


async def _ends_for_its_model(desk: Desk, ended: anyio.Event) -> None:
    with pytest.raises(MisfitError, match=r"the model fails.*TypeError: no shape.*Mend it.*--resume goes on"):
        await desk.watch.run()
    ended.set()


async def _go_on() -> None:
    """Let it look as often as it wants to."""
    for _ in range(100):
        await anyio.lowlevel.checkpoint()


async def test_a_model_that_fails_everywhere_ends_the_run_without_a_wait() -> None:
    desk, ended = Desk(PATIENCE_S), anyio.Event()
    async with alongside(partial(_ends_for_its_model, desk, ended)):
        desk.refused(0.0)
        await _go_on()
        assert not ended.is_set(), "a server may do better"
        desk.mistake = "TypeError: no shape (/own/net.py line 9)"
        desk.refused_changed.notify()
        await _go_on()
        assert ended.is_set()


async def test_a_paused_run_ends_for_its_model_when_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_watch, "_LOOK_S", 0.0)
    desk, ended = Desk(PATIENCE_S), anyio.Event()
    desk.time.pause(0.0)
    desk.mistake = "TypeError: no shape"
    desk.refused(0.0)
    async with alongside(partial(_ends_for_its_model, desk, ended)):
        await _go_on()
        assert not ended.is_set()
        desk.time.resume(0.0)
        await _go_on()
        assert ended.is_set()
