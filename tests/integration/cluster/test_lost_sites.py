"""A site is cut off with a step that it alone has committed: nobody else trains on its samples, whoever dies meanwhile.

Servers 2 and 3 are the home of slot 1 and stand for a site behind one uplink. They are cut off from the client and all
trainers, though not from each other, and are back, with what they have committed, before the round is closed.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shoal.config import Config
from shoal.ids import PeerId
from shoal.swarm.lease import LeaseTable
from shoal.wire.messages.control import StartRound
from shoal.wire.messages.step import Committed
from shoal_lab import Cluster, ClusterResult

from .conftest import MakeCluster, make_config

SITE = (2, 3)
EVERYWHERE = (0, 1, 2, 3)


class Uplink:
    """What connects some servers with the host of the client."""

    def __init__(self, cluster: Cluster, servers: Sequence[int]) -> None:
        self.cluster = cluster
        self.happened: list[str] = []
        here = (cluster.client_peer, cluster.trainer_peer(0), cluster.trainer_peer(1))
        self.links = [(one, cluster.servers[index].peer) for index in servers for one in here]

    def lose(self) -> None:
        self.happened.append("lost")
        for one, other in self.links:
            self.cluster.network.cut(one, other)

    def lose_with_trainer(self) -> None:
        self.lose()
        self.kill_trainer()

    def kill_trainer(self) -> None:
        self.happened.append("killed")
        self.cluster.kill_trainer(1)

    def mend(self) -> None:
        self.happened.append("mended")
        for one, other in self.links:
            self.cluster.network.heal(one, other)
        self.cluster.registry.announce_all()


def config(inner_steps: int, *, deterministic: bool) -> Config:
    return make_config(run={"deterministic": deterministic}, diloco={"inner_steps": inner_steps, "outer_steps": 3})


def steps_of_site(cluster: Cluster, result: ClusterResult) -> set[int]:
    """The numbers of the steps of trainer 1.1 in record 2 that only the site has committed."""
    site: set[PeerId] = {cluster.servers[index].peer for index in SITE}
    keys = [line.entry.key for line in result.steps[2] if set(line.entry.path) == site]
    return {key.number for key in keys if key[:2] == (1, 1)}


@pytest.mark.usual("True")
@pytest.mark.parametrize("deterministic", [True, False])
async def test_a_trainer_dies_with_the_uplink_of_the_site_that_has_committed_its_step(
    make_cluster: MakeCluster, deterministic: bool
) -> None:
    async with make_cluster(config(4, deterministic=deterministic)) as cluster:
        uplink, trainer = Uplink(cluster, SITE), cluster.trainer_peer(1)
        cluster.when(Committed, action=uplink.lose_with_trainer, receiver=trainer, number=5)
        cluster.when(Committed, action=uplink.mend, receiver=trainer, number=6)
        result = await cluster.run()
    assert uplink.happened == ["lost", "killed", "mended"]
    assert 5 in steps_of_site(cluster, result), "the step that the site has committed counts, once"
    assert result.audit.duplicates == 0


async def test_a_trainer_goes_on_without_the_site_and_dies_two_steps_later(make_cluster: MakeCluster) -> None:
    async with make_cluster(config(8, deterministic=False)) as cluster:
        uplink, trainer = Uplink(cluster, SITE), cluster.trainer_peer(1)
        cluster.when(Committed, action=uplink.lose, receiver=trainer, number=9)
        cluster.when(Committed, action=uplink.kill_trainer, receiver=trainer, number=11)
        cluster.when(Committed, action=uplink.mend, receiver=trainer, number=13)
        result = await cluster.run()
    assert uplink.happened == ["lost", "killed", "mended"]
    assert 9 in steps_of_site(cluster, result), "it was left to the record, which has it"
    assert result.audit.duplicates == 0


@pytest.mark.usual("True")
@pytest.mark.parametrize("deterministic", [True, False])
async def test_the_hosts_own_uplink_is_lost_and_with_it_every_server_and_a_trainer(
    make_cluster: MakeCluster, deterministic: bool
) -> None:
    async with make_cluster(config(4, deterministic=deterministic)) as cluster:
        uplink, trainer = Uplink(cluster, EVERYWHERE), cluster.trainer_peer(1)
        cluster.when(Committed, action=uplink.lose_with_trainer, receiver=trainer, number=5)
        cluster.when(StartRound, action=uplink.mend, receiver=trainer, round=2, after=1)
        result = await cluster.run()
    assert uplink.happened == ["lost", "killed", "mended"]
    assert 5 in steps_of_site(cluster, result)
    assert result.audit.duplicates == 0


async def test_what_is_trained_twice_all_the_same_is_recorded_once(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Leases are freed as if the site had committed nothing: the coordinator leaves those out that have it as well."""
    monkeypatch.setattr(LeaseTable, "_is_untrained", lambda _table, held, *_: not held.done)
    async with make_cluster(config(4, deterministic=True)) as cluster:
        uplink, trainer = Uplink(cluster, SITE), cluster.trainer_peer(1)
        cluster.when(Committed, action=uplink.lose_with_trainer, receiver=trainer, number=5)
        cluster.when(Committed, action=uplink.mend, receiver=trainer, number=6)
        result = await cluster.run()
    assert [entry.levelname for entry in caplog.records if entry.message == "samples.trained_twice"] == ["ERROR"]
    assert result.audit.duplicates == 0
    assert 5 not in steps_of_site(cluster, result)
    assert len(result.records) == 3
