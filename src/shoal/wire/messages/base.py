"""What the messages of all protocols share: struct base, router, hop, era of a chain, samples, kinds of traffic."""

from __future__ import annotations

import enum
import sys
from typing import Annotated

import msgspec

from shoal.ids import HOST_NAME_PATTERN, Ballot, Ordinal, PeerId

Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

HostName = Annotated[str, msgspec.Meta(pattern=HOST_NAME_PATTERN)]

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
"""Of steps, samples or targets: sums of as many as a message has are numbers that can be sent, too."""

Warrant = Annotated[bytes, msgspec.Meta(max_length=64)]
"""An Ed25519 signature, by which somebody may do something; empty: there is none."""

HeldRound = Annotated[int, msgspec.Meta(ge=-1, le=1 << 62)]
"""Of the record that somebody holds; -1: of none."""

Finite = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
"""Neither NaN nor infinite, nor below 0: what it is multiplied by stays a number, and JSON has no others."""

Cap = Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
"""The most samples that a replica takes in a microbatch."""

Room = Annotated[int, msgspec.Meta(ge=0, le=4096)]
"""The most microbatches of a step that a replica holds at a time; 0: as many as all do (`swarm.flight_window`)."""


class Struct(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Immutable record, encoded as a msgpack array; unknown or missing fields fail to decode."""


class Traffic(enum.StrEnum):
    """What bytes are for; senders count what they send by it."""

    ACTIVATIONS = "activations"
    GRADIENTS = "gradients"
    PSEUDO_GRADIENTS = "pseudo_gradients"
    STATE = "state"
    CONTROL = "control"


ContentBytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
"""Of a content that is got in chunks. Whoever gets it knows how much it can be, before there is room for it."""

Sent = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]],
    msgspec.Meta(max_length=64),
]
"""Bytes that were sent, by the traffic that they are."""

FigureName = Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[a-z0-9_/]*\Z")]


class RouterReport(Struct, frozen=True):
    """What a part of the model has come to in a step, beside the loss.

    Of a router, how evenly it has spread tokens over experts. `loss`: 1 where it is even, see `model.router_loss`;
    `load_cv`: the standard deviation of the experts' numbers of tokens, over their mean. Else `figure` is the name of
    what `Family.figures` says, `loss` its value, and there is no load."""

    loss: float
    load_cv: float
    figure: FigureName = ""


Routers = Annotated[tuple[RouterReport, ...], msgspec.Meta(max_length=1024)]
"""Of layers in their order; those without experts have none. Behind them the figures."""


WindowMarks = Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
"""Of a stream, and of windows of it (`swarm.window_marks`); empty: of none."""


class Hop(Struct, frozen=True):
    """One peer of a path or a ring, with the addresses under which it can be dialled."""

    peer: Annotated[PeerId, msgspec.Meta(max_length=128)]
    addresses: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=512)], ...], msgspec.Meta(max_length=16)]


class ReplicaRef(Struct, frozen=True):
    """A replica as a trainer is told of it: where it is, and the most samples that it takes in a microbatch (None: any
    number)."""

    hop: Hop
    cap: Cap | None = None

    @property
    def peer(self) -> PeerId:
        """Its peer id."""
        return self.hop.peer


Replicas = tuple[tuple[ReplicaRef, ...], ...]
"""Those of each stage that may be used, best first."""


class Era(Struct, frozen=True):
    """From `round` on a chain's records are of `ballot`, until the next era."""

    round: Ordinal
    ballot: Ballot


class StepRange(Struct, frozen=True):
    """Steps [first, stop) of a trainer, by their numbers in the whole run: those of a round have the same numbers for
    all trainers."""

    first: Number
    stop: Number

    @property
    def numbers(self) -> range:
        """The numbers, in order."""
        return range(self.first, self.stop)

    def __len__(self) -> int:
        return len(self.numbers)


class SampleRange(Struct, frozen=True, order=True):
    """Positions [start, stop) of the shuffled order of one pass over the data."""

    pass_number: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
    start: Count
    stop: Count

    def __len__(self) -> int:
        return max(0, self.stop - self.start)
