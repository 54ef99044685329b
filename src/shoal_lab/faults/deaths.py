"""Every kind of death that a swarm has to survive: who is hit, with what, and when the swarm is whole again.

A *strike* takes one process (or link) away from a swarm that trains. It is over for the trainers when each that it hit
has committed a step that could not have been committed without getting over it, and for the swarm when it is `healed`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from shoal.clock import SystemClock
from shoal_lab.event_log import time_of
from shoal_lab.launched import Launched, until
from shoal_lab.observed import ObservedServer, Step, Swarm, p2pd_of

_CLOCK = SystemClock()
RECOVERY_S = 60.0
"""Far more than any recovery may take: that is measured, not asserted."""


@dataclass
class Strike:
    """One fault.

    Attributes:
        at_s: in seconds of the wall clock.
        victim: as reports name it.
        hit: the slots of the trainers that it hit.
        healed: whether the swarm is as it was before.
        counts: whether a step proves that its trainer has got over the fault.
        undo: ends the fault, if the swarm itself cannot.
        before: the last step of each slot before the fault.
        away: the servers that the fault has taken away.
    """

    at_s: float
    victim: str
    hit: frozenset[int]
    healed: Callable[[], bool]
    counts: Callable[[Step], bool] = lambda _: True
    undo: Callable[[], None] = lambda: None
    before: dict[int, Step] = field(default_factory=dict[int, Step])
    away: Sequence[ObservedServer] = ()

    def next_step(self, swarm: Swarm, slot: int) -> Step | None:
        """Return the first step of a slot that proves that it has got over the fault."""
        return next((step for step in swarm.steps(slot) if step.at_s > self.at_s and self.counts(step)), None)

    def is_over(self, swarm: Swarm) -> bool:
        """Whether each trainer that was hit has got over it."""
        return all(self.next_step(swarm, slot) is not None for slot in self.hit)


@dataclass(frozen=True)
class Kind:
    """One kind of death.

    Attributes:
        limit_s: how long a hit trainer may go without a step, besides `limit_steps` usual steps; None: none may.
        held_s: how long the fault lasts until it is undone from outside.
    """

    strike: Callable[[Swarm, Random], Strike]
    limit_s: float | None
    limit_steps: int = 0
    held_s: float = 0.0


def begin(kind: Kind, swarm: Swarm, random: Random) -> Strike | None:
    """Strike once, and return what was done; None if the victim is not there, since it has not come back yet.

    The caller ends it (`undo`) after the time that it is to last.
    """
    swarm.processes()
    before = {slot: swarm.last_step(slot) for slot in range(swarm.num_slots)}
    try:
        strike = kind.strike(swarm, random)
    except ProcessLookupError:
        return None
    strike.before = before
    return strike


def inflict(kind: Kind, swarm: Swarm, random: Random) -> Strike:
    """Strike once, wait until the swarm has healed, and return what was done.

    Raises:
        RunFailed: it did not heal, or the run has ended.
    """
    strike = until(lambda: begin(kind, swarm, random), RECOVERY_S, "a victim that runs")
    try:
        if kind.held_s:
            held_until_s = strike.at_s + kind.held_s
            until(lambda: _lives(swarm) and _CLOCK.unix_s() > held_until_s, kind.held_s + 10.0, "the end of it")
    finally:
        strike.undo()
    until(lambda: _lives(swarm) and strike.is_over(swarm), RECOVERY_S, f"a step without {strike.victim}")
    until(lambda: _lives(swarm) and strike.healed(), RECOVERY_S, f"{strike.victim} to be back")
    return strike


def _lives(swarm: Swarm) -> bool:
    swarm.client.require_running()
    return True


# ---- servers


def _kill_server(swarm: Swarm, random: Random) -> Strike:
    return take_servers(swarm, [random.choice(swarm.servers)], lambda pid: os.kill(pid, signal.SIGKILL))


def _stop_server(swarm: Swarm, random: Random) -> Strike:
    server = random.choice(swarm.servers)
    pid = server.host.living_pid_of(server.role)
    return take_servers(
        swarm,
        [server],
        lambda pid: os.kill(pid, signal.SIGSTOP),
        lambda: _wake(pid),
    )


def _kill_stage(swarm: Swarm, random: Random) -> Strike:
    """Kill all servers of a stage, so that nobody but a mirror holds its state."""
    stage = random.choice(sorted({server.stage for server in swarm.servers}))
    servers = [server for server in swarm.servers if server.stage == stage]
    pids = [server.host.living_pid_of(server.role) for server in servers]
    at_s = _CLOCK.unix_s()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)

    def healed() -> bool:
        return all(swarm.is_whole(server, at_s) for server in servers)

    return Strike(at_s, f"stage {stage}", _everybody(swarm), healed, swarm.begun_after(at_s))


def take_servers(
    swarm: Swarm,
    servers: Sequence[ObservedServer],
    take: Callable[[int], None],
    give_back: Callable[[], None] | None = None,
) -> Strike:
    """Take servers away; they are back when they have swapped a record, and each trainer has a path of its own."""
    peers = {server.peer for server in servers}
    hit = swarm.users_of(peers)
    at_s = _CLOCK.unix_s()
    take(servers[0].host.living_pid_of(servers[0].role))
    back_s = [at_s]

    def undo() -> None:
        if give_back is not None:
            give_back()
            back_s[0] = _CLOCK.unix_s()

    def healed() -> bool:
        return all(swarm.is_whole(server, back_s[0]) for server in servers)

    def counts(step: Step) -> bool:
        """Whether the step did without them, or came after they had caught up."""
        gone = peers & set(step.path)
        return not gone or all(
            any(time_of(event) < step.at_s for event in server.swapped(back_s[0]))
            for server in servers
            if server.peer in gone
        )

    victim = ", ".join(f"{server.role} (stage {server.stage})" for server in servers)
    return Strike(at_s, victim, hit, healed, counts, undo, away=servers)


# ---- the client's host


def _kill_trainer(swarm: Swarm, random: Random) -> Strike:
    return _take_trainer(swarm, random, signal.SIGKILL)


def _stop_trainer(swarm: Swarm, random: Random) -> Strike:
    """Freeze a trainer; its launcher kills it when its successor is wanted, so nothing has to be undone."""
    return _take_trainer(swarm, random, signal.SIGSTOP)


def _take_trainer(swarm: Swarm, random: Random, number: signal.Signals) -> Strike:
    slot = random.randrange(swarm.num_slots)
    generation = swarm.last_step(slot).generation
    at_s = _signal(swarm.client, f"trainer:{slot}", number)

    def healed() -> bool:
        return swarm.num_records(at_s) >= 1

    return Strike(at_s, f"trainer:{slot}", frozenset({slot}), healed, lambda step: step.generation > generation)


def _kill(role: str) -> Callable[[Swarm, Random], Strike]:
    """Kill a role on which all trainers depend, or may seem to; it is back when two rounds have ended since."""

    def strike(swarm: Swarm, _: Random) -> Strike:
        at_s = _signal(swarm.client, role, signal.SIGKILL)
        return Strike(at_s, role, _everybody(swarm), lambda: swarm.num_records(at_s) >= 2, swarm.begun_after(at_s))

    return strike


def _stop(role: str) -> Callable[[Swarm, Random], Strike]:
    """Freeze a role of the client's host; somebody may have replaced it when it is to wake up."""

    def strike(swarm: Swarm, _: Random) -> Strike:
        pid = swarm.client.living_pid_of(role)
        at_s = _signal(swarm.client, role, signal.SIGSTOP)
        back_s = [at_s]

        def undo() -> None:
            back_s[0] = _CLOCK.unix_s()
            _wake(pid)

        is_whole, counts = lambda: swarm.num_records(back_s[0]) >= 2, swarm.begun_after(at_s)
        return Strike(at_s, role, _everybody(swarm), is_whole, counts, undo)

    return strike


def _kill_fork_server(swarm: Swarm, _: Random) -> Strike:
    pid = swarm.client.fork_server()
    at_s = _CLOCK.unix_s()
    os.kill(pid, signal.SIGKILL)
    is_back, counts = lambda: swarm.num_records(at_s) >= 2, swarm.begun_after(at_s)
    return Strike(at_s, "fork server", _everybody(swarm), is_back, counts)


def _kill_p2pd(swarm: Swarm, _: Random) -> Strike:
    """Kill the libp2p daemon of the client's host: its role starts another one, and nobody else should notice."""
    host = swarm.client
    running = p2pd_of(host)
    if not running:
        raise ProcessLookupError("the client's host has no p2pd")
    at_s = _CLOCK.unix_s()
    os.kill(running[0], signal.SIGKILL)

    def healed() -> bool:
        return bool({*p2pd_of(host)} - {*running}) and swarm.num_records(at_s) >= 2

    return Strike(at_s, "p2pd of the client's host", _everybody(swarm), healed, swarm.begun_after(at_s))


def _wake(pid: int) -> None:
    """Let a frozen process go on, unless it has been replaced or killed since."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _signal(host: Launched, role: str, number: signal.Signals) -> float:
    pid = host.living_pid_of(role)
    at_s = _CLOCK.unix_s()
    os.kill(pid, number)
    return at_s


def _everybody(swarm: Swarm) -> frozenset[int]:
    return frozenset(range(swarm.num_slots))


STOPPED_S = 10.0
NOISE_S = 0.3
"""Nobody waits for these; a machine with fewer cores than processes is not that regular."""

KINDS: dict[str, Kind] = {
    "server": Kind(_kill_server, 0.3, limit_steps=2),
    "server-stopped": Kind(_stop_server, 3.5, limit_steps=2, held_s=STOPPED_S),
    "trainer": Kind(_kill_trainer, 3.0),
    "trainer-stopped": Kind(_stop_trainer, None),
    "data-server": Kind(_kill("data_server:0"), 3.0),
    "data-server-stopped": Kind(_stop("data_server:0"), 5.0, held_s=STOPPED_S),
    "client": Kind(_kill("client:0"), 3.0),
    "client-stopped": Kind(_stop("client:0"), None, held_s=STOPPED_S),
    "monitor": Kind(_kill("monitor:0"), NOISE_S, limit_steps=2),
    "monitor-stopped": Kind(_stop("monitor:0"), NOISE_S, limit_steps=2, held_s=STOPPED_S),
    "mirror": Kind(_kill("mirror:0"), NOISE_S, limit_steps=2),
    "mirror-stopped": Kind(_stop("mirror:0"), NOISE_S, limit_steps=2, held_s=STOPPED_S),
    "fork-server": Kind(_kill_fork_server, None),
    "p2pd": Kind(_kill_p2pd, NOISE_S, limit_steps=2),
}
"""Kinds of death of which a run survives any number; those of a launcher and of a link are elsewhere."""

STAGE = Kind(_kill_stage, 10.0)
"""All servers of a stage: what it has learnt since a record is lost, and without a mirror all of it."""
