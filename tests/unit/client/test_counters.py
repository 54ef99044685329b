"""Counters of all roles: summed, also over restarts, and bounded whatever a peer reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from tests.alongside import alongside
from tests.set_clock import FewSleeps
from tests.unit.client.noted import NotedLedger

from shoal.client.counters import CounterTotals, ask_again
from shoal.client.totals import START_TIME, THIS_CLIENT
from shoal.clock import SystemClock
from shoal.control import counter_report
from shoal.control.counter_report import counters_reported
from shoal.events.run import ClientStarted, RoleCounted
from shoal.ids import PeerId
from shoal.swarm.view import PeerLabel
from shoal.transport.base import Received
from shoal.transport.dispatch import Rest, dispatch, measured
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork
from shoal.wire.messages.control import MAX_COUNTERS, MAX_VALUES, Heartbeat, MetricReport, PeerMetrics

pytestmark = pytest.mark.anyio


LOST = "transport.lost"


class _Clock(SystemClock):
    """Sleeps are short."""

    async def sleep_s(self, duration_s: float) -> None:
        await anyio.sleep(0.001)


class _StoppedClock(SystemClock):
    """Sleeps last until the test lets time pass."""

    def __init__(self) -> None:
        self._sleeping, self._woken = anyio.Event(), anyio.Event()

    async def sleep_s(self, duration_s: float) -> None:
        self._sleeping.set()
        await self._woken.wait()

    async def passes(self) -> None:
        """Wake whoever sleeps, and wait until they sleep again."""
        await self._sleeping.wait()
        self._sleeping, woken, self._woken = anyio.Event(), self._woken, anyio.Event()
        woken.set()
        await self._sleeping.wait()


def _counters(
    endpoint: MemoryEndpoint,
    clock: SystemClock,
    ledger: NotedLedger,
    servers: Sequence[PeerId] = (),
    *,
    tell: Callable[[Mapping[str, float]], None] = lambda _: None,
    pass_on: Callable[[PeerMetrics], None] = lambda _: None,
    reported: Callable[[RoleCounted, MetricReport], None] = lambda *_: None,
) -> CounterTotals:
    """Where the sums, what each peer has measured, and what it had counted before go as the test says."""
    stand_in: Any = SimpleNamespace
    return CounterTotals(
        endpoint,
        clock,
        ledger,
        reports=stand_in(post=tell, pass_on=pass_on),
        membership=stand_in(view=stand_in(replicas=[stand_in(peer=peer) for peer in servers])),
        troubles=stand_in(reported=reported),
        host="desk",
    )


def _totals(ledger: NotedLedger | None = None) -> CounterTotals:
    network = MemoryNetwork()
    endpoint = network.endpoint(PeerId("client"))
    endpoint.metrics.counter("refused").add(2)
    return _counters(endpoint, _Clock(), ledger or NotedLedger())


def _report(totals: CounterTotals, peer: str, started_unix_s: float = 0.0, **counts: int) -> bool:
    gauges = {START_TIME: started_unix_s} if started_unix_s else {}
    return totals.receive(Received(PeerId(peer), MetricReport("server", counts, gauges, {})))


async def test_the_sum_is_over_all_peers_and_this_process() -> None:
    totals = _totals()
    _report(totals, "a", refused=1, lost=1)
    _report(totals, "a", refused=3, lost=1)
    _report(totals, "b", refused=5)
    totals.peer_lost(PeerId("b"))
    assert totals.totals() == {"lost": 1, "refused": 10}


async def test_a_peer_that_was_started_again_adds_to_what_it_had_counted() -> None:
    totals = _totals()
    for value in (3, 1, 2, 1):
        _report(totals, "a", refused=value)
    assert totals.totals() == {"refused": 2 + 3 + 2 + 1}
    _report(totals, "a", lost=1)
    assert totals.totals() == {"lost": 1, "refused": 2 + 3 + 2 + 1}


async def test_a_peer_that_was_started_again_is_seen_although_it_soon_counts_more_than_what_was_noted() -> None:
    totals = _totals()
    _report(totals, "a", refused=5)
    totals.settle()
    for value in (1, 7):
        _report(totals, "a", refused=value)
    assert totals.totals() == {"refused": 2 + 5 + 7}


@pytest.mark.parametrize("settles", [False, True])
async def test_a_peer_that_was_started_again_is_seen_by_its_start_if_it_has_counted_more(settles: bool) -> None:
    totals = _totals()
    for started_unix_s, refused in ((100.0, 2), (100.0, 3), (150.0, 4), (150.0, 5)):
        _report(totals, "a", started_unix_s, refused=refused)
        if settles:
            totals.settle()
    assert totals.totals() == {"refused": 2 + 3 + 5}


async def test_a_client_that_is_started_again_goes_on_from_what_was_counted_before() -> None:
    ledger = NotedLedger()
    first = _totals(ledger)
    _report(first, "a", refused=3)
    _report(first, "b", lost=1)
    first.settle()
    ledger.note(ClientStarted())
    again = _totals(ledger)
    # Its own process has counted 2 again; "a" lives on, "b" was started again as well.
    _report(again, "a", refused=4)
    _report(again, "b", refused=1)
    assert again.totals() == {"lost": 1, "refused": 2 + 2 + 4 + 1}
    assert again.totals() == {"lost": 1, "refused": 2 + 2 + 4 + 1}


async def test_what_has_changed_is_written_down_and_nothing_else() -> None:
    network, ledger = MemoryNetwork(), NotedLedger()
    endpoint, clock = network.endpoint(PeerId("client")), _StoppedClock()
    totals = _counters(endpoint, clock, ledger)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(totals.run)
        await clock.passes()
        assert ledger.noted == []
        _report(totals, "a", refused=1)
        _report(totals, "a", refused=3)
        endpoint.metrics.counter("lost").add(1)
        await clock.passes()
        changed = [RoleCounted(PeerId("a"), {"refused": 3}), RoleCounted(THIS_CLIENT, {"lost": 1})]
        assert ledger.noted == changed
        await clock.passes()
        assert ledger.noted == changed
        tasks.cancel_scope.cancel()


async def test_what_has_changed_is_passed_on_at_ticks() -> None:
    clock = FewSleeps(3)
    totals = _counters(MemoryNetwork().endpoint(PeerId("client")), clock, NotedLedger())
    async with alongside(totals.run):
        await clock.over.wait()
    assert clock.slept_s == pytest.approx([1.7, 2.0, 2.0])


async def test_memory_and_what_the_monitor_is_told_are_bounded() -> None:
    ledger, told = NotedLedger(), list[Mapping[str, float]]()
    endpoint, clock = MemoryNetwork().endpoint(PeerId("client")), _StoppedClock()
    totals = _counters(endpoint, clock, ledger, tell=told.append)
    assert not totals.receive(Received(PeerId("a"), Heartbeat()))
    for i in range(5000):
        _report(totals, f"p{i}", **{f"n{i}_{j}": 1 for j in range(MAX_COUNTERS if i < 8 else 1)})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(totals.run)
        await clock.passes()
        tasks.cancel_scope.cancel()
    assert len(ledger.totals.counted.latest) == 4096
    assert [len(values) for values in told] == [MAX_VALUES]


async def test_what_each_peer_has_measured_is_passed_on_by_itself_when_there_is_news_and_at_the_end() -> None:
    network, passed = MemoryNetwork(), list[PeerMetrics]()
    endpoint, clock = network.endpoint(PeerId("client")), _StoppedClock()
    totals = _counters(endpoint, clock, NotedLedger(), pass_on=passed.append)
    lost = MetricReport("server", {"transport.lost": 1}, {"process.memory_bytes": 5.0}, {})
    totals.receive(Received(PeerId("a"), lost))
    await totals.gather()
    assert passed == [], "it is not its turn to lead the run"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(totals.run)
        await clock.passes()
        assert passed[0] == PeerMetrics(PeerId("a"), lost)
        assert [(each.peer, each.report.role, each.report.host) for each in passed[1:]] == [
            ("client", "client", "desk")
        ]
        passed.clear()
        await clock.passes()
        assert [each.peer for each in passed] == ["client"]
        tasks.cancel_scope.cancel()
    totals.peer_lost(PeerId("a"))
    totals.receive(Received(PeerId("a"), lost))
    totals.peer_lost(PeerId("a"))
    passed.clear()
    with anyio.fail_after(240):
        await totals.gather()
    assert [each.peer for each in passed] == ["a", "client"]


async def test_a_role_reports_to_the_client_which_passes_the_sums_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="shoal")
    network = MemoryNetwork()
    server, client = (network.endpoint(PeerId(name)) for name in ("server", "client"))
    told, wanted = anyio.Event(), "counters/refused{offence=tls}"

    def tell(values: Mapping[str, float]) -> None:
        if values.get(wanted) == 7.0:
            told.set()

    totals = _counters(client, _Clock(), NotedLedger(), tell=tell)
    server.metrics.counter("refused", offence="tls").add(7)

    async def hear() -> None:
        async for event in client.events():
            if isinstance(event, Received):
                totals.receive(event)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hear)
        tasks.start_soon(totals.run)
        with anyio.fail_after(240):
            async with counters_reported(server, PeerLabel("server", "box2", 1), lambda: client.hop, _Clock()):
                await told.wait()
        tasks.cancel_scope.cancel()
    [line] = [record for record in caplog.records if record.getMessage() == "role.counters"]
    assert line.name == counter_report.__name__
    assert vars(line)["counters"] == server.metrics.counts()


async def test_a_role_that_leaves_says_what_it_has_counted_since_its_last_report() -> None:
    network = MemoryNetwork()
    server, client = (network.endpoint(PeerId(name)) for name in ("server", "client"))
    totals = _counters(client, _StoppedClock(), NotedLedger())
    with anyio.fail_after(240):
        async with counters_reported(server, PeerLabel("server", "box2", 1), lambda: client.hop, _StoppedClock()):
            server.metrics.counter("refused").add(7)
        async for event in client.events():
            if isinstance(event, Received):
                assert totals.receive(event)
                break
    assert totals.totals()["refused"] == 7


async def test_who_still_runs_is_asked_and_who_is_lost_is_not_waited_for() -> None:
    network = MemoryNetwork()
    client, server, gone = (network.endpoint(PeerId(name)) for name in ("client", "server", "gone"))
    totals = _counters(client, _StoppedClock(), NotedLedger())
    async with anyio.create_task_group() as tasks:
        for endpoint in (server, gone):
            endpoint.introduce(client.hop)
            endpoint.post(client.peer_id, measured(endpoint, PeerLabel("server", "box2", 1)))
            tasks.start_soon(dispatch, endpoint, ())
        reported = 0
        async for event in client.events():
            reported += isinstance(event, Received) and totals.receive(event)
            if reported == 2:
                break
        server.metrics.counter("refused").add(5)
        network.kill(gone.peer_id)
        tasks.start_soon(dispatch, client, (totals, Rest()))
        with anyio.fail_after(240):
            await totals.ask()
            await totals.ask()  # now nobody is left who would not answer
        assert totals.totals()["refused"] == 5
        tasks.cancel_scope.cancel()


async def test_a_server_that_has_not_reported_yet_is_asked_at_the_end() -> None:
    network = MemoryNetwork()
    client, server = network.endpoint(PeerId("client")), network.endpoint(PeerId("server"))
    client.introduce(server.hop)
    client.post(server.peer_id, Heartbeat())
    server.metrics.counter("refused").add(3)
    servers = [server.peer_id, PeerId("one that nobody reaches")]
    totals = _counters(client, _StoppedClock(), NotedLedger(), servers)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(dispatch, server, (Rest(),))
        tasks.start_soon(dispatch, client, (totals, Rest()))
        await totals.ask()
        tasks.cancel_scope.cancel()
    assert totals.totals()["refused"] == 3


async def test_a_report_that_was_under_way_is_no_answer() -> None:
    network = MemoryNetwork()
    client, server = (network.endpoint(PeerId(name)) for name in ("client", "server"))
    totals = _counters(client, _StoppedClock(), NotedLedger())
    _report(totals, "server", refused=1)
    client.introduce(server.hop)
    done = list[int]()

    async def ask() -> None:
        await totals.ask()
        done.append(totals.totals()["refused"])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        _report(totals, "server", refused=2)
        await anyio.wait_all_tasks_blocked()
        assert done == []
        totals.receive(Received(PeerId("server"), MetricReport("", {"refused": 3}, {}, {}, 1)))
    assert done == [3]


async def test_each_report_is_told_with_what_was_counted_before_also_by_an_earlier_start_of_the_client() -> None:
    told: list[tuple[str, int, int]] = []

    def reported(before: RoleCounted, now: MetricReport) -> None:
        told.append((before.peer, before.counts.get(LOST, 0), now.counters[LOST]))

    ledger = NotedLedger()
    ledger.note(RoleCounted(PeerId("a"), {LOST: 2}))
    endpoint = MemoryNetwork().endpoint(PeerId("client"))
    totals = _counters(endpoint, _Clock(), ledger, reported=reported)
    for count in (3, 7):
        _report(totals, "a", **{LOST: count})
    assert told == [("a", 2, 3), ("a", 3, 7)]


async def test_who_is_asked_again_reports_at_once() -> None:
    network = MemoryNetwork()
    client, server = network.endpoint(PeerId("client")), network.endpoint(PeerId("a"))
    server.metrics.counter("refused").add(4)
    heard = anyio.Event()
    totals = _counters(client, _Clock(), NotedLedger(), reported=lambda *_: heard.set())
    client.introduce(server.hop)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(dispatch, client, (totals,))
        tasks.start_soon(dispatch, server, (Rest(),))
        ask_again(client, PeerId("a"))
        await heard.wait()
        tasks.cancel_scope.cancel()
    assert totals.totals()["refused"] == 4


async def test_a_peer_that_reports_without_end_under_names_without_end_fills_neither_memory_nor_disk() -> None:
    ledger, network = NotedLedger(), MemoryNetwork()
    endpoint, clock, told = network.endpoint(PeerId("client")), _StoppedClock(), list[PeerId]()
    totals = _counters(endpoint, clock, ledger, reported=lambda before, _: told.append(before.peer))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(totals.run)
        for interval in range(4):
            for start in range(1, 200):
                counts = {f"n{interval}_{start}_{number}": 1 for number in range(100)}
                _report(totals, "a", 1000.0 * interval + start, **counts)
            await clock.passes()
        tasks.cancel_scope.cancel()
    assert len(told) == 4 * 16 + 4, "16 reports of an interval, and those of the client itself"
    assert len(ledger.noted) <= 4 * (2 * 16 + 2)
    assert len(ledger.totals.counted.earlier[PeerId("a")]) == MAX_COUNTERS


async def test_a_report_too_many_is_an_answer_all_the_same() -> None:
    totals = _totals()
    for _ in range(20):
        _report(totals, "a", refused=1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(totals.ask)
        await anyio.wait_all_tasks_blocked()
        totals.receive(Received(PeerId("a"), MetricReport("", {"refused": 3}, {}, {}, 1)))
