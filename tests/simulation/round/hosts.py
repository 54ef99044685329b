"""Processes around the two machines: a replica with a model of its state, a client with a model of its trainers."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.simulation.safety import Broken

from shoal.ids import PeerId, StageIndex, StepKey
from shoal.runtime.launcher_messages import StartTrainer
from shoal.swarm.keep_rule import KeepRule
from shoal.swarm.records import GENERATIONS_APART, Tip, record_hash
from shoal.swarm.round_boundary import RunTime
from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_effects import (
    CloseSteps,
    CoordinatorEffect,
    Deposed,
    Fetch,
    Journal,
    MemberEffect,
    Overtaken,
    Pin,
    RecordCommitted,
    ReplicaOut,
    ResolveStep,
    Restored,
    RoundReady,
    RunRing,
    Send,
    Stuck,
    Swap,
    TrainedTwice,
)
from shoal.swarm.round_member import RoundMemberMachine
from shoal.swarm.round_orders import StepsClosed
from shoal.swarm.round_settings import CloseRequest, RoundPhase
from shoal.swarm.run_client import RunClient
from shoal.swarm.run_effects import (
    BeginRound,
    CloseRound,
    Failed,
    GiveInner,
    InheritRecord,
    RoundPlan,
    RunEffect,
    RunPhase,
    RunRules,
    WriteRecord,
)
from shoal.swarm.trainer_slots import TrainerSlots
from shoal.swarm.view import Replica, SwarmView
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import TrainerHello
from shoal.wire.messages.round import Propose, Record, StageHashes
from shoal.wire.messages.step import StepEntry

if TYPE_CHECKING:
    from tests.simulation.round.world import World

_WORK_S = 0.05
_MANY = 100_000
Contribution = tuple[str, str, tuple[str, ...]]
"""What a member gives to its ring: what it has learnt, from which bytes, and in which quorum."""


class Left(NamedTuple):
    """What a start of a client leaves to the next one: the round that it has begun, on top of which record, and the
    number of its ballot."""

    plan: RoundPlan
    base: str
    ballot_number: int


def digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def hashes_of(theta: str) -> StageHashes:
    return StageHashes(theta, theta, "")


def is_bulk(message: object) -> bool:
    """Contributions to rings are tensors; they are tuples here."""
    return type(message) is tuple


class ReplicaHost:
    """A replica whose parameters are a digest, and whose ring is an exchange of everyone's contribution."""

    def __init__(self, world: World, peer: PeerId, stage: int, is_behind: bool = False) -> None:
        self.world, self.peer, self.stage, self.theta = world, peer, stage, world.start_of(peer, stage)
        boot = world.network.boots.get(peer, 0) + 1
        hop = Hop(peer, (f"boot:{boot}",))
        self.machine: RoundMemberMachine = world.member_class(
            hop, stage, Tip(0, world.settings.genesis, None), hashes_of(self.theta), world.unseal, is_behind
        )
        self.begun: dict[int, int] = {}  # how often it has begun to train a round
        self.is_out = False
        self.offers: str | None = None  # the record whose bytes it gives to those that ask
        self.swapped_s = world.network.now_s
        self._clear()

    def _clear(self) -> None:
        self.log: list[StepEntry] = []
        self.doubts: dict[StepKey, StepEntry] = {}
        self.staged: dict[StageHashes, str] = {}
        self.averaged: set[StageHashes] = set()  # of those, what it has averaged itself; it has fetched the others
        self.pinned: StageHashes | None = None
        self.quorum: Propose | None = None
        self.parts: dict[tuple[object, ...], dict[str, Contribution]] = {}

    @property
    def trains(self) -> bool:
        return not self.machine.closing and not self.is_out

    def deliver(self, sender: str, message: object) -> None:
        if type(message) is tuple:
            tag, contribution = message
            self.parts.setdefault(tag, {})[sender] = contribution
            self._ring()
        else:
            self._act(self.machine.receive(PeerId(sender), message))  # type: ignore[arg-type]

    def lost(self, peer: str) -> None:
        self._act(self.machine.lost(PeerId(peer)))

    def _later(self, call: Callable[..., list[MemberEffect]], *arguments: object) -> None:
        network = self.world.network
        delay_s = network.exponential(_WORK_S) * network.slowness(self.peer)
        network.on_host(self.peer, delay_s, self._call, call, arguments)

    def _call(self, call: Callable[..., list[MemberEffect]], arguments: tuple[object, ...]) -> None:
        self._act(call(*arguments))

    def _act(self, effects: list[MemberEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self.world.checks.says(self.peer, message)
                    self.world.passing.send(self.peer, peer, message)
                case CloseSteps():
                    self._later(self._steps_closed)
                case ResolveStep(fate):
                    entry = self.doubts.pop(fate.key)
                    if fate.commit:
                        self.log.append(entry)
                    self._later(self._steps_closed)
                case RunRing(quorum):
                    self.quorum = quorum
                    tag = self._tag(quorum)
                    # In a ring of other members it would have another weight.
                    peers = tuple(hop.peer for hop in quorum.members)
                    contribution = (digest(self.theta, [entry.key for entry in self.log], self.peer), self.theta, peers)
                    for hop in quorum.members:
                        self.world.send(self.peer, hop.peer, (tag, contribution))
                case Pin(hashes):
                    self.pinned = hashes
                case Swap(record, hashes):
                    self._later(self._swap, record, hashes)
                case ReplicaOut():
                    self.is_out = True
                case Fetch():
                    self._later(self._fetch, effect)
                case _:
                    pass

    def _steps_closed(self) -> list[MemberEffect]:
        return self.machine.steps_closed(StepsClosed(len(self.log), tuple(self.doubts), tuple(self.log)))

    def _tag(self, quorum: Propose) -> tuple[object, ...]:
        """What marks the frames of a ring."""
        return (quorum.round, quorum.ballot, quorum.epoch)

    def _ring(self) -> None:
        if self.quorum is None:
            return
        quorum, peers = self.quorum, [hop.peer for hop in self.quorum.members]
        parts = self.parts.get(self._tag(quorum), {})
        if set(peers) <= parts.keys():
            self.quorum = None
            self.world.checks.ring(self, peers, [parts[peer] for peer in peers])
            theta = digest([parts[peer][0] for peer in peers])
            if self.world.flip_rate and self.world.network.rng.random() < self.world.flip_rate:
                theta = digest(theta, "flipped bit", self.peer)
            self.world.checks.base_of[theta] = self.theta
            self.world.checks.made_by[theta] = frozenset(peers)
            hashes = hashes_of(theta)
            self.staged = {kept: value for kept, value in self.staged.items() if kept == self.pinned}
            self.staged[hashes] = theta
            self.averaged.add(hashes)
            self._later(self.machine.ring_done, quorum, hashes)

    def _fetch(self, order: Fetch) -> list[MemberEffect]:
        """Copy the bytes from whoever holds the record and can be reached; else try again."""
        if self.machine.fetching is None or record_hash(self.machine.fetching) != order.record_hash:
            return []
        donor = self.world.donor_of(self.peer, self.stage, order.record_hash)
        if donor is None:
            self._later(self._fetch, order)
            return []
        self.world.checks.gift(donor, order)
        self.staged[order.hashes] = donor.theta
        return self.machine.fetched(order.record_hash, order.hashes)

    def _swap(self, record: Any, hashes: StageHashes) -> list[MemberEffect]:
        if hashes not in self.staged and hashes != hashes_of(self.theta):
            return self.machine.state_broken("the staged bytes are gone")
        self.world.checks.swap(self, record, hashes)
        self.theta = self.staged.get(hashes, self.theta)
        self.is_out = False
        self.swapped_s = self.world.network.now_s
        self._clear()
        effects = self.machine.swapped(hashes, {})
        self.begun[self.machine.round] = self.begun.get(self.machine.round, 0) + 1
        if not self.machine.is_restored:
            self.offers = self.machine.tip.hash
        return effects


class ClientHost:
    """A client: its coordinator, and the machine of its run from the record on that it goes on from.

    Its trainers are there at once and do what the world has them do; it is the facts of its run as well.
    """

    run_class: type[RunClient] = RunClient
    start_timeout_s = math.inf
    is_placing = is_handing_over = is_letting_go = is_unfed = is_refused = False
    durations_s: Sequence[float] = ()

    def __init__(self, world: World, peer: PeerId) -> None:
        self.world, self.peer = world, peer
        self.disk = world.disks[peer]
        # As in production: no start of a client has the generation of another one, whatever is left of its disk.
        self.start = random.Random(f"{peer} {world.network.boots.get(peer, 0)}").getrandbits(31)
        self.machine: RoundCoordinatorMachine = world.coordinator_class(
            peer,
            self.generation(),
            world.settings,
            world.seal_as(peer),
            world.unseal,
            () if world.knows_nothing(peer) else world.pool_of(peer).recorded_ranges(),
            world.ballot_of(peer),
            world.resumption.tip_of(peer),
        )
        self.slots = self.new_slots()
        self.run: RunClient | None = None
        self.ready: RoundReady | None = None
        self.committed_round = 0
        self.tip: Tip | None = None  # on top of which its trainers train
        self.keep_rule = KeepRule(every_rounds=2, every_s=math.inf, last_round=0)
        self.stuck: tuple[int, ...] = ()
        self.led_s = 0.0
        self._wake_s: float | None = None
        self._look_s = math.inf
        self._is_looking = False

    def generation(self) -> int:
        return self.start

    def new_slots(self) -> TrainerSlots:
        return TrainerSlots(start_timeout_s=self.start_timeout_s)

    @property
    def leads(self) -> bool:
        return self.machine.phase is not RoundPhase.WAITING

    @property
    def now_s(self) -> float:
        return self.world.network.now_s

    @property
    def is_here(self) -> bool:
        """Whether its process has not ended."""
        return self.world.network.hosts.get(self.peer) is self

    def deliver(self, sender: str, message: object) -> None:
        self._act(self.machine.receive(PeerId(sender), message, self.now_s))  # type: ignore[arg-type]

    def lost(self, peer: str) -> None:
        self._act(self.machine.lost(PeerId(peer), self.now_s))

    def lead(self) -> None:
        self.led_s = self.now_s
        self._act(self.machine.lead(self.now_s))

    def see(self, hops: dict[PeerId, Hop]) -> None:
        self._act(self.machine.replicas(hops, self.now_s))

    def see_mirrors(self, hops: dict[PeerId, Hop]) -> None:
        self._act(self.machine.mirrors(hops, self.now_s))

    def close(self) -> None:
        """Its trainers have done their steps."""
        if self.run is not None and self.run.phase is RunPhase.TRAIN:
            for pipeline in self.run.pipelines:
                self.slots.finish(pipeline.slot)
            self.look()

    def lowest(self) -> Mapping[int, int]:
        """The lowest generation of each slot's trainer that may still train; here none ever dies."""
        return {}

    # -- what it knows (`RunFacts`)

    @property
    def view(self) -> SwarmView:
        return self.usable({} if self.ready is None else self.ready.holders)

    @property
    def holders(self) -> Mapping[PeerId, int] | None:
        return self.machine.holders

    @property
    def unmirrored(self) -> frozenset[tuple[PeerId, int]]:
        return self.machine.unmirrored

    def usable(self, known: Mapping[PeerId, int]) -> SwarmView:
        holders = self.machine.holders
        stages = known if holders is None else holders
        replicas = (Replica(Hop(peer, ()), 0.0, stage=StageIndex(stage)) for peer, stage in stages.items())
        return SwarmView(tuple(sorted(replicas, key=lambda replica: (replica.stage, replica.peer))))

    def is_own(self, ready: RoundReady, base: str) -> bool:
        record = self._record(ready)
        return record.ballot.peer == self.peer and record.previous == base

    def is_evaluated(self, round: int) -> bool:
        return True

    def _record(self, ready: RoundReady) -> Record:
        assert ready.tip.signed is not None
        return self.world.unseal(ready.tip.signed)

    # -- what comes next

    def look(self) -> None:
        """Have the run go on as far as it goes now."""
        if self._is_looking:
            return
        self._is_looking = True
        while self.is_here and self.run is not None and (effects := self.run.look(self, self.now_s)):
            for effect in effects:
                if self.is_here and self.run is not None:
                    self._carry_out(effect)
        self._is_looking = False
        if self.is_here and self.run is not None and self.run.wake_at_s < self._look_s:
            self._look_s = self.run.wake_at_s
            self.world.network.on_host(self.peer, max(0.0, self._look_s - self.now_s), self._look_again)

    def _look_again(self) -> None:
        self._look_s = math.inf
        self.look()

    def new_run(self) -> RunClient:
        """What an earlier start of it has left, if anything, or a checkpoint, is where it goes on."""
        left = self.world.left_to(self.peer)
        known = self.world.resumption.tip_of(self.peer)
        base = left.base if left is not None else "" if known is None else known.hash
        rules = RunRules(
            num_stages=self.world.num_stages,
            num_rounds=_MANY,
            total_steps=_MANY,
            steps_of=self.world.steps_of,
            expected_servers=1,
            servers_timeout_s=math.inf,
            averaging_timeout_s=math.inf,
            first_deadline_s=self.world.deadline_s,
            succeeds=left is None and known is None and self.world.has_begun,
            patient=True,
        )
        return self.run_class(rules, self.slots, RunTime(), left=None if left is None else left.plan, base=base)

    def _carry_out(self, effect: RunEffect) -> None:
        match effect:
            case StartTrainer(slot, generation):
                self.slots.launched(slot, generation, "", self.now_s)
                trainer = Hop(PeerId(f"{self.peer} {slot}"), ())
                self.slots.receive(trainer.peer, TrainerHello(slot, generation, trainer, 0), self.now_s)
            case BeginRound():
                self.begin_round(effect)
                if self.run is not None:
                    self.run.begun(self.now_s)
            case CloseRound(round):
                self._close(round)
            case InheritRecord(ready):
                self.begin_anew(ready)
                self._carried_out()
            case GiveInner():
                self._carried_out()
            case WriteRecord(ready):
                self.world.pool_of(self.peer).record(self._record(ready))
                self._carried_out()
            case Failed(error):
                raise Broken(f"{self.peer} gives the run up: {error}")
            case _:
                pass

    def _carried_out(self) -> None:
        """What takes a while in production is done."""
        if self.run is not None:
            self.run.carried_out()

    def begin_round(self, order: BeginRound) -> None:
        """Its trainers train from now on."""
        self.slots.nothing_done()
        if self.run is not None and self.ready is not None:
            plan = RoundPlan(order.round, order.steps, self.run.pipelines, dict(self.slots.generations), order.begun_s)
            self.world.leaves(self.peer, Left(plan, order.base, self.machine.ballot.number))
            self.world.has_begun = True
            self.tip = self.ready.tip

    def begin_anew(self, ready: RoundReady) -> None:
        """It goes on from a record of others."""
        if ready.tip.signed is not None:
            self.slots.begin_above(self._record(ready).generations, GENERATIONS_APART)

    def _close(self, round: int) -> None:
        slots = {peer: int(peer.split(".")[1]) for peer in self.world.replicas}
        keep = self.keep_rule.is_due(round, self.now_s)
        self.world.checks.closes(self.machine.ballot, round, keep)
        self._act(self.machine.close(CloseRequest(round, slots, self.lowest(), keep=keep), self.now_s))

    # -- its coordinator

    def _journal(self, effect: Journal) -> None:
        self.disk.write(effect.digest, effect.logs)
        self.disk.sync()
        self._act(self.machine.journaled(effect.digest))

    def _tick(self) -> None:
        self._wake_s = None
        self._act(self.machine.tick(self.now_s))

    def _act(self, effects: list[CoordinatorEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message):
                    if type(message) is Propose:
                        self.world.checks.proposed(self, self.machine._quorums.proposed[message.stage])
                    self.world.checks.says(peer, message)
                    self.world.send(self.peer, peer, message)
                case Journal():
                    # A disk that is slow; what is not written when the client dies is lost.
                    delay_s = self.world.network.exponential(_WORK_S)
                    self.world.network.on_host(self.peer, delay_s, self._journal, effect)
                case RecordCommitted(record, signed):
                    self.tip = self.ready = None
                    self.committed_round = record.round
                    if record.keep:
                        self.keep_rule.begun(record.round, self.now_s)
                    self.world.committed(self.peer, record, signed)
                case Overtaken():
                    self.tip = self.ready = None
                    if self.run is not None:
                        self.run.overtaken()
                case Deposed():
                    # In production its process ends for good; here it may lead once more, as one that is new.
                    self.tip = self.ready = self.run = None
                    self.world.forget(self.peer)
                case RoundReady():
                    self.ready = effect
                    self.world.led_under = self.machine.ballot
                    self.world.checks.begins(self)
                    self.world.resumption.begins(self)
                    self.run = self.run or self.new_run()
                case Stuck(stages):
                    self.stuck = stages
                case TrainedTwice():
                    self.world.trained_twice(effect)
                case Restored(stage, _, basis) if basis is not None:
                    self.world.checks.restored(self, stage, basis)
                case _:
                    pass
            if not self.is_here:
                return  # crashed between two sends of one message to all
        self.look()
        self.world.resumption.acted(self)
        wake_at_s = self.machine.wake_at_s
        if wake_at_s < math.inf and self._wake_s is None:
            self._wake_s = wake_at_s
            self.world.network.on_host(self.peer, max(0.0, wake_at_s - self.now_s), self._tick)


def holds(host: ReplicaHost, tip: Tip | None) -> bool:
    return tip is not None and host.machine.tip.hash == tip.hash
