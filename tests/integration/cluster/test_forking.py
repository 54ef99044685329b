"""A run goes on from a checkpoint of another one, in other stages, with other replicas, data or rounds."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from shoal.checkpoint.manifest import stored_layouts
from shoal.checkpoint.model_layout import stage_layouts
from shoal.checkpoint.stored import StoredCheckpoint
from shoal.cli.cuts import with_known_cut
from shoal.client.forking import write_fork
from shoal.client.resuming import go_back
from shoal.clock import SystemClock
from shoal.config import Config
from shoal.config.dump import dump_config
from shoal.errors import ConfigError
from shoal.replay.plan import plan_of
from shoal.replay.replay import replay
from shoal.replay.run_files import read_run
from shoal.wire.messages.control import StartRound
from shoal.wire.messages.round import Origin
from shoal.wire.messages.transfer import Have
from shoal_lab import Cluster
from shoal_lab.client_host import AUTHORITY, RUN_ID

from .conftest import MakeCluster, make_config, make_text, reproduces
from .test_resuming import good, inner_states, is_same, lost_in_round_4, lost_with_a_checkpoint, resumed


def cut_into(stages: int, *, replicas: int = 2, diloco: dict[str, Any] | None = None, **sections: Any) -> Config:
    """A configuration with its cut, as its launcher knows it."""
    config = make_config(
        model={"num_layers": 3},
        model_pipeline={"stages": stages, "microbatches": 2},
        diloco={"inner_steps": 4, "outer_steps": 6, **(diloco or {})},
        servers={"replicas": replicas},
        health={"lost_state_after_s": 0.3},
        param_mirror={"every_rounds": 1, "keep_last": 3},
        **sections,
    )
    return with_known_cut(config)


def forked(origin: StoredCheckpoint, config: Config, run_id: str, log_dir: Path) -> StoredCheckpoint:
    """The first checkpoint of a fork, whose folder is empty."""
    log_dir.mkdir()
    location = config.model_copy(update={"checkpoint_dir": str(log_dir.parent / "checkpoints")})
    return write_fork(origin, config=location, run_id=run_id, authority=AUTHORITY, clock=SystemClock())


def states_of(checkpoint: StoredCheckpoint) -> dict[str, Tensor]:
    """Parameters, momentum and buffers by name."""
    files = [checkpoint.tensors(stage) for stage in range(len(checkpoint.manifest.stages))]
    return {name: file.read(name) for file in files for name in file.shapes}


def inner_of(checkpoint: StoredCheckpoint, slot: int) -> dict[str, Tensor]:
    """What the inner optimizers of a slot, or of the first one, knew by name."""
    stages = [checkpoint.inner(stage, slot) for stage in range(len(checkpoint.manifest.stages))]
    return {name: tensor for each in stages for name, tensor in (each or {}).items()}


class Look:
    """What the replicas of a cluster hold when a round begins, by name.

    Attributes:
        outer: of each server.
        inner: of each place, those of slots first.
    """

    def __init__(self, cluster: Cluster, config: Config, round: int) -> None:
        self._cluster, self._config = cluster, config
        self.outer: list[dict[str, Tensor]] = []
        self.inner: list[dict[str, Tensor]] = []
        cluster.when(StartRound, action=self._look, round=round)

    def _look(self) -> None:
        layouts = stage_layouts(self._config)
        for server in self._cluster.servers:
            pairs = zip(stored_layouts(layouts[server.stage]), server.replica.member.state.base, strict=True)
            self.outer.append(
                {
                    name: view.clone()
                    for each, flat in pairs
                    for name, view in zip(each.names, each.views(flat), strict=True)
                }
            )
        for places in zip(*inner_states(self._cluster).values(), strict=True):
            self.inner.append({name: tensor for stage in places for name, tensor in stage.items()})

    def require(self, outer: Mapping[str, Tensor], inner: list[dict[str, Tensor]]) -> None:
        """Check that each server holds what it has of these, and that all together hold all."""
        for found in self.outer:
            assert is_same(found, {name: outer[name] for name in found})
        assert {name for found in self.outer for name in found} == outer.keys()
        assert len(self.inner) == len(inner)
        assert all(inner)
        for found, wanted in zip(self.inner, inner, strict=True):
            assert is_same(found, wanted)


async def test_two_three_and_two_stages_of_one_three_and_two_replicas_have_the_same_state_by_name(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    async with make_cluster(cut_into(2, replicas=1)) as cluster:
        first = await lost_with_a_checkpoint(cluster, 3)
    three = cut_into(3, replicas=3, diloco={"outer_steps": 7, "fragments": 2})
    checkpoint = forked(first, three, "three", tmp_path / "three")
    assert is_same(states_of(checkpoint), states_of(first))
    go_back(tmp_path / "three", checkpoint, SystemClock().now_s())
    async with Cluster(three, log_dir=tmp_path / "three", dataset=make_text(1000), checkpoint=checkpoint) as cluster:
        look = Look(cluster, three, 3)
        second = await lost_with_a_checkpoint(cluster, 5)
    look.require(states_of(first), [inner_of(first, 0)] * 3)
    reproduces(tmp_path / "three", three, make_text(1000))
    assert [second.manifest.inner_slots(stage) for stage in range(3)] == [[0, 1, 2]] * 3
    two = cut_into(2, replicas=2)
    checkpoint = forked(second, two, "two", tmp_path / "two")
    looks: list[Look] = []
    result, notices = await resumed(
        two, tmp_path / "two", checkpoint, lambda cluster: looks.append(Look(cluster, two, 5))
    )
    looks[0].require(states_of(second), [inner_of(second, slot) for slot in range(2)])
    assert "the inner optimizers of all servers go on from where they were after round 4" in notices
    assert [record.round for record in result.records] == [4, 5, 6]
    assert (result.audit.duplicates, result.audit.missing, result.audit.unreached) == (0, 0, 0)
    assert (result.audit.samples_before, result.audit.samples) == ((2 * 1 + 2 * 3) * 16, 2 * 2 * 16)
    verdict = reproduces(tmp_path / "two", two, make_text(1000))
    assert (verdict.rounds, verdict.steps) == (2, 2 * 2 * 4)


async def test_a_fork_is_a_run_of_its_own_on_top_of_the_origins_record(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    log_dir, evaluated = await lost_in_round_4(make_cluster, cut_into(2))
    origin = good(log_dir)
    config = cut_into(3, diloco={"outer_steps": 7})
    checkpoint = forked(origin, config, "three", tmp_path / "three")
    result, notices = await resumed(config, tmp_path / "three", checkpoint)
    assert [record.round for record in result.records] == [2, 3, 4, 5, 6, 7]
    assert {record.run_id for record in result.records} == {"three"}
    assert result.records[0].origin == Origin(RUN_ID, origin.manifest.record)
    assert result.records[1].previous == checkpoint.manifest.record
    assert [len(record.stages) for record in result.records] == [3] * 6
    assert notices == [
        "servers take the state of stages 0, 1, 2 from the checkpoint",
        "the inner optimizers of 6 servers begin anew (the checkpoint has nothing for them)",
    ]
    assert (result.audit.duplicates, result.audit.missing, result.audit.unreached) == (0, 0, 0)
    assert (result.audit.samples_before, result.audit.samples) == (2 * 2 * 4 * 4, 5 * 2 * 4 * 4)
    assert result.summary["stages_restored"] == []
    assert math.isclose(result.summary["eval_losses"]["2"], evaluated[2], rel_tol=1e-6)


async def test_another_inner_optimizer_begins_anew_which_is_said(make_cluster: MakeCluster, tmp_path: Path) -> None:
    async with make_cluster(cut_into(2)) as cluster:
        origin = await lost_with_a_checkpoint(cluster, 3)
    config = cut_into(3, diloco={"inner_optim": {"type": "sgd"}})
    result, notices = await resumed(config, tmp_path / "fork", forked(origin, config, "fork", tmp_path / "fork"))
    [said] = [notice for notice in notices if "begin anew" in notice]
    assert "6 servers begin anew (it is the state of another stage's optimizer, or of one of another type)" in said
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    reproduces(tmp_path / "fork", config, make_text(1000))


async def test_a_fork_of_which_everything_is_lost_is_resumed_as_any_run(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    log_dir, _ = await lost_in_round_4(make_cluster, cut_into(2))
    config = cut_into(3)
    checkpoint = forked(good(log_dir), config, "fork", tmp_path / "fork")

    def kill_at_the_first_offer(cluster: Cluster) -> None:
        cluster.when(Have, action=cluster.kill_client, sender=cluster.client_peer)

    result, _ = await resumed(config, tmp_path / "fork", checkpoint, kill_at_the_first_offer)
    assert [record.round for record in result.records] == [2, 3, 4, 5, 6]
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)


async def test_a_fork_with_other_data_trains_it_from_its_beginning(make_cluster: MakeCluster, tmp_path: Path) -> None:
    log_dir, _ = await lost_in_round_4(make_cluster, cut_into(2))
    config = cut_into(2, run={"deterministic": True, "seed": 4})
    checkpoint = forked(good(log_dir), config, "fork", tmp_path / "fork")
    result, _ = await resumed(config, tmp_path / "fork", checkpoint)
    assert (result.audit.samples_before, result.audit.samples) == (0, 4 * 2 * 4 * 4)
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    reproduces(tmp_path / "fork", config, make_text(1000))


async def test_a_fork_is_replayed_with_the_d_0_and_the_checkpoint_that_it_began_with_and_not_without(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    log_dir, _ = await lost_in_round_4(make_cluster, cut_into(2))
    origin, folder, config = good(log_dir), tmp_path / "fork", cut_into(2, diloco={"outer_steps": 3})
    await resumed(config, folder, forked(origin, config, "fork", folder))
    genesis = folder / "rounds/round_0000.json"
    content = genesis.read_text()
    genesis.write_text(json.dumps(json.loads(content) | {"seed": 17}))
    [difference] = replay(folder, config=config, dataset=make_text(1000)).differences
    assert (difference.round, difference.what) == (2, "the fork's first record does not follow its D_0")
    genesis.write_text(content)
    forked(origin, config, "fork", tmp_path / "again")  # in the place of the first one
    with pytest.raises(ConfigError, match="is of another record"):
        replay(folder, config=config, dataset=make_text(1000))
    shutil.rmtree(tmp_path / "checkpoints/fork")
    with pytest.raises(ConfigError, match="is a fork of run cluster: what its first checkpoint holds, of round 2, was"):
        replay(folder, config=config, dataset=make_text(1000))


@pytest.mark.slow
async def test_one_process_and_several_come_to_the_hashes_of_a_fork(make_cluster: MakeCluster, tmp_path: Path) -> None:
    data = {"dataset_name": "pydoc-topics", "task_type": "llm", "seq_len": 16}
    async with make_cluster(cut_into(2, data=data), dataset=None) as cluster:
        origin = await lost_with_a_checkpoint(cluster, 3)
    config, folder = cut_into(3, data=data), tmp_path / "fork"
    checkpoint = forked(origin, config, "fork", folder)
    go_back(folder, checkpoint, SystemClock().now_s())
    async with Cluster(config, log_dir=folder, checkpoint=checkpoint) as cluster:
        await cluster.run()
    (folder / "config.yaml").write_text(dump_config(config))
    assert len(set(plan_of(read_run(folder)).homes(3, 1))) == 3
    for num_processes in (1, 3):
        verdict = replay(folder, num_processes=num_processes)
        assert verdict.agrees, verdict.differences
