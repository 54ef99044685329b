"""A loss from its first sign to its last, in words."""

from __future__ import annotations

import anyio
import pytest

from shoal.client.loss_notices import LossNotices
from shoal.clock import SystemClock
from shoal.ids import PeerId, StageIndex
from shoal.swarm.view import PeerLabel, Replica, SwarmView
from shoal.transport.base import PeerLost
from shoal.transport.dispatch import dispatch
from shoal.transport.memory import MemoryNetwork
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import Heartbeat

MY_FIRST, MY_SECOND, THEIRS = PeerId("mine-0"), PeerId("mine-1"), PeerId("12D3KooWtheirs")


class _Clock(SystemClock):
    """It is 07:00 at 0 s."""

    time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def unix_s(self) -> float:
        return 7 * 3600 + self.time_s


def _replica(peer: PeerId) -> Replica:
    return Replica(Hop(peer, ()), 0.0, stage=StageIndex(0))


FIRST, SECOND, THIRD = _replica(MY_FIRST), _replica(MY_SECOND), _replica(THEIRS)
LABELS = {
    MY_FIRST: PeerLabel("server", "box1", 0),
    MY_SECOND: PeerLabel("server", "box1", 1),
    THEIRS: PeerLabel("server", "box2", 0),
}


class _Story:
    """What the user reads, with the seconds after 07:00 at which it is said."""

    def __init__(self) -> None:
        self.clock = _Clock()
        self.said: list[tuple[float, str]] = []
        view = SwarmView(labels=LABELS)
        self.notices = LossNotices(
            clock=self.clock, notice=lambda text: self.said.append((self.clock.time_s, text)), name_of=view.name_of
        )

    def lose(self, replica: Replica, silent_s: float, *others: Replica, slots: tuple[int, ...] = (0,)) -> None:
        self.notices.connection_ended(PeerLost(replica.peer, "", silent_s))
        self.notices.server_lost(replica, others, slots)


def test_a_freeze_is_told_from_its_first_second_to_the_moment_at_which_the_server_has_caught_up() -> None:
    story = _Story()
    story.clock.time_s = 3.0
    story.notices.step_committed(0, 2.8)
    story.clock.time_s = 5.1
    story.lose(FIRST, 2.1, SECOND, THIRD)
    story.notices.step_committed(0, 5.0)
    story.clock.time_s = 5.6
    story.notices.step_committed(0, 5.5)
    story.notices.step_committed(0, 5.6)
    story.clock.time_s = 17.0
    story.notices.caught_up({MY_FIRST: 0})
    story.notices.found(THEIRS)
    story.notices.found(MY_FIRST)
    story.notices.found(MY_FIRST)
    story.notices.caught_up({MY_SECOND: 0})
    story.clock.time_s = 18.0
    story.notices.caught_up({MY_FIRST: 0, MY_SECOND: 0})
    story.notices.caught_up({MY_FIRST: 0, MY_SECOND: 0})
    assert story.said == [
        (
            5.1,
            "server 0@box1 (stage 0) has said nothing for 2.1 s (since 07:00:03Z), so it is frozen or cut off; its "
            "work goes on over server 1@box1 and server 0@box2",
        ),
        (5.6, "trainer 0 trains again after 2.2 s without a step (server 0@box1 lost)"),
        (17.0, "server 0@box1 is heard again after 14.0 s; it catches up"),
        (18.0, "server 0@box1 has caught up, 15.0 s after it was heard last: it serves stage 0 again"),
    ]


def test_a_kill_is_told_and_what_it_cost_each_trainer_that_it_hit() -> None:
    story = _Story()
    for slot in (0, 1):
        story.notices.step_committed(slot, 1.0 + slot)
    story.clock.time_s = 2.5
    story.lose(SECOND, 0.0, slots=(0, 1))
    story.lose(SECOND, 0.0, slots=(0, 1))
    story.notices.step_committed(1, 4.0)
    story.notices.step_committed(0, 4.5)
    assert [text for _, text in story.said] == [
        "server 1@box1 (stage 0) is gone: its connection has closed; nobody else serves stage 0",
        "trainer 1 trains again after 2.0 s without a step (server 1@box1 lost)",
        "trainer 0 trains again after 3.5 s without a step (server 1@box1 lost)",
    ]


def test_of_a_spare_nobody_has_to_take_over() -> None:
    story = _Story()
    story.lose(THIRD, 0.0, FIRST, slots=())
    story.notices.step_committed(0, 1.0)
    assert [text for _, text in story.said] == [
        "server 0@box2 (stage 0) is gone: its connection has closed; "
        "no trainer's steps ran over it, server 0@box1 serves on"
    ]


def test_a_server_that_is_lost_again_before_it_has_caught_up_is_told_again_with_the_first_loss_s_time() -> None:
    story = _Story()
    story.lose(FIRST, 0.0, slots=())
    story.notices.found(MY_FIRST)
    story.clock.time_s = 4.0
    story.lose(FIRST, 1.0, slots=())
    story.clock.time_s = 9.0
    story.notices.found(MY_FIRST)
    assert len(story.said) == 4
    assert story.said[-1] == (9.0, "server 0@box1 is heard again after 9.0 s; it catches up")


def test_a_trainer_that_is_frozen_is_replaced_and_one_that_has_ended_is_its_host_s_to_tell() -> None:
    story = _Story()
    story.notices.connection_ended(PeerLost(PeerId("t0"), "", 3.0))
    story.clock.time_s = 5.0
    story.notices.lost("trainer 0", (0,), PeerId("t0"))
    story.notices.lost("trainer 1", (1,), PeerId("t1"))
    story.notices.step_committed(1, 6.0)
    assert [text for _, text in story.said] == [
        "trainer 0 has said nothing for 3.0 s (since 07:00:02Z), so it is frozen or cut off; "
        "another one takes its place",
        "trainer 1 trains again after 1.0 s without a step (trainer 1 lost)",
    ]


@pytest.mark.anyio
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
    with anyio.fail_after(240), anyio.CancelScope() as scope:
        await dispatch(client, (Handler(),), on_lost=lambda lost: told.append(lost.peer))
    assert told == ["server", "handler"]
