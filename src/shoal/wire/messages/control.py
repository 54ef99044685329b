"""Between a client, its trainers, its monitor and the servers: assignments one way, reports the other."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shoal.ids import MAX_SLOTS, MAX_STAGES, Ordinal, PeerId, Slot, Stage, StepKey
from shoal.telemetry.registry import FIRST_BUCKET, LAST_BUCKET
from shoal.wire.messages.base import (
    Count,
    Finite,
    HeldRound,
    Hop,
    HostName,
    Number,
    Replicas,
    RouterReport,
    Sent,
    StepRange,
    Struct,
    Warrant,
)


class Heartbeat(Struct, frozen=True, tag="heartbeat"):
    """Sent on a connection that has been idle, or to measure the round trip; never passed up. A `ping` other than 0 is
    sent back at once as the `pong` of another heartbeat."""

    ping: Number = 0
    pong: Number = 0


class TrainerHello(Struct, frozen=True, tag="trainer_hello"):
    """First message of a trainer to its client, again whenever it has been dialled anew, and then followed by all
    reports of `round`: the last one that the trainer was started in, 0 before the first."""

    slot: Slot
    generation: Ordinal
    hop: Hop
    round: Ordinal = 0


class Evaluation(Struct, frozen=True):
    """A share of the held-out set: samples [start, stop), evaluated on the parameters of record `base_round`."""

    base_round: HeldRound
    start: Count
    stop: Count


class StartRound(Struct, frozen=True, tag="start_round"):
    """Work of one trainer in one round: evaluate first (if asked to), then train `steps` over `path`. `replicas[s]` are
    all usable replicas of stage s, best first, to replace one that is lost. `base` is the hash of the record on top of
    which the round is trained. By `warrant` the client says that the receiver is the slot's trainer (`signing.py`): who
    follows this client takes steps of nobody else."""

    round: Ordinal
    slot: Slot
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=MAX_SLOTS)]
    steps: StepRange
    path: tuple[Hop, ...]
    replicas: Replicas
    evaluation: Evaluation | None
    base: str = ""
    warrant: Warrant = b""


class UpdateReplicas(Struct, frozen=True, tag="update_replicas"):
    """The replicas of each stage have changed, or their caps."""

    replicas: Replicas


class StepReport(Struct, frozen=True, tag="step_report"):
    """One step is committed (or skipped), at `at_s` on the monotonic clock of the host of trainer and client. `loss` is
    the mean over its targets. `routers` are those of all stages, in order."""

    slot: Slot
    round: Ordinal
    key: StepKey
    num_samples: Count
    num_targets: Count
    loss: float
    grad_norm: float
    lr: Finite
    skipped: bool
    duration_s: Finite
    at_s: Finite
    routers: tuple[RouterReport, ...] = ()


class EvalReport(Struct, frozen=True, tag="eval_report"):
    """Sum of the losses over the targets in this trainer's share of the held-out set."""

    slot: Slot
    base_round: HeldRound
    loss_sum: float
    num_samples: Count
    num_targets: Count


class TrainerDone(Struct, frozen=True, tag="trainer_done"):
    """The trainer has done its steps of the round and waits. `sent_bytes` counts from its start."""

    slot: Slot
    round: Ordinal
    steps: Ordinal
    num_samples: Count
    sent_bytes: Sent


MAX_REFUSAL_CHARS = 200


class TrainerStuck(Struct, frozen=True, tag="trainer_stuck"):
    """The trainer cannot put a path together: `stages` have no replica that answers, or those of one refuse its step
    (`refusal` says why; `is_model`: every one of them, since the model of the user's own fails)."""

    slot: Slot
    round: Ordinal
    stages: Annotated[tuple[Stage, ...], msgspec.Meta(max_length=MAX_STAGES)]
    refusal: Annotated[str, msgspec.Meta(max_length=MAX_REFUSAL_CHARS)] = ""
    is_model: bool = False


MAX_FAILURE_CHARS = 300
"""Of the reason why a run could not go on: every host shows it."""


class RunOver(Struct, frozen=True, tag="run_over"):
    """The client's last word to every server: the run has ended, in its last round unless it was `interrupted` there or
    there is a `failure`."""

    interrupted: bool
    failure: Annotated[str, msgspec.Meta(max_length=MAX_FAILURE_CHARS)]


MAX_CONFIG_BYTES = 6 * 1024
"""Of a run's shared configuration, packed."""


class AskRun(Struct, frozen=True, tag="ask_run"):
    """Which run is it? Asked of its clients and servers. A client also tells whoever has asked when it is over."""


class TellRun(Struct, frozen=True, tag="tell_run"):
    """The answer: `config` is what all hosts share (`control.run_config`). `client` is the run's client, if the sender
    is that or follows it and is connected with it; else None. `unix_s` is the time by its clock."""

    config: Annotated[bytes, msgspec.Meta(max_length=MAX_CONFIG_BYTES)]
    client: PeerId | None
    unix_s: Annotated[float, msgspec.Meta(ge=0, le=1e11)]


class Leave(Struct, frozen=True, tag="leave"):
    """A server is about to leave, with these others: does anybody who stays hold `stage`? Repeated until it may go."""

    stage: Stage
    others: Annotated[tuple[PeerId, ...], msgspec.Meta(max_length=4096)] = ()


class MayLeave(Struct, frozen=True, tag="may_leave"):
    """The client's answer. With `is_safe` others of the stage hold the newest record, or, if there is a `record_hash`,
    the client keeps the state of that record. Without, the client fetches it now, unless `refused` says why not."""

    stage: Stage
    round: Number
    is_safe: bool
    record_hash: str = ""
    refused: str = ""


COUNTERS = "counters/"
"""How names of numbers begin that are summed up over peers: `counters/transport.refused{offence=tls}`."""

MAX_VALUES = 1024
"""Of one `Metrics` message."""
# What is shown on terminals and kept by the monitor: short, printable ASCII, and nothing else.
RunNumber = Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,160}\Z")]
MetricName = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z_.]{0,47}(\{[!-z|~]{1,96}\})?\Z")]
RoleName = Annotated[str, msgspec.Meta(pattern=r"^[a-z_]{0,16}\Z")]


class Metrics(Struct, frozen=True, tag="metrics"):
    """Numbers of the run for the monitor, names as W&B shows them. `round` 0: the first has not begun. What
    comes with each step is the mean of so many `steps`."""

    role: RoleName
    peer: PeerId
    round: Ordinal
    values: Annotated[dict[RunNumber, float], msgspec.Meta(max_length=MAX_VALUES)]
    steps: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)] = 1


MAX_COUNTERS, MAX_GAUGES, MAX_HISTOGRAMS = 256, 32, 8
"""Of one process."""
MAX_TOTAL = 1 << 53
"""Of anything that is counted or measured: up to here a float is exact."""
Total = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOTAL)]
Amount = Annotated[float, msgspec.Meta(ge=0.0, le=float(MAX_TOTAL))]
Reading = Annotated[float, msgspec.Meta(ge=-(2.0**53), le=2.0**53)]
Bucket = Annotated[int, msgspec.Meta(ge=FIRST_BUCKET, le=LAST_BUCKET)]


class MetricReport(Struct, frozen=True, tag="metric_report"):
    """What a process has measured (`telemetry.catalogue.CATALOGUE`), for its client; counters and histograms count from
    the start of the process. `number` is that of the `AskCounters` that this answers, or 0. `host` (None: this is an
    answer) and `index`, its number there (None: its host has one), say what people call it."""

    role: RoleName
    counters: Annotated[dict[MetricName, Total], msgspec.Meta(max_length=MAX_COUNTERS)]
    gauges: Annotated[dict[MetricName, Reading], msgspec.Meta(max_length=MAX_GAUGES)]
    histograms: Annotated[dict[MetricName, dict[Bucket, Total]], msgspec.Meta(max_length=MAX_HISTOGRAMS)]
    number: Number = 0
    host: HostName | None = None
    index: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] | None = None


class PeerMetrics(Struct, frozen=True, tag="peer_metrics"):
    """The client passes a peer's report on to the monitor."""

    peer: Annotated[PeerId, msgspec.Meta(max_length=128)]
    report: MetricReport


MAX_NOTED_CHARS = 32 * 1024
"""Of an event that the monitor is told of; one that is longer is in the client's file alone."""


class Noted(Struct, frozen=True, tag="noted"):
    """The client tells the monitor what it has just written into `events.jsonl`: one JSON object."""

    line: Annotated[str, msgspec.Meta(max_length=MAX_NOTED_CHARS)]


class AskCounters(Struct, frozen=True, tag="ask_counters"):
    """What has the receiver measured until now? `number` is above 0, and comes back in the answer."""

    number: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]


class AskStatus(Struct, frozen=True, tag="ask_status"):
    """How is the run? Asked by whoever looks at it and takes no part; answered by the client with a `RunStatus`. With
    `since` also who is in the swarm, how losses went, and which events came after the one of that number (0: all that
    the client still has)."""

    since: Number | None = None


MAX_STATE_CHARS = 200
"""Of what a run does, in words."""
MAX_TOLD_EVENTS, MAX_SAYS_CHARS = 64, 400
"""Of one answer, and of what each says."""
MAX_CURVE = 64
"""Losses that stand for a whole run."""
Losses = Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_CURVE)]
PeerHost = Annotated[str, msgspec.Meta(max_length=64)]
MAX_SEEN, MAX_SEEN_BYTES = 4096, 4 << 20
"""Peers of a kind, and how much of a message they take: each may have long addresses."""


class ToldEvent(Struct, frozen=True):
    """Something that the client has noted and that says something to people: `number` is when, in microseconds since
    1970, made unique; `level` and `event` are those of logs; `routine` is what the numbers show anyway."""

    number: Annotated[int, msgspec.Meta(ge=0, le=250_000_000_000_000_000)]  # in the year 9892, and dates end in 9999
    level: Annotated[str, msgspec.Meta(max_length=16)]
    event: Annotated[str, msgspec.Meta(max_length=64)]
    says: Annotated[str, msgspec.Meta(max_length=MAX_SAYS_CHARS)]
    routine: bool = False


class SeenPeer(Struct, frozen=True):
    """A server, mirror or client as the run's client sees it: what it is called, the stage of a server (None: it waits
    for one) and whether it serves it, the round that a server or mirror holds, and why a server cannot be dialled."""

    hop: Hop
    role: RoleName
    host: PeerHost | None
    index: int | None = None
    stage: Stage | None = None
    serving: bool = False
    held_round: int = -1
    problem: str = ""


class ServerNumbers(Struct, frozen=True):
    """What a server has said of itself `age_s` ago, of the time since its process was started; None: nothing is known.
    `busy` is the share of the last seconds in which its device has worked, `step_s` the median of how long a step was
    open there. Speeds that are old are None."""

    peer: PeerId
    age_s: Amount
    steps: Total | None = None
    samples_per_s: Amount | None = None
    busy: Amount | None = None
    step_s: Amount | None = None
    sent_bytes: Total | None = None
    received_bytes: Total | None = None
    memory_bytes: Total | None = None


class RunStatus(Struct, frozen=True, tag="run_status"):
    """How the run is, as its client sees it: `state` in words, the round in progress (0 before the first) of `rounds`,
    committed steps and samples of all trainers, the newest losses (None before the first), the rate over the last
    seconds, how long ago the last step was committed (None before the first), the slots with a trainer, and the numbers
    of the servers that have said any, and whether a user has paused it. `left_s` estimates how long it still takes
    (None: nothing is known, or it stands still). What follows is empty unless `AskStatus.since` asks for it: training
    losses from the first step to the last, each the mean of equally many, held-out losses, events, and the swarm."""

    state: Annotated[str, msgspec.Meta(max_length=MAX_STATE_CHARS)]
    round: Number
    rounds: Number
    steps: Number
    samples: Number
    loss: float | None
    eval_loss: float | None
    samples_per_s: Amount
    last_step_s: Amount | None
    trainers: Annotated[tuple[int, ...], msgspec.Meta(max_length=4096)]
    servers: Annotated[tuple[ServerNumbers, ...], msgspec.Meta(max_length=4096)] = ()
    paused: bool = False
    left_s: Amount | None = None
    losses: Losses = ()
    eval_losses: Losses = ()
    events: Annotated[tuple[ToldEvent, ...], msgspec.Meta(max_length=MAX_TOLD_EVENTS)] = ()
    num_stages: Annotated[int, msgspec.Meta(ge=0, le=MAX_STAGES)] = 0
    peers: Annotated[tuple[SeenPeer, ...], msgspec.Meta(max_length=3 * MAX_SEEN)] = ()


Order = Literal["stop", "pause", "resume", "checkpoint"]
"""What a user wants of a run: that it ends as after Ctrl-C on its client's host, that no step begins, that they begin
again, or that the next record is kept."""
MAX_SAID_CHARS = 200
"""Of what a command and its answer say in words."""


class Steer(Struct, frozen=True, tag="steer"):
    """The user `by` wants something of the run. To its client, from any member, or over the Unix socket of its host,
    which only its own user can open; answered with the `nonce`."""

    nonce: Number
    what: Order
    by: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]


class Steered(Struct, frozen=True, tag="steered"):
    """It is done, in this round of the run (0: before the first), or was so before (`already`), or `refused` says why
    not."""

    nonce: Number
    round: Number
    refused: Annotated[str, msgspec.Meta(max_length=MAX_SAID_CHARS)] = ""
    already: bool = False


ControlMessage = (
    Heartbeat
    | TrainerHello
    | StartRound
    | UpdateReplicas
    | StepReport
    | EvalReport
    | TrainerDone
    | TrainerStuck
    | RunOver
    | AskRun
    | TellRun
    | Leave
    | MayLeave
    | Metrics
    | MetricReport
    | PeerMetrics
    | Noted
    | AskCounters
    | AskStatus
    | RunStatus
    | Steer
    | Steered
)
