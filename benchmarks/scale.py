#!/usr/bin/env python3
"""What a round costs a client that has many replicas: bytes, seconds on a core, and how long its loop stands still.

    python benchmarks/scale.py                              1,000 replicas in 8 stages, 3 rounds of 50 steps
    python benchmarks/scale.py --replicas 400 --rounds 2 --json scale.json

The machines that ship, `RoundCoordinatorMachine` and a `RoundMemberMachine` for each replica, with real keys, play
rounds in one process, without a network: what one posts the other is given. Each slot trains its steps over its home
path, each replica has measured links to others of its stage. What is counted is the client's: the bytes of each message
as they are on the wire, without the 24 of a frame's header; seconds on a core to decode what it takes in, to decide,
and to encode what it posts. A *turn* is all of that for one message, or for one order of the client: nothing else runs
on its loop meanwhile. Trainers are on the client's host as a rule, so what `StartRound` says to all of them is counted
beside the rest.

Then two choices that grow with a stage: the order of a ring, and a trainer's path.

Exit code: 0 if in the last round the client posts at most 300 bytes a replica and 50 kB a stage and computes for at
most 1 s, no turn takes more than 50 ms, nor the order of 250 members, and a path is chosen in 0.2 ms, at home or with
one of home lost; else 1, with a line for each limit that is not kept.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from shoal.averaging.signing import Signer, unsealer
from shoal.identity import Identity, swarm_authority
from shoal.ids import PeerId, StageIndex, StepKey
from shoal.swarm.records import Tip
from shoal.swarm.ring_order import ring_order
from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_effects import (
    CloseSteps,
    CoordinatorEffect,
    Journal,
    MemberEffect,
    RecordCommitted,
    RoundReady,
    RunRing,
    Send,
    Swap,
)
from shoal.swarm.round_member import RoundMemberMachine
from shoal.swarm.round_orders import StepsClosed
from shoal.swarm.round_settings import CloseRequest, RoundSettings
from shoal.swarm.routing import form_pipelines, replicas_for
from shoal.swarm.step_path import Avoidance, choose_path
from shoal.swarm.view import Replica, SwarmView
from shoal.wire.frame import HEADER, Body, encode_frame
from shoal.wire.messages import Message
from shoal.wire.messages.base import Hop, SampleRange, StepRange
from shoal.wire.messages.control import StartRound
from shoal.wire.messages.round import LinkReport, RoundMessage, StageHashes
from shoal.wire.messages.step import StepEntry

BYTES_A_REPLICA, BYTES_A_STAGE = 300, 50_000
COMPUTES_S, TURN_S, PATH_S = 1.0, 0.05, 0.2e-3
RING_MEMBERS, RING_LINKS = 250, (2, 20)
_PATH_STAGES, _PATH_REPLICAS = 8, 125
_SAMPLES_A_STEP = 16
_RUN = "scale-20260101-000000-0000"


@dataclass
class Costs:
    """What one round has cost the client.

    Attributes:
        out, taken: bytes by the kind of message.
        passed: those that members have told each other.
        decoding_s, deciding_s, encoding_s: on a core.
        turns_s: the longest turn by what it was for.
    """

    out: Counter[str] = field(default_factory=Counter[str])
    taken: Counter[str] = field(default_factory=Counter[str])
    passed: Counter[str] = field(default_factory=Counter[str])
    decoding_s: float = 0.0
    deciding_s: float = 0.0
    encoding_s: float = 0.0
    turns_s: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def computing_s(self) -> float:
        """All of it."""
        return self.decoding_s + self.deciding_s + self.encoding_s

    @property
    def longest(self) -> tuple[str, float]:
        """The longest turn of all, and what it was for."""
        return max(self.turns_s.items(), key=lambda item: item[1])


class Swarm:
    """A client and its replicas, whose home paths are `homes`."""

    def __init__(self, num_replicas: int, num_stages: int, num_steps: int, num_links: int) -> None:
        self._rng = rng = random.Random(0)
        self.num_stages, self.num_steps = num_stages, num_steps
        self.peers = [_identity(rng).peer_id for _ in range(num_replicas)]
        self.homes = [self.peers[at : at + num_stages] for at in range(0, num_replicas, num_stages)]
        self.slot_and_stage = {peer: divmod(number, num_stages) for number, peer in enumerate(self.peers)}
        self.hops = {peer: _hop(peer, number) for number, peer in enumerate(self.peers)}
        self.links = {peer: self._links_of(stage, num_links) for peer, (_, stage) in self.slot_and_stage.items()}
        authority, client = swarm_authority(rng.randbytes(32)), _identity(rng)
        signer = Signer(client, authority, _RUN)
        settings = RoundSettings(_RUN, num_stages, "0" * 64)
        self.machine = RoundCoordinatorMachine(client.peer_id, 1, settings, signer.seal, signer.unseal)
        unseal = unsealer(_RUN, authority.peer_id)  # what replicas check takes the client no time
        start = Tip(0, settings.genesis, None)
        self.members = {
            peer: RoundMemberMachine(self.hops[peer], stage, start, _hashes(0, stage), unseal)
            for peer, (_, stage) in self.slot_and_stage.items()
        }
        self.client = client.peer_id
        self.costs = Costs()
        self.committed = 0
        self.ready: RoundReady | None = None
        self._now_s = 0.0
        self._to_client: deque[tuple[PeerId, RoundMessage]] = deque()
        self._to_members: deque[tuple[PeerId, PeerId, RoundMessage]] = deque()
        self._rings: dict[tuple[int, int], list[tuple[PeerId, RunRing]]] = {}
        self._decode = msgspec.msgpack.Decoder(Body).decode

    def begin(self) -> None:
        """The client takes the lead."""
        self._turn("replicas", lambda: self.machine.replicas(self.hops, self._now_s))
        self._turn("lead", lambda: self.machine.lead(self._now_s))
        self._run()

    def round(self) -> Costs:
        """Play a round; returns what it has cost."""
        self.costs, self.ready, number = Costs(), None, self.machine.tip.round + 1
        gc.collect()
        gc.freeze()  # what the replicas have is not the client's
        slots = {peer: slot for peer, (slot, _) in self.slot_and_stage.items()}
        request = CloseRequest(number, slots, dict.fromkeys(range(len(self.homes)), 1), num_samples=1 << 30)
        self._turn("close", lambda: self.machine.close(request, self._now_s))
        self._run()
        if self.committed != number or self.ready is None:
            raise RuntimeError(f"round {number} has not ended: {self.machine.phase}")
        return self.costs

    def start_rounds(self) -> int:
        """Return the bytes with which all trainers are told of a round."""
        replicas = [Replica(self.hops[p], 0.0, stage=StageIndex(s)) for p, (_, s) in self.slot_and_stage.items()]
        view = SwarmView(tuple(sorted(replicas, key=lambda replica: replica.stage)))
        pipelines, steps, num_bytes = form_pipelines(view, self.num_stages), StepRange(0, self.num_steps), 0
        for pipeline in pipelines:
            named = replicas_for(pipeline.slot, view, pipelines, self.num_stages)
            order = StartRound(1, pipeline.slot, len(pipelines), steps, pipeline.path, named, None, "0" * 64, bytes(64))
            num_bytes += _size(order)
        return num_bytes

    # -- the client

    def _run(self) -> None:
        """Until nobody has anything more to say."""
        while self._to_client or self._to_members:
            while self._to_members:
                sender, peer, order = self._to_members.popleft()
                self._do(peer, self.members[peer].receive(sender, order))
            if self._to_client:
                self._take(*self._to_client.popleft())

    def _take(self, peer: PeerId, message: RoundMessage) -> None:
        kind, body = type(message).__name__, bytes(_encoded(message))
        self.costs.taken[kind] += len(body)
        begun_s = time.thread_time()
        self._decode(body)
        decoding_s = time.thread_time() - begun_s
        self.costs.decoding_s += decoding_s
        self._turn(kind, lambda: self.machine.receive(peer, message, self._now_s), decoding_s)

    def _turn(self, name: str, call: Callable[[], list[CoordinatorEffect]], took_s: float = 0.0) -> None:
        self._now_s += 1e-4
        begun_s = time.thread_time()
        effects = call()
        decided_s = time.thread_time()
        sizes = [(e, len(_encoded(e.message))) for e in effects if isinstance(e, Send)]
        encoded_s = time.thread_time()
        self.costs.deciding_s += decided_s - begun_s
        self.costs.encoding_s += encoded_s - decided_s
        turns_s, took_s = self.costs.turns_s, took_s + encoded_s - begun_s
        turns_s[name] = max(took_s, turns_s.get(name, 0.0))
        for send, num_bytes in sizes:
            self.costs.out[type(send.message).__name__] += num_bytes
            self._to_members.append((self.client, send.peer, send.message))  # type: ignore[arg-type]
        for effect in effects:
            match effect:
                case Journal():
                    self._turn("journaled", lambda digest=effect.digest: self.machine.journaled(digest))
                case RecordCommitted(record):
                    self.committed = record.round
                case RoundReady():
                    self.ready = effect
                case _:
                    pass

    # -- a replica

    def _do(self, peer: PeerId, effects: Iterable[MemberEffect]) -> None:
        member = self.members[peer]
        for effect in effects:
            match effect:
                case Send(receiver, message) if receiver != self.client:
                    self.costs.passed[type(message).__name__] += len(_encoded(message))
                    self._to_members.append((peer, receiver, message))  # type: ignore[arg-type]
                case Send(_, message):
                    self._to_client.append((peer, message))  # type: ignore[arg-type]
                case CloseSteps(number):
                    self._do(peer, member.steps_closed(self._closed(peer, number)))
                case RunRing(quorum):
                    ring = self._rings.setdefault((quorum.round, quorum.stage), [])
                    ring.append((peer, effect))
                    if len(ring) == len(self.homes):
                        for each, order in self._rings.pop((quorum.round, quorum.stage)):
                            hashes = _hashes(quorum.round, quorum.stage)
                            self._do(each, self.members[each].ring_done(order.quorum, hashes))
                case Swap(_, hashes):
                    self._do(peer, member.swapped(hashes, {"pseudo_gradients": 1 << 28, "activations": 1 << 30}))
                case _:
                    pass

    def _closed(self, peer: PeerId, number: int) -> StepsClosed:
        slot, _ = self.slot_and_stage[peer]
        log: list[StepEntry] = []
        path, num_slots, first = tuple(self.homes[slot]), len(self.homes), (number - 1) * self.num_steps
        for step in range(first, first + self.num_steps):
            at = _SAMPLES_A_STEP * (step * num_slots + slot)
            samples = (SampleRange(0, at, at + _SAMPLES_A_STEP),)
            targets = 1500 + hash((slot, step)) % 549
            key = StepKey(slot, 1, step, 0)
            log.append(StepEntry(key, path, step - first, samples, _SAMPLES_A_STEP, targets, 0.71, 3e-4, False))
        norm = 1.0 + self._rng.random()
        return StepsClosed(_SAMPLES_A_STEP * self.num_steps, (), tuple(log), self.links[peer], norm)

    def _links_of(self, stage: int, num_links: int) -> tuple[LinkReport, ...]:
        others = [home[stage] for home in self._rng.sample(self.homes, min(num_links, len(self.homes)))]
        rng = self._rng
        return tuple(LinkReport(other, rng.uniform(5.0, 200.0), rng.uniform(5.0, 500.0)) for other in others)


def ring_order_s(num_members: int, num_links: int) -> float:
    """Return how long it takes to order the ring of a stage on as many hosts, each with so many measured links."""
    rng = random.Random(0)
    peers = [_identity(rng).peer_id for _ in range(num_members)]
    links = {
        peer: [
            LinkReport(each, rng.uniform(5.0, 200.0), rng.uniform(5.0, 500.0)) for each in rng.sample(peers, num_links)
        ]
        for peer in peers
    }
    return _fastest_s(lambda: ring_order(peers, links), 3)


def choose_path_s(*, trouble: str, closes: bool) -> float:
    """Return how long it takes to choose a path: the home one, or another one since one of its replicas is lost, or two
    of them do not reach each other."""
    rng = random.Random(0)
    candidates = [[_identity(rng).peer_id for _ in range(_PATH_REPLICAS)] for _ in range(_PATH_STAGES)]
    avoidance = Avoidance()
    if trouble == "one of home lost":
        avoidance.lose(candidates[3][0], 10.0)
    elif trouble == "two of home apart":
        avoidance.avoid_pair(candidates[3][0], candidates[4][0], 10.0)
    return _fastest_s(lambda: choose_path(candidates, avoidance, 0.0, closes=closes), 5)


def _fastest_s(call: Callable[[], object], times: int) -> float:
    took_s: list[float] = []
    for _ in range(times):
        begun_s = time.thread_time()
        call()
        took_s.append(time.thread_time() - begun_s)
    return min(took_s)


def _identity(rng: random.Random) -> Identity:
    return Identity(rng.randbytes(32))


def _hop(peer: PeerId, number: int) -> Hop:
    """Where a server of a home is: its Unix socket, and its host behind a router."""
    socket = f"unix:{number:032x}:/home/user/.cache/shoal/run/{number % 8}.sock"
    return Hop(peer, (socket, f"tcp:10.{number // 65536}.{number // 256 % 256}.{number % 256}:31337"))


def _hashes(number: int, stage: int) -> StageHashes:
    names = (f"{kind} {number} {stage}" for kind in ("parameters", "momentum", "buffers"))
    return StageHashes(*(hashlib.sha256(name.encode()).hexdigest() for name in names))


def _encoded(message: Message) -> memoryview:
    return memoryview(encode_frame(message).head)[HEADER.size :]


def _size(message: Message) -> int:
    return len(_encoded(message))


def _missed(costs: Costs, num_replicas: int, num_stages: int, seconds: dict[str, float]) -> list[str]:
    """Return a line for each limit that is not kept."""
    most_bytes = BYTES_A_REPLICA * num_replicas + BYTES_A_STAGE * num_stages
    name, longest_s = costs.longest
    said = [
        (costs.out.total(), most_bytes, f"{costs.out.total():,} bytes are posted in a round, at most {most_bytes:,}"),
        (costs.computing_s, COMPUTES_S, f"a round takes {costs.computing_s:.2f} s on a core, at most {COMPUTES_S} s"),
        (longest_s, TURN_S, f"a turn of {name} takes {1e3 * longest_s:.0f} ms, at most {1e3 * TURN_S:.0f} ms"),
    ]
    for name, took_s in seconds.items():
        most_s = TURN_S if name.startswith("ring") else PATH_S
        said.append((took_s, most_s, f"{name}: {1e3 * took_s:.2f} ms, at most {1e3 * most_s:.2f} ms"))
    return [line for value, most, line in said if value > most]


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1000, help="a multiple of the stages")
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--steps", type=int, default=50, help="of each slot in a round")
    parser.add_argument("--links", type=int, default=4, help="that each replica has measured; 0: none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    if options.replicas % options.stages or min(options.replicas, options.stages, options.rounds) < 1:
        parser.error("the replicas have to be a multiple of the stages, and there is at least one round")
    swarm = Swarm(options.replicas, options.stages, options.steps, options.links)
    swarm.begin()
    rounds = [swarm.round() for _ in range(options.rounds)]
    table = Table("client", *(f"round {number}" for number in range(1, len(rounds) + 1)), title="bytes, seconds")
    for kind in sorted({kind for costs in rounds for kind in costs.out}):
        table.add_row(f"posts {kind}", *(f"{costs.out[kind]:,}" for costs in rounds))
    table.add_row("posts in all", *(f"{costs.out.total():,}" for costs in rounds), end_section=True)
    for kind in sorted({kind for costs in rounds for kind in costs.taken}):
        table.add_row(f"takes {kind}", *(f"{costs.taken[kind]:,}" for costs in rounds))
    table.add_row("takes in all", *(f"{costs.taken.total():,}" for costs in rounds), end_section=True)
    for kind in sorted({kind for costs in rounds for kind in costs.passed}):
        table.add_row(f"members pass on {kind}", *(f"{costs.passed[kind]:,}" for costs in rounds), end_section=True)
    for what in ("decoding", "deciding", "encoding", "computing"):
        table.add_row(f"{what}, s", *(f"{getattr(costs, f'{what}_s'):.3f}" for costs in rounds))
    for kind in sorted({kind for costs in rounds for kind in costs.turns_s}):
        table.add_row(f"longest turn, {kind}, ms", *(f"{1e3 * costs.turns_s.get(kind, 0.0):.1f}" for costs in rounds))
    console = Console()
    console.print(table)
    started = swarm.start_rounds()
    console.print(f"StartRound, to all {len(swarm.homes)} trainers: {started:,} bytes")
    seconds = {f"ring of {RING_MEMBERS}, {links} links": ring_order_s(RING_MEMBERS, links) for links in RING_LINKS}
    for trouble in ("home whole", "one of home lost"):
        seconds[f"path, {trouble}"] = choose_path_s(trouble=trouble, closes=False)
        seconds[f"path, {trouble}, wrapped"] = choose_path_s(trouble=trouble, closes=True)
    apart = "two of home apart"
    others = {f"path, {apart}": choose_path_s(trouble=apart, closes=False)}
    others[f"path, {apart}, wrapped"] = choose_path_s(trouble=apart, closes=True)
    for name, took_s in (*seconds.items(), *others.items()):
        console.print(f"{name}: {1e3 * took_s:.3f} ms")
    missed = _missed(rounds[-1], options.replicas, options.stages, seconds)
    for line in missed:
        console.print(f"missed: {line}")
    if options.json is not None:
        figures = {
            "rounds": [msgspec.to_builtins(costs) for costs in rounds],
            "start_rounds": started,
            "seconds": seconds | others,
            "missed": missed,
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
