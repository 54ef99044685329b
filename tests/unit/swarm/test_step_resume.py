"""A replica that goes on from a snapshot: what it has committed in the generation before stands, unless it has denied
it."""

from __future__ import annotations

import pytest

from shoal.ids import StepKey
from shoal.swarm.cut_rule import CutRule
from shoal.swarm.step_replica import StepReplica
from shoal.wire.messages.step import (
    Aborted,
    AskOutcome,
    Commit,
    Committed,
    Fence,
    Fenced,
    Open,
    Opened,
    Outcome,
    Prepared,
    Refused,
    StepEntry,
    StepMessage,
    StepsTrained,
    TellOutcome,
)

from .step_by_hand import KEY, PATH, A, C, T, prepared, replica, replies, request, run

LATER = StepKey(0, 1, 1, 0)


def generation_before() -> tuple[StepEntry, ...]:
    """One commit of a replica that is killed then."""
    machine = replica()
    prepared(machine)
    machine.receive(T, Commit(KEY, 0.5, 0.1, False), 0.0)
    run(machine)
    return tuple(machine.log)


def new_generation() -> StepReplica:
    """Not in any round yet."""
    machine = StepReplica(PATH[1].peer, stage=1, num_stages=3, max_open_steps=2)
    machine.start_round(0)
    return machine


def begin(machine: StepReplica) -> bool:
    machine.start_round(1)
    return machine.resume(generation_before())


def test_it_has_committed_what_the_snapshot_has() -> None:
    machine = new_generation()
    assert begin(machine)
    assert machine.version == 1
    assert replies(machine.receive(A, AskOutcome(KEY), 0.0), A) == [
        TellOutcome(KEY, Outcome.COMMITTED, 0.5, 0.1, False)
    ]
    assert replies(machine.receive(T, Commit(KEY, 0.5, 0.1, False), 0.0), T) == [Committed(KEY)]
    assert isinstance(replies(machine.receive(T, request(KEY), 0.0), T)[0], Refused)
    [fenced] = replies(machine.receive(C, Fence({0: 2}), 0.0), C)
    assert isinstance(fenced, Fenced)
    assert fenced.committed == (KEY,)


def test_the_next_step_sees_the_version_after_it() -> None:
    machine = new_generation()
    assert begin(machine)
    sends = prepared(machine, LATER)
    assert [reply.version for reply in replies(sends, T) if isinstance(reply, Prepared)] == [1]
    machine.receive(T, Commit(LATER, 1.0, 0.1, False), 0.0)
    run(machine)
    assert [entry.key for entry in machine.log] == [KEY, LATER]


def test_it_has_trained_in_earlier_rounds_what_the_snapshot_says() -> None:
    machine = new_generation()
    machine.start_round(1)
    earlier = (StepsTrained(3, 12),)
    assert machine.resume(generation_before(), earlier)
    assert machine.earlier == earlier


@pytest.mark.parametrize("num_fragments", [1, 2, 3])
def test_what_some_fragment_has_not_seen_stays_from_round_to_round_and_goes_with_the_parameters(
    num_fragments: int,
) -> None:
    machine = StepReplica(PATH[1].peer, stage=1, num_stages=3, max_open_steps=2, cuts=CutRule(num_fragments))
    machine.start_round(1)
    for round in (1, 2, 3, 4):
        prepared(machine, StepKey(0, 1, round, 0), round=round)
        machine.receive(T, Commit(StepKey(0, 1, round, 0), 0.5, 0.1, False), 0.0)
        run(machine)
        assert [each.num_steps for each in machine.earlier] == [1] * min(round - 1, num_fragments - 1)
        machine.start_round(round + 1, keeps_rest=True)
    machine.start_round(6)
    assert machine.earlier == ()


@pytest.mark.parametrize("message", [AskOutcome(KEY), Commit(KEY, 0.5, 0.1, False), Fence({0: 2})])
def test_it_does_not_go_on_from_what_it_has_denied(message: StepMessage) -> None:
    machine = new_generation()
    [reply] = replies(machine.receive(T, message, 0.0), T)
    assert reply in (TellOutcome(KEY, Outcome.FORGOTTEN), Aborted(KEY), Fenced({0: 2}, (), (), 0, {}, steady=False))
    assert not begin(machine)
    assert machine.version == 0
    assert replies(machine.receive(A, AskOutcome(KEY), 0.0), A) == [TellOutcome(KEY, Outcome.FORGOTTEN)]


@pytest.mark.parametrize("message", [AskOutcome(LATER), Open(LATER, 1, PATH, (2, 2), (2, 2), request().samples)])
def test_what_it_has_said_of_later_steps_does_not_matter(message: StepMessage) -> None:
    machine = new_generation()
    machine.receive(T, message, 0.0)
    assert begin(machine)


def test_a_step_that_was_never_in_it_can_be_opened() -> None:
    machine = new_generation()
    assert begin(machine)
    assert replies(machine.receive(T, request(LATER), 0.0), T) == [Opened(LATER)]
