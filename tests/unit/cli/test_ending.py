"""What is said at the end of a run beside its results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.documented import problem_of

from shoal.cli.afterwards import how_ended, left_commands, next_commands, next_lines
from shoal.cli.app import app
from shoal.cli.live import incident_lines
from shoal.config import load_config

LOST: dict[str, Any] = {
    "kind": "server",
    "cause": "frozen",
    "who": "server 1@box2",
    "stage": 1,
    "round": 3,
    "at_s": 41.2,
    "noticed_after_s": 0.01,
    "recovered_after_s": 0.42,
    "back_after_s": 12.3,
    "steps_lost": 3,
    "replayed": 0,
}


def test_an_incident_is_a_sentence_with_who_when_and_at_what_cost() -> None:
    trainer = LOST | {"who": "trainer 0", "stage": None, "recovered_after_s": None, "back_after_s": None}
    assert list(incident_lines({"incidents": [LOST, trainer | {"steps_lost": 1}, trainer | {"steps_lost": 0}]})) == [
        "server 1@box2 (stage 1): frozen in round 3, 41 s after launch; training went on after 0.4 s; "
        "over after 12.3 s; 3 steps lost",
        "trainer 0: frozen in round 3, 41 s after launch; it was not over at the end; 1 step lost",
        "trainer 0: frozen in round 3, 41 s after launch; it was not over at the end",
    ]


def test_of_a_server_that_was_still_there_at_the_end_it_is_not_said_that_it_left() -> None:
    left = LOST | {"cause": "left", "recovered_after_s": None, "steps_lost": 0}
    assert list(incident_lines({"incidents": [left, left | {"back_after_s": None}]})) == [
        "server 1@box2 (stage 1): left in round 3, 41 s after launch; over after 12.3 s",
        "server 1@box2 (stage 1): wanted to leave in round 3, 41 s after launch; still there at the end",
    ]


def test_of_many_incidents_the_last_ones_are_told_and_all_are_counted() -> None:
    lines = list(incident_lines({"incidents": [LOST | {"round": number} for number in range(12)]}))
    assert lines[0] == "12 incidents on the way; the last of them:"
    assert [line.partition(" in round ")[2].partition(",")[0] for line in lines[1:]] == ["7", "8", "9", "10", "11"]
    assert not list(incident_lines({}))


@pytest.mark.parametrize(
    ("keys", "command"),
    [
        ({}, "generate"),
        ({"model": {"family": "hf"}, "data": {"messages_column": "messages", "tokenizer": "./mine"}}, "chat"),
        ({"model": {"family": "mlp"}, "data": {"task_type": "cv", "dataset_name": "digits"}}, "evaluate"),
        ({"model": {"family": "theirs.model:Mlp"}}, "evaluate"),
        ({"model": {"family": "theirs.model:Mlp"}, "data": {"dataset_name": "theirs.data:Set"}}, "evaluate"),
        ({"model": {"family": "biggan"}, "data": {"task_type": "image_gen", "dataset_name": "digits"}}, "images"),
    ],
)
def test_what_can_be_done_next_is_commands_that_there_are(keys: dict[str, Any], command: str) -> None:
    config = load_config(None, keys, {})
    summary = {"samples": 5, "model": "/logs/a run/model"}
    lines = list(next_lines(next_commands(config, summary, None, Path("/logs/a run"), is_local=True)))
    assert lines[0].startswith(f"next: shoal {command} '/logs/a run/model'")
    # Code of somebody else is run where it is named alone.
    for line in lines[:2]:
        assert ("--family theirs.model:Mlp" in line) == (config.model.family == "theirs.model:Mlp")
        assert ("--dataset-name theirs.data:Set" in line) == (config.data.dataset_name == "theirs.data:Set")
    assert [line.split()[1] for line in lines[1:]] == ["replay", "events"]
    assert [problem_of(line.removeprefix("next:").strip()) for line in lines] == [None] * 3


def test_of_a_run_whose_servers_have_logged_elsewhere_no_replay_is_offered() -> None:
    summary = {"samples": 5, "model": None}
    lines = list(next_lines(next_commands(load_config(), summary, None, Path("/logs/r"), is_local=False)))
    assert lines == ["next: shoal events /logs/r"]


@pytest.mark.parametrize(("is_local", "command"), [(True, "run-local"), (False, "start-trainer-client")])
def test_a_run_that_was_interrupted_or_has_failed_and_has_a_checkpoint_can_go_on(is_local: bool, command: str) -> None:
    summary, folder = {"samples": 5, "model": None, "exit": "interrupted"}, Path("logs/r").absolute()
    told = [
        list(next_commands(load_config(), summary | more, None, folder, is_local=is_local, checkpoints=place))
        for more, place in (({}, "/c/r"), ({"exit": "failed"}, "/c/r"), ({}, None), ({"exit": "done"}, "/c/r"))
    ]
    assert [[line for line in lines if "--resume" in line] for lines in told] == [
        [f"shoal {command} --resume /c/r"],
        [f"shoal {command} --resume /c/r"],
        [],
        [],
    ]
    assert command in app


def test_of_a_run_that_failed_the_warnings_come_first_and_no_model_is_offered() -> None:
    lines = list(
        next_lines(next_commands(load_config(), {"samples": 0, "model": None}, "no", Path("/logs/r"), is_local=True))
    )
    assert lines == ["next: shoal logs /logs/r --level warning", "      shoal events /logs/r"]


def test_of_a_run_that_is_done_and_has_left_no_model_it_is_said_how_the_last_checkpoint_becomes_one(
    tmp_path: Path,
) -> None:
    for round in (9, 12):
        (tmp_path / f"round_{round:06d}").mkdir()
    summary = {"samples": 5, "model": None, "exit": "done"}
    config = load_config(None, {"model": {"family": "theirs.model:Mlp"}}, {})
    [export, *_] = next_commands(config, summary, None, Path("/logs/r"), is_local=True, checkpoints=str(tmp_path))
    assert export == f"shoal export {tmp_path}/round_000012 --to model --family theirs.model:Mlp"
    assert problem_of(export) is None
    for more, place in (({"exit": "interrupted"}, str(tmp_path)), ({}, "s3://bucket/r"), ({}, None)):
        lines = next_commands(config, summary | more, None, Path("/logs/r"), is_local=True, checkpoints=place)
        assert not [line for line in lines if "shoal export" in line]


def test_a_resumed_run_is_told_where_its_folder_and_its_key_are_where_that_is_not_where_they_are_by_themselves() -> (
    None
):
    config = load_config(None, {"network": {"swarm_key_file": "/keys/mine"}}, {})
    summary = {"samples": 0, "exit": "interrupted"}
    for is_local, options in ((True, ""), (False, " --network.swarm-key-file /keys/mine")):
        resume, *_ = next_commands(config, summary, None, Path("/my logs/r"), is_local=is_local, checkpoints="/c/r")
        assert resume.endswith(f" --resume /c/r --log-dir '/my logs'{options}")
        assert problem_of(resume) is None


def test_a_run_without_a_summary_goes_on_from_its_checkpoint_and_one_that_is_whole_does_not(tmp_path: Path) -> None:
    config = load_config(None, {"log_dir": str(tmp_path), "diloco": {"outer_steps": 12}}, {})
    folder = tmp_path / "r"
    assert left_commands(config, "r", folder, None, "no memory is left") == [f"shoal logs {folder} --level warning"]
    (tmp_path / "checkpoints/r/round_000012").mkdir(parents=True)
    resume = f"shoal start-trainer-client --resume {tmp_path}/checkpoints/r --log-dir {tmp_path}"
    for failure in (None, "no memory is left"):
        commands = left_commands(config, "r", folder, None, failure)
        assert resume in commands
        assert (f"shoal logs {folder} --level warning" in commands) == (failure is not None)
    whole = left_commands(config, "r", folder, {"samples": 5, "model": "/m", "exit": "failed"})
    assert not [command for command in whole if "--resume" in command]
    assert f"shoal logs {folder} --level warning" in whole


def test_how_a_run_has_ended_is_said_in_words() -> None:
    assert how_ended("failed", "no memory is left") == "the run has failed: no memory is left"
    assert [how_ended(exit) for exit in ("done", "failed", "interrupted", "runs", "broken off")] == [
        "the run is complete",
        "the run has failed",
        "the run was interrupted",
        "the run went on when this was written",
        "the run has broken off: its launcher was killed, or its disk took no summary",
    ]
