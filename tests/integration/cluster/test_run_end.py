"""What a run leaves when it ends: whatever was committed is on the disk, at whichever message the end comes."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from shoal.averaging import journal
from shoal.averaging.journal import read_records
from shoal.errors import StorageError
from shoal.runtime.role import leaves
from shoal.swarm.records import names
from shoal.wire.messages.round import CommitRecord, Propose, Swapped
from shoal_lab import Cluster

from .conftest import MakeCluster, make_config, make_text

CONFIG = make_config(diloco={"inner_steps": 2, "outer_steps": 50})


async def interrupted(cluster: Cluster, kind: type, after: int) -> None:
    """Run the client until such a message of round 2 is about to be delivered; end it as Ctrl-C does."""
    with anyio.CancelScope() as run:
        in_round_2(cluster, kind, run.cancel, after)
        await cluster.run()
    assert run.cancelled_caught


def in_round_2(cluster: Cluster, kind: type, action: Callable[[], None], after: int) -> None:
    """Do something when such a message is about to be delivered. Before the round's members are known, messages may
    still be of round 1: on a busy machine they are sent again."""
    cluster.when(Propose, action=lambda: cluster.when(kind, action=action, after=after), round=2)


async def everybody_holds(cluster: Cluster, round: int) -> None:
    await cluster.registry.watch().wait_for(lambda view: all(each.base_round == round for each in view.replicas))


@pytest.mark.usual("0-CommitRecord", "3-Swapped")
@pytest.mark.parametrize("kind", [CommitRecord, Swapped])
@pytest.mark.parametrize("after", [0, 3])
async def test_a_record_that_was_committed_is_on_the_disk_when_the_client_is_interrupted(
    make_cluster: MakeCluster, kind: type, after: int
) -> None:
    async with make_cluster(CONFIG) as cluster:
        await interrupted(cluster, kind, after)
        records = [record for record, _ in read_records(cluster.host.log_dir)]
        assert [record.round for record in records] == [1, 2]
        await everybody_holds(cluster, 2)
        for server in cluster.servers:
            assert names(records[-1], server.stage, server.replica.member.hashes)
        summary = (await cluster.result("interrupted")).summary
    assert summary["outer_rounds"] == 2
    assert summary["hashes"] == {str(stage.stage): stage.hashes.parameters for stage in records[-1].stages}


async def test_a_full_disk_gives_its_error_also_when_the_client_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = journal.put_whole

    def on_a_full_disk(path: Path, content: bytes, *, lasting: bool) -> None:
        if path.name == "round_0002.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content, lasting=lasting)

    monkeypatch.setattr(journal, "put_whole", on_a_full_disk)
    async with Cluster(CONFIG, log_dir=tmp_path, dataset=make_text(1000)) as cluster:
        # As a role does that is told to stop: what fails after that is said.
        in_round_2(cluster, CommitRecord, lambda: cluster.client.stop(), 0)
        with pytest.raises((StorageError, BaseExceptionGroup)) as caught:
            await cluster.run()
        [error] = leaves(caught.value)
        assert isinstance(error, StorageError)
        assert "round_0002.json (No space left on device)" in str(error)
        assert [record.round for record, _ in read_records(cluster.host.log_dir)] == [1]
