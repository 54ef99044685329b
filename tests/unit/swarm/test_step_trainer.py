"""The trainer's machine, rule by rule: two stages with two replicas each, driven by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from msgspec import structs

from shoal.ids import PeerId, StepKey
from shoal.swarm.microbatch_cut import MicrobatchPart
from shoal.swarm.step_operations import SendStepMessage
from shoal.swarm.step_trainer import (
    Dial,
    FeedMicrobatch,
    Finished,
    NoPath,
    Note,
    RoundOver,
    StepPlan,
    StepTrainer,
    TrainerEffect,
)
from shoal.wire.frame import encode_frame
from shoal.wire.messages.base import Hop, ReplicaRef, Replicas, RouterReport
from shoal.wire.messages.control import StepReport
from shoal.wire.messages.step import (
    Abort,
    Aborted,
    Broken,
    Busy,
    Commit,
    Committed,
    MicrobatchDone,
    Open,
    Opened,
    Prepared,
    Refused,
    StepMessage,
)

A, A2, B, B2 = (PeerId(name) for name in ("A", "A2", "B", "B2"))
KEY = StepKey(3, 2, 7, 0)
AGAIN = StepKey(3, 2, 7, 1)


def hops(*peers: PeerId) -> tuple[Hop, ...]:
    return tuple(Hop(peer, ()) for peer in peers)


def refs(*peers: PeerId) -> tuple[ReplicaRef, ...]:
    return tuple(ReplicaRef(hop) for hop in hops(*peers))


REPLICAS = (refs(A, A2), refs(B, B2))


def plan(number: int = 7, replicas: Replicas = REPLICAS) -> StepPlan:
    return StepPlan(1, number, ((3, 1), (1, 1), (0,)), (), 0.1, hops(A, B), replicas)


def trainer(max_grad_norm: float | None = 1.0) -> StepTrainer:
    return StepTrainer(trainer=3, generation=2, window=2, max_grad_norm=max_grad_norm, step_timeout_s=10.0)


def running(machine: StepTrainer, the_plan: StepPlan | None = None) -> list[TrainerEffect]:
    effects = machine.start(the_plan or plan(), 0.0)
    assert machine.receive(A, Opened(KEY), 0.0) == machine.receive(B, Opened(KEY), 0.0) == []
    return effects


def prepared(stage: int, squared_norm: float = 0.02, finite: bool = True, key: StepKey = KEY) -> Prepared:
    return Prepared(key, stage, 0, squared_norm, finite, 1.5 if stage == 1 else None)


def committing(machine: StepTrainer) -> list[TrainerEffect]:
    running(machine)
    machine.receive(A, prepared(0), 0.0)
    return machine.receive(B, prepared(1), 0.0)


def sent(effects: list[TrainerEffect]) -> list[tuple[PeerId, type[StepMessage]]]:
    return [(effect.to, type(effect.message)) for effect in effects if isinstance(effect, SendStepMessage)]


def test_the_lease_is_noted_before_anything_is_opened() -> None:
    effects = trainer().start(plan(), 0.0)
    assert effects[0] == Note(KEY, hops(A, B))
    assert sent(effects) == [(A, Open), (B, Open)]


def test_where_a_home_replica_is_the_client_says_later_than_the_round_began() -> None:
    now = Hop(A, ("tcp:10.0.0.9:7",))
    listed = ((ReplicaRef(now), *refs(A2)), refs(B))
    the_plan = StepPlan(1, 7, ((3,),), (), 0.1, (Hop(A, ("tcp:10.0.0.9:5",)), *hops(B)), listed)
    opens = [effect.message for effect in trainer().start(the_plan, 0.0) if isinstance(effect, SendStepMessage)]
    assert [message.path for message in opens if isinstance(message, Open)] == [(now, *hops(B))] * 2


def test_inputs_follow_the_order_to_begin_and_never_more_than_the_window() -> None:
    machine = trainer()
    effects = running(machine)
    assert sent(effects) == [(A, Open), (B, Open)]
    assert effects[-2:] == [
        FeedMicrobatch(KEY, 0, MicrobatchPart(0, 0, 2), A, B),
        FeedMicrobatch(KEY, 1, MicrobatchPart(1, 0, 2), A, B),
    ]
    assert machine.receive(A, MicrobatchDone(KEY, 2), 0.0) == []
    assert machine.receive(B, MicrobatchDone(KEY, 0), 0.0) == []
    assert machine.receive(A, MicrobatchDone(KEY, 0), 0.0) == [FeedMicrobatch(KEY, 2, MicrobatchPart(2, 0, 1), A, B)]
    assert machine.receive(A, MicrobatchDone(KEY, 0), 0.0) == []


def test_after_a_setback_nothing_is_computed_before_all_have_opened() -> None:
    machine = trainer()
    running(machine)
    again = machine.receive(B, Busy(KEY), 0.0)
    assert sent(again) == [(A, Abort), (B, Abort), (A, Open), (B2, Open)]
    assert not any(isinstance(effect, FeedMicrobatch) for effect in again)
    assert machine.receive(A, Opened(AGAIN), 0.0) == []
    fed = machine.receive(B2, Opened(AGAIN), 0.0)
    assert fed == [FeedMicrobatch(AGAIN, each, MicrobatchPart(each, 0, 2), A, B2) for each in (0, 1)]


def test_where_the_way_is_long_as_many_follow_as_every_replica_says_it_holds() -> None:
    machine = StepTrainer(trainer=3, generation=2, window=2, max_grad_norm=1.0, step_timeout_s=10.0)
    now_s, rooms = 0.0, {A: 64, B: 5}
    fed: list[list[int]] = []
    for number in range(6):
        key, num = KEY._replace(number=number), 8
        effects = machine.start(StepPlan(1, number, ((1,),) * num, (), 0.1, hops(A, B), REPLICAS), now_s)
        sent_now = [effect.microbatch for effect in effects if isinstance(effect, FeedMicrobatch)]
        fed.append(sent_now)
        for peer in (A, B):
            effects = machine.receive(peer, Opened(key, rooms[peer]), now_s)
            fed.append([effect.microbatch for effect in effects if isinstance(effect, FeedMicrobatch)])
        for microbatch in range(num):
            now_s += 0.15 if microbatch % 2 == 0 else 0.001
            machine.receive(A, MicrobatchDone(key, microbatch), now_s)
        for peer, stage in ((A, 0), (B, 1)):
            machine.receive(peer, prepared(stage, key=key), now_s)
        machine.receive(A, Committed(key), now_s)
        assert isinstance(machine.ended, Finished)
    assert fed[: 3 * 3] == [[0, 1], [], []] * 3
    assert fed[3 * 3 :] == [[0, 1, 2, 3, 4], [], []] * 3


def test_a_replica_that_holds_less_than_it_said_is_asked_again_how_much_before_more_follow() -> None:
    machine = trainer()
    machine._flight._wanted = 9
    the_plan = StepPlan(1, 7, ((1,),) * 8, (), 0.1, hops(A, B), (refs(A), refs(B)))
    machine.start(the_plan, 0.0)
    machine.receive(A, Opened(KEY, 64), 0.0)
    machine._flight._wanted = 9
    fed = machine.receive(B, Opened(KEY, 6), 0.0)
    assert [effect.microbatch for effect in fed if isinstance(effect, FeedMicrobatch)] == [2, 3, 4, 5]
    machine.receive(B, Busy(KEY), 0.0)
    again = machine.tick(machine.wake_at_s)
    assert sent(again) == [(A, Open), (B, Open)]
    assert not any(isinstance(effect, FeedMicrobatch) for effect in again)
    machine.receive(A, Opened(AGAIN, 64), 0.1)
    fed = machine.receive(B, Opened(AGAIN, 4), 0.1)
    assert [effect.microbatch for effect in fed if isinstance(effect, FeedMicrobatch)] == [0, 1, 2, 3]


def test_what_is_prepared_before_all_have_said_that_they_take_part_is_not_committed() -> None:
    machine = trainer()
    machine.start(plan(), 0.0)
    for peer, stage in ((A, 0), (B, 1)):
        assert machine.receive(peer, prepared(stage), 0.0) == []
    assert machine.receive(A, Opened(KEY), 0.0) == []
    assert sent(machine.receive(B, Opened(KEY), 0.0)) == [(A, Commit), (B, Commit)]


def test_where_one_replica_is_the_whole_path_inputs_follow_at_once_and_what_is_refused_counts_once() -> None:
    machine, alone = trainer(), StepPlan(1, 7, ((3, 1), (1, 1), (0,)), (), 0.1, hops(A), (refs(A, A2),))
    effects = machine.start(alone, 0.0)
    assert sent(effects) == [(A, Open)]
    parts = [effect for effect in effects if isinstance(effect, FeedMicrobatch)]
    assert effects[-2:] == parts, "behind the order to begin"
    assert [(part.microbatch, part.inputs_to, part.labels_to) for part in parts] == [(0, A, A), (1, A, A)]
    assert machine.receive(A, Opened(KEY), 0.0) == []
    [third] = machine.receive(A, MicrobatchDone(KEY, 0), 0.0)
    assert isinstance(third, FeedMicrobatch)
    assert third.microbatch == 2
    again = machine.receive(A, Refused(KEY, "no"), 0.0)
    assert sent(again) == [(A, Abort), (A2, Open)]
    assert (machine.is_current(KEY), machine.is_current(AGAIN)) == (False, True)
    assert machine.receive(A, Refused(KEY, "unknown"), 0.0) == [], "of the inputs of what it has refused"
    assert machine.receive(A2, Prepared(AGAIN, 0, 0, 0.02, True, 1.5), 0.0) == [], (
        "it has not even said that it takes part"
    )


def test_of_a_wrapped_model_the_first_replica_gets_the_labels_and_says_the_loss() -> None:
    machine = StepTrainer(trainer=3, generation=2, window=1, max_grad_norm=None, step_timeout_s=10.0, is_wrapped=True)
    assert running(machine)[-1] == FeedMicrobatch(KEY, 0, MicrobatchPart(0, 0, 2), A, A)
    machine.receive(A, Prepared(KEY, 0, 0, 0.02, True, 2.5), 0.0)
    machine.receive(B, Prepared(KEY, 1, 0, 0.02, True, None), 0.0)
    machine.receive(A, Committed(KEY), 0.0)
    assert isinstance(machine.ended, Finished)
    assert machine.ended.loss == 2.5


def test_a_wrapped_path_is_chosen_by_whether_its_ends_reach_each_other() -> None:
    machine = StepTrainer(trainer=3, generation=2, window=1, max_grad_norm=None, step_timeout_s=10.0, is_wrapped=True)
    three = (refs(A, A2), refs(B), refs(B2))
    the_plan = StepPlan(1, 7, ((1,),), (), 0.1, hops(A, B, B2), three)
    machine.start(the_plan, 0.0)
    effects = machine.receive(B2, Broken(KEY, A), 0.0)
    assert [to for to, kind in sent(effects) if kind is Open] == [A2, B, B2]


def test_gradients_are_clipped_over_all_stages() -> None:
    machine = trainer()
    running(machine)
    machine.receive(A, prepared(0, 9.0), 0.0)
    effects = machine.receive(B, prepared(1, 16.0), 0.0)
    commit = Commit(KEY, 1.0 / (5.0 + 1e-6), 0.1, False)
    assert effects == [SendStepMessage(A, commit), SendStepMessage(B, commit)]
    assert machine.receive(A, Committed(KEY), 0.0) == []
    machine.receive(B, Committed(KEY), 0.0)
    assert machine.ended == Finished(KEY, (A, B), 1.5, 5.0, False, True, 1, 5, 6)


def test_routers_are_those_of_all_stages_in_order_whoever_was_prepared_first() -> None:
    machine = trainer()
    running(machine)
    first, second, third = (RouterReport(1.0 + stage, 0.5) for stage in range(3))
    machine.receive(B, structs.replace(prepared(1), routers=(second, third)), 0.0)
    machine.receive(A, structs.replace(prepared(0), routers=(first,)), 0.0)
    for peer in (A, B):
        machine.receive(peer, Committed(KEY), 0.0)
    assert isinstance(machine.ended, Finished)
    assert machine.ended.routers == (first, second, third)


def test_a_step_can_be_reported_whatever_its_replicas_say_beside_the_loss() -> None:
    machine = trainer()
    running(machine)
    for stage, peer in enumerate((A, B)):
        invented = tuple(RouterReport(1.0, 0.5, f"{peer.lower()}{number:0>63}") for number in range(8000))
        machine.receive(peer, structs.replace(prepared(stage), routers=invented), 0.0)
    for peer in (A, B):
        machine.receive(peer, Committed(KEY), 0.0)
    assert isinstance(machine.ended, Finished)
    report = StepReport(0, 1, KEY, 4, 4, 5.0, 1.0, 0.1, False, 0.5, 7.0, machine.ended.routers)
    assert encode_frame(report).num_bytes < 1 << 20


@pytest.mark.parametrize("max_grad_norm", [None, 100.0])
def test_small_gradients_are_left_as_they_are(max_grad_norm: float | None) -> None:
    machine = trainer(max_grad_norm)
    running(machine)
    machine.receive(A, prepared(0, 9.0), 0.0)
    assert machine.receive(B, prepared(1, 16.0), 0.0)[0] == SendStepMessage(A, Commit(KEY, 1.0, 0.1, False))


@pytest.mark.parametrize(("squared_norm", "finite"), [(1.0, False), (math.nan, True), (math.inf, True)])
def test_a_step_that_is_not_finite_is_skipped_everywhere(squared_norm: float, finite: bool) -> None:
    machine = trainer()
    running(machine)
    machine.receive(A, prepared(0, squared_norm, finite), 0.0)
    assert machine.receive(B, prepared(1), 0.0)[0] == SendStepMessage(A, Commit(KEY, 0.0, 0.1, True))


def test_messages_of_another_attempt_or_of_strangers_mean_nothing() -> None:
    machine = trainer()
    running(machine)
    for sender, message in ((A, Refused(AGAIN, "stale")), (B2, Busy(KEY)), (A, prepared(1)), (B2, prepared(1))):
        assert machine.receive(sender, message, 0.0) == []
    machine.receive(A, prepared(0), 0.0)
    assert machine.ended is None


@pytest.mark.parametrize(
    "setback", [Busy(KEY), Refused(KEY, "behind"), Refused(KEY, "out of memory"), Aborted(KEY), Broken(KEY, A)]
)
def test_a_setback_aborts_the_attempt_everywhere_and_begins_another(setback: StepMessage) -> None:
    machine = trainer()
    running(machine)
    effects = machine.receive(B, setback, 0.0)
    assert sent(effects)[:2] == [(A, Abort), (B, Abort)]
    [note] = [effect for effect in effects if isinstance(effect, Note)]
    assert note.key == AGAIN
    expected = {Broken: {hops(A2, B), hops(A, B2)}, Aborted: {hops(A, B)}}.get(type(setback), {hops(A, B2)})
    assert note.path in expected


@pytest.mark.parametrize("setback", ["aborted", "nobody", "itself", "no neighbour"])
def test_a_replica_that_gives_up_every_attempt_holds_up_no_step(setback: str) -> None:
    peers = [A, B, PeerId("C")]
    replicas = (refs(A, A2), refs(B), refs(peers[2]))
    machine = trainer()
    machine.start(replace(plan(replicas=replicas), home=hops(*peers)), 0.0)
    named = {"nobody": PeerId("X"), "itself": A, "no neighbour": peers[2]}

    def said(key: StepKey) -> StepMessage:
        return Aborted(key) if setback == "aborted" else Broken(key, named[setback])

    assert Note(AGAIN, hops(*peers)) in machine.receive(A, said(KEY), 0.0), "once that may be"
    assert Note(StepKey(3, 2, 7, 2), hops(A2, *peers[1:])) in machine.receive(A, said(AGAIN), 0.0)
    machine.cancel()
    assert Note(StepKey(3, 2, 8, 0), hops(A2, *peers[1:])) in machine.start(
        replace(plan(8, replicas), home=hops(*peers)), 1.0
    )


def test_where_one_of_a_path_has_others_give_up_the_step_runs_over_none_of_it() -> None:
    machine = trainer()
    running(machine)
    machine.receive(A, Aborted(KEY), 0.0)
    assert Note(StepKey(3, 2, 7, 2), hops(A2, B2)) in machine.receive(A, Aborted(AGAIN), 0.0)


def test_a_commit_that_all_give_up_again_and_again_is_replayed_over_others() -> None:
    machine = trainer()
    committing(machine)
    machine.receive(A, Aborted(KEY), 0.0)
    machine.receive(B, Aborted(KEY), 0.0)
    for peer in (A, B):
        machine.receive(peer, Opened(AGAIN), 0.0)
    for stage, peer in enumerate((A, B)):
        machine.receive(peer, prepared(stage, key=AGAIN), 0.0)
    machine.receive(A, Aborted(AGAIN), 0.0)
    assert Note(StepKey(3, 2, 7, 2), hops(A2, B2)) in machine.receive(B, Aborted(AGAIN), 0.0)


def test_a_stage_whose_only_replica_gives_up_every_attempt_ends_the_step() -> None:
    machine = trainer()
    machine.start(plan(replicas=(refs(A), refs(B))), 0.0)
    for attempt in range(10):
        machine.receive(A, Aborted(KEY._replace(attempt=attempt)), 0.2 * attempt)
        machine.tick(0.2 * attempt + 0.1)
    assert machine.ended == NoPath((0,), "it gives up every attempt", num_refusing=1, num_replicas=1)


def test_a_pair_that_was_apart_is_left_to_itself_for_a_while() -> None:
    machine = trainer()
    running(machine)
    machine.receive(B, Broken(KEY, A), 0.0)
    for number, now_s, is_home in ((8, 10.0, False), (9, 20.0, True)):
        machine.cancel()
        effects = machine.start(plan(number), now_s)
        assert (Note(StepKey(3, 2, number, 0), hops(A, B)) in effects) == is_home


def test_a_lost_replica_is_replaced_and_used_again_later() -> None:
    machine = trainer()
    running(machine)
    assert Note(AGAIN, hops(A2, B)) in machine.lost(A, 0.0)
    machine.cancel()
    # It is looked for beside the next step, which does not wait for it.
    effects = machine.start(plan(8), 100.0)
    assert effects[0] == Dial(A)
    assert Note(StepKey(3, 2, 8, 0), hops(A2, B)) in effects
    machine.cancel()
    assert Dial(A) not in machine.start(plan(9), 200.0)  # nobody has answered yet
    machine.cancel()
    machine.peer_found(A)
    effects = machine.start(plan(10), 300.0)
    assert Note(StepKey(3, 2, 10, 0), hops(A, B)) in effects
    assert Dial(A) not in effects


def test_a_lost_replica_is_looked_for_again_after_a_pause_as_long_as_the_client_names_it() -> None:
    machine = trainer()
    machine.lost(A, 0.0)
    assert Dial(A) not in machine.start(plan(7), 0.4)
    machine.cancel()
    assert Dial(A) in machine.start(plan(8), 0.6)
    machine.cancel()
    machine.lost(A, 5.0)
    assert Dial(A) in machine.start(plan(9), 5.6)
    machine.cancel()
    machine.lost(A, 10.0)
    assert Dial(A) not in machine.start(plan(10, (refs(A2), refs(B, B2))), 10.6)


def test_a_home_replica_that_the_client_does_not_name_is_the_last_choice() -> None:
    machine = trainer()
    assert Note(KEY, hops(A2, B)) in machine.start(plan(replicas=(refs(A2), refs(B2, B))), 0.0)
    machine.lost(A2, 0.0)
    assert Note(StepKey(3, 2, 7, 1), hops(A, B)) not in machine.start(plan(replicas=(refs(A2), refs(B))), 0.0)


def test_a_lost_replica_is_used_at_once_where_its_stage_has_no_other() -> None:
    machine = trainer()
    machine.lost(A, 0.0)
    assert Note(KEY, hops(A, B)) in machine.start(plan(replicas=(refs(A), refs(B))), 0.1)


def test_a_round_that_two_replicas_call_closed_ends_the_step_everywhere() -> None:
    machine = trainer()
    running(machine)
    effects = machine.receive(B, Refused(KEY, "closed"), 0.0)
    assert sent(effects) == [(A, Abort), (B, Abort), (A, Open), (B2, Open)]
    assert Note(AGAIN, hops(A, B2)) in effects
    assert sent(machine.receive(A, Refused(AGAIN, "closed"), 0.0)) == [(A, Abort), (B2, Abort)]
    assert machine.ended == RoundOver(A)


def test_one_replica_that_says_so_alone_is_left_out_for_the_round() -> None:
    machine = trainer()
    running(machine)
    machine.receive(B, Refused(KEY, "closed"), 0.0)
    machine.cancel()
    assert Note(StepKey(3, 2, 8, 0), hops(A, B2)) in machine.start(plan(8), 0.0)
    # It is closed indeed by now: nobody is asked once more.
    assert sent(machine.receive(B2, Refused(StepKey(3, 2, 8, 0), "closed"), 0.0)) == [(A, Abort), (B2, Abort)]
    assert machine.ended == RoundOver(B2)
    assert Note(StepKey(3, 2, 9, 0), hops(A, B)) in machine.start(replace(plan(9), round=2), 0.0)


def test_one_replica_that_says_so_alone_has_its_place_again_in_the_next_round() -> None:
    machine = trainer()
    running(machine)
    machine.receive(B, Refused(KEY, "closed"), 0.0)
    machine.cancel()
    assert Note(StepKey(3, 2, 8, 0), hops(A, B)) in machine.start(replace(plan(8), round=2), 0.0)


@pytest.mark.parametrize("fault", ["no other", "lost", "frozen", "apart"])
def test_a_closed_round_ends_the_step_at_once_where_no_other_path_promises_an_answer(fault: str) -> None:
    machine = trainer()
    if fault == "frozen":
        machine.start(replace(plan(), home=hops(A, B2)), 0.0)
        machine.receive(A, Opened(KEY), 0.0)
        machine.tick(machine.wake_at_s)
        machine.cancel()
    elif fault == "lost":
        machine.lost(B2, 0.0)
    elif fault == "apart":
        running(machine, replace(plan(), home=hops(A, B2)))
        machine.receive(A, Broken(KEY, B2), 0.0)
        machine.cancel()
    known = plan(8, (refs(A), refs(B)) if fault == "no other" else (refs(A), refs(B, B2)))
    machine.start(known, 10.0)
    key = StepKey(3, 2, 8, 0)
    assert sent(machine.receive(B, Refused(key, "closed"), 10.0)) == [(A, Abort), (B, Abort)]
    assert machine.ended == RoundOver(B)


def test_the_client_that_begins_the_next_round_ends_a_step_that_waits_for_a_second_word() -> None:
    machine = trainer()
    running(machine)
    assert machine.round_begun(2) == [], "nobody has said that the round of the step is closed"
    machine.receive(B, Refused(KEY, "closed"), 0.0)
    assert machine.round_begun(1) == [], "that is the round of the step"
    assert sent(machine.round_begun(2)) == [(A, Abort), (B2, Abort)]
    assert machine.ended == RoundOver(B)
    assert machine.round_begun(3) == []


def test_a_step_that_is_being_committed_is_ended_by_no_other_round() -> None:
    machine = trainer()
    running(machine)
    machine.receive(B, Refused(KEY, "closed"), 0.0)
    for stage, peer in enumerate((A, B2)):
        machine.receive(peer, Opened(AGAIN), 0.0)
        committed = machine.receive(peer, prepared(stage, key=AGAIN), 0.0)
    machine.receive(A, Opened(AGAIN), 0.0)
    assert sent(committed) == [(A, Commit), (B2, Commit)]
    assert machine.round_begun(2) == []
    assert machine.ended is None


def test_a_busy_replica_without_substitute_is_tried_again_later() -> None:
    machine = trainer()
    running(machine, plan(replicas=(refs(A), refs(B))))
    assert sent(machine.receive(B, Busy(KEY), 0.0)) == [(A, Abort), (B, Abort)]
    assert 0.0 < machine.wake_at_s < 1.0
    assert machine.tick(machine.wake_at_s - 0.001) == []
    assert sent(machine.tick(machine.wake_at_s)) == [(A, Open), (B, Open)]


def test_a_stage_whose_replicas_stay_lost_ends_the_step() -> None:
    machine = trainer()
    running(machine, plan(replicas=(refs(A), refs(B))))
    now_s = 0.0
    machine.lost(B, now_s)
    while machine.ended is None:
        now_s = machine.wake_at_s
        machine.tick(now_s)
        machine.lost(B, now_s)
        assert now_s < 10.0
    assert machine.ended == NoPath((1,))
    assert Note(StepKey(3, 2, 7, 9), hops(A, B)) not in machine.start(plan(), now_s)
    assert machine.receive(A, Opened(KEY), now_s) == []  # attempts count on: the first one stays dead


def test_after_too_long_the_silent_are_replaced() -> None:
    machine = trainer()
    running(machine)
    machine.receive(A, prepared(0), 5.0)
    assert machine.tick(14.9) == []
    assert Note(AGAIN, hops(A, B2)) in machine.tick(15.0)


def test_from_the_first_commit_on_the_step_stands() -> None:
    machine = trainer()
    committing(machine)
    assert machine.lost(A, 0.0) == []
    assert machine.cancel() == []
    machine = trainer()
    committing(machine)
    machine.lost(A, 0.0)
    machine.receive(B, Committed(KEY), 0.0)
    assert isinstance(machine.ended, Finished)
    assert machine.ended.committed


def test_a_commit_that_all_have_aborted_is_replayed() -> None:
    machine = trainer()
    committing(machine)
    machine.receive(A, Aborted(KEY), 0.0)
    assert Note(AGAIN, hops(A, B)) in machine.receive(B, Aborted(KEY), 0.0)


@pytest.mark.parametrize("other_answers", [True, False])
def test_a_commit_that_nobody_confirms_and_somebody_cannot_deny_is_left_to_the_record(other_answers: bool) -> None:
    machine = trainer()
    committing(machine)
    machine.lost(A, 0.0)
    effects = machine.receive(B, Aborted(KEY), 0.0) if other_answers else machine.lost(B, 0.0)
    assert effects == []
    assert isinstance(machine.ended, Finished)
    assert not machine.ended.committed


def test_commit_is_repeated_to_the_silent_until_one_has_applied_it() -> None:
    machine = trainer()
    committing(machine)
    assert sent(machine.tick(10.0)) == [(A, Commit), (B, Commit)]
    machine.receive(A, Aborted(KEY), 11.0)
    assert sent(machine.tick(20.0)) == [(B, Commit)]
    machine.receive(B, Committed(KEY), 21.0)
    assert isinstance(machine.ended, Finished)


def test_one_that_has_committed_makes_the_step_done_and_what_others_say_later_means_nothing() -> None:
    machine = trainer()
    committing(machine)
    machine.receive(B, Committed(KEY), 0.0)
    assert isinstance(machine.ended, Finished)
    assert machine.ended.committed
    machine.start(plan(8), 0.0)
    assert machine.receive(A, Committed(KEY), 0.1) == machine.receive(A, Aborted(KEY), 0.1) == []
    assert machine.ended is None


def test_a_cancelled_step_is_aborted() -> None:
    machine = trainer()
    running(machine)
    assert sent(machine.cancel()) == [(A, Abort), (B, Abort)]
    assert machine.receive(A, prepared(0), 0.0) == []


def test_a_step_that_is_refused_again_and_again_ends() -> None:
    machine = trainer()
    machine.start(plan(), 0.0)
    now_s = 0.0
    for attempt in range(100):
        if machine.ended is not None:
            break
        now_s = max(now_s, machine.wake_at_s) if machine.wake_at_s < 9 + now_s else now_s
        machine.tick(now_s)
        for peer in (B, B2):
            machine.receive(peer, Refused(KEY._replace(attempt=attempt), "float32[2] expected"), now_s)
    assert machine.ended == NoPath((1,), "float32[2] expected", num_refusing=2, num_replicas=2)


def refused_until_it_ends(
    machine: StepTrainer, says: dict[PeerId, Refused], the_plan: StepPlan | None = None, lost: tuple[PeerId, ...] = ()
) -> int:
    """Has peers of stage 1 refuse each attempt that reaches them; returns how many did."""
    effects, now_s, num_refused = machine.start(the_plan or plan(), 0.0), 0.0, 0
    for peer in lost:
        effects += machine.lost(peer, now_s)
    while machine.ended is None:
        opened = [e for e in effects if isinstance(e, SendStepMessage) and isinstance(e.message, Open)]
        if not opened:
            now_s = machine.wake_at_s
            effects = machine.tick(now_s)
            continue
        asked = opened[-1]
        if asked.to in lost:
            effects = machine.lost(asked.to, now_s)
            continue
        assert asked.to in says, f"{asked.to} does the step"
        effects = machine.receive(asked.to, structs.replace(says[asked.to], key=asked.message.key), now_s)
        num_refused += 1
    return num_refused


FAILS = Refused(KEY, "ValueError: odd (/own/net.py line 9)", is_model=True)
NO_ROOM = Refused(KEY, "OutOfMemoryError: CUDA out of memory")
FEW_OF_A = (refs(A), refs(B, B2))


def test_a_step_at_which_the_model_fails_at_every_replica_of_a_stage_ends_at_once() -> None:
    machine = trainer()
    assert refused_until_it_ends(machine, {B: FAILS, B2: FAILS}, plan(replicas=FEW_OF_A)) == 2
    assert machine.ended == NoPath((1,), FAILS.reason, num_refusing=2, num_replicas=2, is_model=True)
    # What was said of a step says nothing of it when it is tried again.
    assert refused_until_it_ends(machine, {B: FAILS, B2: NO_ROOM}, plan(replicas=FEW_OF_A)) > 2
    assert isinstance(machine.ended, NoPath)
    assert not machine.ended.is_model
    many = tuple(PeerId(f"B{number}") for number in range(20))
    says = dict.fromkeys((B, *many), FAILS)
    assert refused_until_it_ends(trainer(), says, plan(replicas=(refs(A), refs(B, *many)))) == 21


def test_where_the_model_fails_at_one_replica_another_one_does_the_step() -> None:
    machine = trainer()
    with pytest.raises(AssertionError, match="B2 does the step"):
        refused_until_it_ends(machine, {B: FAILS}, plan(replicas=FEW_OF_A))
    machine.receive(A, Opened(AGAIN), 0.0)
    machine.receive(B2, Opened(AGAIN), 0.0)
    machine.receive(A, prepared(0, key=AGAIN), 0.0)
    machine.receive(B2, prepared(1, key=AGAIN), 0.0)
    machine.receive(B2, Committed(AGAIN), 0.0)
    assert isinstance(machine.ended, Finished)
    # It has done a step since, and so has not failed at the next one, though the other one does.
    [*_, opened, _, _] = machine.start(plan(8, FEW_OF_A), 0.0)
    assert isinstance(opened, SendStepMessage)
    assert opened.to == B2
    machine.receive(B2, structs.replace(FAILS, key=StepKey(3, 2, 8, 0)), 0.0)
    assert machine.ended is None


@pytest.mark.parametrize(
    ("says", "lost", "told"),
    [
        ({B: FAILS}, (B2,), (1, 2)),
        ({B: FAILS, B2: NO_ROOM}, (), (2, 2)),
        ({B: NO_ROOM, B2: NO_ROOM}, (), (2, 2)),
    ],
    ids=["another one is lost", "another one has no memory", "none has memory"],
)
def test_a_step_that_a_replica_does_not_refuse_for_the_model_is_tried_as_often_as_ever(
    says: dict[PeerId, Refused], lost: tuple[PeerId, ...], told: tuple[int, int]
) -> None:
    machine = trainer()
    assert refused_until_it_ends(machine, says, plan(replicas=FEW_OF_A), lost) >= 9
    assert isinstance(machine.ended, NoPath)
    assert (machine.ended.num_refusing, machine.ended.num_replicas) == told
    assert not machine.ended.is_model


def test_who_is_no_replica_of_the_stage_any_more_is_not_asked_whether_the_model_fails_there() -> None:
    machine = trainer()
    refused_until_it_ends(machine, {B2: FAILS}, plan(replicas=(refs(A), refs(B2))), lost=(B,))
    assert machine.ended == NoPath((1,), FAILS.reason, num_refusing=1, num_replicas=1, is_model=True)


def test_what_the_model_fails_on_may_come_of_one_replica_of_another_stage_which_is_found_out() -> None:
    machine = trainer()
    assert refused_until_it_ends(machine, {B: FAILS}, plan(replicas=(refs(A, A2), refs(B)))) == 2
    assert machine.ended == NoPath((1,), FAILS.reason, num_refusing=1, num_replicas=1, is_model=True)
    alone = trainer()
    refused_until_it_ends(alone, {B: FAILS}, plan(replicas=(refs(A, A2), refs(B))), lost=(A2,))
    assert isinstance(alone.ended, NoPath)
    assert not alone.ended.is_model, "the other one of stage 0 has not been tried"


def test_a_refusal_with_a_cap_is_replayed_at_once_over_the_same_path_in_smaller_microbatches() -> None:
    machine = trainer()
    running(machine)
    effects = machine.receive(B, Refused(KEY, "memory exhausted", cap=1), 0.0)
    assert sent(effects)[:2] == [(A, Abort), (B, Abort)]
    [opened, again] = [e.message for e in effects if isinstance(e, SendStepMessage) and isinstance(e.message, Open)]
    assert opened == again
    assert opened.key == AGAIN
    assert [hop.peer for hop in opened.path] == [A, B]
    assert opened.microbatch_samples == (1,) * 5
    # What the client said is older; the next step is cut as well, and without a refusal.
    machine.cancel()
    [opened, _] = [e.message for e in machine.start(plan(8), 0.0) if isinstance(e, SendStepMessage)]
    assert isinstance(opened, Open)
    assert opened.microbatch_samples == (1,) * 5


def test_a_cap_that_the_microbatches_keep_to_already_makes_a_refusal_no_better() -> None:
    machine = trainer()
    running(machine)
    effects = machine.receive(B, Refused(KEY, "memory exhausted", cap=2), 0.0)
    assert [e.to for e in effects if isinstance(e, SendStepMessage) and isinstance(e.message, Open)] == [A, B2]


def test_the_cap_of_a_peer_that_was_lost_is_forgotten() -> None:
    machine = trainer()
    running(machine)
    machine.receive(B, Refused(KEY, "memory exhausted", cap=1), 0.0)
    machine.cancel()
    machine.lost(B, 0.0)
    machine.peer_found(B)
    [opened, _] = [e.message for e in machine.start(plan(8), 0.0) if isinstance(e, SendStepMessage)]
    assert isinstance(opened, Open)
    assert (opened.path[1].peer, opened.microbatch_samples) == (B, (2, 2, 1))


def test_the_caps_that_the_client_says_cut_a_step_by_the_smallest_one_of_its_path() -> None:
    machine = trainer()
    capped = (
        (ReplicaRef(Hop(A, ()), 5), ReplicaRef(Hop(A2, ()), 1)),
        (ReplicaRef(Hop(B, ()), 1), ReplicaRef(Hop(B2, ()))),
    )
    [_, opened, *_] = machine.start(plan(replicas=capped), 0.0)
    assert isinstance(opened, SendStepMessage)
    assert isinstance(opened.message, Open)
    assert opened.message.microbatch_samples == (1,) * 5
    effects = machine.lost(B, 0.0)
    [opened, _] = [e.message for e in effects if isinstance(e, SendStepMessage) and isinstance(e.message, Open)]
    assert ([hop.peer for hop in opened.path], opened.microbatch_samples) == ([A, B2], (2, 2, 1))
