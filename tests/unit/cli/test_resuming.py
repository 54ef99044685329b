"""What `--resume` takes, what it passes over, and everything that speaks against it in one message."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from tests.unit.checkpoint.checkpoints import checkpoint_of as made_of
from tests.unit.checkpoint.checkpoints import hashes, layout_of, parts_of, vectors_of

from shoal.averaging.journal import Genesis
from shoal.averaging.signing import Signer
from shoal.checkpoint.store import CheckpointStore, KeepPolicy
from shoal.cli import app, resuming
from shoal.cli.resuming import Resumption, find_resumption
from shoal.cli.run_files import LOCAL_KEY
from shoal.config import Config
from shoal.config.load import load_with_origins
from shoal.config.shared import shared_configuration
from shoal.errors import ConfigError
from shoal.identity import Identity, create_swarm_key, load_swarm_key, swarm_authority
from shoal.ids import Ballot, PeerId
from shoal.runtime.run_note import RunNote
from shoal.wire.messages.base import Era
from shoal.wire.messages.round import Record, StageOutcome

RUN = "mine-20260101-000000-abcd"
CLIENT = Identity.generate()


class Runs:
    """Runs of `run_local.py` in one folder of logs, with their checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.said: list[str] = []

    def flags(self, *flags: str) -> tuple[str, ...]:
        return (f"--log-dir={self.path}", *flags)

    def begin(self, run_id: str = RUN, **sections: Any) -> Config:
        values = {"experiment_prefix": run_id.split("-")[0], "model_pipeline": {"stages": 2}, **sections}
        config = Config.model_validate({**values, "log_dir": self.path})
        create_swarm_key(self.path / run_id / LOCAL_KEY)
        return config

    def keep(self, config: Config, *rounds: int, run_id: str = RUN, unix_s: float = 1.75e9) -> None:
        authority = swarm_authority(load_swarm_key(self.path / run_id / LOCAL_KEY))
        seal = Signer(CLIENT, authority, run_id).seal
        store = CheckpointStore(config.checkpoint_location, run_id, policy=KeepPolicy(keep_last=9))
        genesis = Genesis(0, authority.peer_id, shared_configuration(config), (1,), {})
        content = msgspec.json.encode({"form": 2} | msgspec.to_builtins(genesis))
        for round in rounds:
            ballot = Ballot(1, CLIENT.peer_id, 1)
            said = [hashes(vectors_of(stage, round)) for stage in range(2)]
            outcomes = [StageOutcome(stage, 1, (PeerId("s"),), (4,), each, 0) for stage, each in enumerate(said)]
            record = Record(run_id, round, ballot, "0" * 64, tuple(outcomes), (), (), {}, (), (Era(1, ballot),))
            made = made_of(
                round, seal(record), genesis=content, unix_s=unix_s + round, layouts=[layout_of(0), layout_of(1)]
            )
            store.write(made, parts_of(round))

    def folder(self, round: int, run_id: str = RUN) -> Path:
        return self.path / "checkpoints" / run_id / f"round_{round:06d}"

    def resume(self, *flags: str, wanted: str = "latest", config_path: Path | None = None) -> Resumption:
        def load(own: Path | None) -> tuple[Config, Mapping[str, str]]:
            return load_with_origins(config_path or own, self.flags(*flags), {})

        return find_resumption(wanted, load, self.said.append, is_local=True)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.setattr(resuming, "living_runs", list)
    return Runs(tmp_path)


def test_the_newest_good_checkpoint_is_taken_with_the_runs_own_configuration(runs: Runs) -> None:
    config = runs.begin(diloco={"inner_steps": 7})
    runs.keep(config, 10, 20)
    found = runs.resume("--servers.replicas=3")
    assert (found.run_id, found.source.round, found.checkpoint.manifest.round) == (RUN, 20, 20)
    assert (found.config.diloco.inner_steps, found.config.servers.replicas) == (7, 3)
    assert found.swarm_key == load_swarm_key(runs.path / RUN / LOCAL_KEY)
    assert runs.said == [
        f"resuming run {RUN} from its checkpoint of round 20 in {runs.path / 'checkpoints' / RUN}",
    ]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(runs: Runs) -> None:
    runs.keep(runs.begin(), 10, 20)
    (runs.folder(20) / "stage_01.safetensors").write_bytes(b"short")
    assert runs.resume().source.round == 10
    assert runs.said[0].startswith("the checkpoint of round 20: stage_01.safetensors has 5 of ")
    assert runs.said[0].endswith(": it is passed over")


def test_latest_is_of_the_run_that_was_written_last_or_of_the_one_that_is_called_so(runs: Runs) -> None:
    other = "other-20260101-000000-ffff"
    runs.keep(runs.begin(), 10, unix_s=2e9)
    runs.keep(runs.begin(other), 30, run_id=other)
    assert runs.resume().run_id == RUN
    assert runs.resume("--experiment-prefix=other").run_id == other
    with pytest.raises(ConfigError, match="no checkpoint of a run called none-"):
        runs.resume("--experiment-prefix=none")


@pytest.mark.parametrize("which", ["run", "round", "all"])
def test_a_folder_of_a_run_or_of_one_checkpoint_can_be_named(runs: Runs, tmp_path: Path, which: str) -> None:
    runs.keep(runs.begin(), 10, 20)
    elsewhere = tmp_path / "copied"
    shutil.move(tmp_path / "checkpoints", elsewhere)
    place = {"run": elsewhere / RUN, "round": elsewhere / RUN / "round_000010", "all": elsewhere}[which]
    found = runs.resume(wanted=f"{place}/")
    assert found.source.location == str(elsewhere)
    assert found.source.round == (10 if which == "round" else 20)


def test_checkpoint_dir_says_where_checkpoints_lie(runs: Runs, tmp_path: Path) -> None:
    runs.keep(runs.begin(), 10)
    shutil.move(tmp_path / "checkpoints", tmp_path / "disk")
    assert runs.resume(f"--checkpoint-dir={tmp_path / 'disk'}").source.round == 10


def test_where_there_is_none_the_place_is_named(runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"there is no {tmp_path}/checkpoints"):
        runs.resume()
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match=rf"no checkpoint in {tmp_path}/checkpoints"):
        runs.resume()


def test_where_all_are_damaged_each_is_named(runs: Runs) -> None:
    runs.keep(runs.begin(), 10, 20)
    for round in (10, 20):
        (runs.folder(round) / "record.msgpack").unlink()
    with pytest.raises(ConfigError, match=f"run {RUN} has no good checkpoint in"):
        runs.resume()
    assert [line[:27] for line in runs.said] == ["the checkpoint of round 20:", "the checkpoint of round 10:"]
    with pytest.raises(ConfigError, match=r"--resume: .*record\.msgpack is not there"):
        runs.resume(wanted=str(runs.folder(10)))


def test_everything_that_speaks_against_it_is_said_at_once(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def note(hosts: Literal["client", "servers"]) -> RunNote:
        return RunNote(run_id=RUN, hosts=hosts, launcher_pid=42, begun_unix_s=1.0, log_dir="/logs/there")

    runs.keep(runs.begin(), 10)
    monkeypatch.setattr(resuming, "living_runs", lambda: [note("client"), note("servers")])
    with pytest.raises(ConfigError) as error:
        runs.resume("--diloco.inner-steps=9", "--model.hidden-size=64")
    assert str(error.value).splitlines()[0] == f"--resume: run {RUN} is not resumed:"
    for said in (
        f"it runs here (process 42): `shoal stop {RUN}` ends it",
        "--initial-peers=@/logs/there/initial_peers.txt",
        "diloco.inner_steps = 9 (--diloco.inner-steps): the run has",
        "model.hidden_size = 64 (--model.hidden-size): the run has",
    ):
        assert said in str(error.value)


def test_a_run_is_gone_on_with_by_the_key_of_its_swarm_alone(runs: Runs, tmp_path: Path) -> None:
    runs.keep(runs.begin(), 10)
    (tmp_path / RUN / LOCAL_KEY).unlink()
    with pytest.raises(ConfigError, match=r"copy swarm.key from its log folder to .*/swarm\.key$"):
        runs.resume()
    create_swarm_key(tmp_path / RUN / LOCAL_KEY)
    with pytest.raises(ConfigError, match="no good checkpoint"):
        runs.resume()
    assert "without having the swarm key" in runs.said[0]


def test_resume_alone_means_latest() -> None:
    spelt_out = app._spelt_out
    assert spelt_out(["run-local", "--resume"]) == ["run-local", "--resume=latest"]
    assert spelt_out(["run-local", "--resume", "--no-wandb"]) == ["run-local", "--resume=latest", "--no-wandb"]
    assert spelt_out(["run-local", "--resume", "here"]) == ["run-local", "--resume", "here"]
    assert spelt_out(["run-local", "--resume=here"]) == ["run-local", "--resume=here"]


@pytest.mark.parametrize("command", ["run-local", "start-trainer-client"])
def test_the_fork_server_has_begun_when_the_launcher_imports_torch(command: str) -> None:
    code = (
        "import sys\n"
        "from shoal.cli import app, early, runs_here\n"
        "def begun():\n"
        "    sys.exit(8 if 'torch' in sys.modules else 7)\n"
        "early.early_start = begun\n"
        "runs_here.end_leftovers = list\n"
        f"app.run(['{command}', '--resume'])\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 7
