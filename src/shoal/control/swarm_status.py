"""What `shoal status` says: the run as the registry and its client tell it, as typed data and as text. Pure.

The data are the same on all hosts, their form is docs/status.schema.json: keys are added, none is taken away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from shoal.clock import utc_time_of_day
from shoal.control.peer_numbers import FRESH_S
from shoal.ids import PeerId
from shoal.swarm.view import NO_BASE, Candidate, ClientPeer, Replica, SwarmView, network_host, network_places
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import RunStatus, ToldEvent

SCHEMA_VERSION: Final = 1
_EVENTS_TITLE: Final = "events  "
_LAST_EVENTS: Final = 5
"""So many are told beside the numbers: who is away, and what is wrong, stands nowhere else."""


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A server: what it is called, where it is, and what it does: serving, joining, undialled or waiting for a stage.

    `held_round` is the newest round whose record it holds, -1 while it holds none. `age_s` is how old the numbers are
    that follow; they count from the start of its process, null is not known. `busy` is the share of the last seconds in
    which its device has worked, `step_s` the median of how long a step was open there; speeds that are old are null.
    """

    peer: str
    name: str
    host: str
    state: str
    held_round: int
    problem: str = ""
    age_s: float | None = None
    steps: int | None = None
    samples_per_s: float | None = None
    busy: float | None = None
    step_s: float | None = None
    sent_bytes: int | None = None
    received_bytes: int | None = None
    memory_bytes: int | None = None


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A stage and its replicas."""

    stage: int
    replicas: tuple[ServerStatus, ...]


class MirrorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A mirror: what it is called, where it is, and the round whose record it holds of every stage, or a newer one; -1
    while it does not hold all stages."""

    peer: str
    name: str
    host: str
    held_round: int


class ClientStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The client: who it is, its addresses, and whether it has answered; if not, why."""

    peer: str
    name: str
    addresses: tuple[str, ...]
    answers: bool
    problem: str = ""


class EventStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Something that has happened: `number` grows from event to event, `unix_s` is when, `event` is its name in
    docs/events.md, `routine` what the numbers show anyway."""

    number: int
    unix_s: float
    level: str
    event: str
    says: str
    routine: bool = False


class SwarmStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run. What only the client knows is null when there is none, or it does not answer.

    `age_s` is how old all of it is. `left_s` estimates how long the run still takes. `losses` go from the first step
    that the client has seen to the last, each is the mean of equally many; `eval_losses` are those of evaluations.
    """

    schema: int = SCHEMA_VERSION
    experiment_prefix: str
    run: str
    state: str
    round: int | None = None
    rounds: int | None = None
    steps: int | None = None
    samples: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    samples_per_s: float | None = None
    last_step_s: float | None = None
    paused: bool | None = None
    client: ClientStatus | None = None
    trainers: tuple[int, ...] | None = None
    stages: tuple[StageStatus, ...]
    waiting_servers: tuple[ServerStatus, ...] = ()
    mirrors: tuple[MirrorStatus, ...] = ()
    age_s: float = 0.0
    left_s: float | None = None
    losses: tuple[float, ...] = ()
    eval_losses: tuple[float, ...] = ()
    events: tuple[EventStatus, ...] = ()


def swarm_status(prefix: str, view: SwarmView, answer: RunStatus | None, problem: str) -> SwarmStatus:
    """Put together what the registry and the client say.

    Args:
        prefix: the user's name of the experiment.
        view: from the registry; must have a run.
        answer: None if there is no client, or if it does not answer.
        problem: why the client does not answer.

    Raises:
        ValueError: the view has no run.
    """
    run = view.run
    if run is None:
        raise ValueError("the registry announces no run")
    client = view.clients[0] if view.clients else None
    undialled = {} if client is None else dict(client.undialled)
    known = {} if answer is None else msgspec.structs.asdict(answer)
    numbers = {each.peer: msgspec.structs.asdict(each) for each in known.pop("servers", ())}
    for name in ("num_stages", "peers"):  # they are in the view
        known.pop(name, None)
    known["events"] = tuple(_event(each) for each in known.get("events", ()))
    known["state"] = _state(view, client, answer)
    servers: dict[int, list[ServerStatus]] = {}
    for replica in view.replicas:
        servers.setdefault(replica.stage, []).append(_server(replica, view, undialled, numbers))
    stages = tuple(StageStatus(stage=stage, replicas=tuple(servers.get(stage, ()))) for stage in range(run.num_stages))
    return SwarmStatus(
        experiment_prefix=prefix,
        run=run.run_id,
        client=None if client is None else _client(client, view.name_of(client.peer), answer, problem),
        stages=stages,
        waiting_servers=tuple(_server(each, view, undialled, numbers) for each in view.candidates),
        mirrors=tuple(
            MirrorStatus(peer=each.peer, name=view.name_of(each.peer), host=_host(each.hop), held_round=each.held_round)
            for each in view.mirrors
        ),
        **known,
    )


def lines_of(status: SwarmStatus) -> Iterator[str]:
    """Yield the same for people."""
    yield f"run {status.run} ({status.experiment_prefix}): {status.state}"
    if status.round is not None:
        numbers = [f"round {status.round}/{status.rounds}", f"step {status.steps:,}"]
        numbers += [] if status.loss is None else [f"loss {status.loss:.3f}"]
        numbers += [] if status.eval_loss is None else [f"eval loss {status.eval_loss:.3f}"]
        numbers += [f"samples/s {status.samples_per_s:,.1f}"]
        numbers += [] if status.last_step_s is None else [f"last step {status.last_step_s:.0f} s ago"]
        yield "  ".join(numbers)
    for stage in status.stages:
        title = f"stage {stage.stage}  "
        first, *others = [_told(server) for server in stage.replicas] or ["no server"]
        yield title + first
        yield from (" " * len(title) + other for other in others)
    for server in status.waiting_servers:
        yield f"without a stage  {_told(server)}"
    for mirror in status.mirrors:
        holds = f"holds round {mirror.held_round}" if mirror.held_round > NO_BASE else "does not hold all stages yet"
        yield f"mirror  {mirror.name} ({mirror.host}) {holds}"
    if status.trainers is not None:
        slots = ", ".join(map(str, status.trainers))
        yield f"trainers  {slots or 'none'}"
    if status.client is not None:
        answers = "" if status.client.answers else f", does not answer: {status.client.problem}"
        addresses = ", ".join(status.client.addresses)
        where = f" at {addresses}" if addresses else ", which other hosts cannot reach"
        yield f"client  {status.client.name}{where}{answers}"
    happened = [event for event in status.events if not event.routine][-_LAST_EVENTS:]
    for number, event in enumerate(happened):
        title = " " * len(_EVENTS_TITLE) if number else _EVENTS_TITLE
        yield f"{title}{utc_time_of_day(event.unix_s)}  {event.says}"


def _event(event: ToldEvent) -> EventStatus:
    return EventStatus(unix_s=event.number / 1e6, **msgspec.structs.asdict(event))


def _told(server: ServerStatus) -> str:
    reason = f" ({server.problem})" if server.problem else ""
    return "  ".join((f"{server.name} ({server.host}) {server.state}{reason}", *_numbers(server)))


def _numbers(server: ServerStatus) -> Iterator[str]:
    if server.age_s is not None and server.age_s >= FRESH_S:
        yield f"{server.age_s:.0f} s ago:"
    if server.steps is not None:
        yield f"{server.steps:,} steps"
    if server.samples_per_s is not None:
        yield f"{server.samples_per_s:,.1f} samples/s"
    if server.busy is not None:
        yield f"busy {server.busy:.0%}"
    if server.step_s is not None:
        yield f"{server.step_s:.3g} s a step"
    for name, size_bytes in (
        ("sent", server.sent_bytes),
        ("received", server.received_bytes),
        ("memory", server.memory_bytes),
    ):
        if size_bytes is not None:
            yield f"{name} {size_bytes / 2**20:,.0f} MiB"


def _client(client: ClientPeer, name: str, answer: RunStatus | None, problem: str) -> ClientStatus:
    return ClientStatus(
        peer=client.peer,
        name=name,
        addresses=network_places(client.hop),
        answers=answer is not None,
        problem=problem,
    )


def _server(
    server: Candidate, view: SwarmView, undialled: dict[PeerId, str], numbers: dict[str, dict[str, Any]]
) -> ServerStatus:
    problem = undialled.get(server.peer, "")
    measured = numbers.get(server.peer, {"peer": server.peer})
    return ServerStatus(
        name=view.name_of(server.peer),
        host=_host(server.hop),
        state="undialled" if problem else _doing(server),
        held_round=server.base_round if isinstance(server, Replica) else NO_BASE,
        problem=problem,
        **measured,
    )


def _doing(server: Candidate) -> str:
    if not isinstance(server, Replica):
        return "waiting for a stage"
    return "serving" if server.serving else "joining"


def _host(hop: Hop) -> str:
    return network_host(hop) or "the client's host"


def _state(view: SwarmView, client: ClientPeer | None, answer: RunStatus | None) -> str:
    run = view.run
    if answer is not None:
        return answer.state
    if run is not None and run.ended:
        return "has ended"
    servers = _holding(view.replicas)
    return f"the client does not answer; {servers}" if client is not None else f"no client; {servers}"


def _holding(replicas: Sequence[Replica]) -> str:
    """Return who still holds what: "4 servers hold round 6"."""
    counts = Counter(replica.base_round for replica in replicas if replica.base_round > NO_BASE)
    told = [
        f"{number} server{'s'[: number != 1]} hold{'s'[: number == 1]} round {held}"
        for held, number in sorted(counts.items(), reverse=True)
    ]
    return ", ".join(told) or "no server holds anything"
