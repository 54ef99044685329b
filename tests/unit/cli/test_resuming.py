"""What `--resume` takes, what it passes over, and everything that speaks against it in one message."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch
from tests.foreign_code import NAME, lay_trap
from tests.unit.checkpoint.checkpoints import checkpoint_of as made_of
from tests.unit.checkpoint.checkpoints import hashes
from tests.unit.checkpoint.folders import GPT
from tests.unit.checkpoint.test_recut import by_name
from torch import Tensor

from shoal.averaging.journal import Genesis, read_genesis, read_records
from shoal.averaging.signing import Signer
from shoal.checkpoint.model_layout import StageLayout, stage_layouts
from shoal.checkpoint.store import CheckpointStore, KeepPolicy, StagePart
from shoal.cli import app, resuming
from shoal.cli.resuming import Resumption, find_resumption
from shoal.cli.run_folder import LOCAL_KEY
from shoal.clock import SystemClock
from shoal.config import Config, dump_config
from shoal.config.load import load_with_origins
from shoal.config.shared import shared_configuration
from shoal.control.peers_file import PEERS_FILE
from shoal.errors import ConfigError
from shoal.identity import Identity, create_swarm_key, load_swarm_key, swarm_authority
from shoal.ids import Ballot, PeerId
from shoal.runtime.run_dir import RunDir, RunNote
from shoal.swarm.records import used_samples
from shoal.wire.messages.base import Era, SampleRange
from shoal.wire.messages.round import Origin, Record, StageOutcome

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
        given = {"model": GPT, "data": {"seq_len": 32}, "model_pipeline": {"stages": 2, "cut": [3, 2]}, **sections}
        values = {"experiment_prefix": run_id.split("-")[0], **given}
        config = Config.model_validate({**values, "log_dir": self.path})
        create_swarm_key(self.path / run_id / LOCAL_KEY)
        return config

    def keep(
        self,
        config: Config,
        *rounds: int,
        run_id: str = RUN,
        unix_s: float = 1.75e9,
        said: Mapping[str, Any] | None = None,
    ) -> None:
        """Write checkpoints, whose D_0 says of the configuration what is `said`, or what it is."""
        authority = swarm_authority(load_swarm_key(self.path / run_id / LOCAL_KEY))
        seal = Signer(CLIENT, authority, run_id).seal
        store = CheckpointStore(config.checkpoint_location, run_id, policy=KeepPolicy(keep_last=9))
        genesis = Genesis(0, authority.peer_id, {**(said or shared_configuration(config))}, (1,), {})
        content = msgspec.json.encode({"form": 2} | msgspec.to_builtins(genesis))
        layouts = stage_layouts(config)
        for round in rounds:
            parts = [StagePart(stage, random_vectors(layout, round)) for stage, layout in enumerate(layouts)]
            ballot = Ballot(1, CLIENT.peer_id, 1)
            outcomes = [StageOutcome(p.stage, 1, (PeerId("s"),), (4,), hashes(p.vectors), 0) for p in parts]
            samples = SampleRange(0, 0, 4 * round)
            record = Record(
                run_id, round, ballot, "0" * 64, tuple(outcomes), (samples,), (), {0: 7}, (), (Era(1, ballot),)
            )
            made = made_of(
                round,
                seal(record),
                genesis=content,
                unix_s=unix_s + round,
                layouts=layouts,
                cut=config.model_pipeline.cut,
                members=[outcome.members for outcome in outcomes],
            )
            store.write(made, parts)

    def folder(self, round: int, run_id: str = RUN) -> Path:
        return self.path / "checkpoints" / run_id / f"round_{round:06d}"

    def resume(self, *flags: str, wanted: str = "latest", config_path: Path | None = None) -> Resumption:
        def load(run: Mapping[str, Any], own: Path | None) -> tuple[Config, Mapping[str, str]]:
            return load_with_origins(config_path or own, self.flags(*flags), {}, run=run, is_left=config_path is None)

        return find_resumption(wanted, load, self.said.append, is_local=True)


def random_vectors(layout: StageLayout, seed: int) -> tuple[Tensor, ...]:
    """Parameters, momentum, floats, integers."""
    generator = torch.Generator().manual_seed(seed)
    size = layout.parameters.numel
    parameters, momentum = (torch.randn(size, generator=generator) for _ in range(2))
    return parameters, momentum, torch.empty(layout.floats.numel), torch.empty(0, dtype=torch.int64)


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


def test_the_newest_run_is_that_also_if_its_checkpoints_are_damaged(runs: Runs) -> None:
    other = "mine-20260101-000000-0000"
    runs.keep(runs.begin(run_id=other), 10, run_id=other)
    runs.keep(runs.begin(), 20)
    (runs.folder(20) / "manifest.json").write_bytes(b"")
    with pytest.raises(ConfigError, match=f"run {RUN} has no good checkpoint"):
        runs.resume()
    assert "the checkpoint of round 20: manifest.json is damaged" in runs.said[0]


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
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"{tmp_path}/file is no folder"):
        runs.resume(wanted=str(tmp_path / "file"))


def test_where_all_are_damaged_each_is_named(runs: Runs) -> None:
    runs.keep(runs.begin(), 10, 20)
    for round in (10, 20):
        (runs.folder(round) / "record.msgpack").unlink()
    with pytest.raises(ConfigError, match=f"run {RUN} has no good checkpoint in"):
        runs.resume()
    assert [line[:27] for line in runs.said] == ["the checkpoint of round 20:", "the checkpoint of round 10:"]
    with pytest.raises(ConfigError, match=r"--resume: .*record\.msgpack is not there"):
        runs.resume(wanted=str(runs.folder(10)))


def test_a_run_that_has_all_of_its_rounds_and_its_model_is_not_started_to_train_nothing(runs: Runs) -> None:
    config = runs.begin(diloco={"outer_steps": 20})
    runs.keep(config, 10, 20)
    assert runs.resume().source.round == 20, "its model is not left yet"
    model = runs.path / RUN / "model"
    model.mkdir()
    record = CheckpointStore(config.checkpoint_location, RUN).open(20).manifest.record
    (model / "config.json").write_text(json.dumps({"record": record}))
    with pytest.raises(
        ConfigError, match=r"all of its 20 rounds are trained.*model: --diloco\.outer-steps=N with N above"
    ):
        runs.resume()
    assert runs.resume(wanted=str(runs.folder(10))).source.round == 10
    assert runs.resume("--diloco.outer-steps=30").run_id != RUN


def test_everything_that_speaks_against_it_is_said_at_once(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def note(hosts: Literal["client", "servers"]) -> RunNote:
        return RunNote(run_id=RUN, hosts=hosts, launcher_pid=42, begun_unix_s=1.0, log_dir="/logs/there")

    runs.keep(runs.begin(), 10)
    monkeypatch.setattr(resuming, "living_runs", lambda: [note("client"), note("servers")])
    with pytest.raises(ConfigError) as error:
        runs.resume("--diloco.outer-steps=9", "--model.hidden-size=12")
    assert str(error.value).splitlines()[0] == f"--resume: run {RUN} is not resumed:"
    for said in (
        f"it runs here (process 42): `shoal stop {RUN}` ends it",
        "--initial-peers=@/logs/there/initial_peers.txt",
        "diloco.outer_steps = 9: the checkpoint is of round 10",
        "units.head.norm.weight is float32 [12], in the checkpoint float32 [24]",
    ):
        assert said in str(error.value)


def test_a_run_is_gone_on_with_by_the_key_of_its_swarm_alone(runs: Runs, tmp_path: Path) -> None:
    runs.keep(runs.begin(), 10)
    (tmp_path / RUN / LOCAL_KEY).unlink()
    with pytest.raises(ConfigError, match=r"copy swarm.key from its log folder to .*/swarm\.key; a run of start_"):
        runs.resume()
    create_swarm_key(tmp_path / RUN / LOCAL_KEY)
    with pytest.raises(ConfigError, match="no good checkpoint"):
        runs.resume()
    assert "without having the swarm key" in runs.said[0]


@pytest.mark.parametrize("flags", [(), ("--diloco.outer-steps=200",)], ids=["the same run", "a fork"])
@pytest.mark.parametrize(("section", "key"), [("data", "dataset_name"), ("model", "family")])
def test_code_that_a_checkpoint_names_is_imported_only_if_this_host_names_it_too(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, key: str, flags: tuple[str, ...]
) -> None:
    trace = lay_trap(tmp_path, monkeypatch)
    config = runs.begin()
    forged = shared_configuration(config)
    forged[section][key] = f"{NAME}:X"
    runs.keep(config, 4, said=forged)
    flag = f"--{section}.{key.replace('_', '-')}"
    with pytest.raises(
        ConfigError, match=rf"its checkpoint names '{NAME}:X' by {section}\.{key}, .* say {flag} {NAME}:X"
    ):
        runs.resume(*flags)
    assert not trace.exists()


@pytest.mark.parametrize("is_here", [True, False], ids=["its own file", "a flag"])
def test_a_run_with_data_of_ones_own_goes_on_by_the_file_that_it_has_left_here_or_by_a_flag(
    runs: Runs, is_here: bool
) -> None:
    own = {"dataset_name": "own.sets:Texts", "arguments": {"count": 3}, "seq_len": 32}
    config = runs.begin(data=own)
    runs.keep(config, 4)
    if is_here:
        (runs.path / RUN / "config.yaml").write_text(dump_config(config))
    found = runs.resume(*(() if is_here else ("--data.dataset-name=own.sets:Texts",)))
    assert (found.run_id, found.config.data.dataset_name, found.config.data.arguments) == (
        RUN,
        "own.sets:Texts",
        {"count": 3},
    )


def test_the_file_of_a_run_here_counts_and_not_what_a_checkpoint_says_in_its_place(runs: Runs) -> None:
    config = runs.begin(data={"dataset_name": "own.sets:Texts", "arguments": {"path": "mine"}, "seq_len": 32})
    (runs.path / RUN / "config.yaml").write_text(dump_config(config))
    forged = shared_configuration(config)
    forged["data"] |= {"dataset_name": f"{NAME}:X", "arguments": {"path": "theirs"}}
    runs.keep(config, 4, said=forged)
    found = runs.resume().config.data
    assert (found.dataset_name, found.arguments) == ("own.sets:Texts", {"path": "mine"})


@pytest.mark.parametrize("flags", [(), ("--diloco.outer-steps=200",)], ids=["the same run", "a fork"])
def test_a_checkpoint_starts_no_program_of_its_own(runs: Runs, flags: tuple[str, ...]) -> None:
    config = runs.begin()
    runs.keep(config, 4, said={**shared_configuration(config), "notify": {"command": ["touch", "it_has_run"]}})
    with pytest.raises(ConfigError, match="says 'notify', which no run"):
        runs.resume(*flags)


def test_a_checkpoint_that_is_called_as_the_folder_with_checkpoints_brings_no_key_and_no_file(runs: Runs) -> None:
    """They would lie where the checkpoints do, and who writes those can write them."""
    name = "checkpoints"
    config = runs.begin(name, data={"dataset_name": f"{NAME}:X", "seq_len": 32})
    (runs.path / name / "config.yaml").write_text(dump_config(config))
    runs.keep(config, 4, run_id=name)
    with pytest.raises(ConfigError, match="there is no checkpoint in"):
        runs.resume()
    with pytest.raises(ConfigError, match="is not called as a run is"):
        runs.resume(wanted=str(runs.folder(4, name)))


@pytest.mark.parametrize(
    ("flags", "cut", "said"),
    [
        (("--model-pipeline.stages=3",), None, "model_pipeline.stages = 3 instead of 2"),
        (("--model-pipeline.cut=1,3,1",), (1, 3, 1), "model_pipeline.stages = 3 instead of 2"),
        (("--model-pipeline.cut=1,4",), (1, 4), "model_pipeline.cut = [1, 4] instead of [3, 2]"),
        (("--diloco.outer-steps=200",), (3, 2), "diloco.outer_steps = 200 instead of "),
        (("--diloco.batch-size-per-step=4",), (3, 2), "diloco.batch_size_per_step = 4 instead of 8"),
        (("--diloco.fragments=2",), (3, 2), "diloco.fragments = 2 instead of 1"),
    ],
    ids=["stages", "stages by cut", "cut", "more rounds", "smaller batch", "fragments"],
)
def test_what_a_host_changes_of_what_is_shared_makes_a_fork_which_has_the_same_tensors(
    runs: Runs, flags: tuple[str, ...], cut: tuple[int, ...] | None, said: str
) -> None:
    config = runs.begin(diloco={"inner_steps": 7, "batch_size_per_step": 8})
    (runs.path / RUN / "config.yaml").write_text(dump_config(config))
    runs.keep(config, 4)
    found = runs.resume(*flags)
    assert found.run_id != RUN
    assert [line for line in runs.said if said in line and found.run_id in line] == runs.said
    assert runs.said[0].count(said.partition(" = ")[0]) == 1
    assert not (runs.path / found.run_id).exists(), "nothing is written before it begins"
    assert found.config.diloco.inner_steps == 7
    log_dir = found.prepare(SystemClock(), runs.said.append, is_local=True)
    assert (log_dir, load_swarm_key(log_dir / LOCAL_KEY)) == (runs.path / found.run_id, found.swarm_key)
    assert len(runs.said) == 1, "what the client has counted is known: nothing"
    kept = CheckpointStore(found.source.location, found.run_id).open(found.source.round)
    assert cut in (None, kept.manifest.cut)
    assert len(kept.manifest.cut) == found.config.num_stages
    origin = CheckpointStore(found.source.location, RUN).open(4)
    assert kept.record.origin == Origin(RUN, origin.manifest.record)
    assert used_samples(kept.record) == used_samples(origin.record)
    genesis = read_genesis(log_dir)
    assert genesis.configuration == shared_configuration(found.config)
    assert kept.record.previous == genesis.hash(found.run_id)
    [(record, _)] = read_records(log_dir)
    assert record == kept.record
    one, other = by_name(kept), by_name(origin)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_fork_is_gone_on_with_as_any_run(runs: Runs) -> None:
    config = runs.begin()
    runs.keep(config, 4)
    fork = runs.resume("--model-pipeline.stages=3")
    fork.prepare(SystemClock(), runs.said.append, is_local=True)
    again = runs.resume()
    assert (again.run_id, again.source) == (fork.run_id, fork.source)
    assert again.config.model_pipeline == fork.config.model_pipeline


@pytest.mark.parametrize("flag", ["--run.seed=3", "--data.holdout-fraction=0.2"])
def test_of_other_samples_none_counts_as_trained(runs: Runs, flag: str) -> None:
    runs.keep(runs.begin(), 4)
    found = runs.resume(flag)
    assert runs.said[1] == "its samples, or their order, are others: none of them counts as trained"
    log_dir = found.prepare(SystemClock(), runs.said.append, is_local=True)
    [(record, _)] = read_records(log_dir)
    assert used_samples(record) == ()


def test_nobody_waits_for_the_peers_of_before(runs: Runs) -> None:
    runs.keep(runs.begin(), 4)
    left = runs.path / RUN / PEERS_FILE
    left.write_text("/ip4/127.0.0.1/tcp/1/p2p/nobody\n")
    found = runs.resume()
    assert left.exists(), "until it begins, nothing is changed"
    assert found.prepare(SystemClock(), runs.said.append, is_local=True) == runs.path / RUN
    assert not left.exists()


def test_of_two_that_resume_a_run_at_once_one_has_its_folder(runs: Runs, tmp_path: Path) -> None:
    runs.keep(runs.begin(), 4)
    one, other = runs.resume(), runs.resume()
    config = runs.path / RUN / "config.yaml"
    with RunDir(tmp_path) as first, RunDir(tmp_path) as second:
        one.prepare(SystemClock(), runs.said.append, is_local=True, claim=first.claim_folder)
        config.write_text("of the first one")
        with pytest.raises(ConfigError, match=f"{RUN} is in use"):
            other.prepare(SystemClock(), runs.said.append, is_local=True, claim=second.claim_folder)
        assert config.read_text() == "of the first one"


def test_another_number_of_units_is_refused_by_tensors_and_not_by_the_cut_of_the_run(runs: Runs) -> None:
    config = runs.begin()
    (runs.path / RUN / "config.yaml").write_text(dump_config(config))
    runs.keep(config, 4)
    with pytest.raises(ConfigError, match=r"the model has other tensors than the checkpoint: .*units\..* is absent"):
        runs.resume("--model.num-layers=2")


def test_what_does_not_go_together_is_no_fork(runs: Runs) -> None:
    runs.keep(runs.begin(), 4)
    with pytest.raises(ConfigError, match="can be cut into at most 3 stages"):
        runs.resume("--model-pipeline.stages=4")
    with pytest.raises(ConfigError, match="adds up to 6 units"):
        runs.resume("--model-pipeline.cut=3,3")


def test_resume_alone_means_latest() -> None:
    spelt_out = app.spelt_out
    assert spelt_out(["run-local", "--resume"]) == ["run-local", "--resume=latest"]
    assert spelt_out(["run-local", "--resume", "--no-wandb"]) == ["run-local", "--resume=latest", "--no-wandb"]
    assert spelt_out(["run-local", "--resume", "here"]) == ["run-local", "--resume", "here"]
    assert spelt_out(["run-local", "--resume=here"]) == ["run-local", "--resume=here"]


@pytest.mark.parametrize("command", ["run-local", "start-trainer-client"])
def test_the_fork_server_has_begun_when_the_launcher_imports_torch(command: str) -> None:
    code = (
        "import sys\n"
        "from shoal.cli import app, early, runs_here\n"
        "def begun(*_):\n"
        "    sys.exit(8 if 'torch' in sys.modules else 7)\n"
        "early.early_start = begun\n"
        "runs_here.end_leftovers = list\n"
        f"app.run(['{command}', '--resume'])\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 7
