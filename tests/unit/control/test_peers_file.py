"""Where a swarm can be joined: by any of its peers, as the file on each host says."""

from __future__ import annotations

import threading
from pathlib import Path

import anyio
import pytest
from tests.alongside import alongside
from tests.hung_disk import far_disk

from shoal.clock import SystemClock
from shoal.control.membership import Membership
from shoal.control.peers_file import MAX_LISTED, PEERS_FILE, PeersFile, joinable, read_peers_file
from shoal.control.records import (
    ClientRecord,
    GoneRecord,
    MirrorRecord,
    MonitorRecord,
    Record,
    StageRecord,
    VerifiedRecord,
    topic_of,
)
from shoal.ids import PeerId

HERE = ("unix:/a",)


def opened(peer: str, record: Record, sequence: int = 1, topic: str = "") -> VerifiedRecord:
    return VerifiedRecord(topic or topic_of(record) or "", PeerId(peer), sequence, SystemClock().unix_s() + 100, record)


def server(number: int, join_unix_s: float, **fields: object) -> VerifiedRecord:
    return opened(f"s{number}", StageRecord(HERE, join_unix_s, stage=0, maddrs=(f"/s{number}",), **fields))


def swarm() -> Membership:
    membership = Membership(SystemClock())
    membership.update(
        [
            server(0, 9.0),
            server(1, 8.0),
            opened("c", ClientRecord(HERE, 50.0, maddrs=("/c",))),
            opened("m", MonitorRecord(HERE, 60.0, maddrs=("/m1", "/m2"))),
            opened("p", MirrorRecord(HERE, 70.0, maddrs=("/p",))),
        ]
    )
    return membership


def test_who_stays_for_the_whole_run_comes_first() -> None:
    membership = swarm()
    assert membership.view.maddrs == ("/m1", "/m2", "/c", "/p", "/s1", "/s0")
    membership.lost(PeerId("c"))
    membership.update([opened("m", GoneRecord(), 2, "monitor")])
    assert membership.view.maddrs == ("/p", "/s1", "/s0")


async def test_the_list_follows_the_view_with_the_own_address_first_and_survives_an_empty_view() -> None:
    membership, seen = Membership(SystemClock()), list[tuple[str, ...]]()

    async def follow() -> None:
        async for maddrs in joinable(membership, lambda: ("/m1",)):
            seen.append(maddrs)

    async with alongside(follow):
        await anyio.wait_all_tasks_blocked()
        assert seen == []
        membership.update([opened("m", MonitorRecord(HERE, 60.0, maddrs=("/m1",))), server(3, 1.0)])
        await anyio.wait_all_tasks_blocked()
        membership.update([server(number, 2.0 + number) for number in range(4, 30)])
        await anyio.wait_all_tasks_blocked()
        for number in range(3, 30):
            membership.lost(PeerId(f"s{number}"))
        membership.lost(PeerId("m"))
        await anyio.wait_all_tasks_blocked()
    assert seen[:2] == [("/m1", "/s3"), ("/m1", "/s3", *(f"/s{number}" for number in range(4, 18)))]
    assert len(seen[1]) == MAX_LISTED
    assert all(maddrs[0] == "/m1" for maddrs in seen)
    assert len(seen[-1]) > 1 or membership.view.maddrs == (), "an empty view is no news"


def test_the_file_is_replaced_as_a_whole_and_read_back(tmp_path: Path) -> None:
    notices: list[str] = []
    file = PeersFile(tmp_path, notices.append)
    assert not file.exists
    assert read_peers_file(tmp_path) == ()
    file.write(("/a", "/b"))
    file.write(("/b",))
    assert file.exists
    assert read_peers_file(tmp_path) == ("/b",)
    assert [path.name for path in tmp_path.iterdir()] == [PEERS_FILE]
    assert notices == []


def test_a_file_whose_disk_does_not_answer_may_have_been_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far_disk(monkeypatch)
    file = PeersFile(tmp_path, lambda _: None)
    for _ in range(2):  # for the second time it is asked, and not waited for
        answers = threading.Event()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "exists", lambda _, answers=answers: answers.wait())
            assert file.exists
            answers.set()
            file._thread.end()
    while file.exists:  # until the disk is as fast as it was
        file._thread.end()
    file._thread.end()


def test_a_file_that_cannot_be_written_is_said_once_until_it_can(tmp_path: Path) -> None:
    notices: list[str] = []
    gone = tmp_path / "gone"
    file = PeersFile(gone, notices.append)
    for _ in range(3):
        file.write(("/a",))
    [told, remedy] = notices
    assert "initial_peers.txt (No such file or directory: see who has removed the folder)" in told
    assert "who joins reads there" in remedy
    gone.mkdir()
    file.write(("/a",))
    assert read_peers_file(gone) == ("/a",)
    (gone / PEERS_FILE).unlink()
    gone.rmdir()
    file.write(("/a",))
    assert len(notices) == 4
