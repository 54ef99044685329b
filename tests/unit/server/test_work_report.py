"""What a server says of its work: its share is that of the record, and who falls silent has a name."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio
import pytest
from tests.alongside import alongside
from tests.set_clock import FewSleeps, SetClock

from shoal.ids import Ballot, PeerId, StageIndex
from shoal.runtime.launcher_messages import PeerHeard, PeerSilent, WorkDone
from shoal.server.work_report import WorkReport
from shoal.swarm.view import ClientPeer, PeerLabel, Replica, SwarmView
from shoal.telemetry.registry import MetricRegistry
from shoal.transport.base import PeerLost
from shoal.wire.messages.base import Hop, SampleRange
from shoal.wire.messages.round import Record, StageHashes, StageOutcome

ME, OTHER, CLIENT = PeerId("me"), PeerId("12D3KooWtheirs"), PeerId("client")
LABELS = {OTHER: PeerLabel("server", "box2", 1), CLIENT: PeerLabel("client", "desk")}


@dataclass
class _Replica:
    """Stage 1, in round 3, with seven steps."""

    stage: int = 1
    num_committed: int = 7
    num_open: int = 1
    cap: int | None = None
    offered_round: int = 2

    @property
    def worker(self) -> _Replica:
        return self

    @property
    def member(self) -> _Replica:
        return self


@dataclass
class _Desk:
    clock: SetClock = field(default_factory=lambda: SetClock(0.0))
    replica: _Replica = field(default_factory=_Replica)
    metrics: MetricRegistry = field(default_factory=MetricRegistry)
    told: list[WorkDone | PeerSilent | PeerHeard] = field(default_factory=list[WorkDone | PeerSilent | PeerHeard])

    def __post_init__(self) -> None:
        there = Replica(Hop(OTHER, ()), 0.0, stage=StageIndex(0))
        view = SwarmView((there,), clients=(ClientPeer(Hop(CLIENT, ()), 0.0),), labels=LABELS)
        self.report = WorkReport(
            peer=ME,
            replica=lambda: self.replica,
            view=lambda: view,
            metrics=self.metrics,
            clock=self.clock,
            tell=self.told.append,
        )


def _record(round: int, num_samples: int, **weights: int) -> Record:
    members = tuple(PeerId(peer) for peer in weights)
    outcome = StageOutcome(1, 0, members, tuple(weights.values()), StageHashes("", "", ""), 0)
    return Record("run", round, Ballot(1, CLIENT, 1), "", (outcome,), (SampleRange(0, 0, num_samples),), (), {})


def test_the_share_and_the_speed_of_the_run_are_those_of_the_records() -> None:
    desk = _Desk()
    desk.metrics.counter("step.samples", stage=1).add(20)
    known = {"stage": 1, "round": 3, "steps": 7, "alive_peers": 2, "disk_failing": 0}
    assert desk.report.numbers() == {**known, "samples": 20}
    desk.report.recorded(_record(0, 100, other=70))
    desk.clock.now = 1.0
    # It has fetched the record before: how long this round took it does not know.
    desk.report.recorded(_record(1, 100, me=30, other=70))
    assert "run_samples_per_s" not in desk.report.numbers()
    desk.clock.now = 5.0
    desk.metrics.counter("step.samples", stage=1).add(50)
    # The weights are those of targets, of which a sample may have many.
    desk.report.recorded(_record(2, 80, me=2000, other=6000))
    assert desk.report.numbers() == {**known, "samples": 20 + 50, "share": 0.25, "run_samples_per_s": 20}
    desk.report.recorded(_record(3, 80, other=80))
    assert desk.report.numbers()["share"] == 0


def test_a_disk_that_takes_nothing_is_said() -> None:
    desk = _Desk()
    desk.metrics.counter("step.samples", stage=1).add(20)
    gauge = desk.metrics.gauge("disk.failing", what="replica_log")
    for fails in (1.0, 0.0):
        gauge.set(fails)
        assert desk.report.numbers()["disk_failing"] == fails


def test_a_peer_that_falls_silent_is_named_once_and_is_heard_again_once() -> None:
    desk = _Desk()
    for lost in (PeerLost(CLIENT, "closed"), PeerLost(PeerId("a trainer"), "silent", 2.0)):
        desk.report.lost(lost)
    for peer in (CLIENT, OTHER, OTHER):
        desk.report.lost(PeerLost(peer, "silent", 2.5))
    for peer in (OTHER, OTHER, PeerId("a trainer")):
        desk.report.found(peer)
    other, client = "server 1@box2 (stage 0)", "the client (client@desk)"
    assert desk.told == [
        PeerSilent(CLIENT, client, 2.5),
        PeerSilent(OTHER, other, 2.5),
        PeerHeard(OTHER, other),
    ]


class _Enough(Exception):
    """The last sleep."""


async def test_nothing_is_said_while_nothing_changes() -> None:
    desk, sleeps = _Desk(), 0

    async def sleep_s(duration_s: float) -> None:
        nonlocal sleeps
        sleeps += 1
        await anyio.lowlevel.checkpoint()
        if sleeps == 2:
            desk.replica.num_committed += 1
        if sleeps == 4:
            raise _Enough

    desk.clock.sleep_s = sleep_s  # type: ignore[method-assign]
    with pytest.raises(_Enough):
        await desk.report.run()
    assert [said.numbers["steps"] for said in desk.told if isinstance(said, WorkDone)] == [7, 8]


async def test_it_is_said_at_ticks() -> None:
    clock = FewSleeps(3)
    async with alongside(_Desk(clock).report.run):
        await clock.over.wait()
    assert clock.slept_s == pytest.approx([1.7, 2.0, 2.0])
