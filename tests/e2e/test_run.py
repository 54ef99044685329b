"""A whole run from its command line to its summary: what it says, and whether its files prove it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from tests.e2e.launched import END_S, SMALL, Launched, completed, launched
from tools import files

from shoal.averaging.audit import audit
from shoal.averaging.journal import read_records
from shoal.averaging.signing import unsealer
from shoal.report.learning import read_learning
from shoal.runtime.linux_calls import LinuxCall, has
from shoal.swarm.records import genesis_hash, record_hash

pytestmark = pytest.mark.timeout(600)

_COUNTS = (
    "stages",
    "replicas",
    "pipelines_max",
    "trainers",
    "inner_steps",
    "outer_rounds",
    "samples",
    "duplicates",
    "missing",
    "processes",
)
_NUMBERS = (
    "loss_first",
    "loss_last",
    "eval_loss_first",
    "eval_loss_last",
    "samples_per_s",
    "seconds_to_first_step",
    "seconds_total",
    "peak_pss_bytes",
)


def test_the_summary_has_every_field_with_its_type(short_run: Launched) -> None:
    summary = short_run.summary()
    assert {name: type(summary[name]) for name in ("run_id", "config", "exit")} == dict.fromkeys(
        ("run_id", "config", "exit"), str
    )
    assert {name: type(summary[name]) for name in _COUNTS} == dict.fromkeys(_COUNTS, int)
    for name in _NUMBERS:
        assert isinstance(summary[name], int | float)
        assert summary[name] > 0
    sent = summary["bytes_sent"]
    assert set(sent) == {"activations", "gradients", "pseudo_gradients", "state", "control"}
    assert all(sent[kind] > 0 for kind in ("activations", "gradients", "pseudo_gradients", "control")), sent
    assert (summary["failovers"], summary["incidents"]) == ([], [])
    assert (summary["steps_lost"], summary["steps_lost_otherwise"]) == ({"0": 0, "1": 0}, 0)


def test_what_has_happened_is_in_a_file_beside_the_logs(short_run: Launched) -> None:
    lines = (short_run.require_log_dir() / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert events[0]["event"] == "run.launched"
    assert [event["round"] for event in events if event["event"] == "round.recorded"] == [1, 2]
    assert "model.left" in {event["event"] for event in events}
    assert all(event["time"] for event in events)
    # The mirror of a busy host may come when the last record is there.
    usual = [event for event in events if event["event"] != "checkpoint.last_lacks"]
    assert {event["level"] for event in usual} == {"INFO"}


def test_the_page_about_files_says_what_each_is(short_run: Launched) -> None:
    left = [f"{path.name}{'/' * path.is_dir()}" for path in short_run.require_log_dir().iterdir()]
    assert {"summary.json", "steps/"} <= set(left)
    assert [name for name in left if not files.is_described(name)] == []


def test_a_picture_shows_how_it_has_learned(short_run: Launched) -> None:
    folder = short_run.require_log_dir()
    assert f"curves: {folder / 'curves.svg'}" in short_run.output
    learning, summary = read_learning(folder), short_run.summary()
    assert learning.rounds == {1: 2 * 4 * 4, 2: summary["samples"]}
    assert [loss for _, loss in learning.held_out] == list(summary["eval_losses"].values())
    assert len(learning.trained) == summary["steps"]
    assert learning.trained[-1].loss.mean == pytest.approx(summary["loss_last"], rel=1e-4)
    picture = (folder / "curves.svg").read_text()
    assert f"held-out loss {summary['eval_loss_last']:.4g}, perplexity" in picture
    assert f"{folder.name}, 2 stages, 2 rounds in 0:0" in picture


def test_the_monitor_has_heard_what_each_server_measures(short_run: Launched) -> None:
    [heard] = [line["measured"] for line in short_run.events("monitor_0", "monitor.peers")]
    servers = {name: own for name, own in heard.items() if name.startswith("server ")}
    assert [name.partition("@")[0] for name in sorted(servers)] == [f"server {index}" for index in range(4)]
    for own in servers.values():
        assert 0 < own["step.committed"] <= 2 * 2 * 4
        assert own["step.open_seconds/p50"] > 0
        assert own["process.memory_bytes"] > 2**20
        assert own["transport.sent_bytes"] > 0
        assert own["transport.received_bytes"] > 0


def test_a_short_run_trains_on_a_whole_swarm(short_run: Launched) -> None:
    summary = short_run.summary()
    expected = {
        "config": "sandbox",
        "stages": 2,
        "replicas": 4,
        "pipelines_max": 2,
        "trainers": 2,
        "inner_steps": 4,
        "outer_rounds": 2,
        "samples": 2 * 2 * 4 * 4,
        "duplicates": 0,
        "missing": 0,
        "exit": "done",
    }
    assert {name: summary[name] for name in expected} == expected
    assert summary["eval_loss_first"] > 5.3
    assert summary["eval_loss_last"] < summary["eval_loss_first"]
    assert summary["processes"] <= 16
    # Elsewhere a page that processes share counts for each of them.
    assert summary["peak_pss_bytes"] < 1.2e9 or not has(LinuxCall.PROC)


def test_all_replicas_of_a_stage_report_the_hash_of_the_summary(short_run: Launched) -> None:
    reported: dict[str, list[str]] = {"0": [], "1": []}
    for server in range(4):
        (ready,) = short_run.events(f"server_{server}", "server.ready")
        swapped = short_run.events(f"server_{server}", "round.swapped")
        assert [event["round"] for event in swapped] == [1, 2]
        assert swapped[0]["parameters"] != swapped[1]["parameters"]
        reported[str(ready["stage"])].append(swapped[-1]["parameters"])
    assert reported == {stage: [digest] * 2 for stage, digest in short_run.summary()["hashes"].items()}


def test_counts_can_be_recomputed_from_the_files_of_a_run(short_run: Launched) -> None:
    assert short_run.log_dir is not None
    (opened,) = short_run.events("data_server_0", "dataset.opened")
    found, summary = audit(short_run.log_dir, opened["num_train"]), short_run.summary()
    assert (found.rounds, found.steps) == (2, 2 * 2 * 4)
    assert (found.samples, found.duplicates, found.missing) == (summary["samples"], 0, 0)
    # All of the first round's steps twice would be noticed.
    first, second = sorted((short_run.log_dir / "steps").iterdir())
    kept = second.read_bytes()
    try:
        second.write_bytes(kept + first.read_bytes())
        assert audit(short_run.log_dir, opened["num_train"]).duplicates == 2 * 4 * 4
    finally:
        second.write_bytes(kept)


def test_round_records_form_a_signed_chain_from_the_configuration_on(short_run: Launched) -> None:
    assert short_run.log_dir is not None
    summary = short_run.summary()
    genesis = json.loads((short_run.log_dir / "rounds" / "round_0000.json").read_text())
    assert genesis["seed"] == 7
    assert set(genesis["versions"]) >= {"shoal", "torch"}
    previous = genesis_hash(summary["run_id"], genesis["seed"], genesis["configuration"], genesis["authority"])
    check = unsealer(summary["run_id"], genesis["authority"])
    records = list(read_records(short_run.log_dir))
    assert [record.round for record, _ in records] == [1, 2]
    for record, signed in records:
        assert check(signed) == record
        assert record.previous == previous
        previous = record_hash(signed)
    hashes = {str(stage.stage): stage.hashes.parameters for stage in records[-1][0].stages}
    assert hashes == summary["hashes"]


@pytest.mark.slow
def test_two_runs_at_once_one_without_dashboard_do_not_disturb_each_other_and_equal_seeds_end_equally(
    short_run: Launched, tmp_path: Path
) -> None:
    runtime_dir = Path(tempfile.mkdtemp(prefix="sh", dir="/tmp"))  # shared, as all runs of one user do
    with (
        launched(tmp_path / "same", *SMALL, "--run.seed=7", runtime_dir=runtime_dir) as same,
        launched(tmp_path / "other", *SMALL, "--run.seed=8", "--no-dashboard.enable", runtime_dir=runtime_dir) as other,
    ):
        assert other.ends(END_S) == 0, other.output
        assert same.ends(END_S) == 0, same.output
        same.leaves_nothing()
        other.leaves_nothing()
    assert same.summary()["hashes"] == short_run.summary()["hashes"]
    assert set(other.summary()["hashes"].values()).isdisjoint(short_run.summary()["hashes"].values())
    assert (other.summary()["duplicates"], other.summary()["missing"]) == (0, 0)
    # It was to have no dashboard; its report it leaves all the same.
    log_dir = other.require_log_dir()
    assert not (log_dir / "dashboard.url").exists()
    assert "dashboard:" not in other.output
    assert "dashboard.enable" not in other.output
    assert (log_dir / "report.html").is_file()


@pytest.mark.slow
def test_the_sandbox_as_it_is_gives_equal_hashes_twice(tmp_path: Path) -> None:
    flags = ("--no-wandb", "--deterministic", "--diloco.outer-steps=2", "--diloco.inner-steps=3")
    first, second = (completed(tmp_path / name, *flags, cold=True).summary() for name in ("first", "second"))
    assert first["hashes"] == second["hashes"]
    assert first["eval_losses"] == second["eval_losses"]
