"""What is wrong with peers that are there, and what those had that were lost, is told by what they report."""

from __future__ import annotations

import errno

import anyio
import msgspec
import pytest
from tests.set_clock import SetClock
from tests.unit.client.noted import NotedLedger

from shoal.client.totals import START_TIME, counted_by
from shoal.client.troubles import Troubles
from shoal.control.membership import Membership
from shoal.control.records import StageRecord, VerifiedRecord
from shoal.events.incidents import Cause, IncidentClosed, IncidentOpened, LossExplained
from shoal.events.losses import ServerHeard, ServerLost
from shoal.events.run import RoleCounted
from shoal.ids import PeerId
from shoal.wire.messages.control import MetricReport

A, B = PeerId("a"), PeerId("b")


def report(gauges: dict[str, float] | None = None, role: str = "server", **counters: int) -> MetricReport:
    return MetricReport(role, {name.replace("__", "."): count for name, count in counters.items()}, gauges or {}, {})


class Story:
    """A client on box1, and a server on box2 that has announced itself."""

    def __init__(self) -> None:
        self.clock = SetClock()
        self.ledger = NotedLedger(self.clock)
        self.membership = Membership(self.clock)
        record = StageRecord(("memory:a",), 0.0, stage=1, host="box2", index=0)
        self.membership.update([VerifiedRecord("stage.1", A, 1, 1e9, record)])
        self.troubles = Troubles(self.ledger, self.membership, "box1", self.clock)
        self.counted: dict[PeerId, RoleCounted] = {}

    def hear(self, message: MetricReport, peer: PeerId = A) -> None:
        self.troubles.reported(self.counted.get(peer) or RoleCounted(peer, {}), message)
        self.counted[peer] = counted_by(peer, message)

    @property
    def told(self) -> list[str]:
        return [event.say() for event in self.ledger.noted if isinstance(event, IncidentOpened | IncidentClosed)]


def test_a_server_without_memory_is_told_until_it_commits_a_step_again() -> None:
    story = Story()
    story.hear(report(step__committed=3))
    story.hear(report(step__committed=3, step__out_of_memory=1))
    story.hear(report(step__committed=3, step__out_of_memory=2))
    assert len(story.told) == 1
    story.clock.now += 4.0
    story.hear(report(step__committed=4, step__out_of_memory=2))
    story.hear(report(step__committed=5, step__out_of_memory=2))
    assert story.told == [
        "server 0@box2 has no memory for a microbatch: the step is tried again, in smaller microbatches if any fit",
        "server 0@box2 was out of memory: over after 4.0 s",
    ]
    [opened, *_] = [event for event in story.ledger.noted if isinstance(event, IncidentOpened)]
    assert (opened.kind, opened.cause, opened.host, opened.stage) == ("server", Cause.MEMORY, "box2", 1)


def test_a_disk_that_takes_nothing_is_told_with_what_is_lost_until_it_takes_it_again() -> None:
    story = Story()
    number = float(errno.ENOSPC)
    full = {"disk.failing{what=log}": number, "disk.failing{what=replica_log}": number, "process.memory_bytes": 1.0}
    story.hear(report(full))
    story.hear(report(full))
    story.clock.now += 2.0
    story.hear(report({name: 0.0 for name in full}))
    assert story.told == [
        "server 0@box2 cannot write to its disk (log, replica log): free space there; training goes on, and what it "
        "logs is lost and unless it soon can, this run cannot be replayed",
        "server 0@box2 could not write to its disk: over after 2.0 s",
    ]


def test_who_takes_no_more_connections_is_told_once_with_what_to_do_until_it_does_again() -> None:
    story = Story()
    for crowded in (1.0, 1.0, 0.0):
        story.hear(report({"process.crowded": crowded}))
        story.clock.now += 2.0
    [said, over] = story.told
    assert said.startswith("server 0@box2 may open no more files: it goes on with the connections that it has")
    assert "`ulimit -n 65536`" in said
    assert over == "server 0@box2 took no more connections: over after 4.0 s"


def test_who_announces_itself_to_nobody_is_called_as_its_report_says() -> None:
    failing = {"disk.failing{what=log}": float(errno.ETIMEDOUT)}
    of_trainer = msgspec.structs.replace(report(failing, "trainer"), host="box1", index=1)
    of_scout = msgspec.structs.replace(report(failing, "scout"), host="box3")
    for said, name in ((of_trainer, "trainer 1@box1"), (of_scout, "scout@box3"), (report(failing, ""), "peer@box1")):
        story = Story()
        story.hear(said, B)
        assert story.told == [
            f"{name} cannot write to its disk (log): see why it does not answer; training goes on, and what it logs is "
            "lost"
        ]


@pytest.mark.parametrize(
    ("before", "now", "cause"),
    [
        ({"step__committed": 5}, {"step__committed": 1}, Cause.ENDED),
        ({"step__committed": 5}, {"step__committed": 5, "process__stalled_ms": 3000}, Cause.FROZEN),
        ({"step__committed": 5}, {"step__committed": 5, "process__stalled_ms": 1000}, Cause.CUT),
    ],
)
def test_what_a_server_had_that_is_heard_again_follows_from_what_it_has_counted(
    before: dict[str, int], now: dict[str, int], cause: Cause
) -> None:
    story = Story()
    story.hear(report(**before))
    story.ledger.note(ServerLost(A, "server 0@box2", 1, 2.0, "", (), (), story.clock.now))
    story.clock.now += 3.0
    story.hear(report(**before))
    story.ledger.note(ServerHeard(A, "server 0@box2", 5.0))
    story.hear(report(**now))
    story.hear(report(**now))
    explained = [event.cause for event in story.ledger.noted if isinstance(event, LossExplained)]
    assert explained == [cause]


def test_another_process_is_known_by_its_start_also_where_the_first_had_counted_less() -> None:
    story = Story()
    story.hear(report({START_TIME: 100.0}, step__committed=1))
    story.ledger.note(ServerLost(A, "server 0@box2", 1, 0.0, "", (), (), story.clock.now))
    story.clock.now += 3.0
    story.ledger.note(ServerHeard(A, "server 0@box2", 5.0))
    story.hear(report({START_TIME: 102.5}, step__committed=4))
    explained = [event.cause for event in story.ledger.noted if isinstance(event, LossExplained)]
    assert explained == [Cause.ENDED]


@pytest.mark.parametrize(("started_after_s", "cause"), [(1.0, Cause.ENDED), (-1.0, Cause.CUT)])
def test_of_a_server_that_was_lost_before_it_had_reported_its_start_says_whether_it_had_ended(
    started_after_s: float, cause: Cause
) -> None:
    story = Story()
    lost_unix_s = story.clock.unix_s()
    story.ledger.note(ServerLost(A, "server 0@box2", 1, 0.0, "", (), (), story.clock.now))
    story.clock.now += 3.0
    story.ledger.note(ServerHeard(A, "server 0@box2", 3.0))
    story.hear(report({START_TIME: lost_unix_s + started_after_s}))
    story.hear(report({START_TIME: lost_unix_s + started_after_s}, step__committed=4))
    explained = [event.cause for event in story.ledger.noted if isinstance(event, LossExplained)]
    assert explained == [cause]


async def test_a_peer_of_another_time_is_told_until_its_records_are_believed() -> None:
    story = Story()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(story.troubles.run)
        for differences in ({B: (3600.0, "server 1@box3")}, {B: (3601.0, "server 1@box3")}, {}):
            story.clock.now += 5.0
            await anyio.wait_all_tasks_blocked()
            story.membership.clocks(differences)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert story.told == [
        "the clock of server 1@box3 is 3600 s ahead of this host's, so neither believes what the other announces: "
        "set both, best by NTP",
        "server 1@box3 had another time: over after 5.0 s",
    ]


def test_a_peer_that_says_again_and_again_that_it_has_trouble_and_has_none_is_told_of_once_a_minute() -> None:
    story = Story()
    for number in range(200):
        story.hear(report({"disk.failing{what=log}": float(number % 2)}))
        story.clock.now += 1.0
    assert len(story.ledger.totals.incidents.all) == 4
