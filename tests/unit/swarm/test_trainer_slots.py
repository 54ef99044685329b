"""Which trainers are started, when one counts as there, and who takes the place of one that is lost in a round."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import pytest

from shoal.events.trainers import TrainerFenced, TrainerGivenUp, TrainerNotReplaced, TrainerReplaced, TrainerStale
from shoal.ids import PeerId, StepKey
from shoal.runtime.launcher_messages import StartTrainer
from shoal.swarm.step_operations import SendStepMessage
from shoal.swarm.takeover import TakeoverMachine
from shoal.swarm.trainer_slots import MAX_PER_ROUND, GoOn, ReleaseLeases, SlotEffect, TrainerSlots, TrainerThere
from shoal.wire.messages.base import Hop, StepRange
from shoal.wire.messages.control import TrainerHello
from shoal.wire.messages.feed import Released
from shoal.wire.messages.step import Fence, Fenced

A, B = PeerId("A"), PeerId("B")
KEY, NEXT, OTHER = StepKey(1, 1, 4, 0), StepKey(1, 1, 5, 0), StepKey(0, 1, 4, 0)
STEPS, NONE = StepRange(4, 8), StepRange(8, 8)


def hello(slot: int, generation: int, *, hop: str | None = None, round: int = 0) -> tuple[PeerId, TrainerHello]:
    name = f"T{slot}.{generation}"
    return PeerId(name), TrainerHello(slot, generation, Hop(PeerId(hop or name), ()), round)


def fenced(*committed: StepKey, in_doubt: tuple[StepKey, ...] = (), lowest: int = 2, steady: bool = True) -> Fenced:
    return Fenced({1: lowest}, committed, in_doubt, 3, {}, steady)


class Desk:
    """A client with two trainers and two replicas, in round 3."""

    def __init__(self, *, steps: StepRange = STEPS, named: Collection[PeerId] | None = (A, B)) -> None:
        self.slots = TrainerSlots(start_timeout_s=20.0)
        self.slots.adopt({0: 1, 1: 1}, [0, 1])
        for slot in (0, 1):
            self.slots.receive(*hello(slot, 1, round=3), 0.0)
        self.slots.replicas([A, B], 0.0)
        steady = () if named is None else (A, B)
        self.begun = self.slots.begin_round(3, frozenset({0, 1}), steps, named, steady, 1.0)

    def lose(self, generation: int = 1, now_s: float = 2.0) -> list[SlotEffect]:
        return self.slots.lost(PeerId(f"T1.{generation}"), now_s)

    def answer(self, peer: PeerId, message: Fenced, now_s: float = 2.05) -> list[SlotEffect]:
        return self.slots.receive(peer, message, now_s)

    def settle(self) -> ReleaseLeases:
        """The last trainer is lost, and neither replica has committed anything of it."""
        self.lose()
        self.slots.launched(1, 2, "", 2.01)
        self.answer(A, fenced())
        [_, release] = self.answer(B, fenced())
        assert isinstance(release, ReleaseLeases)
        return release


def only(effects: Sequence[SlotEffect], *kinds: type) -> list[SlotEffect]:
    return [effect for effect in effects if isinstance(effect, kinds)]


# ---- which trainers there are


def test_only_slots_without_a_trainer_get_one() -> None:
    slots = TrainerSlots(start_timeout_s=5.0)
    assert slots.want(2) == [StartTrainer(0, 1), StartTrainer(1, 1)]
    assert slots.silent([0, 1]) == [0, 1]
    assert slots.receive(*hello(0, 1), 0.0) == [TrainerThere(0, 1, Hop(PeerId("T0.1"), ()))]
    assert slots.silent([0, 1]) == [1]
    assert slots.want(3) == [StartTrainer(2, 1)], "the second one is on its way"
    assert list(slots.present) == [0]
    assert (slots.slot_of(PeerId("T0.1")), slots.slot_of(PeerId("T7.1"))) == (0, None)


def test_a_lost_trainer_is_followed_by_the_next_generation_and_may_not_train_in_the_round_that_ends() -> None:
    slots = TrainerSlots(start_timeout_s=5.0)
    slots.want(2)
    for slot in (0, 1):
        slots.receive(*hello(slot, 1), 0.0)
    assert slots.lost(PeerId("T0.1"), 1.0) == slots.lost(PeerId("somebody"), 1.0) == []
    assert (slots.generations, slots.lowest) == ({0: 1, 1: 1}, {0: 2, 1: 1})
    assert not slots.silent([0]), "it has said hello, and is not waited for"
    assert slots.want(2) == [StartTrainer(0, 2)]


@pytest.mark.parametrize("stale", [hello(0, 0), hello(0, 2), hello(1, 1), hello(0, 1, hop="somebody")])
def test_a_hello_that_was_not_asked_for_is_ignored(stale: tuple[PeerId, TrainerHello]) -> None:
    slots = TrainerSlots(start_timeout_s=5.0)
    slots.want(1)
    assert slots.receive(*stale, 0.0) == [TrainerStale(stale[0], stale[1].slot, stale[1].generation)]
    assert not slots.present


def test_who_is_not_waited_for_or_could_not_be_started_is_started_anew_later() -> None:
    slots = TrainerSlots(start_timeout_s=5.0)
    slots.want(3)
    slots.receive(*hello(0, 1), 0.0)
    assert slots.launched(1, 1, "no memory", 0.0) == []
    assert slots.launched(2, 0, "the one before could not", 0.0) == []
    assert slots.want(3) == [StartTrainer(1, 2)]
    assert slots.forgo([0, 2]) == [2]
    assert slots.want(3) == [StartTrainer(2, 2)]


def test_trainers_that_run_are_adopted_and_not_started_again() -> None:
    slots = TrainerSlots(start_timeout_s=5.0)
    slots.adopt({0: 2, 1: 1, 2: 4}, [0, 2])
    assert slots.booting == [0, 2]
    slots.receive(*hello(2, 4), 0.0)
    assert slots.booting == [0]
    assert slots.want(3) == [StartTrainer(1, 2)]


def test_generations_begin_above_all_of_another_client_s() -> None:
    slots = TrainerSlots(start_timeout_s=5.0, above=1000)
    slots.want(1)
    slots.receive(*hello(0, 1001), 0.0)
    slots.begin_above({1: 1007}, 1000)
    assert not slots.present
    assert slots.generations == {0: 2001, 1: 2007}
    assert only(slots.receive(*hello(0, 1001), 0.0), TrainerThere) == [], "an earlier one is not believed"
    assert slots.want(3) == [StartTrainer(0, 2002), StartTrainer(1, 2008), StartTrainer(2, 1001)]


# ---- in a round


def test_a_lost_trainer_s_steps_are_settled_while_the_next_one_is_launched_and_that_one_does_the_rest() -> None:
    desk = Desk()
    assert desk.begun == []
    assert desk.lose() == [StartTrainer(1, 2), *(SendStepMessage(peer, Fence({1: 2})) for peer in (A, B))]
    assert desk.slots.wake_at_s == pytest.approx(2.1)
    assert desk.answer(A, fenced(KEY, OTHER)) == []
    settled = desk.answer(B, fenced())
    assert settled == [TrainerFenced(slot=1, lowest=2, committed=1, in_doubt=0, complete=True, after_s=0.05)]
    assert desk.slots.wake_at_s == math.inf
    [release] = desk.slots.launched(1, 2, "", 2.3)
    assert isinstance(release, ReleaseLeases)
    assert (release.slot, release.generation, release.settled.committed) == (1, 1, {KEY})
    assert desk.slots.released(Released(1, 1, 4, is_known=True), -1, 2.4) == [TrainerReplaced(1, 2, 5)]
    there, go_on = desk.slots.receive(*hello(1, 2), 3.0)
    assert (there, go_on) == (TrainerThere(1, 2, Hop(PeerId("T1.2"), ())), GoOn(1, StepRange(5, 8)))
    assert desk.slots.wake_at_s == math.inf


def test_a_hello_that_comes_before_leases_are_free_waits_for_them() -> None:
    desk = Desk()
    desk.settle()
    assert only(desk.slots.receive(*hello(1, 2), 2.1), GoOn) == []
    assert desk.slots.released(Released(1, 0, 4, is_known=True), -1, 2.2) == [], "that was to an earlier release"
    replaced, go_on = desk.slots.released(Released(1, 1, 4, is_known=True), 6, 2.3)
    assert (replaced, go_on) == (TrainerReplaced(1, 2, 7), GoOn(1, StepRange(7, 8))), "after all that was reported"


def test_without_steps_nothing_is_settled() -> None:
    desk = Desk(steps=NONE)
    assert desk.lose() == [StartTrainer(1, 2)]
    desk.slots.launched(1, 2, "", 2.5)
    assert only(desk.slots.receive(*hello(1, 2), 3.0), GoOn) == [GoOn(1, NONE)]


def test_replicas_are_asked_again_while_they_are_silent_or_in_doubt() -> None:
    desk = Desk()
    desk.lose()
    desk.answer(A, fenced())
    desk.answer(B, fenced(in_doubt=(KEY,)))
    assert desk.slots.tick(2.1) == [SendStepMessage(peer, Fence({1: 2})) for peer in (A, B)]
    [said] = desk.answer(B, fenced(KEY), 2.2)
    assert isinstance(said, TrainerFenced)
    assert (said.committed, said.in_doubt) == (1, 0)


def test_doubt_that_was_waited_for_in_vain_holds_up_no_other_replacement_in_the_round() -> None:
    desk = Desk()
    desk.lose()
    desk.answer(A, fenced())
    desk.answer(B, fenced(in_doubt=(KEY,)))
    desk.slots.launched(1, 2, "", 2.1)
    desk.slots.receive(*hello(1, 2), 2.2)
    [said, release] = desk.slots.tick(3.1)
    assert isinstance(said, TrainerFenced)
    assert isinstance(release, ReleaseLeases)
    assert said.in_doubt == 1
    desk.slots.released(Released(1, 1, 4, is_known=True), -1, 3.2)
    desk.lose(generation=2, now_s=4.0)
    desk.answer(A, fenced(lowest=3), 4.01)
    [again] = desk.answer(B, fenced(in_doubt=(KEY,), lowest=3), 4.02)
    assert isinstance(again, TrainerFenced)
    assert (again.in_doubt, again.after_s) == (1, 0.02)


def test_new_doubt_is_waited_for_beside_the_one_that_is_left_to_the_record() -> None:
    machine = TakeoverMachine(1, 3, 3, 4.0, left_to_record=(KEY,))
    machine.receive(A, fenced(in_doubt=(KEY, NEXT), lowest=3))
    assert not machine.is_over([A], 4.9)
    machine.receive(A, fenced(NEXT, in_doubt=(KEY,), lowest=3))
    assert machine.is_over([A], 4.1)
    assert machine.settled([A], ()).in_doubt == {KEY}


def test_a_replica_that_is_lost_meanwhile_is_not_waited_for_and_does_not_count_as_settled() -> None:
    desk = Desk()
    desk.lose()
    desk.answer(A, fenced(KEY))
    [said] = desk.slots.lost(B, 2.5)
    assert isinstance(said, TrainerFenced)
    assert not said.complete


def test_without_any_replica_in_reach_nobody_trains_and_the_first_that_is_back_is_asked() -> None:
    desk = Desk()
    desk.slots.replicas([], 1.5)
    assert not only(desk.lose(), TrainerFenced)
    assert only(desk.slots.replicas([A], 2.5), SendStepMessage) == [SendStepMessage(A, Fence({1: 2}))]
    assert only(desk.answer(A, fenced(KEY), 2.6), TrainerFenced)


def test_replicas_that_stay_away_are_waited_for_as_long_as_silent_ones() -> None:
    desk = Desk()
    desk.slots.replicas([], 1.5)
    desk.lose()
    assert not desk.slots.tick(6.9)
    [said] = desk.slots.tick(7.1)
    assert isinstance(said, TrainerFenced)
    assert not said.complete


def test_who_was_there_when_the_round_began_and_was_not_lost_since_would_know_of_every_attempt() -> None:
    desk = Desk()
    desk.slots.lost(B, 1.5)
    desk.slots.replicas([A, B], 1.6)
    settled = desk.settle().settled
    assert settled.denies(KEY, (A,))
    assert not settled.denies(KEY, (B,)), "what answers now may have been started since"


def test_a_client_that_was_started_again_does_not_know_who_has_been_there_since_the_round_began() -> None:
    settled = Desk(named=None).settle().settled
    assert not settled.denies(KEY, (A, B))
    assert not settled.complete, "nor whom trainers were told of"


def test_a_replica_that_came_in_during_the_round_and_is_cut_off_since_may_have_committed() -> None:
    named = {A, B}
    desk = Desk(named=named)
    named.add(PeerId("came in"))
    assert not desk.settle().settled.complete


def test_a_trainer_that_an_earlier_start_of_the_client_has_not_told_of_the_round_is_told() -> None:
    slots = TrainerSlots(start_timeout_s=20.0)
    slots.adopt({0: 1, 1: 2, 2: 1}, [0, 1, 2])
    for peer, message in (hello(0, 1, round=3), hello(1, 2, round=2), hello(2, 1, round=2)):
        slots.receive(peer, message, 0.0)
    slots.finish(2)
    slots.replicas([A], 0.0)
    begun = slots.begin_round(3, frozenset({0, 1, 2}), STEPS, None, (), 1.0)
    assert begun == [SendStepMessage(A, Fence({1: 2}))], "no other one is started, and who is done has nothing to do"
    _, release = slots.receive(A, fenced(), 1.1)
    assert isinstance(release, ReleaseLeases)
    assert (release.slot, release.generation) == (1, 1)
    assert slots.released(Released(1, 1, 4, is_known=True), -1, 1.2)[1:] == [GoOn(1, STEPS)]


def test_who_is_not_there_when_a_round_begins_is_replaced_and_who_is_done_is_not() -> None:
    slots = TrainerSlots(start_timeout_s=20.0)
    slots.adopt({0: 1, 1: 1}, [])
    slots.finish(0)
    assert slots.begin_round(3, frozenset({0, 1}), NONE, (), (), 1.0) == [StartTrainer(1, 2)]


@pytest.mark.parametrize("is_done", [False, True])
def test_between_rounds_and_after_all_is_done_nobody_is_replaced(is_done: bool) -> None:
    desk = Desk()
    if is_done:
        desk.slots.finish(1)
    else:
        desk.slots.end_round()
    assert desk.lose() == []
    assert desk.slots.wake_at_s == math.inf
    desk.slots.nothing_done()
    assert not desk.slots.is_done(1)


def test_a_slot_whose_trainers_are_lost_again_and_again_is_given_up_for_the_round() -> None:
    desk = Desk(steps=NONE)
    said, generation = desk.lose(), 1
    for generation in range(2, MAX_PER_ROUND + 2):
        assert said == [StartTrainer(1, generation)]
        desk.slots.launched(1, generation, "", 2.0)
        assert only(desk.slots.receive(*hello(1, generation), 2.0), GoOn) == [GoOn(1, NONE)]
        said = desk.lose(generation)
    assert said == [TrainerGivenUp(1, MAX_PER_ROUND)]
    assert desk.slots.is_done(1)


def test_one_that_is_lost_while_the_last_one_is_settled_is_replaced_when_that_is_over() -> None:
    desk = Desk()
    desk.settle()
    desk.slots.receive(*hello(1, 2), 2.1)
    assert desk.lose(2, 2.2) == []
    _, start, *_ = desk.slots.released(Released(1, 1, 4, is_known=True), -1, 2.3)
    assert start == StartTrainer(1, 3)


def test_a_slot_whose_next_trainer_cannot_be_started_does_no_more_in_the_round() -> None:
    desk = Desk()
    desk.lose()
    assert desk.slots.launched(1, 2, "no memory", 2.1) == [TrainerNotReplaced(1, "no memory")]
    assert desk.slots.is_done(1)
    assert desk.slots.want(2) == [StartTrainer(1, 3)], "but in the next one"


def test_a_trainer_that_was_started_and_says_nothing_is_not_waited_for() -> None:
    desk = Desk(steps=NONE)
    desk.lose()
    desk.slots.launched(1, 2, "", 2.0)
    assert desk.slots.wake_at_s == 22.0
    assert desk.slots.tick(21.9) == []
    [said] = desk.slots.tick(22.0)
    assert said == TrainerNotReplaced(1, "trainer 1 was started but did not report; see its log")
    assert desk.slots.is_done(1)
    assert desk.slots.wake_at_s == math.inf


def test_the_last_one_s_steps_may_take_long_to_settle_and_the_next_one_has_no_longer_to_say_hello() -> None:
    desk = Desk()
    desk.slots.replicas([], 1.5)
    desk.lose()
    desk.slots.launched(1, 2, "", 2.1)
    desk.slots.tick(7.1)
    desk.slots.released(Released(1, 1, 9, is_known=True), 8, 7.2)
    assert desk.slots.wake_at_s == 22.1
    assert only(desk.slots.tick(22.1), TrainerNotReplaced)
