"""Outer rounds: who takes part, rings, and what a replica goes on from."""

from __future__ import annotations

from logging import ERROR, WARNING

from shoal.events.base import Event
from shoal.ids import PeerId


class RoundIsReady(Event, frozen=True, tag="round.ready"):
    """Steps of the next round can be trained: enough replicas hold the base record."""

    base_round: int
    holders: int


class RoundOvertaken(Event, frozen=True, tag="round.overtaken"):
    """Another client has coordinated meanwhile: what this one knows of the round that it is in is void."""

    level = WARNING
    base_round: int
    record: str


class RoundDeposed(Event, frozen=True, tag="round.deposed"):
    """Another client coordinates the run."""

    level = WARNING
    ballot: str


class ReplicaCameIn(Event, frozen=True, tag="replica.in"):
    """A replica takes part in the round."""

    peer: PeerId
    round: int


class ReplicaPutOut(Event, frozen=True, tag="replica.out"):
    """A replica takes no part in the round any more. The coordinator names the peer, the replica itself the round."""

    level = WARNING
    reason: str
    peer: PeerId | None = None
    round: int | None = None


class ReplicaIsSuspect(Event, frozen=True, tag="replica.suspect"):
    """The contribution of a replica is far from those of the others, or not finite."""

    level = WARNING
    round: int
    stage: int
    peer: PeerId
    suspicion: str
    scale: float
    is_member: bool


class SamplesTrainedTwice(Event, frozen=True, tag="samples.trained_twice"):
    """Two steps of a round share samples, which is a bug; the round leaves these replicas out."""

    level = ERROR
    steps: list[str]
    left_out: tuple[PeerId, ...]


class ReplicaRestored(Event, frozen=True, tag="replica.restored", rename={"from_": "from"}):
    """This replica holds the older state from which its stage goes on."""

    level = WARNING
    round: int
    from_: int


class ReplicaChainLeft(Event, frozen=True, tag="replica.chain_left"):
    """This replica has left its chain of records for the one with which the run goes on."""

    level = WARNING
    round: int
    stage: int


class RoundHasSwapped(Event, frozen=True, tag="round.swapped"):
    """This replica trains on from the state of a committed record; these are the hashes of that state.

    Attributes:
        record: its hash: a round that is trained again after a resume has another one.
    """

    round: int
    stage: int
    parameters: str
    momentum: str
    buffers: str
    record: str


class RoundCloseSuperseded(Event, frozen=True, tag="round.close_superseded"):
    """The steps of a round were to be closed when this replica was past it."""

    round: int


class RingStarted(Event, frozen=True, tag="ring.started"):
    """The members of a stage begin to average."""

    round: int
    epoch: int
    members: list[PeerId]


class RingRefused(Event, frozen=True, tag="ring.refused"):
    """A member has sent what does not belong into the average; its connection was closed."""

    level = WARNING
    peer: PeerId
    error: str


class ReplicaResumed(Event, frozen=True, tag="replica.resumed"):
    """This replica goes on from the snapshot that a buddy kept for it."""

    round: int
    stage: int
    steps: int
    taken: bool


class ReplicaNotResumed(Event, frozen=True, tag="replica.not_resumed"):
    """The snapshot that a buddy kept for this replica could not be used; its steps of the round are lost."""

    round: int
    stage: int
    steps: int
    taken: bool
