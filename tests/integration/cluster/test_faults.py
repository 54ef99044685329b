"""Servers and trainers that die at a chosen message: no sample is lost or doubled, survivors agree, the run goes on."""

from __future__ import annotations

import hashlib

import anyio
import pytest

from shoal.errors import ControlError
from shoal.ids import PeerId, StepKey
from shoal.wire.messages.collective import RingPart
from shoal.wire.messages.control import EvalReport, StartRound, StepReport, TrainerDone
from shoal.wire.messages.feed import Acknowledge, BatchReady, Lease, NoteAttempt
from shoal.wire.messages.round import Close, CommitRecord, Join, Propose
from shoal.wire.messages.step import (
    Backward,
    Commit,
    Committed,
    EvalForward,
    EvalRefused,
    Forward,
    MicrobatchDone,
    Open,
    Opened,
    Prepared,
)
from shoal_lab import Cluster, ClusterResult

from .conftest import SEQ_LEN, MakeCluster, make_config, run_undisturbed

CONFIG = make_config(diloco={"inner_steps": 4, "outer_steps": 4})
# Server i serves stage i % 2, so servers 2 and 3 are the home of slot 1 and have the steps of trainer 1.
VICTIM_STAGE_0, VICTIM_STAGE_1 = 2, 3


def kill_data_server(cluster: Cluster) -> None:
    """Kill it; it is started again soon."""

    async def come_back() -> None:
        await anyio.sleep(0.05)
        cluster.restart_data_server()

    cluster.kill_data_server()
    cluster._tasks.start_soon(come_back)


def check_agreement(cluster: Cluster, result: ClusterResult, not_evaluated: int | None = None) -> None:
    """Every sample once, every live server holds the last record's bytes, and the records were evaluated."""
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    assert len(result.records) == 4
    for server in cluster.servers:
        if server.process.running:
            held = hashlib.sha256(server.parameters().numpy().tobytes()).hexdigest()
            assert held == result.hashes[server.stage]
            assert server.replica.member.base_round == 4
    assert list(result.progress.eval_losses) == [round for round in range(5) if round != not_evaluated]
    costs = sum(incident["steps_lost"] for incident in result.summary["incidents"])
    assert costs + result.summary["steps_lost_otherwise"] == sum(result.summary["steps_lost"].values())


@pytest.mark.usual("Open-3-False", "Prepared-2-True", "Commit-3-False")
@pytest.mark.parametrize(
    ("kind", "index", "is_sender"),
    [
        (Open, VICTIM_STAGE_1, False),
        (Opened, VICTIM_STAGE_0, True),
        (Forward, VICTIM_STAGE_1, False),
        (Backward, VICTIM_STAGE_0, False),
        (Prepared, VICTIM_STAGE_0, True),
        (Commit, VICTIM_STAGE_1, False),
        (Committed, VICTIM_STAGE_0, True),
    ],
)
async def test_a_server_dies_in_a_step_and_another_replica_takes_over(
    make_cluster: MakeCluster, kind: type, index: int, is_sender: bool
) -> None:
    async with make_cluster(CONFIG) as cluster:
        peer = cluster.servers[index].peer
        ends = {"sender": peer} if is_sender else {"receiver": peer}
        cluster.when(kind, action=lambda: cluster.kill_server(index), number=6, **ends)
        result = await cluster.run()
        check_agreement(cluster, result)
    stage = index % 2
    # Steps 4 and 5 of trainer 1, committed by the victim since the record of round 1, are its loss; with them goes the
    # one in which it died, if the other stage has committed it.
    died_after_commit = kind in (Commit, Committed)
    assert result.audit.steps_lost == {stage: 2 + died_after_commit, 1 - stage: 0}
    assert result.records[1].stages[stage].steps_lost == 2 + died_after_commit
    attempts = {line.entry.key.attempt for line in result.steps[2] if line.entry.key[:3] == (1, 1, 6)}
    assert attempts == {0 if died_after_commit else 1}
    assert len(result.steps[2]) == 16 - 2 - died_after_commit
    # Only one pipeline is left from round 3 on.
    trainers = [{line.entry.key.trainer for line in result.steps[round]} for round in (1, 2, 3, 4)]
    assert trainers == [{0, 1}, {0, 1}, {0}, {0}]
    [failover] = result.summary["failovers"]
    assert failover["kind"] == "server"
    assert failover["recovered_after_s"] > 0
    [incident] = result.summary["incidents"]
    assert (incident["kind"], incident["stage"], incident["round"]) == ("server", stage, 2)
    assert incident["steps_lost"] == 2 + died_after_commit
    assert incident["back_after_s"] is None


@pytest.mark.usual("RingPart", "CommitRecord")
@pytest.mark.parametrize("kind", [Close, Join, Propose, RingPart, CommitRecord])
async def test_a_server_dies_in_the_averaging_and_the_others_finish_it(make_cluster: MakeCluster, kind: type) -> None:
    async with make_cluster(CONFIG) as cluster:
        ends = {"sender" if kind is Join else "receiver": cluster.servers[VICTIM_STAGE_0].peer}
        # A committed record is named in CommitRecord; the others name the round themselves.
        which = {"after": 1} if kind is CommitRecord else {"round": 2}
        cluster.when(kind, action=lambda: cluster.kill_server(VICTIM_STAGE_0), **ends, **which)
        result = await cluster.run()
        check_agreement(cluster, result)
    # Before the record its share of round 2 is lost; afterwards the others have it.
    assert result.audit.steps_lost == {0: 0 if kind is CommitRecord else 4, 1: 0}


async def test_a_spare_takes_the_place_of_a_dead_server(make_cluster: MakeCluster) -> None:
    async with make_cluster(CONFIG, replicas=[0, 1, 0, 1, 0]) as cluster:
        victim = cluster.servers[VICTIM_STAGE_0]
        cluster.when(Forward, action=lambda: cluster.kill_server(VICTIM_STAGE_0), receiver=victim.peer, number=6)
        result = await cluster.run()
        check_agreement(cluster, result)
        spare = cluster.servers[4]
    # It takes over in the step, and keeps the pipeline.
    assert [dict(zip(r.stages[0].members, r.stages[0].weights, strict=True))[spare.peer] for r in result.records] == [
        0,
        8 * SEQ_LEN,
        16 * SEQ_LEN,
        16 * SEQ_LEN,
    ]
    assert {line.entry.key.trainer for line in result.steps[4]} == {0, 1}


@pytest.mark.usual("StartRound-False-1", "Prepared-False-1", "Commit-True-1")
@pytest.mark.parametrize(
    ("kind", "is_sender", "after"),
    [
        (StartRound, False, 1),
        (Lease, True, 5),
        (BatchReady, False, 7),
        (NoteAttempt, True, 0),
        (Open, True, 1),
        (MicrobatchDone, False, 0),
        (Prepared, False, 1),
        (Commit, True, 0),
        (Commit, True, 1),
        (Committed, False, 1),
        (Acknowledge, True, 0),
        (StepReport, True, 0),
    ],
)
async def test_a_trainer_dies_and_a_new_generation_does_the_rest_of_its_round(
    make_cluster: MakeCluster, kind: type, is_sender: bool, after: int
) -> None:
    undisturbed = await run_undisturbed(make_cluster, CONFIG, 40)
    async with make_cluster(CONFIG, num_train=40) as cluster:
        peer = cluster.trainer_peer(1)
        ends = {"sender": peer} if is_sender else {"receiver": peer}
        which = {"number": 5} if kind not in (StartRound, Lease, BatchReady) else {}
        cluster.when(kind, action=lambda: cluster.kill_trainer(1), after=after, **ends, **which)
        result = await cluster.run()
        check_agreement(cluster, result)
    # Whatever was committed and not reported, and whatever was not: every step is done once, with the same batch.
    assert result.hashes == undisturbed.hashes
    assert result.audit.steps == undisturbed.audit.steps
    assert result.audit.steps_lost == {0: 0, 1: 0}
    assert result.progress.eval_losses == undisturbed.progress.eval_losses
    in_round_2 = {line.entry.key for line in result.steps[2] if line.entry.key.trainer == 1}
    assert sorted(key.number for key in in_round_2) == [4, 5, 6, 7]
    committed = {StartRound: 0, Commit: 1 + (after > 0), Committed: 2, Acknowledge: 2, StepReport: 2}
    first = sorted(key.number for key in in_round_2 if key.generation == 1)
    assert len(first) in {committed.get(kind, 1), 1 + (kind is Commit)}
    assert result.records[1].generations == {0: 1, 1: 2}
    [failover] = result.summary["failovers"]
    assert failover["kind"] == "trainer"
    assert failover["recovered_after_s"] > 0


async def test_a_trainer_dies_in_the_last_round_and_nothing_is_missing(make_cluster: MakeCluster) -> None:
    undisturbed = await run_undisturbed(make_cluster, CONFIG)
    async with make_cluster(CONFIG) as cluster:
        cluster.when(Prepared, action=lambda: cluster.kill_trainer(0), receiver=cluster.trainer_peer(0), number=15)
        result = await cluster.run()
        check_agreement(cluster, result)
    assert (result.hashes, result.audit.samples) == (undisturbed.hashes, undisturbed.audit.samples)


async def test_both_trainers_die_one_of_them_twice_and_the_run_is_as_if_nothing_had_been(
    make_cluster: MakeCluster,
) -> None:
    undisturbed = await run_undisturbed(make_cluster, CONFIG)
    async with make_cluster(CONFIG) as cluster:
        for slot, number in ((0, 5), (1, 5), (1, 6)):
            cluster.when(
                Open,
                action=lambda slot=slot: cluster.kill_trainer(slot),
                sender=cluster.trainer_peer(slot),
                number=number,
            )
        result = await cluster.run()
        check_agreement(cluster, result)
    assert result.hashes == undisturbed.hashes
    assert result.records[1].generations == {0: 2, 1: 3}


async def test_a_trainer_and_a_server_of_its_path_die_at_once(make_cluster: MakeCluster) -> None:
    def both() -> None:
        cluster.kill_trainer(1)
        cluster.kill_server(VICTIM_STAGE_1)

    async with make_cluster(CONFIG) as cluster:
        cluster.when(Commit, action=both, sender=cluster.trainer_peer(1), number=5, after=1)
        result = await cluster.run()
        check_agreement(cluster, result)
    # One replica of the path has committed step 5 (it stands), and the slot goes on after it.
    assert {line.entry.key.number for line in result.steps[2] if line.entry.key.trainer == 1} >= {5, 6, 7}


@pytest.mark.usual("3")
@pytest.mark.parametrize("index", [VICTIM_STAGE_0, VICTIM_STAGE_1])
async def test_a_record_is_evaluated_over_shared_replicas_when_a_server_dies_in_the_evaluation(
    make_cluster: MakeCluster, index: int
) -> None:
    undisturbed = await run_undisturbed(make_cluster, CONFIG)
    async with make_cluster(CONFIG) as cluster:
        peer, other = cluster.servers[index].peer, cluster.servers[index - 2].peer
        cluster.when(EvalForward, action=lambda: cluster.freeze_server(index), receiver=peer, base_round=2)
        cluster.when(Committed, action=lambda: cluster.kill_server(index), sender=other, number=8)
        result = await cluster.run()
        check_agreement(cluster, result)
    # The other trainer has trained on the shared replica before that, but D_2 is what is evaluated.
    for round in (0, 1, 2):
        assert result.progress.eval_losses[round] == undisturbed.progress.eval_losses[round]
    assert result.progress.eval_losses[3] != undisturbed.progress.eval_losses[3]


async def test_a_record_is_evaluated_over_others_when_two_replicas_of_the_path_lose_each_other_and_nobody_else(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster(CONFIG) as cluster:
        first, second = cluster.servers[VICTIM_STAGE_0].peer, cluster.servers[VICTIM_STAGE_1].peer
        refused: list[str] = []
        deliver = cluster.network.before_delivery
        assert deliver is not None

        def look(sender: PeerId, receiver: PeerId, message: object) -> None:
            if isinstance(message, EvalRefused):
                refused.append(sender)
            if isinstance(message, EvalForward) and (sender, message.base_round) == (first, 2) and not refused:
                cluster.network.cut(first, second)  # it is lost on its way
            deliver(sender, receiver, message)

        cluster.network.before_delivery = look
        result = await cluster.run()
    assert refused
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    assert 2 in result.progress.eval_losses


async def test_three_pipelines_go_on_as_two_without_a_gap_in_the_samples(make_cluster: MakeCluster) -> None:
    config = CONFIG.model_copy(update={"servers": CONFIG.servers.model_copy(update={"replicas": 3})})
    async with make_cluster(config, num_train=31) as cluster:
        middle = cluster.servers[VICTIM_STAGE_0]
        cluster.when(Forward, action=lambda: cluster.kill_server(VICTIM_STAGE_0), receiver=middle.peer, number=5)
        result = await cluster.run()
        check_agreement(cluster, result)
    trainers = [{line.entry.key.trainer for line in result.steps[round]} for round in (1, 2, 3, 4)]
    assert trainers == [{0, 1, 2}, {0, 1, 2}, {0, 1}, {0, 1}]
    assert result.audit.steps == 4 * (3 + 3 + 2 + 2)


async def test_the_last_evaluation_is_repeated_when_a_trainer_dies_in_it(make_cluster: MakeCluster) -> None:
    undisturbed = await run_undisturbed(make_cluster, CONFIG)
    async with make_cluster(CONFIG) as cluster:
        cluster.when(EvalForward, action=lambda: cluster.kill_trainer(1), sender=cluster.trainer_peer(1), base_round=4)
        result = await cluster.run()
        check_agreement(cluster, result)
    assert result.hashes == undisturbed.hashes
    assert result.progress.eval_losses == undisturbed.progress.eval_losses


async def test_reports_for_another_slot_are_not_counted(make_cluster: MakeCluster) -> None:
    undisturbed = await run_undisturbed(make_cluster, CONFIG)
    async with make_cluster(CONFIG) as cluster:

        def lie() -> None:
            key = StepKey(0, 1, 0, 0)
            liar = cluster.trainer_endpoint(1)
            liar.post(cluster.client_peer, StepReport(0, 2, key, 1000, 1000, 0.0, 0.0, 0.0, False, 0.0, 0.0))
            liar.post(cluster.client_peer, EvalReport(0, 1, -1000.0, 6, 6))
            liar.post(cluster.client_peer, TrainerDone(0, 2, 4, 16, {}))

        cluster.when(Open, action=lie, sender=cluster.trainer_peer(1), number=4)
        result = await cluster.run()
        check_agreement(cluster, result)
    assert result.hashes == undisturbed.hashes
    assert result.progress.eval_losses == undisturbed.progress.eval_losses
    assert result.progress.samples == undisturbed.progress.samples


@pytest.mark.usual("Commit")
@pytest.mark.parametrize("kind", [Commit, Close])
async def test_a_client_that_loses_living_servers_has_them_back_before_they_announce_themselves(
    make_cluster: MakeCluster, kind: type
) -> None:
    async with make_cluster(CONFIG) as cluster:

        def part() -> None:
            # As after a time in which the client was frozen: they have closed their connections with it.
            for server in cluster.servers:
                cluster.network.unlink(cluster.client_peer, server.peer, "silent")

        cluster.when(kind, action=part, after=10 if kind is Commit else 5)
        result = await cluster.run()
        check_agreement(cluster, result)
    assert result.hashes == (await run_undisturbed(make_cluster, CONFIG)).hashes
    assert [len(stage.members) for stage in result.records[-1].stages] == [2, 2]


async def test_trainers_that_never_train_end_the_run(make_cluster: MakeCluster) -> None:
    config = make_config(diloco={"outer_steps": 5}, servers={"replicas": 1})
    async with make_cluster(config) as cluster:
        for round in (2, 3, 4):
            for after in range(4):
                cluster.when(StartRound, action=lambda: cluster.kill_trainer(0), round=round, after=after)
        with pytest.RaisesGroup(ControlError, flatten_subgroups=True):
            await cluster.run()
        result = await cluster.result("failed")
    assert [bool(record.samples) for record in result.records] == [True, False, False, False]
    # Without a sample in it, a round changes nothing.
    assert len({record.stages[0].hashes.parameters for record in result.records}) == 1


@pytest.mark.usual("Lease-9-True", "Commit-20-False", "Close-4-True")
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    ("kind", "after"),
    [(StartRound, 2), (Lease, 9), (BatchReady, 10), (NoteAttempt, 10), (Commit, 20), (Acknowledge, 11), (Close, 4)],
)
async def test_a_data_server_that_is_started_again_goes_on_without_a_sample_twice_or_missing(
    make_cluster: MakeCluster, kind: type, after: int, deterministic: bool
) -> None:
    config = make_config(
        run={"deterministic": deterministic}, diloco={"inner_steps": 4, "outer_steps": 4}, servers={"replicas": 2}
    )
    async with make_cluster(config) as cluster:
        cluster.when(kind, action=lambda: kill_data_server(cluster), after=after)
        result = await cluster.run()
        check_agreement(cluster, result)
    assert result.records[1].generations == {0: 1, 1: 1}, "no trainer died of it"
    if deterministic:
        undisturbed = await run_undisturbed(make_cluster, config)
        assert result.audit.steps == undisturbed.audit.steps
        assert result.hashes == undisturbed.hashes
    assert [failover["kind"] for failover in result.summary["failovers"]] == ["data_server"]


@pytest.mark.usual("True-True")
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("is_trainer_first", [True, False])
async def test_a_data_server_and_a_trainer_die_in_one_round(
    make_cluster: MakeCluster, is_trainer_first: bool, deterministic: bool
) -> None:
    config = make_config(
        run={"deterministic": deterministic}, diloco={"inner_steps": 6, "outer_steps": 4}, servers={"replicas": 2}
    )
    async with make_cluster(config) as cluster:
        numbers = (7, 9) if is_trainer_first else (9, 7)
        peer = cluster.trainer_peer(1)
        cluster.when(Prepared, action=lambda: cluster.kill_trainer(1), receiver=peer, number=numbers[0])
        cluster.when(Prepared, action=lambda: kill_data_server(cluster), receiver=peer, number=numbers[1])
        result = await cluster.run()
        check_agreement(cluster, result)
    assert sorted(failover["kind"] for failover in result.summary["failovers"]) == ["data_server", "trainer"]
    if deterministic:
        assert result.audit.steps == 2 * 6 * 4
