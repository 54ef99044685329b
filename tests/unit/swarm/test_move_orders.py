"""The coordinator's machine for moves: one at a time, repeated, followed to its end."""

from __future__ import annotations

import math
from dataclasses import replace

from tests.unit.swarm.test_reassignment import swarm

from shoal.ids import NO_BALLOT, PeerId
from shoal.swarm.move_orders import Begun, Ended, MoveEnd, MoveOrders, MoveSettings, SendOrder
from shoal.swarm.placement import StageMove
from shoal.swarm.view import Candidate, SwarmView
from shoal.wire.messages.base import Hop
from shoal.wire.messages.round import Moving

TO_1 = StageMove(PeerId("s0.2"), 0, 1, False)
URGENT = StageMove(PeerId("s0.2"), 0, 1, True)


class Swarm:
    """A machine and the view that it is shown; every server holds the record unless said otherwise."""

    def __init__(self, *counts: int) -> None:
        self.machine = MoveOrders(len(counts), MoveSettings())
        self.view = swarm(*counts)
        self.away: set[str] = set()
        self.loading: set[str] = set()
        self.now_s = 0.0

    @property
    def known(self) -> dict[PeerId, int]:
        return {r.peer: r.stage for r in self.view.replicas if r.peer not in self.away}

    @property
    def holders(self) -> dict[PeerId, int]:
        return {peer: stage for peer, stage in self.known.items() if peer not in self.loading}

    def look(self, now_s: float) -> list[object]:
        self.now_s = now_s
        return self.machine.update(self.view, self.holders, self.known, now_s)

    def record(self, round: int, now_s: float) -> list[object]:
        self.now_s = now_s
        return self.machine.recorded(self.view, self.holders, round, now_s)

    def place(self, peer: str, stage: int) -> None:
        self.view = self.view.placed({PeerId(peer): stage})

    def answer(self, peer: str, stage: int, refused: str = "") -> list[object]:
        return self.machine.receive(PeerId(peer), Moving(NO_BALLOT, stage, refused), self.now_s)


def test_after_a_record_one_server_is_ordered_until_it_answers_and_followed_until_it_holds_the_record() -> None:
    world = Swarm(3, 1)
    assert world.look(0.0) == []  # in the middle of a round nobody is sent for a gain
    assert world.record(1, 1.0) == [Begun(TO_1), SendOrder(TO_1)]
    assert world.machine.wake_at_s == 1.5
    assert world.look(1.2) == []
    assert world.look(1.5) == [SendOrder(TO_1)]
    assert world.answer("s0.2", 1) == []
    assert world.look(3.0) == []
    # While it is on its way it is used for neither stage, and no other one is sent.
    assert world.machine.stage_of(PeerId("s0.2"), 0) is None
    assert world.machine.stage_of(PeerId("s0.2"), 1) == 1
    assert world.machine.stage_of(PeerId("s0.1"), 0) == 0
    assert world.record(2, 4.0) == []
    world.machine.lost(PeerId("s0.2"))
    world.away.add("s0.2")
    assert world.look(4.1) == []
    world.away.clear()
    world.place("s0.2", 1)
    world.loading.add("s0.2")
    assert world.look(4.2) == []
    world.loading.clear()
    assert world.look(5.0) == [Ended(TO_1, MoveEnd.ARRIVED)]
    assert world.answer("s0.2", 1) == []  # a late repetition begins nothing
    assert world.machine.under_way is None
    assert world.record(3, 6.0) == []


def test_a_stage_without_anybody_is_filled_after_a_moment_but_not_if_somebody_comes() -> None:
    world = Swarm(3, 0)
    assert world.look(0.0) == []
    assert world.machine.wake_at_s == 1.0
    assert world.look(0.9) == []
    assert world.look(1.0) == [Begun(URGENT), SendOrder(URGENT)]

    world = Swarm(3, 1)
    there = world.view
    world.view = there.without({PeerId("s1.0")})
    assert world.look(0.0) == []
    world.view = there  # only its connection had broken
    assert world.look(0.8) == []
    assert world.machine.wake_at_s == math.inf
    world.view = there.without({PeerId("s1.0")})
    assert world.look(1.5) == []
    assert world.look(2.6)[0] == Begun(URGENT)


def test_who_has_filled_a_gap_goes_back_in_the_same_round_if_those_that_were_lost_are_there_again() -> None:
    there = swarm(2, 2)
    lost = {r.peer for r in there.replicas if r.stage == 1}
    for back_at_s, goes_back in ((1.5, True), (11.0, True), (14.0, False)):
        world = Swarm(2, 2)
        world.view = there.without(lost)
        world.look(0.0)
        sent = world.look(1.0)[0].move
        assert sent == StageMove(PeerId("s0.1"), 0, 1, True)
        world.answer("s0.1", 1)
        world.view = there.without(lost).placed({sent.peer: 1})
        assert world.look(3.0) == [Ended(sent, MoveEnd.ARRIVED)]
        assert world.look(max(3.0, back_at_s)) == [], "it is the only one of its stage"
        world.view = there.placed({sent.peer: 1})
        back = StageMove(sent.peer, 1, 0, False)
        assert world.look(max(3.0, back_at_s)) == ([Begun(back), SendOrder(back)] if goes_back else [])
        if not goes_back:
            assert world.record(1, 20.0)[0].move.stage == 0, "now nobody loses what it has trained"


def test_who_goes_back_is_not_sent_on_again_and_others_stay() -> None:
    there = swarm(2, 2)
    world = Swarm(2, 2)
    world.view = there.without({r.peer for r in there.replicas if r.stage == 1})
    world.look(0.0)
    world.look(1.0)
    world.view = there.placed({PeerId("s0.1"): 1})
    assert [type(each) for each in world.look(2.0)] == [Ended, Begun, SendOrder]
    assert world.answer("s0.1", 0, "its user has given it a stage")[0].how is MoveEnd.REFUSED
    assert world.look(2.5) == []
    world.view = swarm(1, 4)  # others would have to go: they may have trained
    assert world.look(3.0) == []


def test_a_candidate_fills_the_gap_and_nobody_moves() -> None:
    world = Swarm(2, 0)
    world.view = SwarmView(world.view.replicas, (Candidate(Hop(PeerId("new"), ()), 200.0),))
    assert [world.look(at_s) for at_s in (0.0, 1.0, 2.0)] == [[], [], []]
    world.view = replace(world.view, candidates=())  # it has left
    assert world.look(3.0)[0] == Begun(StageMove(PeerId("s0.1"), 0, 1, True))


def test_one_that_refuses_is_not_asked_again_and_the_next_one_is_once_there_is_a_record() -> None:
    world = Swarm(4, 1)
    first = world.record(1, 0.0)[0].move
    assert first.peer == "s0.3"
    assert world.answer("s0.3", 1, "too small") == [Ended(first, MoveEnd.REFUSED, "too small")]
    assert world.answer("s0.3", 1) == []
    assert world.machine.under_way is None, "that it goes was said before it refused, and has come late"
    assert world.look(0.1) == []
    assert world.record(2, 1.0)[0].move.peer == "s0.2"


def test_where_a_stage_has_nobody_the_next_one_is_asked_at_once() -> None:
    world = Swarm(3, 0)
    world.look(0.0)
    world.look(1.0)
    world.answer("s0.2", 1, "too small")
    assert world.look(2.0)[0].move.peer == "s0.1"


def test_a_server_rests_between_two_moves_unless_a_stage_has_nobody() -> None:
    world = Swarm(3, 1)
    world.record(1, 0.0)
    world.place("s0.2", 1)
    assert world.look(1.0) == [Ended(TO_1, MoveEnd.ARRIVED)]
    # Stage 0 loses one and two more come to stage 1: the mover is the youngest there, and stays.
    later = swarm(1, 4)
    world.view = SwarmView((*(r for r in later.replicas if r.peer != "s1.3"), replace(later.replicas[-1], hop=TO_HOP)))
    for round in (2, 3):
        assert world.record(round, float(round))[0].move.peer != "s0.2"
        world.machine.under_way = None
    assert world.record(4, 4.0)[0].move.peer == "s0.2"


TO_HOP = Hop(PeerId("s0.2"), ())


def test_a_mover_that_dies_is_forgotten_after_a_while_and_one_that_comes_back_at_once() -> None:
    world = Swarm(3, 1)
    world.record(1, 0.0)
    world.answer("s0.2", 1)
    world.machine.lost(PeerId("s0.2"))
    world.away.add("s0.2")
    assert world.look(1.0) == []
    assert world.look(9.9) == []
    assert world.machine.wake_at_s == 10.0
    assert world.look(10.0) == [Ended(TO_1, MoveEnd.LOST)]

    world = Swarm(3, 1)
    world.record(1, 0.0)
    world.machine.lost(PeerId("s0.2"))
    world.away.add("s0.2")
    world.look(1.0)
    world.away.clear()
    assert world.look(2.0) == [Ended(TO_1, MoveEnd.CAME_BACK)]


def test_one_that_never_gets_there_does_not_keep_others_from_moving() -> None:
    world = Swarm(3, 1)
    world.record(1, 0.0)
    world.answer("s0.2", 1)
    for at_s in range(1, 120):
        assert world.look(float(at_s)) == []
    assert world.look(120.0) == [Ended(TO_1, MoveEnd.TOO_SLOW)]


def test_a_successor_hears_of_the_mover_and_sends_no_second_one() -> None:
    world = Swarm(3, 0)
    world.look(0.0)
    # What it asks when it takes its ballot is answered by the mover with where it goes.
    assert world.answer("s0.2", 1) == []
    assert world.look(1.5) == []
    assert world.record(4, 2.0) == []
    world.place("s0.2", 1)
    assert [effect.how for effect in world.look(3.0)] == [MoveEnd.ARRIVED]


def test_before_the_first_round_servers_are_sent_one_after_the_other_until_they_stand_well() -> None:
    world = Swarm(4, 1, 1)  # for a gain alone nobody would be sent

    def placed(now_s: float) -> list[object]:
        world.now_s = now_s
        return world.machine.placed(world.view, world.holders, now_s)

    first, second = StageMove(PeerId("s0.3"), 0, 1, False), StageMove(PeerId("s0.2"), 0, 1, False)
    assert placed(0.0) == [Begun(first), SendOrder(first)]
    assert placed(0.1) == [], "one at a time"
    # Who refuses is not asked again, and another one is.
    assert world.answer("s0.3", 1, "it does not fit") == [Ended(first, MoveEnd.REFUSED, "it does not fit")]
    assert placed(0.2) == [Begun(second), SendOrder(second)]
    assert world.answer("s0.2", 1) == []
    world.place("s0.2", 1)
    assert world.look(1.0) == [Ended(second, MoveEnd.ARRIVED)]
    third = StageMove(PeerId("s0.1"), 0, 2, False)
    assert placed(1.1) == [Begun(third), SendOrder(third)]
    world.place("s0.1", 2)
    assert world.look(2.0) == [Ended(third, MoveEnd.ARRIVED)]
    assert placed(2.1) == []
    assert world.machine.under_way is None
