"""What a lost connection changes at once, and what is said from the first sign of a loss to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from tests.unit.client.noted import NotedLedger
from tests.unit.client.present import present_trainers

from shoal.client.watch import Watch
from shoal.clock import SystemClock
from shoal.control.membership import Membership
from shoal.control.records import StageRecord
from shoal.events.incidents import Cause, IncidentOpened
from shoal.events.losses import LossFound, ServerLost, TrainerLost
from shoal.events.run import StepReported
from shoal.ids import PeerId
from shoal.runtime.launcher_messages import LostProcess
from shoal.swarm.view import SwarmView
from shoal.transport.base import PeerLost
from shoal.transport.dispatch import dispatch
from shoal.transport.memory import MemoryNetwork
from shoal.wire.messages import Message
from shoal.wire.messages.control import Heartbeat
from shoal_lab.registry import LocalRegistry

FIRST, SECOND, OTHER, DATA = PeerId("first"), PeerId("second"), PeerId("other"), PeerId("data")
"""Servers: two of stage 0 and one of stage 1; and the data server."""
SLOTS = {FIRST: frozenset({0, 1}), OTHER: frozenset({0, 1})}
"""The trainers whose steps run over a server."""


class Clock(SystemClock):
    """The machine has run for 1000 seconds longer than the run, which was launched at 07:00."""

    time_s = 1000.0

    def now_s(self) -> float:
        return self.time_s

    def unix_s(self) -> float:
        return 7 * 3600 + self.time_s - 1000


def lost(role: str, at_s: float, index: int = 0, peer: PeerId | None = None) -> LostProcess:
    return LostProcess(role, 1000 + at_s, index, peer)


@dataclass
class Story:
    """A client with three servers and two trainers; times are seconds after the launch."""

    clock: Clock
    ledger: NotedLedger
    watch: Watch
    membership: Membership
    dialled: list[PeerId] = field(default_factory=list[PeerId])

    def step(self, slot: int, at_s: float, attempt: int = 0) -> None:
        self.ledger.note(StepReported(slot, 0, attempt, 4, 4, 5.0, False, 0.5, 1000 + at_s))

    def lose(self, peer: PeerId, at_s: float, silent_s: float = 0.0, still_s: float = 0.0) -> None:
        self.clock.time_s = 1000 + at_s
        self.watch.lost(PeerLost(peer, "", silent_s, still_s))

    def find(self, peer: PeerId, at_s: float) -> None:
        self.clock.time_s = 1000 + at_s
        self.membership.found(peer)
        self.watch.found(peer)

    def failovers(self) -> list[tuple[str, float, float | None]]:
        """Kind, time of the notice, time of the recovery."""
        return [
            (each.kind, each.noticed_s - 1000, None if each.recovered_s is None else each.recovered_s - 1000)
            for each in self.ledger.totals.incidents.all
        ]


def _watch(
    membership: Membership, num_trainers: int, ledger: NotedLedger, clock: Clock, dialled: list[PeerId]
) -> Watch:
    stand_in: Any = SimpleNamespace

    def post(peer: PeerId, message: Message) -> None:
        if isinstance(message, Heartbeat):
            dialled.append(peer)

    return Watch(
        endpoint=stand_in(post=post),
        membership=membership,
        trainers=present_trainers(num_trainers),
        homes=stand_in(slots_of=lambda peer: SLOTS.get(peer, frozenset())),
        reassignment=stand_in(is_moving=lambda _: False),
        data_server=DATA,
        ledger=ledger,
        clock=clock,
    )


@pytest.fixture
async def story(monkeypatch: pytest.MonkeyPatch) -> Story:
    monkeypatch.setattr(SwarmView, "name_of", lambda _, peer: peer)
    clock = Clock()
    registry = LocalRegistry(SystemClock())
    for peer, stage in ((FIRST, 0), (SECOND, 0), (OTHER, 1)):
        registry.of(peer).advertise(StageRecord((f"memory:{peer}",), 0.0, stage=stage))
    membership, dialled = registry.watch(), list[PeerId]()
    ledger = NotedLedger(clock)
    watch = _watch(membership, 2, ledger, clock, dialled)
    ledger.noted.clear()
    return Story(clock, ledger, watch, membership, dialled)


async def test_a_lost_server_leaves_the_view_at_once_and_is_one_loss_until_it_is_heard(story: Story) -> None:
    assert story.membership.view.replica(FIRST) is not None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(story.membership.changed)
        await anyio.wait_all_tasks_blocked()
        story.lose(FIRST, 1.0)
    assert story.membership.view.replica(FIRST) is None
    story.membership.found(FIRST)  # the registry names it again
    story.lose(FIRST, 1.5)
    story.step(0, 2.0)
    story.step(1, 2.5)
    assert story.failovers() == [("server", 1.0, 2.5)]


async def test_a_lost_trainer_is_a_loss_and_any_other_peer_is_none(story: Story) -> None:
    story.lose(PeerId("monitor"), 1.0)
    story.lose(PeerId("T0"), 2.0)
    assert [type(event) for event in story.ledger.noted] == [TrainerLost, IncidentOpened]


async def test_a_step_counts_from_when_it_was_committed_whenever_it_is_heard_of(story: Story) -> None:
    story.watch.processes_ended([lost("client", 2.0)], (0,))
    story.clock.time_s = 1005.0
    story.step(0, 1.5)
    assert story.failovers() == [("client", 2.0, None)], "it was committed before"
    story.step(0, 2.25)
    assert story.failovers() == [("client", 2.0, 2.25)]
    assert story.ledger.totals.seconds_to_first_step == 1.5
    assert story.ledger.said == [], "trainers do not stop for a client"


async def test_what_the_launcher_tells_is_noted_once_and_not_what_an_earlier_start_has_seen(story: Story) -> None:
    story.lose(FIRST, 3.0)
    ended = [
        lost("server", 2.5, 0, FIRST),
        lost("trainer", 2.0, 1),
        lost("client", 2.9),
        lost("client", 2.95),
        lost("data_server", 4.0),
        lost("server", 9.0, 2, OTHER),
    ]
    for _ in range(2):
        story.watch.processes_ended(ended, (0, 1))
    found = [event for event in story.ledger.noted if isinstance(event, LossFound)]
    assert [(event.kind, event.who, event.slots, event.at_s - 1000) for event in found] == [
        ("trainer", "trainer 1", (1,), 2.0),
        ("client", "the client", (0, 1), pytest.approx(2.9)),
        ("client", "the client", (0, 1), pytest.approx(2.95)),
        ("data_server", "the data server", (0, 1), 4.0),
        ("server", "other", (0, 1), 9.0),
    ]


async def test_what_ends_after_a_resume_is_known_by_its_own_time_and_not_by_that_since_the_launch(story: Story) -> None:
    # Ten hours were trained before; the launcher of the resumed run is young.
    story.ledger.totals.move(story.clock.time_s + 36000.0, story.clock.time_s)
    story.watch.processes_ended([lost("client", 5.0), lost("trainer", 4.0, 1)], (0, 1))
    assert story.failovers() == [("trainer", 4.0, None), ("client", 5.0, None)]
    assert story.ledger.totals.since_launch_s(1005.0) == 36005.0


async def test_what_a_start_has_missed_that_ended_at_once_the_next_one_notes(story: Story) -> None:
    story.watch.processes_ended([lost("trainer", 1.0, 0), lost("client", 5.0)], (0,))
    story.ledger.noted.clear()
    ended = [
        lost("trainer", 1.0, 0),  # of which connections have told a client that has lived
        lost("client", 5.0),
        lost("client", 7.0),
        lost("data_server", 7.1),
        lost("client", 7.2),
    ]
    story.watch.processes_ended(ended, (0,))
    found = [event for event in story.ledger.noted if isinstance(event, LossFound)]
    assert [(event.kind, event.at_s - 1000) for event in found] == [
        ("client", 7.0),
        ("data_server", pytest.approx(7.1)),
        ("client", pytest.approx(7.2)),
    ]


async def test_a_server_that_the_registry_has_forgotten_before_its_connection_ends_has_left_all_the_same(
    story: Story,
) -> None:
    story.watch.leaves(FIRST, 0)
    story.membership.lost(FIRST)
    assert story.membership.view.replica(FIRST) is None
    story.lose(FIRST, 3.0)
    (incident,) = story.ledger.totals.incidents.all
    assert (incident.cause, incident.gone_s) == (Cause.LEFT, 1003.0)
    story.lose(FIRST, 4.0)
    assert [type(event) for event in story.ledger.noted].count(ServerLost) == 1, "it is gone once"


async def test_of_two_that_end_at_once_the_one_that_an_earlier_start_has_not_seen_is_noted(story: Story) -> None:
    story.lose(FIRST, 3.0)
    story.watch.processes_ended([lost("client", 3.0), lost("server", 3.0, 1, SECOND)], (0, 1))
    story.lose(PeerId("T0"), 4.0)
    story.watch.processes_ended([lost("client", 4.0), lost("trainer", 4.0, 1)], (0, 1))
    found = [event for event in story.ledger.noted if isinstance(event, LossFound) and event.kind != "client"]
    assert [(event.kind, event.who) for event in found] == [("server", "second"), ("trainer", "trainer 1")]


async def test_what_broke_shortly_before_the_client_on_a_busy_host_is_noted_once(story: Story) -> None:
    ended = [lost("server", 2.7, 1, SECOND), lost("server", 4.9, 0, FIRST), lost("client", 4.0)]
    story.lose(FIRST, 3.0, silent_s=1.0)
    story.watch.processes_ended(ended, (0, 1))
    found = [event for event in story.ledger.noted if isinstance(event, LossFound)]
    assert [(event.kind, event.who) for event in found] == [("server", "second"), ("client", "the client")]


async def test_a_lost_server_is_dialled_once_and_nobody_else_is(story: Story) -> None:
    story.lose(PeerId("T0"), 1.0)
    story.lose(PeerId("stranger"), 1.0)
    assert story.dialled == []
    story.lose(FIRST, 1.0)
    story.lose(FIRST, 1.0)  # it could not be reached
    assert story.dialled == [FIRST]
    story.membership.found(FIRST)
    story.lose(FIRST, 1.0)
    assert story.dialled == [FIRST, FIRST]


async def test_a_freeze_is_told_from_its_first_second_to_the_moment_at_which_the_server_has_caught_up(
    story: Story,
) -> None:
    story.step(0, 2.8)
    story.lose(FIRST, 5.1, silent_s=2.1)
    story.step(0, 5.0)
    story.step(0, 5.5)
    story.step(0, 5.6)
    story.watch.caught_up({FIRST: 0, SECOND: 0})
    story.watch.found(SECOND)
    story.find(FIRST, 17.0)
    story.find(FIRST, 17.0)
    story.watch.caught_up({SECOND: 0})
    story.clock.time_s = 1018.0
    story.watch.caught_up({FIRST: 0, SECOND: 0})
    story.watch.caught_up({FIRST: 0, SECOND: 0})
    assert story.ledger.said == [
        "first (stage 0) has said nothing for 2.1 s (since 07:00:03Z), so it is frozen or cut off; its work goes on "
        "over second",
        "trainer 0 trains again after 2.2 s without a step (first lost)",
        "first is heard again after 14.0 s; it catches up",
        "first has caught up, 15.0 s after it was heard last: it serves stage 0 again",
    ]


async def test_who_comes_while_training_goes_on_is_told_once_and_who_was_there_before_is_not(story: Story) -> None:
    story.watch.caught_up({FIRST: 0})
    story.watch.caught_up({FIRST: 0, OTHER: 1})
    story.step(0, 1.0)
    for _ in range(2):
        story.watch.caught_up({FIRST: 0, SECOND: 0, OTHER: 1})
    assert story.ledger.said == ["second has come: it serves stage 0"]


async def test_a_client_that_is_started_again_does_not_take_who_answers_late_for_a_newcomer(story: Story) -> None:
    story.step(0, 1.0)
    story.ledger.totals.rounds = 3
    watch = _watch(story.membership, 0, story.ledger, story.clock, [])
    watch.caught_up({FIRST: 0})
    watch.caught_up({FIRST: 0, OTHER: 1})
    story.ledger.totals.rounds = 4
    watch.caught_up({FIRST: 0, SECOND: 0, OTHER: 1})
    assert story.ledger.said == ["second has come: it serves stage 0"]


async def test_a_kill_is_told_and_what_it_cost_each_trainer_that_it_hit(story: Story) -> None:
    story.step(0, 1.0)
    story.step(1, 2.0)
    story.lose(OTHER, 2.5)
    story.step(1, 4.0)
    story.step(0, 4.5)
    assert story.ledger.said == [
        "other (stage 1) is gone: its connection has closed; nobody else serves stage 1",
        "trainer 1 trains again after 2.0 s without a step (other lost)",
        "trainer 0 trains again after 3.5 s without a step (other lost)",
    ]


async def test_a_server_that_has_given_up_a_client_which_stood_still_is_not_called_gone(story: Story) -> None:
    story.step(0, 1.0)
    story.lose(OTHER, 14.5, still_s=12.25)
    assert story.ledger.said == [
        "other (stage 1) has given this client up, which stood still for 12.2 s; nobody else serves stage 1"
    ]
    [incident] = story.ledger.totals.incidents.all
    assert (incident.cause, incident.began_s) == (Cause.CUT, 1002.25)


async def test_of_a_spare_nobody_has_to_take_over(story: Story) -> None:
    story.lose(SECOND, 0.5)
    story.step(0, 1.0)
    assert story.ledger.said == [
        "second (stage 0) is gone: its connection has closed; no trainer's steps ran over it, first serves on"
    ]


async def test_a_server_that_is_lost_again_before_it_has_caught_up_is_told_again_with_the_first_loss_s_time(
    story: Story,
) -> None:
    story.lose(SECOND, 0.0)
    story.find(SECOND, 1.0)
    story.lose(SECOND, 4.0, silent_s=1.0)
    story.find(SECOND, 9.0)
    assert [type(event) for event in story.ledger.noted].count(ServerLost) == 2
    assert story.ledger.said[-1] == "second is heard again after 9.0 s; it catches up"


async def test_a_trainer_that_is_frozen_is_replaced_and_one_that_has_ended_is_its_host_s_to_tell(story: Story) -> None:
    story.lose(PeerId("T0"), 5.0, silent_s=3.0)
    story.lose(PeerId("T1"), 5.0)
    story.step(1, 6.0)
    assert story.ledger.said == [
        "trainer 0 has said nothing for 3.0 s (since 07:00:02Z), so it is frozen or cut off; "
        "its client replaces it, unless it was lost too often in this round",
        "trainer 1 trains again after 1.0 s without a step (trainer 1 lost)",
    ]


async def test_several_losses_at_once_are_named_together(story: Story) -> None:
    story.step(0, 1.0)
    story.lose(OTHER, 2.0)
    story.lose(PeerId("T0"), 2.0)
    story.lose(DATA, 2.0)
    story.step(0, 3.5)
    assert (
        story.ledger.said[-1]
        == "trainer 0 trains again after 2.5 s without a step (other, trainer 0 and the data server lost)"
    )


async def test_how_a_connection_has_ended_is_known_before_the_handlers_act_on_it() -> None:
    network = MemoryNetwork()
    client, server = (network.endpoint(PeerId(name)) for name in ("client", "server"))
    client.introduce(server.hop)
    client.post(server.peer_id, Heartbeat())
    told: list[str] = []

    class Handler:
        def receive(self, event: object) -> bool:
            return True

        def peer_lost(self, peer: PeerId) -> None:
            told.append("handler")
            scope.cancel()

    network.kill(server.peer_id)
    with anyio.CancelScope() as scope:
        await dispatch(client, (Handler(),), on_lost=lambda lost: told.append(lost.peer))
    assert told == ["server", "handler"]
