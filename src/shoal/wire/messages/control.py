"""Between a client, its trainers, its monitor and the servers: assignments one way, reports the other."""

from __future__ import annotations

from shoal.ids import PeerId, StepKey
from shoal.wire.messages.base import Hop, Struct


class Heartbeat(Struct, frozen=True, tag="heartbeat"):
    """Sent on a connection that has been idle; carries nothing and is never passed up."""


class TrainerHello(Struct, frozen=True, tag="trainer_hello"):
    """First message of a trainer to the client that started it."""

    slot: int
    incarnation: int
    hop: Hop


class Evaluation(Struct, frozen=True):
    """A share of the held-out set: samples [start, stop), evaluated on the parameters of record `held`."""

    held: int
    start: int
    stop: int


class StartRound(Struct, frozen=True, tag="start_round"):
    """Work of one trainer in one round: evaluate first (if asked to), then `inner_steps` steps from number `first_step`
    on over `path`. `replicas[s]` are all usable replicas of stage s, best first, to replace one that is lost."""

    round: int
    slot: int
    num_slots: int
    first_step: int
    inner_steps: int
    path: tuple[Hop, ...]
    replicas: tuple[tuple[Hop, ...], ...]
    evaluation: Evaluation | None


class UpdateReplicas(Struct, frozen=True, tag="update_replicas"):
    """The replicas of each stage have changed."""

    replicas: tuple[tuple[Hop, ...], ...]


class StepReport(Struct, frozen=True, tag="step_report"):
    """One step is committed (or skipped)."""

    slot: int
    round: int
    key: StepKey
    num_samples: int
    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    duration_s: float


class EvalReport(Struct, frozen=True, tag="eval_report"):
    """Sum of the losses over this trainer's share of the held-out set."""

    slot: int
    held: int
    loss_sum: float
    num_samples: int


class TrainerDone(Struct, frozen=True, tag="trainer_done"):
    """The trainer has done its steps of the round and waits."""

    slot: int
    round: int
    steps: int
    num_samples: int
    sent_bytes: dict[str, int]


class TrainerStuck(Struct, frozen=True, tag="trainer_stuck"):
    """The trainer cannot put a path together: `stages` have no replica that answers."""

    slot: int
    round: int
    stages: tuple[int, ...]


class Metrics(Struct, frozen=True, tag="metrics"):
    """Numbers for the monitor: names as W&B shows them."""

    role: str
    peer: PeerId
    round: int
    values: dict[str, float]


ControlMessage = (
    Heartbeat
    | TrainerHello
    | StartRound
    | UpdateReplicas
    | StepReport
    | EvalReport
    | TrainerDone
    | TrainerStuck
    | Metrics
)
