"""What a coordinator orders a replica to do in a round, and what the replica brings to it."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import RemoteProtocolError
from shoal.ids import Ballot, PeerId, StepKey
from shoal.swarm.view import NOTHING_HELD
from shoal.wire.messages.round import (
    AskRound,
    Basis,
    Close,
    Decide,
    Hold,
    Join,
    LinkReport,
    Move,
    Propose,
    Resolve,
    Restore,
    StageHashes,
)
from shoal.wire.messages.step import StepEntry

Order = AskRound | Close | Resolve | Propose | Hold | Decide | Restore | Move
"""What only a coordinator sends."""

NO_BYTES = Basis(NOTHING_HELD, StageHashes("", "", ""))
"""What a replica has whose memory does not hold what it should."""


@dataclass(frozen=True, slots=True)
class StepsClosed:
    """What the replica has committed in the round, in apply order, what it cannot decide alone, its links, and the
    length of its pseudo-gradient (see `Join`)."""

    num_samples: int
    in_doubt: tuple[StepKey, ...]
    log: tuple[StepEntry, ...]
    links: tuple[LinkReport, ...] = ()
    gradient_norm: float = 0.0

    def join(self, ballot: Ballot, round: int, stage: int, aborted: tuple[StepKey, ...]) -> Join:
        """What the replica joins with; `aborted` are the steps that a Resolve has aborted here."""
        known = self.num_samples, self.in_doubt, self.log, aborted, self.links, self.gradient_norm
        return Join(ballot, round, stage, *known)


def check_view(view: Propose, stage: int, me: PeerId) -> None:
    """Check that a proposed view is one for this replica.

    Raises:
        RemoteProtocolError: It is not, or it contradicts itself.
    """
    peers = [hop.peer for hop in view.members]
    is_sound = len(set(peers)) == len(peers) == len(view.weights) and min(view.weights, default=-1) >= 0
    is_sound = is_sound and len(view.scales) in (0, len(peers)) and all(0 <= scale <= 1 for scale in view.scales)
    if view.stage != stage or me not in peers or not is_sound:
        raise RemoteProtocolError(f"view {view.epoch} of stage {view.stage} is none for {me}")
