"""Identifiers that every layer shares: one type for one thing, no behaviour beyond order and text.

A *step* is named by the trainer that drives it, the generation (restart count) of that trainer, and its number; a
*step key* adds the attempt, because a step that was aborted is tried again under a new attempt and late messages of the
old one must be told apart. A *ballot* orders coordinators: the highest one leads.

All of them come from peers, so they say what they may be, and whatever decodes them refuses the rest.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple, NewType

import msgspec

PeerId = NewType("PeerId", str)
"""libp2p peer id in base58; for our Ed25519 identities it contains the public key itself."""

RunId = NewType("RunId", str)
"""`<experiment_prefix>-<UTC>-<4 hex>`: one training job."""

StageIndex = NewType("StageIndex", int)
"""0..S-1: a contiguous part of the model."""


Ordinal = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
"""What is counted on from a number that a peer has said: far enough below what travels that the next ones do, too."""

PREFIX_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"
"""What `experiment_prefix` may be, also where others say it: users paste it, and files are named by it."""

HOST_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}\Z"
"""What a host may be called: it is shown on the terminals of other hosts, so no character of it has a meaning there."""

MAX_SLOTS = 4096
"""Trainers of a run, at most: what is remembered of each has a bound."""

MAX_STAGES = 4096

MAX_PARTS = MAX_STAGES
"""Layers, or experts, of a model, at most: each layer may be a stage, and what lists more of them fills the memory."""

Slot = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SLOTS)]
"""The number of a trainer."""

Stage = Annotated[int, msgspec.Meta(ge=0, lt=MAX_STAGES)]
"""A stage as a message names it: not always one that the run has."""


class StepId(NamedTuple):
    """One inner optimizer step of one trainer."""

    trainer: Slot
    generation: Ordinal
    number: Ordinal


class StepKey(NamedTuple):
    """One attempt at a step; every message of the step protocol carries it."""

    trainer: Slot
    generation: Ordinal
    number: Ordinal
    attempt: Ordinal

    @property
    def step(self) -> StepId:
        """The step that this is an attempt at."""
        return StepId(self.trainer, self.generation, self.number)

    def __str__(self) -> str:
        return f"t{self.trainer}.{self.generation}/{self.number}#{self.attempt}"


class Ballot(NamedTuple):
    """Right to coordinate; compared field by field, the highest wins."""

    number: Ordinal
    peer: PeerId
    generation: Ordinal


NO_BALLOT = Ballot(0, PeerId(""), 0)
"""Lower than every ballot that a client can take."""
