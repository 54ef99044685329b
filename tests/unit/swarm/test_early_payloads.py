"""What comes for a step before the step: held as long as it may still be opened, and never more than a bound."""

from __future__ import annotations

import pytest
from tests.unit.swarm.step_by_hand import KEY, OTHER, A, B, C, T, U, replica, request, run

from shoal.ids import PeerId, StepKey
from shoal.swarm import early_payloads
from shoal.swarm.early_payloads import EarlyPayload, EarlyPayloads
from shoal.swarm.step_replica import StepReplica
from shoal.wire.messages.step import Abort, AskOutcome, Fence, Forward

AGAIN = KEY._replace(attempt=1)


def early(key: StepKey = KEY, microbatch: int = 0, sender: PeerId = A, num_bytes: int = 8) -> EarlyPayload[str]:
    return EarlyPayload(sender, Forward(key, microbatch), f"{sender} {key} {microbatch}", num_bytes)


def holding(*held: EarlyPayload[str]) -> tuple[StepReplica, EarlyPayloads[str]]:
    machine = replica()
    payloads = EarlyPayloads[str](machine)
    for each in held:
        assert payloads.hold(each)
    return machine, payloads


def test_it_is_taken_when_its_attempt_is_opened_and_once() -> None:
    machine, payloads = holding(early(), early(microbatch=1))
    machine.receive(T, request(), 0.0)
    assert payloads.take(KEY) == [early(), early(microbatch=1)]
    assert payloads.take(KEY) == []
    for each in (early(), early(microbatch=1)):
        machine.receive(each.sender, each.message, 0.0)
    assert [send.message for send in run(machine)] == [Forward(KEY, 0), Forward(KEY, 1)]


def test_who_is_not_the_replica_before_it_on_the_path_brings_nothing() -> None:
    machine, payloads = holding(early(), early(sender=C), early(sender=U))
    machine.receive(T, request(), 0.0)
    assert payloads.take(KEY) == [early()]


def test_an_attempt_that_is_open_or_over_is_not_held() -> None:
    machine, payloads = holding()
    machine.receive(T, request(), 0.0)
    assert not payloads.hold(early())
    machine.receive(T, Abort(KEY), 0.0)
    assert not payloads.hold(early())
    assert payloads.hold(early(AGAIN))
    machine.receive(PeerId("client"), Fence({0: 2}), 0.0)
    assert not payloads.hold(early(AGAIN))
    assert machine.receive(A, Forward(AGAIN, 0), 0.0) == []


def test_what_was_held_for_an_attempt_that_is_refused_or_left_for_a_newer_one_is_dropped() -> None:
    machine, payloads = holding(early(), early(OTHER))
    machine.receive(A, AskOutcome(KEY), 0.0)
    machine.receive(T, request(), 0.0)
    assert payloads.take(KEY) == []
    assert payloads.hold(early(AGAIN))
    assert payloads.hold(early(AGAIN._replace(number=1)))
    machine.receive(T, request(AGAIN._replace(number=1)), 0.0)
    assert payloads.take(AGAIN._replace(number=1)) == [early(AGAIN._replace(number=1))]
    machine.receive(U, request(OTHER), 0.0)
    assert payloads.take(OTHER) == [early(OTHER)], "another trainer's"
    assert payloads._held == []


def test_who_names_a_newer_attempt_drops_what_it_has_sent_itself_and_nobody_else_s() -> None:
    _, payloads = holding(early(), early(sender=C), early(KEY._replace(number=1 << 40), sender=C))
    assert [each.sender for each in payloads._held] == [A, C]
    payloads.lost(C)
    assert payloads._held == [early()]
    payloads.clear()
    assert payloads._held == []


@pytest.mark.parametrize("limit", ["MAX_HELD_BYTES", "MAX_HELD"])
def test_more_than_the_bound_is_not_held(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(early_payloads, limit, {"MAX_HELD_BYTES": 16, "MAX_HELD": 2}[limit])
    _, payloads = holding(early(), early(sender=B))
    assert not payloads.hold(early(sender=C))
    payloads.lost(B)
    assert payloads.hold(early(sender=C))
