"""Advertising, watching and choosing stages over a store that all peers of a test share."""

from __future__ import annotations

import time

import anyio
import anyio.lowlevel
import pytest
from tests.alongside import alongside, until
from tests.unit.control.shelf import ADDRESSES, NAMESPACE, BriefClock, Shelf, ShelfStore, registry_has

from shoal.clock import Clock, SystemClock
from shoal.control.assignment import StageChooser
from shoal.control.read_pace import SLOW_READ_S, ReadPace
from shoal.control.record_holders import SOME
from shoal.control.records import GoneRecord, MonitorRecord, RunRecord, StageRecord, VerifiedRecord
from shoal.control.registry import RENEW_S, RETRY_S, Registry
from shoal.errors import InvariantViolation
from shoal.identity import Identity
from shoal.ids import StageIndex
from shoal.swarm.assignment import StageNeed
from shoal.swarm.view import SwarmView


class _StandingClock(BriefClock):
    """Wall time does not pass at all."""

    def __init__(self) -> None:
        self._unix_s = super().unix_s()

    def unix_s(self) -> float:
        return self._unix_s


def _registry(shelf: Shelf, clock: SystemClock | None = None) -> tuple[Registry, ShelfStore, Identity]:
    identity = Identity.generate()
    store = ShelfStore(shelf, identity.peer_id)
    return Registry(store, identity, NAMESPACE, 2, clock or BriefClock()), store, identity


async def test_one_peer_sees_what_another_advertises_changes_and_withdraws() -> None:
    shelf: Shelf = {}
    (mine, _, me), (theirs, _, _) = _registry(shelf), _registry(shelf)
    async with alongside(mine.run, theirs.run):
        mine.advertise(StageRecord(ADDRESSES, 1.0))
        await theirs.membership.wait_for(lambda v: [c.peer for c in v.candidates] == [me.peer_id])
        mine.advertise(StageRecord(ADDRESSES, 1.0, stage=1))
        view = await theirs.membership.wait_for(lambda v: v.replica(me.peer_id) is not None)
        assert not view.candidates
        assert mine.membership.view == view
        await mine.withdraw()
        await theirs.membership.wait_for(lambda v: v.num_servers == 0)


async def test_each_record_of_a_peer_says_where_the_dht_can_be_joined_through_it_now() -> None:
    shelf: Shelf = {}
    (mine, store, _), (theirs, _, _) = _registry(shelf), _registry(shelf)
    async with alongside(mine.run, theirs.run):
        mine.advertise(StageRecord(ADDRESSES, 1.0, stage=1))
        await theirs.membership.wait_for(lambda v: v.maddrs == store.maddrs)
        # As after its p2pd was started again, on another port.
        store.maddrs = ("/another",)
        mine.advertise(StageRecord(ADDRESSES, 1.0, stage=1, step=1))
        await theirs.membership.wait_for(lambda v: v.maddrs == ("/another",))


async def test_a_record_that_is_renewed_says_where_its_peer_can_be_dialled_now() -> None:
    shelf: Shelf = {}
    (_, store, me), (theirs, _, _) = _registry(shelf), _registry(shelf)
    found = [("tcp:10.0.0.5:7",)]
    mine = Registry(store, me, NAMESPACE, 2, BriefClock(), addresses=lambda: found[-1])

    def is_at(view: SwarmView) -> bool:
        return [replica.hop.addresses for replica in view.replicas] == [found[-1]]

    async with alongside(mine.run, theirs.run):
        mine.advertise(StageRecord(("tcp:10.0.0.5:7",), 1.0, stage=1))
        await theirs.membership.wait_for(is_at)
        found.append(("tcp:10.0.0.9:7",))
        mine.advertise(StageRecord(("tcp:10.0.0.5:7",), 1.0, stage=1, step=1))
        await theirs.membership.wait_for(is_at)
        mine.advertise(RunRecord("r", 2, 1.0))
        await theirs.membership.wait_for(lambda view: view.run is not None)


async def test_a_last_word_stands_after_the_farewell() -> None:
    shelf: Shelf = {}
    (mine, _, _), (theirs, _, _) = _registry(shelf), _registry(shelf)
    run = RunRecord("r", 2, 1.0)
    async with alongside(mine.run, theirs.run):
        mine.advertise(run)
        await theirs.membership.wait_for(lambda v: v.run is not None)
        await mine.conclude(RunRecord("r", 2, 1.0, ended=True))
        await mine.withdraw()
        view = await theirs.membership.wait_for(lambda v: v.run is None or v.run.ended)
        assert view.run is not None
    with pytest.raises(InvariantViolation, match="withdraw"):
        await mine.conclude(GoneRecord())


async def test_changes_within_one_instant_are_all_stored() -> None:
    shelf: Shelf = {}
    (mine, store, _), (theirs, _, _) = _registry(shelf, _StandingClock()), _registry(shelf)
    async with alongside(mine.run, theirs.run):
        for base_round in range(20):
            mine.advertise(StageRecord(ADDRESSES, 1.0, stage=0, base_round=base_round))
            await theirs.membership.wait_for(lambda v, r=base_round: [x.base_round for x in v.by_stage(0)] == [r])
    assert store.num_stored == {"stage.0": 20}


async def test_what_can_wait_is_left_to_the_next_renewal() -> None:
    shelf: Shelf = {}
    (mine, store, _), (theirs, _, _) = _registry(shelf), _registry(shelf)
    async with alongside(mine.run, theirs.run):
        mine.advertise(MonitorRecord(ADDRESSES, 1.0), at_once=False)
        await anyio.wait_all_tasks_blocked()
        assert not store.num_stored
        mine.advertise(MonitorRecord(ADDRESSES, 1.0))
        await theirs.membership.wait_for(lambda v: v.monitor is not None)
    assert store.num_stored == {"monitor": 1}


async def test_a_dead_node_is_revived_and_everything_is_announced_again(caplog: pytest.LogCaptureFixture) -> None:
    shelf: Shelf = {}
    (mine, store, me), (theirs, _, _) = _registry(shelf), _registry(shelf)
    async with alongside(mine.run, theirs.run) as tasks:
        mine.advertise(StageRecord(ADDRESSES, 1.0, stage=0))
        await theirs.membership.wait_for(lambda v: v.num_servers == 1)
        shelf.clear()
        store.alive = False
        late, _, _ = _registry(shelf)
        tasks.start_soon(late.run)
        with mine.membership.eager():
            await late.membership.wait_for(lambda v: v.replica(me.peer_id) is not None)
    assert store.revivals == 2
    assert "registry.dht_unreachable" in caplog.text


async def test_who_has_not_counted_for_an_hour_announces_itself_anew_once_it_knows_the_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.control.registry.RENEW_S", 3600.0)
    mine, store, _ = _registry({})
    right_unix_s = time.time()
    monkeypatch.setattr(SystemClock, "began_unix_s", SystemClock.began_unix_s - 3600.0)
    async with alongside(mine.run):
        mine.advertise(StageRecord(ADDRESSES, 1.0, stage=0))
        await until(lambda: store.num_stored["stage.0"])
        store.clock_difference_s = 3600.0
        with mine.membership.eager():
            await until(lambda: store.num_stored["stage.0"] > 1)
    assert mine.membership.next_expiry_unix_s > right_unix_s
    [event] = [each for each in caplog.records if each.getMessage() == "clock.caught_up"]
    assert event.__dict__["behind_s"] == pytest.approx(3600, abs=30)


class _CountingClock(BriefClock):
    """Remembers for how long it was to sleep."""

    def __init__(self) -> None:
        self.slept_s: list[float] = []

    async def sleep_s(self, duration_s: float) -> None:
        self.slept_s.append(duration_s)
        await super().sleep_s(duration_s)


async def test_a_node_that_cannot_be_had_yet_is_asked_for_once_a_second() -> None:
    clock = _CountingClock()
    mine, store, _ = _registry({}, clock)
    store.alive, store.revivals = False, -100
    async with alongside(mine.run):
        await until(lambda: store.revivals > -95)
    assert clock.slept_s[:4] == [RETRY_S] * 4


async def test_what_can_wait_is_renewed_and_read_at_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_s: list[float] = []

    def at_once_s(clock: Clock, duration_s: float) -> float:
        waits_s.append(duration_s)
        return 0.0

    monkeypatch.setattr("shoal.control.registry.until_tick_s", at_once_s)
    mine, store, _ = _registry({})
    async with alongside(mine.run):
        mine.advertise(StageRecord(ADDRESSES, 1.0, stage=0))
        await until(lambda: store.num_stored["stage.0"] > 2 and SLOW_READ_S in waits_s)
    assert RENEW_S in waits_s


def test_a_gone_record_cannot_be_advertised() -> None:
    with pytest.raises(InvariantViolation, match="withdraw"):
        _registry({})[0].advertise(GoneRecord())


def _chooser(registry: Registry, me: Identity, num_servers: int | None) -> StageChooser:
    record = StageRecord(ADDRESSES, 1.0, free_memory_bytes=10)
    needs = (StageNeed(5), StageNeed(6))
    return StageChooser(registry, me.peer_id, record, needs, num_servers=num_servers, settle_s=0.3)


@pytest.mark.parametrize("known", [True, False], ids=["number of servers known", "not known"])
async def test_servers_that_start_together_do_not_race_into_one_gap(known: bool) -> None:
    shelf: Shelf = {}
    peers = [_registry(shelf) for _ in range(4)]
    chosen: list[StageIndex] = []

    async def choose(registry: Registry, me: Identity) -> None:
        chosen.append(await _chooser(registry, me, 4 if known else None).choose())

    async with alongside() as tasks:
        for registry, _, _ in peers:
            tasks.start_soon(registry.run)
        async with anyio.create_task_group() as choosing:
            for registry, _, me in peers:
                choosing.start_soon(choose, registry, me)
        await peers[0][0].membership.wait_for(lambda v: v.num_replicas(2) == (2, 2))
    assert sorted(chosen) == [0, 0, 1, 1]


async def test_a_server_does_not_wait_for_ever_for_others_that_do_not_start() -> None:
    registry, _, me = _registry({})
    async with alongside(registry.run):
        assert await _chooser(registry, me, 4).choose() == 0


async def test_a_server_that_was_started_again_is_not_taken_for_the_replica_that_it_was() -> None:
    shelf: Shelf = {}
    mine, _, me = _registry(shelf)
    other, _, _ = _registry(shelf)
    async with alongside(other.run, mine.run):
        other.advertise(StageRecord(ADDRESSES, 1.0, stage=1, step=5, serving=True, free_memory_bytes=10))
        # What its process before this one has left: the swarm is complete with it before it has said anything.
        mine.advertise(StageRecord(ADDRESSES, 1.0, stage=0, step=5, serving=True, free_memory_bytes=10))
        await mine.membership.wait_for(lambda view: view.num_replicas(2) == (1, 1))
        assert await _chooser(mine, me, 2).choose() == 0


async def test_a_lost_peer_has_the_registry_read_soon_however_long_nothing_had_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Parts of a pause are shortened, the pause itself is not: only what ends it early lets the test end in time.
    monkeypatch.setattr("shoal.control.registry.SLOW_READ_S", 0.01)
    monkeypatch.setattr(ReadPace, "pause_s", lambda *_args, **_kwargs: 1000.0)
    shelf: Shelf = {}
    registry, store, _ = _registry(shelf)
    other, _, identity = _registry(shelf)
    other.advertise(StageRecord(ADDRESSES, 1.0, stage=0))
    reads = anyio.create_memory_object_stream[None](100)
    get = store.get

    async def counted(topics: tuple[str, ...], holders: int | None, age_s: float) -> tuple[VerifiedRecord, ...]:
        found = await get(topics, holders, age_s)
        reads[0].send_nowait(None)
        return found

    store.get = counted  # type: ignore[method-assign]
    async with alongside(other.run) as tasks:
        await registry_has(shelf)
        tasks.start_soon(registry.run)
        await reads[1].receive()
        await anyio.lowlevel.checkpoint()
        registry.membership.lost(identity.peer_id)
        await reads[1].receive()
    for stream in reads:
        stream.close()


async def test_a_read_that_does_not_end_is_given_up_and_the_next_one_begins(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shoal.control.registry.READ_TIMEOUT_S", 0.05)
    shelf: Shelf = {}
    (mine, store, _), (theirs, _, identity) = _registry(shelf), _registry(shelf)
    get, reads = store.get, 0

    async def endless_at_first(
        topics: tuple[str, ...], holders: int | None, age_s: float
    ) -> tuple[VerifiedRecord, ...]:
        nonlocal reads
        reads += 1
        if reads == 1:
            await anyio.sleep_forever()
        return await get(topics, holders, age_s)

    store.get = endless_at_first  # type: ignore[method-assign]
    theirs.advertise(StageRecord(ADDRESSES, 1.0, stage=0))
    async with alongside(theirs.run, mine.run):
        await mine.membership.wait_for(lambda v: v.replica(identity.peer_id) is not None)
    assert [r.getMessage() for r in caplog.records].count("registry.read_given_up") == 1


async def test_few_are_asked_where_nothing_happens_and_everybody_as_soon_as_something_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.control.registry.SLOW_READ_S", 0.01)

    def pause_s(pace: ReadPace, **_: object) -> float:
        pace.holders = SOME
        return 0.02

    monkeypatch.setattr(ReadPace, "pause_s", pause_s)
    shelf: Shelf = {}
    registry, store, _ = _registry(shelf, SystemClock())
    other, _, identity = _registry(shelf, SystemClock())
    other.advertise(StageRecord(ADDRESSES, 1.0, stage=0))
    asked: list[int | None] = []
    get = store.get

    async def noted(topics: tuple[str, ...], holders: int | None, age_s: float) -> tuple[VerifiedRecord, ...]:
        asked.append(holders)
        return await get(topics, holders, age_s)

    store.get = noted  # type: ignore[method-assign]

    async with alongside(other.run) as tasks:
        await registry_has(shelf)
        tasks.start_soon(registry.run)
        await until(lambda: asked[-3:] == [SOME, SOME, SOME])
        assert asked[0] is None
        before = len(asked)
        for _ in range(5):  # until this read is over and it pauses
            await anyio.lowlevel.checkpoint()
        registry.membership.lost(identity.peer_id)
        await until(lambda: len(asked) > before)
        assert asked[before] is None
        await until(lambda: asked[-3:] == [SOME, SOME, SOME])
        # Whose p2pd was started again knows nobody.
        before, store.alive, store.revivals = len(asked), False, 1
        await until(lambda: store.alive and len(asked) > before + 1)
        assert None in asked[before : before + 2]


async def test_a_record_that_nobody_takes_at_once_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="shoal")
    mine, store, _ = _registry({})
    store.full = True
    await mine.conclude(MonitorRecord(ADDRESSES, 1.0))
    assert [(r.getMessage(), r.levelname) for r in caplog.records] == [("registry.store_refused", "INFO")]


@pytest.mark.anyio
async def test_a_dht_that_goes_on_refusing_a_record_leaves_a_few_lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", logger="shoal")
    monkeypatch.setattr(SystemClock, "now_s", lambda _: 0.0)
    mine, store, _ = _registry({})
    store.full = True
    for _ in range(30):
        await mine.conclude(MonitorRecord(ADDRESSES, 1.0))
    assert [record.getMessage() for record in caplog.records] == ["registry.store_refused"] * 5


class _SkippingClock(BriefClock):
    """Pauses take no time, and have passed."""

    def __init__(self) -> None:
        self.time_s = 50.0

    def now_s(self) -> float:
        return self.time_s

    async def sleep_s(self, duration_s: float) -> None:
        self.time_s += duration_s
        await anyio.lowlevel.checkpoint()


async def test_what_another_process_of_the_host_has_got_does_if_it_is_young_beside_the_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses = iter((0.4, 1.0, 15.0))
    monkeypatch.setattr(ReadPace, "pause_s", lambda *_args, **_kwargs: next(pauses, 0.1))
    registry, store, _ = _registry({}, _SkippingClock())
    ages: list[float] = []
    get = store.get

    async def noted(topics: tuple[str, ...], holders: int | None, age_s: float) -> tuple[VerifiedRecord, ...]:
        ages.append(round(age_s, 6))
        return await get(topics, holders, age_s)

    store.get = noted  # type: ignore[method-assign]
    with registry.membership.eager():
        async with alongside(registry.run):
            await until(lambda: len(ages) > 3)
    assert ages[:4] == [0.0, 0.2, 0.5, 1.0]
