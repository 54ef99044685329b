"""The view of a process: built from records, corrected by the data plane, waited on."""

from __future__ import annotations

import anyio
import pytest
from tests.alongside import alongside
from tests.set_clock import SetClock

from shoal.control import membership as membership_module
from shoal.control.membership import Membership
from shoal.control.records import (
    MAX_TTL_S,
    ClientRecord,
    GoneRecord,
    MirrorRecord,
    MonitorRecord,
    OtherVersion,
    Record,
    RunRecord,
    StageRecord,
    VerifiedRecord,
    topic_of,
)
from shoal.ids import PeerId
from shoal.swarm.view import Replica, Run, SwarmView
from shoal.wire.handshake import PROTOCOL_VERSION

ADDRESSES = ("unix:/a",)


def _opened(peer: str, record: Record, sequence: int = 1, topic: str = "", expires: float = 1030.0) -> VerifiedRecord:
    return VerifiedRecord(topic or topic_of(record) or "", PeerId(peer), sequence, expires, record)


def _stage(stage: int | None, join_unix_s: float = 0.0) -> StageRecord:
    return StageRecord(ADDRESSES, join_unix_s, stage=stage)


def test_records_become_a_view_in_a_fixed_order() -> None:
    membership = Membership(SetClock())
    membership.update(
        [
            _opened("s3", _stage(None, 2.0)),
            _opened("s2", _stage(0, 2.0)),
            _opened("s1", _stage(1, 1.0)),
            _opened("s0", _stage(0, 1.0)),
            _opened("c1", ClientRecord(ADDRESSES, 5.0)),
            _opened("c0", ClientRecord(ADDRESSES, 6.0)),
            _opened("m", MonitorRecord(ADDRESSES, 1.0)),
            _opened("p1", MirrorRecord(ADDRESSES, 3.0, held_round=4)),
            _opened("p0", MirrorRecord(ADDRESSES, 4.0, host="box2")),
            _opened("c0", RunRecord("late", 2, 6.0)),
            _opened("c1", RunRecord("first", 2, 5.0)),
        ]
    )
    view = membership.view
    assert [(r.peer, r.stage) for r in view.replicas] == [("s0", 0), ("s2", 0), ("s1", 1)]
    assert [c.peer for c in view.candidates] == ["s3"]
    assert [c.peer for c in view.clients] == ["c1", "c0"]
    assert [(m.peer, m.held_round) for m in view.mirrors] == [("p0", -1), ("p1", 4)]
    assert view.name_of(PeerId("p0")) == "mirror@box2"
    assert view.num_peers == 9
    assert [m.peer for m in view.without({PeerId("p0")}).mirrors] == ["p1"]
    assert view.monitor is not None
    assert view.monitor.peer == "m"
    assert view.run == Run("first", 2, PeerId("c1"))


def test_names_without_end_push_nobody_out_and_take_no_more_than_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "_MAX_RECORDS", 4)
    clock = SetClock()
    membership = Membership(clock)
    membership.found(PeerId("connected"))
    membership.update([_opened("s0", _stage(0))])
    membership.update([_opened(f"x{number}", _stage(1), expires=1005.0) for number in range(9)])
    membership.update([_opened("s0", _stage(1), sequence=2), _opened("connected", _stage(0)), _opened("s1", _stage(0))])
    assert {r.peer: r.stage for r in membership.view.replicas} == {"s0": 1, "connected": 0, "x0": 1, "x1": 1, "x2": 1}
    clock.now = 1010.0
    membership.update([])
    membership.update([_opened("s1", _stage(0))])
    assert {r.peer for r in membership.view.replicas} == {"s0", "connected", "s1"}


def test_who_is_lost_and_was_never_announced_is_not_remembered_for_ever() -> None:
    clock = SetClock()
    membership = Membership(clock)
    for number in range(100):
        membership.lost(PeerId(f"made up {number}"))
    membership.update([_opened("s0", _stage(0), sequence=5)])
    membership.lost(PeerId("s0"))
    clock.now += 3 * MAX_TTL_S
    membership.update([_opened("s0", _stage(0), sequence=6, expires=1e6)])
    assert membership._lost.keys() == {"s0"}, "of which a record is there"
    assert membership.view.replicas == ()


def test_a_run_that_goes_on_comes_before_one_that_has_ended() -> None:
    membership = Membership(SetClock())
    membership.update([_opened("c0", RunRecord("old", 2, 5.0, ended=True)), _opened("c1", RunRecord("new", 2, 6.0))])
    assert membership.view.run == Run("new", 2, PeerId("c1"))
    membership.update([_opened("c1", RunRecord("new", 2, 6.0, ended=True), sequence=2)])
    assert membership.view.run is not None
    assert membership.view.run.ended


def test_what_hosts_of_servers_keep_of_a_run_counts_while_no_client_says_anything_of_it() -> None:
    membership = Membership(SetClock())
    kept = RunRecord("run", 2, 1.0, kept=True)
    membership.update([_opened("scout", kept), _opened("c0", RunRecord("other", 2, 5.0, ended=True))])
    assert membership.view.run == Run("run", 2, PeerId("scout"), kept=True)
    membership.update([_opened("c1", RunRecord("run", 2, 6.0))])
    assert membership.view.run == Run("run", 2, PeerId("c1"))
    # The scout has not heard of the client yet, and keeps what is over.
    membership.update([_opened("c1", RunRecord("run", 2, 6.0, ended=True), sequence=2)])
    assert membership.view.run is not None
    assert membership.view.run.ended


def test_a_server_is_where_its_newest_record_says() -> None:
    membership = Membership(SetClock())
    membership.update([_opened("s", _stage(1), sequence=2), _opened("s", _stage(None), sequence=1)])
    assert isinstance(membership.view.replica(PeerId("s")), Replica)
    assert not membership.view.candidates
    membership.update([_opened("s", _stage(0), sequence=3)])
    assert [(r.peer, r.stage) for r in membership.view.replicas] == [("s", 0)]


def test_a_peer_that_takes_its_record_back_is_gone() -> None:
    membership = Membership(SetClock())
    membership.update([_opened("s", _stage(1)), _opened("c", ClientRecord(ADDRESSES, 1.0))])
    membership.update([_opened("s", GoneRecord(), 2, topic="stage.1"), _opened("c", GoneRecord(), 2, topic="client")])
    assert membership.view.num_peers == 0


def test_who_is_connected_again_is_there_by_what_it_has_said_before_its_record_expired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership_module, "_MAX_EXPIRED", 2)
    clock = SetClock()
    membership = Membership(clock)
    membership.update([_opened("s0", _stage(0)), _opened("s1", _stage(1)), _opened("s2", _stage(1))])
    for peer in ("s0", "s1", "s2"):
        membership.lost(PeerId(peer))
    clock.now = 1030.1
    membership.update([])
    for peer in ("s0", "s1", "s2"):
        membership.found(PeerId(peer))
    assert [(r.peer, r.stage) for r in membership.view.replicas] == [("s1", 1), ("s2", 1)], "those of which it has room"
    membership.update([_opened("s1", _stage(0), sequence=2, expires=1060.0)])
    assert [(r.peer, r.stage) for r in membership.view.replicas] == [("s1", 0), ("s2", 1)]
    membership.lost(PeerId("s2"))
    membership.lost(PeerId("s1"))
    assert not membership.view.replicas


def test_a_record_that_is_not_renewed_expires() -> None:
    clock = SetClock()
    membership = Membership(clock)
    membership.update([_opened("s", _stage(1))])
    clock.now = 1029.9
    membership.update([])
    assert membership.view.num_servers == 1
    clock.now = 1030.0
    membership.update([])
    assert membership.view.num_servers == 0


@pytest.mark.parametrize("is_looked_for", [False, True])
def test_a_connected_peer_stays_when_its_record_expires_and_goes_with_its_connection(is_looked_for: bool) -> None:
    clock = SetClock()
    membership = Membership(clock)
    membership.update([_opened("s", _stage(1)), _opened("t", _stage(0), expires=1040.0)])
    membership.found(PeerId("s"))
    assert membership.next_expiry_unix_s == 1030.0
    clock.now = 1030.0
    membership.update([])
    assert [replica.peer for replica in membership.view.replicas] == ["t", "s"]
    assert membership.next_expiry_unix_s == 1040.0
    (membership.unlinked if is_looked_for else membership.lost)(PeerId("s"))
    membership.update([])
    assert [replica.peer for replica in membership.view.replicas] == ["t"]


def test_a_connected_peer_that_takes_its_record_back_is_gone_for_good() -> None:
    clock = SetClock()
    membership = Membership(clock)
    membership.found(PeerId("s"))
    # It had another stage before.
    membership.update([_opened("s", _stage(0)), _opened("s", _stage(1), sequence=2)])
    membership.update([_opened("s", GoneRecord(), sequence=3, topic="stage.1")])
    clock.now = 1031.0
    membership.update([])
    assert membership.view.num_servers == 0


def test_a_lost_peer_is_out_at_once_whatever_its_record_says() -> None:
    membership = Membership(SetClock())
    membership.update([_opened("s", _stage(1), sequence=999_000)])
    membership.lost(PeerId("s"))
    assert membership.view.num_servers == 0
    # Signed just before it died, and read just after.
    membership.update([_opened("s", _stage(1), sequence=999_999)])
    assert membership.view.num_servers == 0


def test_a_lost_peer_is_back_with_a_record_that_is_younger_than_the_loss() -> None:
    membership = Membership(SetClock())
    membership.update([_opened("s", _stage(1), sequence=999_000)])
    membership.lost(PeerId("s"))
    membership.update([_opened("s", _stage(1), sequence=1_000_001)])
    assert membership.view.num_servers == 1


def test_a_lost_peer_is_back_when_it_is_connected_again() -> None:
    membership = Membership(SetClock())
    membership.update([_opened("s", _stage(1))])
    membership.lost(PeerId("s"))
    membership.found(PeerId("s"))
    assert membership.view.num_servers == 1


async def test_waiters_wake_on_a_change_and_only_on_a_change() -> None:
    membership = Membership(SetClock())
    membership.update([_opened("a", _stage(0))])
    seen: list[int] = []

    async def watch() -> None:
        while True:
            seen.append((await membership.changed()).num_servers)

    async with alongside(watch):
        await anyio.wait_all_tasks_blocked()
        membership.update([_opened("a", _stage(0), sequence=5)])
        await anyio.wait_all_tasks_blocked()
        assert seen == []
        membership.update([_opened("b", _stage(0))])
        await anyio.wait_all_tasks_blocked()
        assert seen == [2]


async def test_waiting_for_something_makes_the_registry_read_often_until_it_is_there() -> None:
    membership = Membership(SetClock())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(membership.wait_for, lambda view: view.num_servers == 1)
        await anyio.wait_all_tasks_blocked()
        assert membership.awaited
        await membership.until_awaited()
        membership.update([_opened("b", _stage(0))])
    assert not membership.awaited


def test_a_peer_of_another_version_is_seen_and_named_once_but_is_not_in_the_view(
    caplog: pytest.LogCaptureFixture,
) -> None:
    membership = Membership(SetClock())
    for sequence in (1, 2, 3):
        opened = VerifiedRecord("stage.0", PeerId("newer"), sequence, 1030.0, OtherVersion(PROTOCOL_VERSION + 1))
        membership.update([opened, VerifiedRecord("stage.1", PeerId("older"), sequence, 1030.0, OtherVersion(1))])
        assert membership.view == SwarmView()
        assert membership.other_versions == {"newer": PROTOCOL_VERSION + 1, "older": 1}
    named = {vars(r)["peer"]: vars(r)["reason"] for r in caplog.records if r.getMessage() == "peer.other_version"}
    assert len(caplog.records) == 2
    assert named["newer"].endswith("upgrade this side")
    assert named["older"].endswith("upgrade the other side")
    membership.update([_opened("newer", _stage(0), sequence=4)])
    assert [r.peer for r in membership.view.replicas] == ["newer"], "it was downgraded"
    assert membership.other_versions == {"older": 1}


def _named(peer: str, host: str, index: int = 0, sequence: int = 1) -> VerifiedRecord:
    return _opened(peer, StageRecord(ADDRESSES, 0.0, stage=0, host=host, index=index), sequence)


def test_a_peer_is_called_what_its_newest_record_says() -> None:
    membership = Membership(SetClock())
    assert membership.view.name_of(PeerId("12D3KooW8abcd123")) == "peer ...8abcd123"
    membership.update([_named("a", "box2", 1, 2), _opened("c", ClientRecord(ADDRESSES, 1.0, host="desk"))])
    membership.update([_opened("a", StageRecord(ADDRESSES, 0.0, host="old"), 1)])
    assert [membership.view.name_of(PeerId(peer)) for peer in "ac"] == ["server 1@box2", "client@desk"]


def test_two_peers_of_one_name_can_be_told_apart() -> None:
    membership = Membership(SetClock())
    membership.update([_named("12D3KooWaaaaaaaa", "box"), _named("12D3KooWbbbbbbbb", "box"), _named("c", "box", 1)])
    names = [membership.view.name_of(PeerId(peer)) for peer in ("12D3KooWaaaaaaaa", "12D3KooWbbbbbbbb", "c")]
    assert names == ["server 0@box#aaaaaaaa", "server 0@box#bbbbbbbb", "server 1@box"]


def test_who_is_lost_or_gone_keeps_its_name() -> None:
    clock = SetClock()
    membership = Membership(clock)
    membership.update([_named("a", "box2")])
    membership.lost(PeerId("a"))
    assert membership.view.replicas == ()
    assert membership.view.name_of(PeerId("a")) == "server 0@box2"
    clock.now += 60.0
    membership.update([_opened("a", GoneRecord(), 2, topic="stage.0", expires=1090.0)])
    assert membership.view.name_of(PeerId("a")) == "server 0@box2"


def test_names_of_ever_new_peers_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "_MAX_LABELS", 8)
    clock = SetClock()
    membership = Membership(clock)
    for number in range(100):
        clock.now += 31.0
        membership.update([_opened(f"p{number}", StageRecord(ADDRESSES, 0.0), expires=clock.now + 30.0)])
    assert set(membership.view.labels) == {PeerId(f"p{number}") for number in range(92, 100)}
