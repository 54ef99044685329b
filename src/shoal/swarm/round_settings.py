"""What the coordinator's machine is told (for the run, and to end a round), and its phases."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.ids import PeerId


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """What does not change during a run.

    Attributes:
        run_id: Of the run.
        num_stages: S.
        genesis: Hash that stands for D_0.
        retry_s: Between repetitions of what must be answered.
        drop_after_s: How long a held record whose bytes nobody has is waited for.
        stage_timeout_s: After which a view that does not end is proposed anew.
        lost_state_after_s: How long a replica that may hold the bytes of its stage alone is waited for.
        max_gradient_ratio: Beyond which pseudo-gradients are clipped (see `contribution_guard`); None clips none.
    """

    run_id: str
    num_stages: int
    genesis: str
    retry_s: float = 0.5
    drop_after_s: float = 10.0
    stage_timeout_s: float = 120.0
    lost_state_after_s: float = 30.0
    max_gradient_ratio: float | None = 10.0


@dataclass(frozen=True, slots=True)
class CloseRequest:
    """End a round.

    Attributes:
        round: Which one.
        slots: Place of each home replica in its stage's ring; spares come last.
        incarnations: The lowest of each trainer that may still act.
        join_by_s: When to go on without those that have not joined; None waits for all that are reachable.
    """

    round: int
    slots: Mapping[PeerId, int]
    incarnations: Mapping[int, int]
    join_by_s: float | None = None


class Phase(enum.Enum):
    """Where the coordinator stands; see the diagram of `round_coordinator`."""

    WAITING = "waiting"
    ASKING = "asking"
    IDLE = "idle"
    JOINING = "joining"
    STAGING = "staging"
    HOLDING = "holding"
