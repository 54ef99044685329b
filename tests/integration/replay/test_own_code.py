"""A folder may name code: a replay imports what the person at this host has named, and nothing for forged records."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import pytest
from tests.foreign_code import NAME, lay_trap
from tests.integration.cluster.conftest import make_config
from tests.integration.replay.conftest import CONFIG
from tests.integration.replay.own_text import Letters, OwnGpt
from tests.integration.replay.test_replay import signed_by_a_stranger

from shoal.averaging.journal import read_genesis, write_genesis
from shoal.cli import main
from shoal.config import Config
from shoal.config.dump import dump_config
from shoal.config.shared import shared_configuration
from shoal.errors import ConfigError
from shoal.replay.own_code import NamedCode
from shoal.replay.plan import plan_of
from shoal.replay.processes import Processes
from shoal.replay.replay import replay
from shoal.replay.run_files import read_run
from shoal_lab import Cluster

FAMILY, DATASET = (f"{each.__module__}:{each.__qualname__}" for each in (OwnGpt, Letters))


def forged(folder: Path, section: str, key: str, name: str = f"{NAME}:X") -> None:
    """Have D_0 and the configuration in a folder name code."""
    values = CONFIG.model_dump()
    values[section][key] = name
    config = Config.model_validate(values)
    (folder / "config.yaml").write_text(dump_config(config))
    genesis = read_genesis(folder)
    write_genesis(folder, msgspec.structs.replace(genesis, configuration=shared_configuration(config)))


@pytest.mark.parametrize(("section", "key"), [("data", "dataset_name"), ("model", "family")])
def test_code_that_a_folder_names_is_not_imported_and_what_names_it_is_said(
    section: str,
    key: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace = lay_trap(tmp_path, monkeypatch)
    forged(folder, section, key)
    signed_by_a_stranger(folder, also_the_first=True)
    assert main(["replay", str(folder), "--processes", "2"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{folder / 'config.yaml'} names '{NAME}:X' by {section}.{key}" in said
    assert f"say --{key.replace('_', '-')} {NAME}:X" in said
    assert NAME not in sys.modules
    assert not trace.exists()


def test_code_that_was_named_is_not_imported_where_no_record_follows_from_the_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who has no key of the swarm can change D_0 and the configuration, and sign nothing that follows from them."""
    trace = lay_trap(tmp_path, monkeypatch)
    forged(folder, "data", "dataset_name")
    assert main(["replay", str(folder), "--dataset-name", f"{NAME}:X"]) == 1
    assert "which is not run for such records: round 1: the record follows" in " ".join(capsys.readouterr().err.split())
    assert not trace.exists()


def test_a_process_of_a_replay_looks_itself(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder may change after the replay has looked at it."""
    trace = lay_trap(tmp_path, monkeypatch)
    homes = plan_of(read_run(folder)).homes(2, 1)
    forged(folder, "data", "dataset_name")
    signed_by_a_stranger(folder, also_the_first=True)
    with (
        Processes(folder, homes, lambda round: None, NamedCode(FAMILY)) as processes,
        pytest.raises(ConfigError, match=f"say --dataset-name {NAME}:X"),
    ):
        list(processes.finish())
    assert not trace.exists()


async def test_a_run_with_code_of_ones_own_is_reproduced_where_that_is_named(tmp_path: Path) -> None:
    config = make_config(
        model={"family": FAMILY},
        data={"dataset_name": DATASET, "arguments": {"count": 300}, "seq_len": 16},
        diloco={"inner_steps": 2, "outer_steps": 1},
    )
    async with Cluster(config, log_dir=tmp_path) as cluster:
        with anyio.fail_after(240):
            await cluster.run()
    (tmp_path / "config.yaml").write_text(dump_config(config))
    for named in (NamedCode(), NamedCode(family=FAMILY), NamedCode(dataset=DATASET), NamedCode(DATASET, FAMILY)):
        with pytest.raises(ConfigError):
            replay(tmp_path, named=named)
    for processes in (1, 2):
        verdict = await anyio.to_thread.run_sync(
            lambda number=processes: replay(tmp_path, num_processes=number, named=NamedCode(FAMILY, DATASET))
        )
        assert verdict.agrees, verdict.differences
