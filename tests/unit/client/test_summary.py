"""What `summary.json` holds."""

from __future__ import annotations

import json
from pathlib import Path

from shoal.averaging.audit import Audit
from shoal.client.model_export import ModelLeft
from shoal.client.progress import Progress
from shoal.client.summary import build_summary
from shoal.config import Config
from shoal.ids import PeerId, StepKey
from shoal.swarm.contribution_guard import Suspect, Suspicion
from shoal.wire.messages.base import Traffic

LOST = tuple(StepKey(0, 1, number, 0) for number in range(4))


def summary(progress: Progress, **fields: object) -> dict[str, object]:
    audit = Audit(rounds=2, steps=9, samples=30, skipped=2, duplicates=1, missing=3, lost={0: (), 1: LOST})
    values: dict[str, object] = {
        "config": Config.model_validate({"model_pipeline": {"stages": 2}, "experiment_prefix": "fish"}),
        "run_id": "fish-1",
        "progress": progress,
        "name_of": lambda peer: f"server 1@{peer}",
        "audit": audit,
        "replicas": 4,
        "outer_rounds": 2,
        "hashes": {1: "bb", 0: "aa"},
        "seconds_to_first_step": 1.5,
        "failovers": [],
        "counters": {"transport.refused{offence=tls}": 3},
        "servers_moved": 1,
        "stages_restored": [],
        "chains_left": [],
        "model": ModelLeft(Path("/logs/fish-1/model"), 2),
        "exit_reason": "done",
    }
    return build_summary(**{**values, **fields})


def test_samples_are_those_of_the_audit_and_not_of_the_reports() -> None:
    found = summary(Progress(samples=99, steps=12))
    assert (found["samples"], found["duplicates"], found["missing"]) == (30, 1, 3)
    assert found["steps_lost"] == {"0": 0, "1": 4}


def test_the_first_and_last_evaluation_are_those_of_the_lowest_and_highest_record() -> None:
    found = summary(Progress(eval_losses={2: 3.0, 0: 5.0, 1: 4.0}))
    assert (found["eval_loss_first"], found["eval_loss_last"]) == (5.0, 3.0)
    assert found["eval_losses"] == {"0": 5.0, "1": 4.0, "2": 3.0}


def test_the_folder_of_the_model_is_named_or_why_there_is_none() -> None:
    found = summary(Progress())
    assert (found["model"], found["model_round"], found["model_missing"]) == ("/logs/fish-1/model", 2, None)
    found = summary(Progress(), model=ModelLeft(reason="nobody holds stage 1"))
    assert (found["model"], found["model_round"], found["model_missing"]) == (None, None, "nobody holds stage 1")


def test_every_kind_of_traffic_is_named() -> None:
    progress = Progress()
    progress.add_sent({"activations": 7})
    found = summary(progress)
    assert found["bytes_sent"] == {str(traffic): 7 * (traffic == Traffic.ACTIVATIONS) for traffic in Traffic}


def test_a_run_that_did_nothing_has_a_summary_too() -> None:
    found = summary(Progress(), hashes={}, seconds_to_first_step=None, exit_reason="interrupted")
    assert found["exit"] == "interrupted"
    assert found["loss_first"] is None
    assert found["eval_loss_last"] is None
    assert found["samples_per_s"] == 0.0
    json.dumps(found)


def test_an_evaluation_of_what_was_there_at_the_beginning_says_nothing_about_the_end() -> None:
    found = summary(Progress(eval_losses={0: 5.0}), exit_reason="interrupted")
    assert (found["eval_loss_first"], found["eval_loss_last"]) == (5.0, None)


def test_who_is_suspected_is_named_as_everywhere() -> None:
    suspect = Suspect(1, PeerId("box2"), Suspicion.CLIPPED, 0.5, True)
    found = summary(Progress(), audit=Audit(2, 9, 30, 0, 0, 0, {}, suspects=((2, suspect),)))["suspects"]
    assert found == [{"round": 2, **suspect._asdict(), "name": "server 1@box2"}]
