"""What the monitor hears of each peer, and from whom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from tests.alongside import alongside
from tests.set_clock import ManualClock, PassingClock

from shoal.clock import Clock, SystemClock
from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId
from shoal.monitor.exporters.base import Exporter, NotedEvent
from shoal.monitor.gatherer import STATUS_INTERVAL_S, Gatherer
from shoal.monitor.status import Status
from shoal.swarm.view import PeerLabel, SwarmView
from shoal.telemetry.rows import MetricRow
from shoal.transport.base import Received
from shoal.wire.messages.control import MetricReport, Metrics, Noted, PeerMetrics

pytestmark = pytest.mark.anyio

CLIENT, SERVER, TRAINER = PeerId("client"), PeerId("12D3KooWserver00"), PeerId("12D3KooWtrainer0")
VIEW = SwarmView(labels={SERVER: PeerLabel("server", "box2", 1)})


class _Exporter:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[MetricRow] = []
        self.events: list[NotedEvent] = []
        self.is_closed = False
        self.has_row = anyio.Event()

    def row(self, row: MetricRow) -> None:
        self.rows.append(row)
        self.has_row.set()

    def event(self, event: NotedEvent) -> None:
        self.events.append(event)

    def close(self, timeout_s: float) -> bool:
        self.is_closed = True
        return True


class _Registry:
    """Says once who is there."""

    def __init__(self) -> None:
        self.membership = self
        self._views = [VIEW]

    async def changed(self) -> SwarmView:
        if not self._views:
            await anyio.sleep_forever()
        return self._views.pop()


async def _gatherer(*exporters: Exporter, clock: Clock | None = None) -> Gatherer:
    registry: Any = _Registry()
    gatherer = Gatherer(Status(2), exporters, clock or SystemClock(), CLIENT)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(gatherer.follow, registry)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    return gatherer


def _passed_on(peer: PeerId, role: str, committed: int) -> PeerMetrics:
    return PeerMetrics(peer, MetricReport(role, {"step.committed{stage=1}": committed}, {}, {}))


async def test_what_comes_in_a_second_is_one_row_with_each_peer_under_its_name() -> None:
    exporter = _Exporter()
    gatherer = await _gatherer(exporter)
    assert gatherer.receive(Received(CLIENT, _passed_on(SERVER, "server", 3)))
    assert gatherer.receive(Received(CLIENT, _passed_on(TRAINER, "trainer", 0)))
    for loss, samples, steps in ((3.0, 8.0, 1), (1.0, 16.0, 3)):
        numbers = {"samples": samples, "loss/train": loss}
        gatherer.receive(Received(CLIENT, Metrics("client", CLIENT, 1, numbers, steps)))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(gatherer.export)
        with anyio.fail_after(60):
            await exporter.has_row.wait()
        tasks.cancel_scope.cancel()
    [row] = exporter.rows
    assert row.run == {"samples": 16.0, "round": 1.0, "loss/train": 1.5}
    assert row.peers == {"server 1@box2": {"step.committed": 3.0}, "trainer ...trainer0": {"step.committed": 0.0}}
    await gatherer.aclose()
    assert exporter.rows == [row]
    assert exporter.is_closed


async def test_who_does_not_announce_itself_has_the_name_that_its_report_says_and_a_new_trainer_takes_it_over() -> None:
    gatherer = await _gatherer(_Exporter())
    again, scouts = PeerId("12D3KooWtrainer1"), [PeerId(f"12D3KooWscouting{number}") for number in range(2)]

    def say(peer: PeerId, role: str, host: str | None, index: int | None = None) -> None:
        report = MetricReport(role, {"step.committed{stage=1}": 1}, {}, {}, host=host, index=index)
        gatherer.receive(Received(CLIENT, PeerMetrics(peer, report)))

    say(SERVER, "trainer", "evil", 0)  # it has announced itself, by which it is called
    say(TRAINER, "trainer", "desk", 0)
    say(PeerId("data"), "data_server", "desk")
    say(PeerId("data"), "", None)  # an answer
    for scout in scouts:
        say(scout, "scout", "box2")
    everybody = [SERVER, TRAINER, PeerId("data"), *scouts]
    named = ["server 1@box2", "trainer 0@desk", "data server@desk", "scout@box2#couting0", "scout@box2#couting1"]
    assert list(gatherer.measured(everybody)) == named
    say(again, "trainer", "desk", 0)
    assert list(gatherer.measured([TRAINER, again])) == ["trainer ...trainer0", "trainer 0@desk"]


async def test_the_launcher_is_told_at_once_what_has_changed_and_then_no_more_often_than_it_shows_it() -> None:
    clock = PassingClock(1.0)
    gatherer = await _gatherer(clock=clock)
    told: list[float] = []
    control: Any = SimpleNamespace(tell=lambda status: told.append(status.values["step"]))

    async def step(number: float) -> None:
        gatherer.receive(Received(CLIENT, Metrics("client", CLIENT, 1, {"step": number})))
        await anyio.wait_all_tasks_blocked()

    async with anyio.create_task_group() as tasks:
        await step(1.0)
        tasks.start_soon(gatherer.report, control)
        await anyio.wait_all_tasks_blocked()
        assert told == [1.0]
        await step(2.0)
        await step(3.0)
        assert told == [1.0]
        clock.pass_s(STATUS_INTERVAL_S)
        await anyio.wait_all_tasks_blocked()
        assert told == [1.0, 3.0]
        clock.pass_s(STATUS_INTERVAL_S)
        await anyio.wait_all_tasks_blocked()
        assert told == [1.0, 3.0], "nothing has changed"
        await step(4.0)
        assert told == [1.0, 3.0, 4.0]
        tasks.cancel_scope.cancel()


async def test_what_can_wait_is_told_and_handed_on_at_ticks() -> None:
    exporter, clock = _Exporter(), ManualClock(100.3)
    gatherer = await _gatherer(exporter, clock=clock)
    told_s: list[float] = []
    control: Any = SimpleNamespace(tell=lambda _: told_s.append(clock.now))

    async def step() -> None:
        gatherer.receive(Received(CLIENT, Metrics("client", CLIENT, 1, {"step": 1.0})))
        await anyio.wait_all_tasks_blocked()

    async with alongside(lambda: gatherer.report(control)):
        await step()
        await step()
    assert told_s == pytest.approx([100.3, 100.5])
    clock.now = 100.7
    async with alongside(gatherer.export):
        await step()
    assert clock.now == pytest.approx(101.5)
    assert len(exporter.rows) == 1


async def test_an_exporter_that_is_not_done_in_time_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class _Slow(_Exporter):
        def close(self, timeout_s: float) -> bool:
            return False

    gatherer = await _gatherer(_Slow())
    await gatherer.aclose()
    said = [record.getMessage() for record in caplog.records if record.name == "shoal.monitor.gatherer"]
    assert said.count("export.unfinished") == 1


async def test_events_of_the_client_go_to_all_exporters_at_once() -> None:
    exporters = _Exporter(), _Exporter()
    gatherer = await _gatherer(*exporters)
    line = '{"time": "2026-01-01T00:00:00.000+00:00", "level": "WARNING", "event": "server.lost", "says": "it is lost"}'
    assert gatherer.receive(Received(CLIENT, Noted(line)))
    for exporter in exporters:
        [event] = exporter.events
        assert (event.level, event.event, event.says) == ("WARNING", "server.lost", "it is lost")
        assert event.line == line.encode()


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"time": 1, "level": "INFO", "event": "a"}', "{"])
async def test_what_is_no_event_breaks_the_protocol(line: str) -> None:
    exporter = _Exporter()
    gatherer = await _gatherer(exporter)
    with pytest.raises(RemoteProtocolError, match="no event"):
        gatherer.receive(Received(CLIENT, Noted(line)))
    assert exporter.events == []


async def test_only_the_client_of_this_host_speaks_for_others() -> None:
    gatherer = await _gatherer()
    for message in (_passed_on(TRAINER, "trainer", 3), Noted("{}")):
        with pytest.raises(RemoteProtocolError, match="only the client does"):
            gatherer.receive(Received(SERVER, message))
    assert gatherer.measured([]) == {}


async def test_what_each_peer_has_measured_last_is_left_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="shoal")
    gatherer = await _gatherer()
    for committed in (3, 5):
        gatherer.receive(Received(CLIENT, _passed_on(SERVER, "server", committed)))
    await gatherer.aclose()
    [line] = [record for record in caplog.records if record.getMessage() == "monitor.peers"]
    assert vars(line)["measured"] == {"server 1@box2": {"step.committed": 5.0}}


async def test_who_looks_when_they_like_gets_the_newest_numbers_of_those_that_are_there() -> None:
    clock = PassingClock(1.0)
    gatherer = await _gatherer(clock=clock)
    gatherer.receive(Received(CLIENT, Metrics("client", CLIENT, 1, {"step": 7.0})))
    gatherer.receive(Received(CLIENT, _passed_on(SERVER, "server", 3)))
    clock.now = 20.0
    gatherer.receive(Received(CLIENT, _passed_on(TRAINER, "trainer", 4)))
    assert gatherer.newest().run["step"] == 7.0
    assert [who for who, _ in gatherer.newest().peers] == ["server 1@box2", "trainer ...trainer0"]
    clock.now = 35.0
    assert [who for who, _ in gatherer.newest().peers] == ["trainer ...trainer0"], "the server has said nothing since"
