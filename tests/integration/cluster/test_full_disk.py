"""The disk of the client takes nothing for a while: the run waits for it, and has lost nothing when it goes on."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from shoal.averaging import journal
from shoal.client import diary, needed_files
from shoal.runtime import durable_files
from shoal.wire.messages.round import Join
from shoal_lab import Cluster

from .conftest import MakeCluster, make_config

CONFIG = make_config(diloco={"inner_steps": 2, "outer_steps": 3, "batch_size_per_step": 4})


class FullDisk:
    """Refuses some of what a client writes.

    Attributes:
        left: so many writes are refused from now on.
        refused: what was to be written.
    """

    def __init__(self, patch: pytest.MonkeyPatch, what: str) -> None:
        self.left = 0
        self.refused: list[str] = []
        put_whole, write = durable_files.put_whole, diary._write

        def put(path: Path, content: bytes, *, lasting: bool) -> None:
            if what in path.name:
                self._take(path.name)
            put_whole(path, content, lasting=lasting)

        def append(file: int, content: bytearray) -> None:
            if what == diary.FILE_NAME:
                self._take(what)
            write(file, content)

        patch.setattr(journal, "put_whole", put)
        patch.setattr(diary, "_write", append)

    def _take(self, name: str) -> None:
        if self.left:
            self.left -= 1
            self.refused.append(name)
            raise OSError(errno.ENOSPC, "No space left on device")


def told(cluster: Cluster) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (cluster.host.log_dir / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("what", ["prepared", "round_0002.json", diary.FILE_NAME])
async def test_a_run_waits_for_a_disk_that_is_full_says_so_once_and_loses_nothing(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(needed_files, "_PAUSE_S", 0.2)
    async with make_cluster(CONFIG) as cluster:
        disk = FullDisk(monkeypatch, what)

        def fill() -> None:
            # Of events, which wait, none is lost either: more of them than there are until the round ends.
            disk.left = 3 if what != diary.FILE_NAME else 30

        cluster.when(Join, action=fill, round=2)
        result = await cluster.run()
        assert (disk.left, len(disk.refused)) == (0, 30 if what == diary.FILE_NAME else 3)
        events = told(cluster)
    assert [record.round for record in result.records] == [1, 2, 3]
    assert (result.summary["duplicates"], result.summary["missing"], result.summary["exit"]) == (0, 0, "done")
    [waits] = [event for event in events if event["event"] == "disk.takes_nothing"]
    assert waits["says"].startswith("the run waits for its disk: cannot write ")
    assert "(No space left on device): " in waits["says"]
    assert "; free space there, or start again with --log-dir on another disk" in waits["says"]
    [over] = [event for event in events if event["event"] == "disk.takes"]
    assert over["says"] == "the client can write to its disk again"


async def test_a_run_that_waits_for_a_disk_can_be_ended(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_cluster(CONFIG) as cluster:
        disk = FullDisk(monkeypatch, "round_0002.json")

        def fill() -> None:
            disk.left = 10_000

        cluster.when(Join, action=fill, round=2)

        def end(said: str) -> None:
            if said.startswith("the run waits for its disk"):
                disk.left = 0
                cluster.client.stop()

        cluster.client.ledger.show = end
        result = await cluster.run()
    assert [record.round for record in result.records] == [1, 2]
