"""What `summary.json` holds."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.unit.client.noted import totals_of

from shoal.averaging.audit import Audit
from shoal.client.model_export import ModelLeft
from shoal.client.progress import Progress
from shoal.client.summary import build_summary, costs_of
from shoal.client.totals import RunTotals
from shoal.config import Config
from shoal.events.losses import ServerBack, ServerHeard, ServerLost
from shoal.events.run import RoundBegun, RoundRecorded, RunLaunched, RunPaused, RunResumed, StepReported
from shoal.events.stages import ChainLost, StageBeganAnew
from shoal.ids import PeerId, StepKey
from shoal.swarm.contribution_guard import Suspect, Suspicion
from shoal.swarm.incidents import LostStep
from shoal.wire.messages.base import Traffic

LOST = tuple(StepKey(0, 1, number, 0) for number in range(4))
A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def summary(totals: RunTotals, audit: Audit | None = None, **fields: Any) -> dict[str, Any]:
    found = Audit(rounds=2, steps=9, samples=30, skipped=2, duplicates=1, missing=3, lost={0: (), 1: LOST})
    values: dict[str, Any] = {
        "config": Config.model_validate({"model_pipeline": {"stages": 2}, "experiment_prefix": "fish"}),
        "run_id": "fish-1",
        "totals": totals,
        "paused_s": 0.0,
        "audit": audit or found,
        "costs": costs_of(totals, audit or found),
        "view": SimpleNamespace(name_of=lambda peer: f"server 1@{peer}"),
        "model": ModelLeft(Path("/logs/fish-1/model"), 2),
        "exit_reason": "done",
    }
    return build_summary(**{**values, **fields})


def lost(peer: PeerId, stage: int, at_s: float, *slots: int, silent_s: float = 0.0) -> ServerLost:
    return ServerLost(peer, f"server {peer}", stage, silent_s, "", (), slots, at_s, "box")


def test_every_loss_is_told_with_what_followed_and_the_sums_of_the_steps_are_those_of_the_audit() -> None:
    totals = totals_of(
        RunLaunched(10.0),
        RoundBegun(1, 4, 2, 2, 4),
        lost(A, 1, 22.0, 0, 1, silent_s=2.0),
        StepReported(0, 3, 0, 4, 4, 1.0, False, 1.0, 23.0),
        StepReported(1, 3, 2, 4, 4, 1.0, False, 1.0, 24.5),
        RoundBegun(2, 4, 2, 2, 4),
        lost(B, 0, 30.0),
        ServerHeard(B, "server b", 1.0),
        ServerBack(B, "server b", 0, 2.0, 32.0),
        lost(C, 1, 40.0, 0),
        StageBeganAnew(1, 3, 0, "pp"),
    )
    steps = (
        *(LostStep(1, 1, A, 1),) * 3,
        LostStep(1, 1, C, 3),  # the rounds of a stage that starts again are lost with its last server
        LostStep(2, 1, C, 2),
        LostStep(2, 0, A, 2),  # for another reason: it was lost in the round before
    )
    keys = {stage: tuple(LOST[: sum(step.stage == stage for step in steps)]) for stage in (0, 1)}
    keys[1] = (*LOST, StepKey(0, 1, 4, 0))
    found = summary(totals, Audit(2, 9, 30, 2, 1, 3, lost=keys, lost_steps=steps))
    told = found["incidents"]
    assert told[0] == {
        "kind": "server",
        "cause": "silent",
        "who": "server a",
        "host": "box",
        "stage": 1,
        "round": 1,
        "at_s": 10.0,
        "noticed_after_s": 2.0,
        "recovered_after_s": 4.5,
        "back_after_s": None,
        "steps_lost": 3,
        "replayed": 1,
    }
    assert [(each["who"], each["steps_lost"], each["back_after_s"]) for each in told[1:]] == [
        ("server b", 0, 2.0),
        ("server c", 2, None),
    ]
    assert found["steps_lost_otherwise"] == 1
    assert sum(each["steps_lost"] for each in told) + 1 == sum(found["steps_lost"].values())
    assert found["failovers"] == [
        {"kind": "server", "at_s": 12.0, "recovered_after_s": 2.5},
        {"kind": "server", "at_s": 20.0, "recovered_after_s": 0.0},
        {"kind": "server", "at_s": 30.0, "recovered_after_s": None},
    ]
    json.dumps(found)


def test_restored_stages_and_chains_that_were_left_are_told() -> None:
    found = summary(totals_of(StageBeganAnew(1, 5, 2, "pp"), ChainLost(5, "ab", 3, 40, 6, 7, "cd")))
    assert found["stages_restored"] == [{"stage": 1, "in_round": 5, "lost_rounds": [3, 4], "parameters": "pp"}]
    assert found["chains_left"] == [
        {"base_round": 5, "record": "ab", "common_round": 3, "samples": 40, "samples_freed": 6}
    ]


def test_samples_are_those_of_the_audit_and_not_of_the_reports() -> None:
    found = summary(RunTotals(progress=Progress(samples=99, steps=12)))
    assert (found["samples"], found["duplicates"], found["missing"]) == (30, 1, 3)
    assert found["steps_lost"] == {"0": 0, "1": 4}


def test_the_first_and_last_evaluation_are_those_of_the_lowest_and_highest_record() -> None:
    found = summary(RunTotals(progress=Progress(eval_losses={2: 3.0, 0: 5.0, 1: 4.0})))
    assert (found["eval_loss_first"], found["eval_loss_last"]) == (5.0, 3.0)
    assert found["eval_losses"] == {"0": 5.0, "1": 4.0, "2": 3.0}


def test_the_folder_of_the_model_is_named_or_why_there_is_none() -> None:
    found = summary(RunTotals())
    assert (found["model"], found["model_round"], found["model_missing"]) == ("/logs/fish-1/model", 2, None)
    found = summary(RunTotals(), model=ModelLeft(reason="nobody holds stage 1"))
    assert (found["model"], found["model_round"], found["model_missing"]) == (None, None, "nobody holds stage 1")


def test_every_kind_of_traffic_is_named() -> None:
    found = summary(totals_of(RoundRecorded(1, None, {}, True, {"activations": 7}, None)))
    assert found["bytes_sent"] == {str(traffic): 7 * (traffic == Traffic.ACTIVATIONS) for traffic in Traffic}


def test_a_run_that_did_nothing_has_a_summary_too() -> None:
    found = summary(RunTotals(), exit_reason="interrupted")
    assert found["exit"] == "interrupted"
    assert found["loss_first"] is None
    assert found["eval_loss_last"] is None
    assert found["samples_per_s"] == 0.0
    json.dumps(found)


def test_an_evaluation_of_what_was_there_at_the_beginning_says_nothing_about_the_end() -> None:
    found = summary(RunTotals(progress=Progress(eval_losses={0: 5.0})), exit_reason="interrupted")
    assert (found["eval_loss_first"], found["eval_loss_last"]) == (5.0, None)


def test_who_is_suspected_is_named_as_everywhere() -> None:
    suspect = Suspect(1, PeerId("box2"), Suspicion.CLIPPED, 0.5, True)
    found = summary(RunTotals(), audit=Audit(2, 9, 30, 0, 0, 0, {}, suspects=((2, suspect),)))["suspects"]
    assert found == [{"round": 2, **suspect._asdict(), "name": "server 1@box2"}]


def test_a_pause_is_said_and_is_no_time_in_which_samples_were_trained() -> None:
    def step(number: int, at_s: float) -> StepReported:
        return StepReported(0, number, 0, 4, 4, 1.0, False, 1.0, at_s)

    pause = RunPaused("me", 12.0), RunResumed("me", 112.0)
    totals = totals_of(*pause, step(0, 200.0), RunPaused("me", 201.0), RunResumed("me", 301.0), step(1, 302.0), *pause)
    assert summary(totals, paused_s=200.0)["seconds_paused"] == 200.0
    assert summary(totals)["samples_per_s"] == 2.0
