"""What the coordinator's machine is told (for the run, and to end a round), and its phases."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.ids import PeerId
from shoal.swarm.codec_rule import CodecRule
from shoal.swarm.cut_rule import EVERY_STEP, CutRule
from shoal.swarm.passed_orders import IN_LARGE_RINGS, PassingRule


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """What does not change during a run.

    Attributes:
        genesis: the hash that stands for D_0.
        retry_s: pause before a message without an answer is sent again.
        drop_after_s: how long the coordinator waits for a prepared record whose bytes no reachable replica has.
        stage_timeout_s: after this time an unfinished quorum is proposed again.
        lost_state_after_s: how long the coordinator waits for a replica that may alone hold its stage's bytes.
        max_gradient_ratio: pseudo-gradients are clipped above it (see `contribution_guard`); None clips none.
        cuts: which steps the average of a round has.
        codecs: as what pseudo-gradients of the next round travel; None: always the same.
        passing: which orders members pass on.
    """

    run_id: str
    num_stages: int
    genesis: str
    retry_s: float = 0.5
    drop_after_s: float = 10.0
    stage_timeout_s: float = 120.0
    lost_state_after_s: float = 30.0
    max_gradient_ratio: float | None = 10.0
    cuts: CutRule = EVERY_STEP
    codecs: CodecRule | None = None
    passing: PassingRule = IN_LARGE_RINGS


@dataclass(frozen=True, slots=True)
class CloseRequest:
    """End a round.

    Attributes:
        slots: place of each home replica in its stage's ring; spares come last.
        generations: the lowest of each trainer that may still act.
        join_within_s: how long those that are told to join are waited for, each time anew; None: while reachable.
        keep: a checkpoint of its record is wanted.
        trained_s: how long it was trained; None: not known.
        num_samples: of a pass over the data; None: not known.
        marks: of the windows of a stream that the data server has read; empty: of none.
    """

    round: int
    slots: Mapping[PeerId, int]
    generations: Mapping[int, int]
    join_within_s: float | None = None
    keep: bool = False
    trained_s: float | None = None
    num_samples: int | None = None
    marks: bytes = b""


class RoundPhase(enum.Enum):
    """Where the coordinator stands; see the diagram of `round_coordinator`."""

    WAITING = "waiting"
    ASKING = "asking"
    IDLE = "idle"
    JOINING = "joining"
    STAGING = "staging"
    PREPARING = "preparing"
