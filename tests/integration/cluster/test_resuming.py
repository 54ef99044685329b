"""Everything of a run is gone but a checkpoint: another start goes on from it, to the last round."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import anyio
import pytest
import torch
from tests.alongside import until
from torch import Tensor

from shoal.averaging.journal import last_record, read_records
from shoal.checkpoint.model_layout import StageLayout, stage_layouts
from shoal.checkpoint.store import Checkpoint, CheckpointStore, StagePart
from shoal.checkpoint.stored import StageVectors, StoredCheckpoint
from shoal.client.resuming import KeptTotals, go_back
from shoal.clock import SystemClock
from shoal.config import Config
from shoal.swarm.records import GENERATIONS_APART
from shoal.wire.messages.control import StartRound
from shoal.wire.messages.mirror import RunCounts
from shoal.wire.messages.round import StageHashes
from shoal.wire.messages.step import Forward
from shoal.wire.messages.transfer import Have
from shoal_lab import Cluster, ClusterResult
from shoal_lab.client_host import RUN_ID

from .conftest import MakeCluster, make_config, make_text, run_noticed, run_undisturbed

CONFIG = make_config(diloco={"inner_steps": 4, "outer_steps": 6}, health={"lost_state_after_s": 0.3})


def store_of(log_dir: Path) -> CheckpointStore:
    return CheckpointStore(str(log_dir.parent / "checkpoints"), RUN_ID)


def keep(cluster: Cluster, config: Config, log_dir: Path) -> None:
    """Write a checkpoint of the newest record, while no replica swaps."""
    newest = last_record(log_dir)
    assert newest is not None
    record, signed = newest
    held = {server.stage: server.replica.member for server in cluster.servers}
    assert {member.base_round for member in held.values()} == {record.round}
    layouts = stage_layouts(config)
    totals = KeptTotals(cluster.client.ledger.totals, cluster.client.ledger.now_s())
    checkpoint = Checkpoint(
        signed=signed,
        genesis=(log_dir / "rounds/round_0000.json").read_bytes(),
        layouts=layouts,
        cut=[1] * len(layouts),
        members=[outcome.members for outcome in record.stages],
        unix_s=1.75e9,
        client=totals.encoded(),
    )
    store_of(log_dir).write(checkpoint, [StagePart(stage, held[stage].state.base) for stage in range(len(layouts))])


async def broken_off(
    make_cluster: MakeCluster,
    config: Config,
    *,
    kept: tuple[int, ...],
    dies: type,
    which: dict[str, int],
) -> Path:
    """Train until a message, keep checkpoints at the beginning of rounds, and lose every process at once."""
    gone = anyio.Event()
    async with make_cluster(config) as cluster:
        log_dir = cluster._log_dir
        for round in kept:
            cluster.when(StartRound, action=lambda: keep(cluster, config, log_dir), round=round + 1)
        cluster.when(dies, action=gone.set, **which)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cluster.run)
            await gone.wait()
            tasks.cancel_scope.cancel()
    return log_dir


async def resumed(
    config: Config, log_dir: Path, checkpoint: StoredCheckpoint, act: Callable[[Cluster], object] | None = None
) -> tuple[ClusterResult, list[str]]:
    go_back(log_dir, checkpoint, SystemClock().now_s())
    async with Cluster(config, log_dir=log_dir, dataset=make_text(1000), checkpoint=checkpoint) as cluster:
        if act is not None:
            act(cluster)
        return await run_noticed(cluster)


def good(log_dir: Path) -> StoredCheckpoint:
    checkpoint = store_of(log_dir).newest_good().checkpoint
    assert checkpoint is not None
    return checkpoint


async def lost_in_round_4(make_cluster: MakeCluster, config: Config = CONFIG) -> tuple[Path, dict[int, float]]:
    """Return the folder of a run with a checkpoint of round 2, and the losses that it has evaluated."""
    log_dir = await broken_off(make_cluster, config, kept=(2,), dies=Forward, which={"number": 14})
    lines = [json.loads(line) for line in (log_dir / "events.jsonl").read_text().splitlines()]
    return log_dir, {each["base_round"]: each["loss"] for each in lines if each["event"] == "evaluation.done"}


async def test_a_run_goes_on_from_a_checkpoint_as_if_its_record_were_the_newest(make_cluster: MakeCluster) -> None:
    log_dir, evaluated = await lost_in_round_4(make_cluster)
    checkpoint = good(log_dir)
    result, notices = await resumed(CONFIG, log_dir, checkpoint)
    assert [record.round for record in result.records] == [1, 2, 3, 4, 5, 6]
    assert result.records[2].previous == checkpoint.manifest.record
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    assert result.audit.samples == 6 * 2 * 4 * 4
    assert result.summary["steps"] == 6 * 2 * 4, "what was counted until the checkpoint, and from there on"
    assert result.summary["stages_restored"] == []
    assert result.summary["eval_losses"]["2"] == evaluated[2]
    # What came after the checkpoint is none of the run's any more, and is kept aside.
    assert [record.round for record, _ in read_records(log_dir / "left/1")] == [3]
    assert notices == [
        "servers take the state of stages 0, 1 from the checkpoint",
        "the inner optimizers of 4 servers begin anew (the checkpoint has nothing for them)",
    ]
    lowest = {
        slot: min(line.entry.key.generation for line in lines) for slot, lines in result.steps.items() if slot > 2
    }
    assert min(lowest.values()) >= GENERATIONS_APART, "steps of before have other names"


async def test_no_stage_begins_anew_while_the_checkpoint_is_being_read(make_cluster: MakeCluster) -> None:
    log_dir, _ = await lost_in_round_4(make_cluster)
    checkpoint = good(log_dir)
    vectors = checkpoint.vectors

    def read_slowly(stage: int, layout: StageLayout | None = None) -> StageVectors:
        threading.Event().wait(2 * CONFIG.health.lost_state_after_s)
        return vectors(stage, layout)

    checkpoint.vectors = read_slowly
    result, _ = await resumed(CONFIG, log_dir, checkpoint)
    assert result.summary["stages_restored"] == []
    assert [o.restored for record in result.records for o in record.stages] == [None] * 12


async def test_a_client_that_is_killed_while_it_resumes_resumes_again(make_cluster: MakeCluster) -> None:
    log_dir, _ = await lost_in_round_4(make_cluster)
    checkpoint = good(log_dir)

    def kill_at_the_first_offer(cluster: Cluster) -> None:
        cluster.when(Have, action=cluster.kill_client, sender=cluster.client_peer)

    result, _ = await resumed(CONFIG, log_dir, checkpoint, kill_at_the_first_offer)
    assert [record.round for record in result.records] == [1, 2, 3, 4, 5, 6]
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    assert result.summary["stages_restored"] == []


async def test_a_client_that_is_killed_when_the_run_has_gone_on_needs_no_checkpoint_any_more(
    make_cluster: MakeCluster,
) -> None:
    log_dir, _ = await lost_in_round_4(make_cluster)
    checkpoint = good(log_dir)

    def kill_in_round_5(cluster: Cluster) -> None:
        def remove_and_kill() -> None:
            # As a mirror does when there are newer ones.
            shutil.rmtree(log_dir.parent / "checkpoints")
            cluster.kill_client()

        cluster.when(Forward, action=remove_and_kill, number=18)

    result, _ = await resumed(CONFIG, log_dir, checkpoint, kill_in_round_5)
    assert [record.round for record in result.records] == [1, 2, 3, 4, 5, 6]
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    assert result.summary["stages_restored"] == []


async def test_a_run_is_resumed_in_another_folder_where_its_own_is_lost(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    log_dir, _ = await lost_in_round_4(make_cluster)
    checkpoint = good(log_dir)
    for name in ("rounds", "steps", "replicas"):
        shutil.rmtree(log_dir / name)
    (log_dir / "client.state").unlink()
    result, _ = await resumed(CONFIG, log_dir, checkpoint)
    assert [record.round for record in result.records] == [2, 3, 4, 5, 6]
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    assert result.summary["samples_before"] == 2 * 2 * 4 * 4
    shutil.rmtree(log_dir / "rounds")  # what is left cannot be replayed from its beginning


KEPT = make_config(
    # What a codec has left out so far is a part of what goes on.
    diloco={
        "inner_steps": 4,
        "outer_steps": 6,
        "averaging_compression": "2bit",
        "inner_optim": {"type": "muon"},
        "lr_schedule": {"type": "wsd", "warmup_steps": 2, "decay_fraction": 0.5},
    },
    health={"lost_state_after_s": 0.3},
    param_mirror={"every_rounds": 1, "keep_last": 3},
)


def hashes(result: ClusterResult) -> dict[int, list[StageHashes]]:
    return {record.round: [outcome.hashes for outcome in record.stages] for record in result.records}


async def lost_in_round_5(make_cluster: MakeCluster, config: Config = KEPT) -> Path:
    """Return the folder of a run with a mirror, whose newest checkpoint is that of round 4."""
    async with make_cluster(config) as cluster:
        await lost_with_a_checkpoint(cluster, 5)
    return cluster._log_dir


async def lost_with_a_checkpoint(cluster: Cluster, round: int) -> StoredCheckpoint:
    """Train with a mirror until the middle of a round, and return the checkpoint of the round before."""
    gone = anyio.Event()
    store = CheckpointStore(str(cluster._log_dir.parent / "checkpoints"), cluster._run_id)
    cluster.start_mirror(store)

    async def written() -> None:
        await until(lambda: round - 1 in store.rounds())
        assert cluster.client._pausing.resume("me")

    def pause() -> None:
        assert cluster.client._pausing.pause("me")
        cluster._tasks.start_soon(written)

    cluster.when(StartRound, action=pause, round=round)
    cluster.when(Forward, action=gone.set, number=4 * round - 2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cluster.run)
        await gone.wait()
        tasks.cancel_scope.cancel()
    return store.open(round - 1)


async def test_a_resumed_run_comes_to_the_hashes_of_one_that_was_never_lost(make_cluster: MakeCluster) -> None:
    undisturbed = await run_undisturbed(make_cluster, KEPT)
    log_dir = await lost_in_round_5(make_cluster)
    checkpoint = good(log_dir)
    assert checkpoint.record.round == 4
    assert checkpoint.record.keep
    assert [checkpoint.manifest.inner_slots(stage) for stage in range(2)] == [[0, 1], [0, 1]]
    result, notices = await resumed(KEPT, log_dir, checkpoint)
    assert notices[-1] == "the inner optimizers of all servers go on from where they were after round 4"
    assert hashes(result) == hashes(undisturbed)


STOPPED = KEPT.model_copy(
    update={"param_mirror": KEPT.param_mirror.model_copy(update={"every_rounds": 0, "every_s": None})}
)
"""Checkpoints of the first and the last record alone are wanted."""


async def stopped_in(cluster: Cluster, round: int) -> CheckpointStore:
    """Train with a mirror until the middle of a round, and stop the run as a user does."""
    store = CheckpointStore(str(cluster._log_dir.parent / "checkpoints"), cluster._run_id)
    cluster.start_mirror(store)

    async def written() -> None:
        await until(lambda: 1 in store.rounds())
        assert cluster.client._pausing.resume("me")

    def pause() -> None:
        assert cluster.client._pausing.pause("me")
        cluster._tasks.start_soon(written)

    # Replicas hold one copy: a run so fast may stop while the mirror still reads that of the first record.
    cluster.when(StartRound, action=pause, round=2)
    cluster.when(Forward, action=lambda: cluster.client.stop(), number=4 * round - 2)
    await cluster.host.run_client()
    return store


async def test_a_run_that_is_stopped_and_resumed_comes_to_the_hashes_of_one_that_was_never_stopped(
    make_cluster: MakeCluster,
) -> None:
    undisturbed = await run_undisturbed(make_cluster, STOPPED)
    async with make_cluster(STOPPED) as cluster:
        store = await stopped_in(cluster, 4)
        assert store.rounds()[-1] == 3, "servers are there until it is written"
        noted = [json.loads(line) for line in (cluster._log_dir / "events.jsonl").read_text().splitlines()]
        assert not [each for each in noted if each["event"] == "checkpoint.last_lacks"]
    checkpoint = good(cluster._log_dir)
    assert not checkpoint.record.keep
    assert [checkpoint.manifest.inner_slots(stage) for stage in range(2)] == [[0, 1], [0, 1]]
    result, notices = await resumed(STOPPED, cluster._log_dir, checkpoint)
    assert notices[-1] == "the inner optimizers of all servers go on from where they were after round 3"
    assert hashes(result) == hashes(undisturbed)
    assert result.summary["steps"] == undisturbed.summary["steps"], "what was begun of round 4 counts once"


async def test_a_run_whose_mirror_dies_is_stopped_all_the_same_and_says_what_it_has_not_kept(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster(STOPPED) as cluster:
        cluster.when(RunCounts, action=lambda: cluster.mirrors[0].process.kill(), is_last=True)
        await stopped_in(cluster, 4)
        noted = [json.loads(line) for line in (cluster._log_dir / "events.jsonl").read_text().splitlines()]
    [lacks] = [each for each in noted if each["event"] == "checkpoint.last_lacks"]
    assert (lacks["round"], lacks["lacks"]) == (3, "its mirror was lost before it was written")


def inner_states(cluster: Cluster) -> dict[int, list[dict[str, Tensor]]]:
    """What the inner optimizers of each stage know now, in the order of slots and then of the servers."""
    places = cluster.client._homes.in_order()
    of_peer = {server.peer: server.replica.compute.parts for server in cluster.servers}
    return {
        stage: [{name: each.clone() for name, each in of_peer[peer].inner_state().items()} for peer in peers]
        for stage, peers in enumerate(places)
    }


def is_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("num", "slots"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 0])])
async def test_each_slot_goes_on_with_its_inner_states_further_ones_copy_the_first_and_fewer_drop_the_last(
    make_cluster: MakeCluster, num: int, slots: list[int]
) -> None:
    log_dir = await lost_in_round_5(make_cluster)
    checkpoint = good(log_dir)
    found: list[dict[int, list[dict[str, Tensor]]]] = []
    config = KEPT.model_copy(update={"servers": KEPT.servers.model_copy(update={"replicas": num})})

    def look(cluster: Cluster) -> None:
        cluster.when(StartRound, action=lambda: found.append(inner_states(cluster)), round=5)

    result, notices = await resumed(config, log_dir, checkpoint, look)
    assert "the inner optimizers of all servers go on from where they were after round 4" in notices
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    for stage, states in found[0].items():
        kept = {slot: checkpoint.inner(stage, slot) or {} for slot in slots}
        assert all(kept.values())
        assert all(is_same(state, kept[slot]) for state, slot in zip(states, slots, strict=True))


async def test_a_replica_that_cannot_take_an_inner_state_begins_anew_and_the_run_goes_on(
    make_cluster: MakeCluster,
) -> None:
    log_dir = await lost_in_round_5(make_cluster)
    checkpoint = good(log_dir)
    read = checkpoint.inner_content

    def of_the_other_stage(stage: int, slot: int) -> bytes | None:
        return read(1 - stage, slot) if slot == 1 else read(stage, slot)

    checkpoint.inner_content = of_the_other_stage
    result, notices = await resumed(KEPT, log_dir, checkpoint)
    assert "the inner optimizers of 2 of 4 servers go on from where they were after round 4" in notices
    assert any("of 2 servers begin anew (it is the state of another stage's optimizer" in each for each in notices)
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
