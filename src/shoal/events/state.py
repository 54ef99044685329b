"""The state of a stage on its way: to newcomers, and to the buddies that keep snapshots."""

from __future__ import annotations

from logging import WARNING

from shoal.events.base import Event
from shoal.ids import PeerId


class StateFetching(Event, frozen=True, tag="state.fetching"):
    """This replica begins to fetch a state, or the averages that lead to it."""

    stage: int
    round: int
    average: bool
    chunks: int


class StateFetched(Event, frozen=True, tag="state.fetched", rename={"from_": "from"}):
    """This replica has fetched a state, or the averages that lead to it, with so many chunks of each peer."""

    stage: int
    round: int
    average: bool
    took_s: float
    from_: dict[PeerId, int]


class StateOffered(Event, frozen=True, tag="state.offered"):
    """This replica has told a peer the hashes of a state that the peer may read."""

    peer: PeerId
    record: str
    average: bool
    chunks: int


class StateDonorDistrusted(Event, frozen=True, tag="state.donor_distrusted"):
    """A peer has given something else than the state that it offers, and is asked for nothing more."""

    level = WARNING
    peer: PeerId
    stage: int
    reason: str


class StateNobody(Event, frozen=True, tag="state.nobody"):
    """Nobody holds the state that this replica needs; it waits."""

    level = WARNING
    stage: int
    round: int
    reason: str


class StartNobody(Event, frozen=True, tag="state.start_nobody"):
    """Nobody who is there has the weights of the stage that the run begins from; this server waits for them."""

    level = WARNING
    why = "neither a server of the stage nor a mirror has the files of model.name_or_path"
    says = "the server waits for the weights of stage {stage}: nobody has them yet"
    do = "copy the folder of the model to this host, or run a mirror where it is (the client's host begins with one)"
    stage: int


class WeightsElsewhere(Event, frozen=True, tag="state.weights_elsewhere"):
    """This server has not the weights that the run begins from, and asks its peers for those of its stage."""

    says = "the weights of stage {stage} come from peers: {reason}"
    stage: int
    reason: str


class StateLate(Event, frozen=True, tag="state.late"):
    """The state takes long to come; everybody is asked again for what is missing."""

    level = WARNING
    stage: int
    round: int
    reason: str


class StateOvertaken(Event, frozen=True, tag="state.overtaken"):
    """What this replica fetches is kept by nobody any more, so that it starts again with the newest record."""

    level = WARNING
    do = "raise diloco.inner_steps, or use a faster link, where the reason names the link"
    stage: int
    round: int
    reason: str


class SnapshotWasKept(Event, frozen=True, tag="snapshot.kept"):
    """A buddy keeps a snapshot of this replica's steps."""

    round: int
    stage: int
    steps: int
    bytes: int
    buddy: PeerId


class SnapshotRefused(Event, frozen=True, tag="snapshot.refused"):
    """A buddy has not taken a snapshot; the next one is asked."""

    round: int
    stage: int
    steps: int
    bytes: int
    buddy: PeerId
    reason: str


class SnapshotNotKept(Event, frozen=True, tag="snapshot.not_kept"):
    """No buddy has taken a snapshot of this replica's steps."""

    level = WARNING
    round: int
    stage: int
    steps: int
    bytes: int
    effect: str


class SnapshotForged(Event, frozen=True, tag="snapshot.forged"):
    """A peer offers a snapshot that this replica has not sealed; it is not used."""

    level = WARNING
    peer: PeerId


class SnapshotSearched(Event, frozen=True, tag="snapshot.searched"):
    """A new start of a server has asked its buddies for a snapshot."""

    stage: int
    asked: int


class InnerKept(Event, frozen=True, tag="inner.kept"):
    """This replica has copied what its inner optimizer knows: a checkpoint of the record is wanted."""

    round: int
    stage: int
    num_bytes: int


class InnerTakenOver(Event, frozen=True, tag="inner.taken_over"):
    """This replica's inner optimizer goes on from what another one knew at the record of a checkpoint."""

    round: int
    stage: int
    of: PeerId
    tensors: int


class InnerRefused(Event, frozen=True, tag="inner.refused"):
    """This replica was given what an inner optimizer knew, and cannot go on from it."""

    level = WARNING
    stage: int
    peer: PeerId
    reason: str
