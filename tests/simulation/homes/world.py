"""Rounds of a swarm whose machines come, go, hang and differ: who trains together, how long all wait, what counts.

What is simulated are the decisions that a client makes around a round: `swarm.routing` forms the pipelines,
`swarm.round_boundary` says how long their trainers are waited for, `swarm.ring_order` orders those who average, and
`swarm.contribution_guard` says what each counts. The round itself is the matter of the world `round`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.simulation import liveness
from tests.simulation.kernel import Kernel
from tests.simulation.safety import Broken

from shoal.ids import NO_BALLOT, PeerId, StageIndex, StepKey
from shoal.swarm.contribution_guard import scales_of
from shoal.swarm.ring_order import PART_BYTES, Links, ring_order
from shoal.swarm.round_boundary import boundary_s
from shoal.swarm.routing import Pipeline, form_pipelines, replicas_for
from shoal.swarm.view import Replica, SwarmView
from shoal.wire.messages.base import Hop
from shoal.wire.messages.round import Join, LinkReport
from shoal.wire.messages.step import StepEntry, StepsTrained

FIRST_DEADLINE_S = 60.0
HANGS_S = 1000.0
NUM_STEPS = 4
NUM_ROUNDS = 25
MAX_RATIO = 10.0
SPEEDS = (0.7, 1.0, 1.0, 1.3)
SETTLED_ROUNDS = 5
"""After so many rounds of usual length the deadline is that of these, whatever was before the last fault."""
DEVIATIONS = 8.0
"""By so many times the range of usual rounds the deadline may be above them, whoever hangs: a limit of virtual time."""


@dataclass(frozen=True)
class Decisions:
    """What a client decides by; a mutant has another one of them."""

    form: Callable[..., tuple[Pipeline, ...]] = form_pipelines
    replicas: Callable[..., tuple[tuple[Hop, ...], ...]] = replicas_for
    boundary_s: Callable[[Sequence[float], float], float] = boundary_s
    order: Callable[[Sequence[PeerId], Links], tuple[PeerId, ...]] = ring_order
    scales: Callable[[Mapping[PeerId, Join], float | None], dict[PeerId, float]] = scales_of


@dataclass
class Machine:
    """A server's machine: how fast it is, and where it stands."""

    host: int
    step_s: float
    replica: Replica
    measures: bool = field(default=True)


class World:
    """One seed: two or three stages with up to five replicas each, on a few hosts."""

    def __init__(self, seed: int, decisions: Decisions | None = None) -> None:
        self.network = Kernel(seed)
        self.decide = decisions or Decisions()
        rng = self.network.rng
        self.num_stages = rng.choice((2, 3))
        self.num_hosts = rng.randint(2, 6)
        self.is_even = rng.random() < 0.5
        self.machines: dict[PeerId, Machine] = {}
        self.pipelines: tuple[Pipeline, ...] = ()
        self.durations_s: list[float] = []
        self.round = 1
        self.num_hung = 0
        between = [(a, b) for a in range(self.num_hosts) for b in range(a)]
        self.link_s = {frozenset(pair): rng.choice((0.05, 0.1, 0.4, 2.0)) for pair in between}
        for stage in range(self.num_stages):
            for _ in range(rng.randint(2, 5)):
                self.arrives(stage)
        self.network.at(0.0, self.begins)

    # -- machines

    def arrives(self, stage: int) -> None:
        rng = self.network.rng
        peer = PeerId(f"S{len(self.machines)}-{rng.randrange(10**6)}")
        speed = 1.0 if self.is_even else rng.choice(SPEEDS)
        host = rng.randrange(self.num_hosts)
        hop = Hop(peer, (f"tcp:host{host}:1",))
        replica = Replica(hop=hop, join_unix_s=self.network.now_s, stage=StageIndex(stage), base_round=self.round - 1)
        self.machines[peer] = Machine(host, speed, replica, rng.random() < 0.8)

    def churn(self) -> None:
        """Between two rounds somebody may come, and somebody may go, but nobody who is the last of a stage."""
        rng = self.network.rng
        if rng.random() < 0.3:
            self.arrives(rng.randrange(self.num_stages))
        if rng.random() < 0.3:
            peer = rng.choice(list(self.machines))
            stage = self.machines[peer].replica.stage
            if sum(machine.replica.stage == stage for machine in self.machines.values()) > 1:
                del self.machines[peer]

    @property
    def view(self) -> SwarmView:
        """As it is announced: one that still loads holds an older record."""
        return SwarmView(tuple(machine.replica for machine in self.machines.values()))

    # -- a round

    def begins(self) -> None:
        rng = self.network.rng
        before, view = self.pipelines, self.view
        self.pipelines = self.decide.form(view, self.num_stages, before)
        self.check_pipelines(before, view)
        hangs = rng.random() < 0.15
        taken_s = [self._steps_s(pipeline) for pipeline in self.pipelines]
        usual_s = max(taken_s)
        if hangs:
            self.num_hung += 1
            taken_s[rng.randrange(len(taken_s))] += HANGS_S
        deadline_s = self.decide.boundary_s(self.durations_s, FIRST_DEADLINE_S)
        took_s = min(max(taken_s), deadline_s)
        if not hangs and self.is_even and deadline_s < usual_s:
            raise Broken(f"round {self.round} ends after {deadline_s:.2f} s, a usual one takes {usual_s:.2f} s")
        if len(self.durations_s) >= SETTLED_ROUNDS and self.num_hung < len(self.durations_s) / 3:
            fastest, slowest = (1.0, 1.0) if self.is_even else (min(SPEEDS), max(SPEEDS))
            least_s, most_s = 0.95 * NUM_STEPS * fastest, 1.05 * NUM_STEPS * slowest
            liveness.within(took_s, most_s + DEVIATIONS * (most_s - least_s), f"round {self.round}")
        self.network.after(took_s, self.ends, took_s)

    def ends(self, took_s: float) -> None:
        self.durations_s.append(took_s)
        for stage in range(self.num_stages):
            self.average([p for p, machine in self.machines.items() if machine.replica.stage == stage])
        self.round += 1
        for machine in self.machines.values():
            machine.replica = replace(machine.replica, base_round=self.round - 1)
        self.churn()
        if self.round <= NUM_ROUNDS:
            self.begins()

    def _steps_s(self, pipeline: Pipeline) -> float:
        """How long the steps of a round take over a path: as long as its slowest machine needs."""
        slowest_s = max(self.machines[peer].step_s for peer in pipeline.peers)
        return NUM_STEPS * slowest_s * self.network.rng.uniform(0.95, 1.05)

    def average(self, members: Sequence[PeerId]) -> None:
        """The replicas of a stage join with what they have measured, and with a pseudo-gradient each."""
        rng = self.network.rng
        links = {peer: self._links(peer, members) for peer in members if self.machines[peer].measures}
        self.check_ring(members, links, self.decide.order(members, links))
        num_steps = {peer: rng.randint(0, NUM_STEPS) for peer in members}
        norms = {peer: math.sqrt(num_steps[peer]) * rng.uniform(0.5, 2.0) for peer in members}
        trained = [peer for peer in members if num_steps[peer]]
        wrong = set(rng.sample(trained, rng.randint(0, (len(trained) - 1) // 2))) if trained else set[PeerId]()
        for peer in wrong:
            norms[peer] *= rng.choice((math.inf, math.nan, 200.0, 1e9))
        joins = {peer: self._join(peer, num_steps[peer], norms[peer]) for peer in members}
        self.check_scales(joins, wrong, self.decide.scales(joins, MAX_RATIO))

    def _links(self, peer: PeerId, members: Sequence[PeerId]) -> list[LinkReport]:
        here = self.machines[peer].host
        found: list[LinkReport] = []
        for other in members:
            there = self.machines[other].host
            if other != peer:
                cost_s = 0.0 if here == there else self.link_s[frozenset((here, there))]
                found.append(LinkReport(other, 0.0, PART_BYTES * 8e-6 / max(cost_s, 1e-6), here == there))
        return found

    def _join(self, peer: PeerId, num_steps: int, norm: float) -> Join:
        # Some of the steps are of the round before, since which the fragment has waited.
        num_earlier = random.Random(f"{peer} {self.round}").randint(0, num_steps)
        numbers = range(num_earlier, num_steps)
        log = tuple(StepEntry(StepKey(0, 1, n, 0), (), 0, (), 1, 1, 1.0, 0.1, False) for n in numbers)
        stage, earlier = self.machines[peer].replica.stage, (StepsTrained(num_earlier, num_earlier),)
        return Join(NO_BALLOT, self.round, stage, len(log), (), log, (), (), norm, earlier=earlier)

    # -- promises

    def check_pipelines(self, before: Sequence[Pipeline], view: SwarmView) -> None:
        """They are complete and disjoint, as many as there can be, and no whole one is taken apart."""
        peers = [peer for pipeline in self.pipelines for peer in pipeline.peers]
        if len(peers) != len(set(peers)):
            raise Broken(f"pipelines share a replica: {peers}")
        stages = {replica.peer: replica.stage for replica in view.replicas}
        for pipeline in self.pipelines:
            if [stages.get(peer) for peer in pipeline.peers] != list(range(self.num_stages)):
                raise Broken(f"pipeline {pipeline} is not complete")
        most = min(len(view.by_stage(stage)) for stage in range(self.num_stages))
        if len(self.pipelines) != most:
            raise Broken(f"{len(self.pipelines)} pipelines of {most} that there could be")
        whole = [pipeline for pipeline in before if set(pipeline.peers) <= stages.keys()]
        taken_apart = [pipeline for pipeline in whole[:most] if pipeline not in self.pipelines]
        if len(whole) <= most and taken_apart:
            raise Broken(f"{taken_apart[0]} is taken apart though all of it is there")
        for pipeline in self.pipelines:
            choices = self.decide.replicas(pipeline.slot, view, self.pipelines, self.num_stages)
            for stage, (own, found) in enumerate(zip(pipeline.peers, choices, strict=True)):
                if {replica.peer for replica in found} != {replica.peer for replica in view.by_stage(stage)}:
                    raise Broken(f"slot {pipeline.slot} does not know all replicas of stage {stage}")
                if found[0].peer != own:
                    raise Broken(f"slot {pipeline.slot} tries {found[0].peer} before its own {own}")

    def check_ring(self, members: Sequence[PeerId], links: Links, order: Sequence[PeerId]) -> None:
        """It has all members once; those of a host are neighbours; and it is no slower than the order of the slots."""
        if sorted(order) != sorted(members):
            raise Broken(f"the ring {order} has other members than {members}")
        if len(links) < len(members):
            return
        hosts = [self.machines[peer].host for peer in order]
        changes = sum(one != other for one, other in zip(hosts, hosts[1:] + hosts[:1], strict=True))
        if changes > max(len(set(hosts)), 2 if len(set(hosts)) > 1 else 0):
            raise Broken(f"members of one host are no neighbours: {hosts}")
        grouped = sorted(members, key=lambda peer: [self.machines[p].host for p in members].index(self._host(peer)))
        if self._slowest_s(order) > self._slowest_s(grouped) + 1e-9:
            raise Broken(f"the ring takes {self._slowest_s(order)} s a part, {self._slowest_s(grouped)} s would do")

    def _host(self, peer: PeerId) -> int:
        return self.machines[peer].host

    def _slowest_s(self, order: Sequence[PeerId]) -> float:
        pairs = [(self._host(a), self._host(b)) for a, b in zip(order, [*order[1:], order[0]], strict=True)]
        return max((self.link_s[frozenset(pair)] for pair in pairs if pair[0] != pair[1]), default=0.0)

    def check_scales(self, joins: Mapping[PeerId, Join], wrong: set[PeerId], scales: Mapping[PeerId, float]) -> None:
        """What the sound ones have made counts as it is; what is not finite counts nothing, what is too long less."""
        if changed := [peer for peer in scales if peer not in wrong]:
            raise Broken(f"{changed[0]} is sound and counts {scales[changed[0]]}")
        steps = {peer: len(join.log) + sum(each.num_steps for each in join.earlier) for peer, join in joins.items()}
        lengths = {peer: joins[peer].gradient_norm / math.sqrt(number) for peer, number in steps.items() if number}
        longest = max((length for peer, length in lengths.items() if peer not in wrong), default=0.0)
        num_finite = sum(math.isfinite(length) for length in lengths.values())
        for peer in wrong:
            length, scale = lengths[peer], scales.get(peer, 1.0)
            if not math.isfinite(length) and scale != 0:
                raise Broken(f"{peer} is not finite and counts {scale}")
            if math.isfinite(length) and num_finite >= 3 and length * scale > MAX_RATIO * longest * (1 + 1e-9):
                raise Broken(f"{peer} is {length * scale / longest:.0f} times as long as any sound one")

    def run(self) -> None:
        """Run to the end.

        Raises:
            Broken: One of these promises.
        """
        self.network.run(1e6)
        if self.round <= NUM_ROUNDS:
            raise Broken(f"no progress after round {self.round}")
