"""What the machines of the training step ask of their drivers: messages to send, operations for the device.

No tensors: payloads stay with the driver, keyed by (step key, microbatch). A `Forward` or `Backward` in a
`SendStepMessage` only says that the payload must be sent now.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.ids import PeerId, StepKey
from shoal.wire.messages.base import RouterReport
from shoal.wire.messages.step import StepMessage

CLOSED = "closed"
"""Reason of a refusal: the round is over at the replica; the trainer stops, once another one or the client says so."""
BEHIND = "behind"
"""Reason of a refusal: the replica does not hold the record before the round yet."""
STALE = "stale"
"""Reason of a refusal: a fenced generation, or an attempt that is not newer than the last one of its trainer."""
MALFORMED = "malformed"
"""Reason of a refusal: a path or microbatches that this replica cannot take part in."""
UNKNOWN = "unknown"
"""Reason of a refusal: the attempt was never opened here; the replica has probably been restarted."""


LARGEST_LOSS_SCALE = 2.0**32
"""Above it, the gradients of a model that is worth training are not finite."""


class Schedule(enum.StrEnum):
    """In which order a replica works on the microbatches of a step; diagrams are in `pipeline.schedule`."""

    GPIPE = "gpipe"
    """All forwards, then all backwards."""
    ONE_F_ONE_B = "1f1b"
    """A backward as soon as there is one."""
    ZERO_BUBBLE = "zero_bubble"
    """The same, with the gradients of the parameters put off to when nothing else can be done."""


@dataclass(frozen=True, slots=True)
class Decision:
    """With what a step is committed: gradients times `scale`, learning rate `lr`; `skipped` changes nothing."""

    scale: float
    lr: float
    skipped: bool

    @property
    def is_sane(self) -> bool:
        """Whether the numbers can be applied at all."""
        return all(math.isfinite(number) and number >= 0 for number in (self.scale, self.lr))


def gradient_norm(squared_norms: Iterable[float]) -> float:
    """Return the norm of a step's gradients from what each stage's come to, added in stage order; it may be NaN."""
    total = 0.0
    for squared_norm in squared_norms:
        total += squared_norm
    return math.sqrt(total) if total >= 0 else math.nan


def decision_of(norm: float, is_finite: bool, lr: float, max_norm: float | None) -> Decision:
    """Return the decision with which to commit a step that every stage has prepared.

    Args:
        norm: of the step's gradients, over all stages.
        is_finite: whether gradients and loss are finite in every stage.
        max_norm: gradients are scaled down to it; None does not clip.
    """
    if not math.isfinite(norm) or not is_finite:
        return Decision(0.0, lr, True)
    return Decision(1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6)), lr, False)


def is_loss_scale(value: float) -> bool:
    """Return whether losses may be scaled by this: by a power of two that is not too large, which rounds nothing."""
    return 1.0 <= value <= LARGEST_LOSS_SCALE and math.frexp(value)[0] == 0.5


@dataclass(frozen=True, slots=True)
class SendStepMessage:
    """Effect: send `message` to `to`; for Forward and Backward the driver adds the tensor."""

    to: PeerId
    message: StepMessage


class OperationKind(enum.IntEnum):
    """What the device does next; smaller goes first."""

    DROP = 0
    COMMIT = 1
    BACKWARD = 2
    LOSS = 3
    FORWARD = 4
    WEIGHTS = 5


@dataclass(frozen=True, slots=True)
class Operation:
    """One piece of work for the device.

    LOSS is forward, loss and backward of a microbatch in the last stage; with gpipe the forward has been done before.
    With zero_bubble a backward gives only the gradient of the input, and WEIGHTS those of the parameters. DROP forgets
    an attempt's gradients, activations and buffers. `microbatch` is -1 and `decision` None where they do not apply.
    `is_head`: in the head that a wrapped first stage hosts, and not in its own units (`swarm.microbatch_pass`).
    """

    kind: OperationKind
    key: StepKey
    microbatch: int = -1
    decision: Decision | None = None
    is_head: bool = False


@dataclass(frozen=True, slots=True)
class ReadyOperation:
    """An operation that could run now.

    Attributes:
        begun: the step has run an operation here before.
        opened: place of the step in the order in which steps were opened here.
        kept: number of the step's microbatches whose activations are kept here, for the way that it is part of.
    """

    operation: Operation
    begun: bool
    opened: int
    kept: int = 0


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Result of a step in one stage, when all its gradients are there.

    Attributes:
        squared_norm: of this stage's gradients, in float64.
        finite: whether gradients and the loss are.
        loss: mean over the step's targets; None but in the stage that has the head.
        routers: of this stage's layers with experts, in order.
    """

    squared_norm: float
    finite: bool
    loss: float | None
    routers: tuple[RouterReport, ...] = ()
