"""Lease tables, and what they answer, for the tests of both kinds of deal."""

from __future__ import annotations

from shoal.ids import PeerId, StepKey
from shoal.swarm.lease import Denial, Grant, Later, LeaseTable
from shoal.swarm.sample_ranges import Batch, BatchStream
from shoal.swarm.takeover import Settled
from shoal.wire.messages.base import SampleRange


def table(num_samples: int = 20, batch_samples: int = 2, *, deterministic: bool = True) -> LeaseTable:
    return LeaseTable(BatchStream(num_samples, batch_samples), deterministic=deterministic)


def batch(start: int, stop: int, pass_number: int = 0) -> Batch:
    return Batch((SampleRange(pass_number, start, stop),))


def granted(answer: Grant | Later | Denial) -> Grant:
    assert isinstance(answer, Grant), answer
    return answer


def denied(answer: Grant | Later | Denial) -> str:
    assert isinstance(answer, Denial), answer
    return answer.reason


A, B = PeerId("A"), PeerId("B")
PATH = (A, B)


def settled(
    *kept: StepKey, since: dict[PeerId, StepKey] | None = None, complete: bool = True, round: int = 1
) -> Settled:
    """What is known of trainer 0: by default A has lived since its first step, and everybody has answered."""
    return Settled(round, frozenset(kept), frozenset(), {A: key(0, 0)} if since is None else since, complete)


def key(trainer: int, number: int, generation: int = 1, attempt: int = 0) -> StepKey:
    return StepKey(trainer, generation, number, attempt)
