"""A client that dies at a chosen message and is started again: the run goes on where it was, with right totals."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
from tests.covering import covering

from shoal.errors import NoPipeline, RecordRejected
from shoal.wire.messages.collective import RingPart
from shoal.wire.messages.control import EvalReport, StartRound, StepReport, TrainerDone, TrainerHello
from shoal.wire.messages.feed import Acknowledge, HoldoutInfo, Lease, PlanRound, RecordSamples
from shoal.wire.messages.round import Close, CommitRecord, Join, PrepareRecord, Propose, RecordPrepared, Staged, Swapped
from shoal.wire.messages.step import Commit, Fence, Fenced, Open, Prepared
from shoal_lab import Cluster, ClusterResult

from .conftest import MakeCluster, make_config, run_undisturbed
from .test_faults import check_agreement

BOTH = [True, pytest.param(False, marks=pytest.mark.slow)]
CONFIG = make_config(diloco={"inner_steps": 4, "outer_steps": 4})
NOT_REPEATED = (
    "samples_per_s",
    "seconds_to_first_step",
    "failovers",
    "incidents",
    "bytes_sent",
    "counters",
    # Of the step that was reported first and last: trainers that step at the same time may come in either order.
    "loss_first",
    "loss_last",
    # Each run has a folder of its own.
    "model",
)
"""Of a summary: what two runs do not have in common."""


def check_same(result: ClusterResult, expected: ClusterResult) -> None:
    """The run has come to the same as one in which nobody died, and its summary says so."""
    assert result.hashes == expected.hashes
    assert result.steps == expected.steps or _keys(result) == _keys(expected)
    for name in expected.summary:
        if name not in NOT_REPEATED:
            assert result.summary[name] == expected.summary[name], name
    assert 0 < result.summary["seconds_to_first_step"] < 60
    assert result.summary["samples_per_s"] > 0
    sent, usual = result.summary["bytes_sent"], expected.summary["bytes_sent"]
    assert (sent["activations"], sent["gradients"]) == (usual["activations"], usual["gradients"])
    # A round that was being averaged is averaged again.
    assert usual["pseudo_gradients"] <= sent["pseudo_gradients"] <= usual["pseudo_gradients"] * 5 / 4


def _keys(result: ClusterResult) -> dict[int, list[object]]:
    return {r: sorted((line.stage, line.entry.key, line.entry.samples) for line in s) for r, s in result.steps.items()}


MOMENTS = [
    (TrainerHello, 0),  # before the first round
    (TrainerHello, 1),
    (PlanRound, 0),
    (StartRound, 0),
    (StartRound, 1),
    (StartRound, 4),  # one trainer is in round 3, one is not
    (StartRound, 5),
    (Open, 9),  # training
    (Lease, 9),
    (Commit, 13),
    (StepReport, 6),
    (EvalReport, 3),
    (Acknowledge, 11),
    (TrainerDone, 2),
    (TrainerDone, 3),  # the boundary of round 2
    (Close, 4),
    (Close, 6),
    (Join, 5),
    (Propose, 4),
    (Propose, 6),
    (RingPart, 9),
    (Staged, 5),
    (Staged, 7),
    (PrepareRecord, 4),
    (PrepareRecord, 6),  # after PrepareRecord, before CommitRecord
    (RecordPrepared, 5),
    (RecordPrepared, 7),
    (CommitRecord, 4),
    (CommitRecord, 5),
    (CommitRecord, 7),  # after CommitRecord
    (Swapped, 4),
    (Swapped, 7),
    (RecordSamples, 1),
    (PlanRound, 2),
    (StartRound, 8),  # the last evaluation
    (EvalReport, 9),
    (TrainerDone, 9),
]


@pytest.mark.usual(
    "TrainerHello-0",
    "Open-9",
    "Close-4",
    "Staged-5",
    "CommitRecord-5",
    "StartRound-8",
)
@pytest.mark.parametrize(("kind", "after"), MOMENTS, ids=[f"{kind.__name__}-{after}" for kind, after in MOMENTS])
async def test_a_run_whose_client_dies_ends_as_if_it_had_not(make_cluster: MakeCluster, kind: type, after: int) -> None:
    expected = await run_undisturbed(make_cluster, CONFIG)
    async with make_cluster(CONFIG) as cluster:
        cluster.when(kind, action=cluster.kill_client, after=after)
        result = await cluster.run()
        check_agreement(cluster, result)
    check_same(result, expected)
    assert [failover["kind"] for failover in result.summary["failovers"]] == ["client"]
    [incident] = result.summary["incidents"]
    assert (incident["kind"], incident["who"], incident["noticed_after_s"]) == ("client", "the client", 0.0)
    assert incident["back_after_s"] > 0
    assert [record.generations for record in result.records] == [{0: 1, 1: 1}] * 4, "no trainer was started again"


async def test_trainers_do_not_stop_while_there_is_no_client(make_cluster: MakeCluster) -> None:
    async with make_cluster(CONFIG) as cluster:
        has_stepped = anyio.Event()

        def leave() -> None:
            cluster.kill_client(until=has_stepped)
            cluster.when(Commit, action=has_stepped.set, number=6)

        cluster.when(Open, action=leave, number=4)
        result = await cluster.run()
    [failover] = result.summary["failovers"]
    assert failover["recovered_after_s"] > 0


@pytest.mark.usual("True")
@pytest.mark.parametrize("deterministic", [True, False])
async def test_a_client_dies_twice(make_cluster: MakeCluster, deterministic: bool) -> None:
    config = make_config(run={"deterministic": deterministic}, diloco={"inner_steps": 4, "outer_steps": 4})
    async with make_cluster(config) as cluster:
        cluster.when(RecordPrepared, action=cluster.kill_client, after=1)
        cluster.when(TrainerHello, action=cluster.kill_client, after=3)
        result = await cluster.run()
        check_agreement(cluster, result)
    assert [failover["kind"] for failover in result.summary["failovers"]] == ["client", "client"]
    assert result.summary["steps"] == result.audit.steps == 2 * 4 * 4


def both(cluster: Cluster, other: Callable[[], None], is_client_first: bool) -> Callable[[], None]:
    def die() -> None:
        for kill in (cluster.kill_client, other) if is_client_first else (other, cluster.kill_client):
            kill()

    return die


@pytest.mark.usual("Commit-True", "TrainerDone-True")
@pytest.mark.parametrize("is_client_first", BOTH)
@pytest.mark.parametrize("kind", [Open, Prepared, Commit, Acknowledge, StepReport, TrainerDone, Close])
async def test_client_and_trainer_die_at_once(make_cluster: MakeCluster, kind: type, is_client_first: bool) -> None:
    expected = await run_undisturbed(make_cluster, CONFIG)
    async with make_cluster(CONFIG) as cluster:
        die = both(cluster, lambda: cluster.kill_trainer(1), is_client_first)
        which = {} if kind is Close else {"round": 2} if kind is TrainerDone else {"number": 6}
        if kind is Prepared:
            which["receiver"] = cluster.trainer_peer(1)
        elif kind is not Close:
            which["sender"] = cluster.trainer_peer(1)
        cluster.when(kind, action=die, after=4 if kind is Close else 0, **which)
        result = await cluster.run()
        check_agreement(cluster, result)
    assert "client" in [failover["kind"] for failover in result.summary["failovers"]]
    assert result.hashes == expected.hashes
    assert result.audit.steps == expected.audit.steps


async def test_a_trainer_whose_takeover_dies_with_the_client_goes_on_in_its_place(make_cluster: MakeCluster) -> None:
    expected = await run_undisturbed(make_cluster, CONFIG)
    for kind, after in ((Fence, 1), (Fenced, 2), (TrainerHello, 2)):
        async with make_cluster(CONFIG) as cluster:
            cluster.when(Open, action=lambda: cluster.kill_trainer(1), sender=cluster.trainer_peer(1), number=6)
            cluster.when(kind, action=cluster.kill_client, after=after)
            result = await cluster.run()
            check_agreement(cluster, result)
        assert result.hashes == expected.hashes
        assert result.records[1].generations == {0: 1, 1: 2}
        assert [failover["kind"] for failover in result.summary["failovers"]] == ["trainer", "client"]


@pytest.mark.usual("Commit-True", "RecordPrepared-True")
@pytest.mark.parametrize("is_client_first", BOTH)
@pytest.mark.parametrize("kind", [Open, Commit, Join, RingPart, RecordPrepared, CommitRecord])
async def test_client_and_server_die_at_once(make_cluster: MakeCluster, kind: type, is_client_first: bool) -> None:
    async with make_cluster(CONFIG) as cluster:
        die = both(cluster, lambda: cluster.kill_server(3), is_client_first)
        cluster.when(kind, action=die, after={Open: 10, Commit: 10}.get(kind, 5))
        result = await cluster.run()
        check_agreement(cluster, result)
    assert "client" in [failover["kind"] for failover in result.summary["failovers"]]


WITH_DATA_SERVER = {
    "kind": (Lease, Acknowledge, Commit, TrainerDone, RecordPrepared, Swapped, HoldoutInfo),
    "deterministic": (True, False),
    "client_away_s": (0.02, 0.15),
}


@pytest.mark.usual("Lease-True-0.02", "RecordPrepared-True-0.02")
@pytest.mark.parametrize(tuple(WITH_DATA_SERVER), covering(WITH_DATA_SERVER))
async def test_client_and_data_server_die_at_once(
    make_cluster: MakeCluster, kind: type, deterministic: bool, client_away_s: float
) -> None:
    config = make_config(run={"deterministic": deterministic}, diloco={"inner_steps": 4, "outer_steps": 4})
    async with make_cluster(config) as cluster:

        def die() -> None:
            cluster.kill_data_server()
            cluster.kill_client(client_away_s)
            cluster._tasks.start_soon(come_back)

        async def come_back() -> None:
            await anyio.sleep(0.05)
            cluster.restart_data_server()

        cluster.when(kind, action=die, after={TrainerDone: 2, HoldoutInfo: 2}.get(kind, 6))
        result = await cluster.run()
        check_agreement(cluster, result)
    assert result.records[1].generations == {0: 1, 1: 1}, "no trainer died of it"
    assert result.summary["steps"] == result.audit.steps


async def test_a_client_that_dies_when_all_is_done_sums_up_without_anybody(make_cluster: MakeCluster) -> None:
    async with make_cluster(CONFIG) as cluster:
        expected = await cluster.run()
        for index in range(len(cluster.servers)):
            cluster.kill_server(index)
        cluster.kill_client()
        cluster.host.start_client()
        result = await cluster.run()
    for name in expected.summary.keys() - {"counters"}:  # each start counts its own connections
        assert result.summary[name] == expected.summary[name], name


@pytest.mark.usual("3")
@pytest.mark.parametrize("client_dies_in_round", [3, 4])
async def test_a_client_that_is_started_again_knows_which_stages_were_restored(
    make_cluster: MakeCluster, client_dies_in_round: int
) -> None:
    config = make_config(diloco={"inner_steps": 4, "outer_steps": 4}, health={"lost_state_after_s": 0.3})
    async with make_cluster(config) as cluster:

        async def come_back() -> None:
            for index in (1, 3):
                await cluster.restart_server(index)

        def die() -> None:
            for index in (1, 3):
                cluster.kill_server(index)
            cluster._tasks.start_soon(come_back)

        cluster.when(Open, action=die, number=10)
        cluster.when(Close, action=cluster.kill_client, round=client_dies_in_round)
        result = await cluster.run()
        check_agreement(cluster, result)
    [restored] = result.summary["stages_restored"]
    assert (restored["stage"], restored["in_round"], restored["lost_rounds"]) == (1, 3, [1, 2])
    assert [failover["kind"] for failover in result.summary["failovers"]] == ["server", "server", "client"]


@pytest.mark.parametrize("client_dies_in_round", [3, 7])
async def test_a_client_that_is_started_again_knows_how_many_servers_have_moved(
    make_cluster: MakeCluster, client_dies_in_round: int
) -> None:
    config = make_config(diloco={"inner_steps": 4, "outer_steps": 8})
    async with make_cluster(config, replicas=[0, 0, 0, 1, 1], pinned=False) as cluster:
        cluster.when(Open, action=lambda: cluster.kill_server(4), number=5)

        def die_once_it_has_moved() -> None:
            if cluster.client.ledger.totals.servers_moved:
                cluster.kill_client()
            else:
                cluster.when(Close, action=die_once_it_has_moved)

        cluster.when(Close, action=die_once_it_has_moved, round=client_dies_in_round)
        result = await cluster.run()
        assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    assert result.summary["servers_moved"] == 1
    assert "client" in [failover["kind"] for failover in result.summary["failovers"]]


async def test_what_was_counted_before_the_client_died_is_in_the_summary(make_cluster: MakeCluster) -> None:
    async with make_cluster(CONFIG) as cluster:
        for round in (1, 3):
            cluster.when(StartRound, action=lambda: cluster.client._endpoint.metrics.counter("odd").add(3), round=round)
            cluster.when(Close, action=cluster.kill_client, round=round + 1)
        result = await cluster.run()
    assert result.summary["counters"]["odd"] == 6


async def test_what_a_client_has_left_must_fit_the_run(make_cluster: MakeCluster) -> None:
    async with make_cluster(CONFIG) as cluster:
        cluster.when(Open, action=cluster.kill_client, number=6)

        def forget() -> None:
            (cluster._log_dir / "client.state").unlink()

        cluster.when(Open, action=forget, number=6)
        with pytest.raises(RecordRejected, match=r"client\.state is gone"):
            await cluster.run()


@pytest.mark.parametrize(("dead", "stages"), [((0, 1, 2, 3), "0, 1"), ((1, 3), "1")])
async def test_a_client_that_is_started_again_does_not_wait_for_ever_for_the_servers_that_died_with_it(
    make_cluster: MakeCluster, dead: tuple[int, ...], stages: str
) -> None:
    config = make_config(diloco={"inner_steps": 4, "outer_steps": 4}, network={"bootstrap_timeout_s": 0.3})
    async with make_cluster(config) as cluster:

        def die() -> None:
            for index in dead:
                cluster.kill_server(index)
            cluster.kill_client()

        cluster.when(Open, action=die, after=9)
        with pytest.RaisesGroup(
            pytest.RaisesExc(NoPipeline, match=f"no replica serves stage {stages} any more: start servers"),
            flatten_subgroups=True,
        ):
            await cluster.run()
        result = await cluster.result("failed")
    assert result.summary["exit"] == "failed"
    assert result.audit.duplicates == 0


async def test_a_client_that_is_started_again_goes_on_with_servers_that_come_back_in_time(
    make_cluster: MakeCluster,
) -> None:
    diloco, network = {"inner_steps": 4, "outer_steps": 4}, {"bootstrap_timeout_s": 120.0}
    config = make_config(diloco=diloco, network=network, health={"lost_state_after_s": 0.1})
    async with make_cluster(config) as cluster:

        async def come_back() -> None:
            for index in range(4):
                await cluster.restart_server(index)

        def die() -> None:
            for index in range(4):
                cluster.kill_server(index)
            cluster.kill_client()

        cluster.when(Open, action=die, after=9)
        # To the client that was started again: the first one has heard two.
        cluster.when(TrainerHello, action=lambda: cluster._tasks.start_soon(come_back), after=2)
        result = await cluster.run()
        check_agreement(cluster, result)
    assert len(result.records) == 4
