"""The swarm is parted, both sides go on, each with a client and all stages; then they meet, and one chain stands."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from shoal.errors import RoundAborted
from shoal.ids import PeerId
from shoal.swarm.records import used_samples
from shoal.swarm.sample_ranges import count, merge
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.round import Close
from shoal.wire.messages.step import Open
from shoal_lab import Cluster, ClusterResult
from shoal_lab.client_host import ClientHost
from shoal_lab.emulation.device_pace import DevicePace

from .conftest import MakeCluster, make_config

INNER, OUTER, SAMPLES_PER_STEP = 4, 32, 4
CONFIG = make_config(run={"deterministic": False}, diloco={"inner_steps": INNER, "outer_steps": OUTER})
HERE, THERE = (0, 2), (1, 3)
"""Servers of both sides: one of each stage."""
OWN_SAMPLES = INNER * SAMPLES_PER_STEP
"""Each side trains so many at least, and one so many more than the other."""


@dataclass
class Parted:
    """A cluster whose second half goes on with a client of its own.

    Attributes:
        second: the host of that client.
        ended: it has run to the end.
        paces: of the servers, until the sides meet.
        kills_client: the second client is killed, and started again, when it ends a round after that.
        lost_server: is killed when the links are healed.
        begun: how many samples were recorded when the swarm was parted.
        met: how many of each side when the links were healed, here and there.
    """

    cluster: Cluster
    paces: dict[int, DevicePace]
    kills_client: bool
    lost_server: int | None = None
    begun: int = 0
    second: list[ClientHost] = field(default_factory=list)
    ended: list[ClientHost] = field(default_factory=list)
    met: tuple[int, int] = (0, 0)

    @property
    def pairs(self) -> list[tuple[PeerId, PeerId]]:
        """All pairs of peers of the two sides."""
        first, servers = self.cluster.host, self.cluster.servers
        here = [
            first.identity.peer_id,
            *(first.trainer_peer(slot) for slot in (0, 1)),
            *(servers[i].peer for i in HERE),
        ]
        there = [servers[i].peer for i in THERE]
        for host in self.second:
            there += [host.identity.peer_id, *(host.trainer_peer(slot) for slot in (0, 1))]
        return [(one, other) for one in here for other in there]

    def part(self) -> None:
        self.begun = count(self.cluster.client._data.recorded)
        self.second.append(self.cluster.start_client_host(1))
        pairs = {frozenset(pair) for pair in self.pairs}
        for pair in pairs:
            self.cluster.network.cut(*pair)
        self.cluster.registry.is_hidden = lambda watcher, peer: frozenset((watcher, peer)) in pairs
        self.cluster._tasks.start_soon(self._go_on)

    async def _go_on(self) -> None:
        assert await self.second[0].run_client()
        self.ended.append(self.second[0])

    async def meet(self, here_is_ahead: bool) -> None:
        """Heal the links when one side has trained much more than the other, which has trained as well."""
        while True:
            await self.cluster.device.run(int)
            if not self.second:
                continue
            here, there = (count(host.client._data.recorded) for host in (self.cluster.host, self.second[0]))
            ahead = here - there if here_is_ahead else there - here
            if min(here, there) >= self.begun + OWN_SAMPLES and ahead >= OWN_SAMPLES:
                break
        self.met = here, there
        for pair in self.pairs:
            self.cluster.network.heal(*pair)
        for pace in self.paces.values():
            pace.forward_s = pace.input_gradient_s = 0.0
        if self.lost_server is not None:
            self.cluster.kill_server(self.lost_server)
        if self.kills_client:
            second = self.second[0]
            self.cluster.when(Close, action=second.kill_client, sender=second.identity.peer_id)
        self.cluster.registry.is_hidden = lambda _watcher, _peer: False
        self.cluster.registry.announce_all()


@pytest.mark.usual("False-False")
@pytest.mark.parametrize(("here_is_ahead", "kills_client"), [(True, False), (False, False), (True, True)])
async def test_two_sides_that_have_trained_apart_go_on_from_the_chain_with_more_samples(
    make_cluster: MakeCluster, here_is_ahead: bool, kills_client: bool
) -> None:
    slow = THERE if here_is_ahead else HERE
    times_s = {server: 0.03 if server in slow else 0.01 for server in (*HERE, *THERE)}
    paces = {server: DevicePace(forward_s=s, input_gradient_s=s) for server, s in times_s.items()}
    async with make_cluster(CONFIG, replicas=[0, 0, 1, 1], paces=paces) as cluster:
        first, parted = cluster.host, Parted(cluster, paces, kills_client)
        cluster.when(Open, action=parted.part, number=5)
        cluster._tasks.start_soon(parted.meet, here_is_ahead)
        with pytest.raises(ExceptionGroup) as raised:
            await first.run_client()
        assert raised.group_contains(RoundAborted, match="has taken the run over")
        while not parted.ended:
            await cluster.device.run(int)
        cluster.host = parted.second[0]
        result = await cluster.result()
        lost = await first.result("failed")
        check_one_chain(cluster, parted, result.records[-1].round)
    assert (parted.second[0].diary.generation > 1) == kills_client
    # A client that was killed meanwhile has counted it as another process.
    assert kills_client or cluster.client._endpoint.metrics.totals()["round.chains_left"] == 1
    [split] = [each for each in result.summary["incidents"] if each["kind"] == "swarm"]
    assert (split["cause"], split["who"]) == ("split", "two sides of the swarm")
    [left] = result.summary["chains_left"]
    assert left["samples"] < max(parted.met), "the larger one was chosen"
    assert left["base_round"] > left["common_round"] >= 1
    kept = {record.round: record for record in result.records}
    own = {record.round: record for record in lost.records}
    common = [r for r in kept.keys() & own.keys() if kept[r] == own[r]]
    if here_is_ahead:
        # Its last record may have been committed without its client's knowledge: then the next one names the one
        # before.
        last = json.loads((first.log_dir / "rounds" / f"round_{max(own):04d}.json").read_text())
        assert common or kept[max(own) + 1].previous == last["hash"], "the other host's records stand"
        assert list((cluster.host.log_dir / "left").glob("1/rounds/*.json")), "its own ones were put away"
    else:
        assert max(common, default=left["common_round"]) == left["common_round"]
        assert not (cluster.host.log_dir / "left").exists()
    check_samples(result)


def check_one_chain(cluster: Cluster, parted: Parted, last_round: int) -> None:
    """All servers hold the last record, with the same bytes for each stage, and follow the second client."""
    assert last_round == OUTER
    for one, other in zip(HERE, THERE, strict=True):
        servers = cluster.servers[one], cluster.servers[other]
        assert {server.replica.member.base_round for server in servers} == {OUTER}
        assert len({server.replica.member.hashes for server in servers}) == 1
        assert {server.replica.member.coordinator for server in servers} == {parted.second[0].identity.peer_id}


async def test_a_side_that_lacks_a_stage_is_left_though_it_has_trained_more(make_cluster: MakeCluster) -> None:
    paces = {server: DevicePace(forward_s=0.03, input_gradient_s=0.03) for server in HERE}
    async with make_cluster(CONFIG, replicas=[0, 0, 1, 1], paces=paces) as cluster:
        first, parted = cluster.host, Parted(cluster, paces, kills_client=False, lost_server=THERE[1])
        cluster.when(Open, action=parted.part, number=5)
        cluster._tasks.start_soon(parted.meet, False)
        with pytest.raises(ExceptionGroup):
            await first.run_client()
        while not parted.ended:
            await cluster.device.run(int)
        cluster.host = parted.second[0]
        result = await cluster.result()
        servers = [cluster.servers[i] for i in (*HERE, THERE[0])]
        assert {server.replica.member.base_round for server in servers} == {OUTER}
        assert len({server.replica.member.hashes for server in servers if server.stage == 0}) == 1
    [left] = result.summary["chains_left"]
    assert left["samples"] > parted.met[0]
    assert left["samples_freed"] > 0
    assert list((cluster.host.log_dir / "left").glob("1/rounds/*.json"))
    check_samples(result)


def check_samples(result: ClusterResult) -> None:
    """All samples were trained in their order, each once; also those that the side that was left had used."""
    assert (result.summary["exit"], result.summary["outer_rounds"]) == ("done", OUTER)
    assert (result.summary["duplicates"], result.summary["missing"]) == (0, 0)
    used = used_samples(result.records[-1])
    assert result.summary["samples_before"] + result.audit.samples + result.audit.skipped == count(used)
    assert used == merge([SampleRange(0, 0, count(used))])
