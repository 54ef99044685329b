"""Other configurations than the sandbox: images, one stage and three, a spare server, and the plain loop."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.launched import END_S, ROOT, SMALL, SMALLEST, Launched, completed, launched, run_shoal

from shoal.averaging.journal import read_records
from shoal.config import load_config
from shoal.ids import PeerId
from shoal.runtime.file_memory import file_room
from shoal.server.memory import stage_needs
from shoal.swarm.assignment import Files
from shoal.swarm.view import Candidate
from shoal.wire.messages.base import Hop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_TINY_IMAGES = (
    "--no-wandb",
    "--diloco.inner-steps=2",
    "--diloco.outer-steps=1",
    "--diloco.batch-size-per-step=4",
    "--data.holdout-fraction=0.01",
)


def test_a_resnet_trains_in_one_stage_on_images_of_digits(tmp_path: Path) -> None:
    run = completed(tmp_path, "--config-path=configs/resnet18.yaml", *_TINY_IMAGES, within_s=150.0)
    summary = run.summary()
    assert (summary["stages"], summary["outer_rounds"], summary["exit"]) == (1, 1, "done")
    assert (summary["duplicates"], summary["missing"]) == (0, 0)
    assert len(summary["hashes"]) == 1
    # Ten classes: an untrained model is near ln 10.
    assert 1.5 < summary["eval_loss_first"] < 3.5


def test_three_stages(tmp_path: Path) -> None:
    run = completed(tmp_path, *SMALL, "--model.num-layers=3", "--model-pipeline.stages=3")
    summary = run.summary()
    assert (summary["stages"], summary["replicas"], summary["pipelines_max"]) == (3, 6, 2)
    assert set(summary["hashes"]) == {"0", "1", "2"}
    assert summary["processes"] <= 25
    assert (summary["duplicates"], summary["missing"]) == (0, 0)


def test_a_run_that_need_not_be_repeatable_is_cut_by_what_its_units_take_here(tmp_path: Path) -> None:
    flags = (*SMALLEST, "--no-deterministic")
    cuts: list[tuple[int, ...]] = []
    for start in (1, 2):
        run = completed(tmp_path, *flags)
        assert run.log_dir is not None
        (decided,) = run.events("launcher", "model.cut")
        config = load_config(run.log_dir / "config.yaml", (), {})
        assert list(config.model_pipeline.cut or ()) == decided["units"]
        assert sum(decided["units"]) == config.model.num_units
        # The first start measures; the second one knows.
        assert (run.log_dir / "profiler_0.log").exists() == (start == 1)
        cuts.append(tuple(decided["units"]))
    assert cuts[0] == cuts[1]


@pytest.fixture(scope="module")
def five_servers(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """A run over one server more than two paths take, each with threads and a niceness of its own."""
    own = ("--threads=1,2,1,3,1", "--nice=0,1,2,1,0", f"--device={','.join(['cpu'] * 5)}")
    return completed(tmp_path_factory.mktemp("five"), *SMALL, "--num-servers=5", *own)


def test_a_spare_server_stays_current_without_weight(five_servers: Launched) -> None:
    run, summary = five_servers, five_servers.summary()
    assert (summary["replicas"], summary["pipelines_max"], summary["trainers"]) == (5, 2, 2)
    assert run.log_dir is not None
    stage_of = {index: run.events(f"server_{index}", "server.ready")[0]["stage"] for index in range(5)}
    crowded = 0 if list(stage_of.values()).count(0) == 3 else 1
    hashes = [
        run.events(f"server_{index}", "round.swapped")[-1]["parameters"]
        for index, stage in stage_of.items()
        if stage == crowded
    ]
    assert hashes == [summary["hashes"][str(crowded)]] * 3
    for record, _ in read_records(run.log_dir):
        weights = {stage.stage: sorted(stage.weights) for stage in record.stages}
        # 16 samples of 64 bytes each.
        assert weights[crowded] == [0, 1024, 1024]
        assert weights[1 - crowded] == [1024, 1024]


def test_each_server_has_its_threads_and_gives_way_as_told(five_servers: Launched) -> None:
    ready = [five_servers.events(f"server_{index}", "server.ready")[0] for index in range(5)]
    own = os.nice(0)
    assert [each["threads"] for each in ready] == [1, 2, 1, 3, 1]
    assert [each["nice"] for each in ready] == [min(19, own + nice) for nice in (0, 1, 2, 1, 0)]
    assert five_servers.summary()["exit"] == "done"


def test_the_plain_loop_alone_prints_its_losses(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shoal", "trainer", "--run-locally", "--trainer-id", "-1"]
    flags = ["--config-path", "configs/sandbox.yaml", *SMALL, "--log-dir", str(tmp_path)]
    done = subprocess.run([*command, *flags], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["0/8", "4/8", "8/8"]
    losses = [float(re.search(r"eval loss (\d\.\d+)", line)[1]) for line in lines]  # type: ignore[index]
    assert losses[0] > losses[-1]
    assert "loss/baseline" in lines[-1]


def test_initial_peers_that_do_not_answer_are_the_users_error(tmp_path: Path) -> None:
    peer = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWHLJW71ZtfKw6G3ZYJEjguaKyesPPx9KMauF5RtJtLgoM"
    with launched(tmp_path, *SMALL, f"--network.initial-peers={peer}", "--network.bootstrap-timeout-s=3") as run:
        assert run.ends(END_S) == 2, run.output
        run.leaves_nothing()
    assert "none of the initial peers answered" in run.output


def test_a_run_needs_no_standard_streams_and_nobody_who_reads_it(tmp_path: Path) -> None:
    script = f'"$0" run_local.py "$@" --log-dir={tmp_path}'
    for redirection in ("<&- >&- 2>&-", "| head -1; exit ${PIPESTATUS[0]}", ">/dev/full"):
        command = ["bash", "-c", f"{script} {redirection}", sys.executable, *SMALLEST]
        assert subprocess.run(command, cwd=ROOT, timeout=END_S, check=False).returncode == 0, redirection


def test_servers_with_little_memory_take_smaller_microbatches(tmp_path: Path) -> None:
    # Both stages fit with a few of the 16 samples; a server without a stage has 128 MiB.
    flags = ("--diloco.batch-size-per-step=16", "--model-pipeline.microbatches=1", "--servers.max-memory-bytes=133MiB")
    run = completed(tmp_path, *SMALL, *flags)
    caps = {}
    for index in range(4):
        [less] = run.events(f"server_{index}", "server.takes_less")
        caps.setdefault(less["stage"], set()).add(less["cap"])
    assert all(len(each) == 1 and 0 < min(each) < 16 for each in caps.values()), caps
    assert set(caps) == {0, 1}
    summary = run.summary()
    assert (summary["exit"], summary["duplicates"], summary["missing"]) == ("done", 0, 0)


def test_a_stage_too_large_for_its_servers_memory_lies_in_files_and_its_run_is_reproduced_in_memory(
    tmp_path: Path,
) -> None:
    if why := file_room(tmp_path)[1]:
        pytest.skip(why)
    flags = (*SMALL, "--model.hidden-size=576", "--model-pipeline.stages=1", "--diloco.inner-steps=2")
    [need] = stage_needs(load_config(ROOT / "configs" / "sandbox.yaml", flags, {}))
    nobody = Candidate(Hop(PeerId("any"), ()), 0.0)
    # Smaller microbatches would rather be taken.
    limit = need.of(nobody, need.min_samples, files=Files.VECTORS)[0] - 1
    assert need.of(nobody, need.min_samples, files=Files.MOMENTS)[0] <= limit
    run = completed(tmp_path, *flags, f"--servers.max-memory-bytes={limit}")
    for index in range(2):
        [said] = run.events(f"server_{index}", "server.uses_disk")
        assert (said["files"], said["file_bytes"]) == ("moments", need.disk_bytes)
    assert run.log_dir is not None
    assert "bit for bit" in run_shoal("replay", str(run.log_dir)), "which has no limit"
    with launched(tmp_path, *flags, f"--servers.max-memory-bytes={limit}", "--servers.max-disk-bytes=0") as refused:
        assert refused.ends(END_S) == 2, refused.output
    assert "Nothing may lie in files instead: servers.max_disk_bytes is 0." in refused.output


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_of_compiled_stages_is_reproduced_with_the_same_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = completed(tmp_path, *SMALL, "--model-pipeline.compile", "--servers.replicas=1", within_s=900.0)
    assert {event["stage"] for i in range(2) for event in run.events(f"server_{i}", "stage.compiled")} == {0, 1}
    assert run.log_dir is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    command = [sys.executable, "-m", "shoal", "replay", str(run.log_dir)]
    replayed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "bit for bit" in replayed.stdout
