"""The training step between a trainer and the replicas of its path.

    trainer                      replica of stage s                  replica of stage s+1
      | -- Open ----------------> |                                    |
      | <- Opened / Busy / Refused |                                    |
      | -- Forward (stage 0), Labels (last stage)                       |
      |                           | -- Forward ----------------------> |
      |                           | <- Backward ---------------------- |
      | <- MicrobatchDone (stage 0), Prepared (every stage)             |
      | -- Commit / Abort ------> |                                    |
      | <- Committed / Aborted    |                                    |

`Forward`, `Labels` and `Backward` are followed by their tensors in the same frame. Evaluation has no step: each message
names the path, nothing is kept, and the last stage answers the trainer. Of a wrapped model the last stage sends its
`Forward` to stage 0, which has the head: labels are for it, and the answer is its own.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from shoal.ids import Ordinal, PeerId, Slot, Stage, StepKey
from shoal.wire.messages.base import Cap, Count, Finite, HeldRound, Hop, Room, Routers, SampleRange, Struct, Warrant


class StepsTrained(Struct, frozen=True):
    """What a replica has trained in one round, or before or after the cut of one: the steps that have changed its
    parameters, and their targets."""

    num_steps: Count = 0
    num_targets: Count = 0


Earlier = Annotated[tuple[StepsTrained, ...], msgspec.Meta(max_length=127)]
"""What a replica has trained in the rounds before and of which some fragment of the parameters has not been averaged
there yet, the oldest first: of one round less than there are fragments at most. With `diloco.overlap_steps` there are
two for each round, up to its cut and after it, and one more: after the last cut of the fragment of this round."""


class StepEntry(Struct, frozen=True):
    """One committed step in a replica's log, in apply order. `version`: commits this replica had applied in the round
    when the step's forwards ran. `num_targets`: labels that the loss counts. `skipped`: committed with scale 0 because
    a gradient was not finite."""

    key: StepKey
    path: tuple[PeerId, ...]
    version: Count
    samples: tuple[SampleRange, ...]
    num_samples: Count
    num_targets: Count
    scale: Finite
    lr: Finite
    skipped: bool


class Open(Struct, frozen=True, tag="open"):
    """Begin attempt `key` in round `round`; `microbatch_samples[m]` is the size of microbatch m, and
    `microbatch_targets[m]`, how many of its labels the loss counts, is its weight. `base` is the hash of the record on
    top of which the round is trained: after a split two rounds may have one number. Every stage computes with the loss
    times `loss_scale`, a power of two, and says and applies its gradients divided by it. `warrant`: see
    `StartRound`."""

    key: StepKey
    round: Ordinal
    path: tuple[Hop, ...]
    microbatch_samples: tuple[Count, ...]
    microbatch_targets: tuple[Count, ...]
    samples: tuple[SampleRange, ...]
    base: str = ""
    loss_scale: Finite = 1.0
    warrant: Warrant = b""


class Opened(Struct, frozen=True, tag="opened"):
    """The replica takes part. Of this trainer's steps it holds `room` microbatches at a time."""

    key: StepKey
    room: Room = 0


class Busy(Struct, frozen=True, tag="busy"):
    """The replica cannot take another step now, or not as many microbatches of it as were sent; try another replica, or
    this one later."""

    key: StepKey


class Refused(Struct, frozen=True, tag="refused"):
    """The replica will not take part in this attempt: another round, a stale generation, closing. Never answered.
    `cap`: it takes the step in microbatches of at most so many samples. `is_model`: the model of the user's own has
    failed on it, as it would on any machine."""

    key: StepKey
    reason: str
    cap: Cap | None = None
    is_model: bool = False


class Forward(Struct, frozen=True, tag="fwd"):
    """Input of one microbatch for the receiving stage. Its tensor, and those of the context, which is handed on."""

    key: StepKey
    microbatch: Count


class Labels(Struct, frozen=True, tag="labels"):
    """Labels of one microbatch, for the last stage. One tensor."""

    key: StepKey
    microbatch: Count


class Backward(Struct, frozen=True, tag="bwd"):
    """Gradient with respect to what the receiving stage sent forward. One tensor."""

    key: StepKey
    microbatch: Count


class MicrobatchDone(Struct, frozen=True, tag="mb_done"):
    """Stage 0 has finished the backward of a microbatch: the trainer may send the next one."""

    key: StepKey
    microbatch: Count


class Prepared(Struct, frozen=True, tag="prepared"):
    """All microbatches of the step are done here. `squared_norm` sums over this stage's gradients in float64; `loss` is
    the mean over the step's targets and comes from the last stage only, `routers` from stages that have experts."""

    key: StepKey
    stage: Stage
    version: Count
    squared_norm: float
    finite: bool
    loss: float | None
    routers: Routers = ()


class Commit(Struct, frozen=True, tag="commit"):
    """Apply the step: gradients times `scale`, learning rate `lr`. `scale` 0 with `skipped` leaves parameters alone."""

    key: StepKey
    scale: Finite
    lr: Finite
    skipped: bool


class Committed(Struct, frozen=True, tag="committed"):
    """The step is applied here (sent again for every repeated Commit)."""

    key: StepKey


class Abort(Struct, frozen=True, tag="abort"):
    """Forget the attempt."""

    key: StepKey


class Aborted(Struct, frozen=True, tag="aborted"):
    """The attempt is not applied here and never will be."""

    key: StepKey


class Broken(Struct, frozen=True, tag="broken"):
    """The sender cannot reach `peer`, its neighbour on the path."""

    key: StepKey
    peer: Annotated[PeerId, msgspec.Meta(max_length=128)]


class AskOutcome(Struct, frozen=True, tag="ask_outcome"):
    """A prepared replica that lost its trainer asks another replica of the path.

    `forgotten`: of whom the asker knows that they have forgotten the step (`Outcome.FORGOTTEN`).
    """

    key: StepKey
    forgotten: tuple[PeerId, ...] = ()


class Outcome(enum.StrEnum):
    """How an attempt stands at one replica."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    NOT_COMMITTED = "not_committed"
    """Not committed, and by this answer promised not to be by the trainer: only the settlement can."""
    FORGOTTEN = "forgotten"
    """Not committed since the replica was started, which was after the attempt was opened; before that, who knows."""


class TellOutcome(Struct, frozen=True, tag="tell_outcome"):
    """Answer to AskOutcome. The numbers of the commit come with COMMITTED, so that the asker applies the same.

    `forgotten`: as in AskOutcome, of whom the replica that answers knows it.
    """

    key: StepKey
    outcome: Outcome
    scale: Finite = 0.0
    lr: Finite = 0.0
    skipped: bool = False
    forgotten: tuple[PeerId, ...] = ()


class Fence(Struct, frozen=True, tag="fence"):
    """From now on refuse every generation of a trainer below the given one (trainer -> lowest allowed generation)."""

    generations: dict[Slot, Ordinal]


class Fenced(Struct, frozen=True, tag="fenced"):
    """Answer to Fence: what the fenced generations had committed in this round, and what is still in doubt.

    `round` is the one that the replica is in. `since` (trainer -> attempt) is the oldest attempt of a fenced
    generation that was opened in this generation of the replica: it would know of that one and of all later ones.
    `steady`: it has dropped nothing since it came into the round; whoever was there then knows that it would know of
    all.
    """

    generations: dict[Slot, Ordinal]
    committed: tuple[StepKey, ...]
    in_doubt: tuple[StepKey, ...]
    round: Ordinal
    since: dict[Slot, StepKey]
    steady: bool


class EvalForward(Struct, frozen=True, tag="eval_fwd"):
    """Input of one evaluation batch for the receiving stage of `path`; its replicas must hold the record of
    `base_round`. Tensors as of `Forward`. `trainer`, `evaluation` and `microbatch` pair it with its labels; the answer
    goes to `trainer`."""

    evaluation: Ordinal
    microbatch: Count
    base_round: HeldRound
    path: tuple[Hop, ...]
    trainer: Hop


class EvalLabels(Struct, frozen=True, tag="eval_labels"):
    """Labels of one evaluation batch, for the last stage. One tensor."""

    evaluation: Ordinal
    microbatch: Count
    base_round: HeldRound


class EvalResult(Struct, frozen=True, tag="eval_result"):
    """Mean loss over the targets of one evaluation batch of `num_samples` samples; 0 where it has none."""

    evaluation: Ordinal
    microbatch: Count
    loss: float
    num_samples: Count


class EvalRefused(Struct, frozen=True, tag="eval_refused"):
    """The sender does not hold the record asked for, or cannot reach the next stage."""

    evaluation: Ordinal
    microbatch: Count
    reason: str


StepMessage = (
    Open
    | Opened
    | Busy
    | Refused
    | Forward
    | Labels
    | Backward
    | MicrobatchDone
    | Prepared
    | Commit
    | Committed
    | Abort
    | Aborted
    | Broken
    | AskOutcome
    | TellOutcome
    | Fence
    | Fenced
    | EvalForward
    | EvalLabels
    | EvalResult
    | EvalRefused
)
