"""Servers that train and average, clients that fence, and the leases of their trainers: the machines put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.round.hosts import ClientHost
from tests.simulation.round.hosts import ReplicaHost as RoundHost
from tests.simulation.safety import Broken
from tests.simulation.step.hosts import STEPS_PER_ROUND, Envelope, Hello, Join, TrainerHost, Work
from tests.simulation.step.hosts import ReplicaHost as StepHost

from shoal.ids import PeerId, StepKey
from shoal.swarm.lease import Grant, Release
from shoal.swarm.round_effects import (
    CloseSteps,
    CoordinatorEffect,
    Journal,
    MemberEffect,
    ResolveStep,
    RoundReady,
    Swap,
)
from shoal.swarm.round_orders import StepsClosed
from shoal.swarm.step_operations import Decision
from shoal.swarm.step_trainer import Finished
from shoal.swarm.takeover import Settled, TakeoverMachine, next_number
from shoal.wire.messages.base import StepRange
from shoal.wire.messages.round import Resolve, StageHashes
from shoal.wire.messages.step import Fenced, StepEntry

if TYPE_CHECKING:
    from tests.simulation.swarm.world import World

_TELL_S = 0.5
_LOOK_S = 0.05


def steps_of(round: int) -> StepRange:
    """The numbers that production gives the steps of a round."""
    return StepRange((round - 1) * STEPS_PER_ROUND, round * STEPS_PER_ROUND)


class Steps(StepHost):
    """The steps of a server; when a round ends is the other half's to say."""

    world: World

    def __init__(self, server: Server) -> None:
        self.server = server
        # By fragment, the steps that are in its parameters and in no average of this fragment yet.
        self.since: list[list[StepKey]] = [[] for _ in range(server.world.num_fragments)]
        self.taken: int | None = None  # of those of this round's fragment, how many it had at its cut
        super().__init__(server.world, server.peer)

    def attach(self) -> None:
        """The process is the server's."""

    def answer_fence(self, to: PeerId, message: Fenced) -> None:
        self.world.network.send(self.peer, to, Envelope(message))

    def _apply(self, key: StepKey, work: Work) -> None:
        step = self.machine.open[key]
        path = [hop.peer for hop in step.request.path]
        super()._apply(key, work)
        for keys in self.since if step.decision is not None and not step.decision.skipped else ():
            keys.append(key)
        if len(self.applied) == self.world.cut_in(self.machine.round):
            self.taken = len(self.fragment)
        self.world.applied(key, path)

    @property
    def fragment(self) -> list[StepKey]:
        """`since` of what this round averages."""
        return self.since[self.machine.round % self.world.num_fragments]

    @property
    def averaged(self) -> int:
        """Of how many steps its pseudo-gradient is, if the round is closed now."""
        return len(self.fragment) if self.taken is None else self.taken

    def close(self) -> None:
        self._do(self.machine.close())
        self._try_join()

    def resolve(self, fate: Resolve) -> None:
        decision = Decision(fate.scale, fate.lr, fate.skipped) if fate.commit else None
        self._do(self.machine.resolve(fate.key, decision))
        self.joined = None
        self._try_join()
        self._kick()

    def _try_join(self) -> None:
        if self.machine.closed:
            self.machine.join()
            self.joined = Join(self.machine.round, self.generation, tuple(self.machine.log), self.machine.in_doubt)
            self.server.steps_closed()

    def begin(self, round: int) -> None:
        """The server holds the record before this round; it may have kept what the record has not averaged."""
        if self.server.keeps_rest:
            del self.fragment[: self.averaged]
        else:
            self.since = [[] for _ in self.since]
        self.taken = None
        self.generation, self.applied, self.buffers, self.joined = self.world.new_generation(self.peer), [], [], None
        self._do(self.machine.start_round(round, keeps_rest=self.server.keeps_rest))
        self.server.keeps_rest = False
        self._kick()


class Server(RoundHost):
    """One replica: its steps and its part in the rounds."""

    world: World
    steps_class = Steps

    def __init__(self, world: World, peer: PeerId, stage: int, is_behind: bool = False) -> None:
        self.steps: Steps | None = None
        self.keeps_rest = False
        super().__init__(world, peer, stage, is_behind)
        self.steps = self.steps_class(self)
        if not is_behind:
            self.steps.begin(1)

    @property
    def log(self) -> list[StepEntry]:  # type: ignore[override]
        return [] if self.steps is None else self.steps.machine.log

    @log.setter
    def log(self, entries: list[StepEntry]) -> None:
        """It is the step machine's."""

    def deliver(self, sender: str, message: object) -> None:
        if type(message) is Envelope and self.steps is not None:
            self.steps.deliver(sender, message)
        else:
            super().deliver(sender, message)

    def lost(self, peer: str) -> None:
        if self.steps is not None:
            self.steps.lost(peer)
        super().lost(peer)

    def _act(self, effects: list[MemberEffect]) -> None:
        for effect in effects:
            if isinstance(effect, CloseSteps) and self.steps is not None:
                self.steps.close()
            elif isinstance(effect, ResolveStep) and self.steps is not None:
                self.steps.resolve(effect.fate)
            else:
                self.keeps_rest = effect.keeps_rest if isinstance(effect, Swap) else self.keeps_rest
                super()._act([effect])

    def steps_closed(self) -> None:
        if self.steps is not None:
            machine, averaged = self.steps.machine, self.steps.averaged
            log = tuple(machine.log)
            brought = machine.cuts.brought(machine.round, log, machine.earlier)
            if brought.num_steps != averaged:
                raise Broken(f"{self.peer} joins as with {brought}, and has {averaged} of {self.steps.fragment}")
            num_samples = sum(entry.num_samples for entry in log)
            closed = StepsClosed(num_samples, machine.in_doubt, log, earlier=machine.earlier)
            self._act(self.machine.steps_closed(closed))

    def _swap(self, record: object, hashes: StageHashes) -> list[MemberEffect]:
        swapping = self.machine.swapping
        effects = super()._swap(record, hashes)
        if swapping is not None and self.machine.tip.signed == swapping and self.steps is not None:
            self.steps.begin(self.machine.round)
        return effects


class Client(ClientHost):
    """A client that tells its trainers of rounds, and has those that die replaced."""

    world: World

    def __init__(self, world: World, peer: PeerId) -> None:
        super().__init__(world, peer)
        self._begun = ""  # hash of the record on top of which the round is trained
        self.named: frozenset[PeerId] | None = None
        self.steady: set[PeerId] = set()
        self._takeovers: dict[tuple[int, int], TakeoverMachine] = {}

    def deliver(self, sender: str, message: object) -> None:
        if type(message) is Envelope and isinstance(message.message, Fenced):
            for machine in self._takeovers.values():
                machine.receive(PeerId(sender), message.message)
        elif type(message) is not Envelope:
            super().deliver(sender, message)

    def _act(self, effects: list[CoordinatorEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Journal):
                self.world.journaled[effect.digest] = effect
        super()._act(effects)
        for effect in effects:
            if isinstance(effect, RoundReady) and self.world.network.hosts.get(self.peer) is self:
                self._begin(effect)

    def _begin(self, ready: RoundReady) -> None:
        """Begin a round once; who was there when another process has begun it is not known, as in `client.rounds`."""
        if ready.tip.hash == self._begun:
            return
        self._begun = ready.tip.hash
        is_first = self.world.begun.setdefault(ready.tip.hash, self) is self
        self.named, self.steady = (frozenset(ready.holders), set(ready.holders)) if is_first else (None, set())
        self._takeovers.clear()
        round = ready.tip.round + 1
        self.world.leases.table.plan_round(round, self.world.num_trainers, steps_of(round))
        self.tell()

    def lost(self, peer: str) -> None:
        self.steady.discard(PeerId(peer))
        super().lost(peer)

    def tell(self) -> None:
        """Say which round is trained."""
        if self.tip is None:
            return
        for peer in self.world.trainer_peers():
            self.world.network.send(self.peer, peer, Hello(self.tip.round + 1, {}, False, {}))

    def repeat(self) -> None:
        self.world.network.on_host(self.peer, _TELL_S, self.repeat)
        self.tell()

    def replace_trainers(self) -> None:
        """Settle what trainers that are gone have left: the ones of the round, as `client.takeover` does."""
        network = self.world.network
        network.on_host(self.peer, _LOOK_S, self.replace_trainers)
        if self.tip is None:
            return
        live = [replica for replica in self.world.replicas if network.is_linked(self.peer, replica)]
        for gone in list(self.world.leases.gone):
            slot, generation = gone
            round = self.tip.round + 1
            if gone not in self._takeovers:
                self._takeovers[gone] = self.world.takeover_class(slot, generation + 1, round, self.now_s)
            machine = self._takeovers[gone]
            for send in machine.asks(live, self.now_s):
                network.send(self.peer, send.to, Envelope(send.message))
            if machine.is_over(live, self.now_s):
                del self._takeovers[gone]
                everyone = None if self.named is None else {*live, *self.named}
                settled = machine.settled(everyone, self.steady)
                released = self.world.leases.release(slot, generation, settled)
                steps = steps_of(round)
                number = next_number(settled, steps, -1, released.next_step, is_known=released.is_known)
                self.world.start_trainer(slot, generation + 1, round, number - steps.first)


class Trainer(TrainerHost):
    """A trainer whose steps have the numbers that production gives them."""

    def __init__(self, world: World, slot: int, generation: int, round: int, steps: int) -> None:
        super().__init__(world, slot, generation, 0)  # type: ignore[arg-type]
        self.round, self.steps = round, steps
        self._arm()

    @property
    def number(self) -> int:  # type: ignore[override]
        return steps_of(self.round).first + self.steps

    @number.setter
    def number(self, number: int) -> None:
        """It follows from round and step."""


class Leases:
    """The data server: it lives as long as the run. What `step.coordinator.Ledger` is there, over the real table.

    Attributes:
        gone: Trainers that have died, (slot, generation), whose steps nobody has settled yet.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.table = world.new_table()
        self.gone: set[tuple[int, int]] = set()
        self._leases: dict[PeerId, int] = {}

    def lease(self, trainer: TrainerHost) -> int | None:
        now_s = self.world.network.now_s
        number = steps_of(trainer.round).first + trainer.steps
        given = self.table.lease(trainer.slot, trainer.generation, trainer.round, number, now_s)
        if not isinstance(given, Grant):
            return None
        self.table.begun(given.lease, now_s)
        self._leases[trainer.peer] = given.lease
        return given.batch.samples[0].start

    def note(self, trainer: TrainerHost, key: StepKey, path: tuple[PeerId, ...]) -> None:
        self.world.safety.opened(key, {peer: self.world.generations[peer] for peer in path})
        hosts = [self.world.network.hosts.get(peer) for peer in path]
        self.world.checks.opened(key, [host for host in hosts if isinstance(host, Server)])
        self.table.note(self._leases[trainer.peer], key, path)

    def acknowledge(self, trainer: TrainerHost) -> None:
        ended = trainer.machine.ended
        is_sure = isinstance(ended, Finished) and ended.committed
        self.table.acknowledge(self._leases[trainer.peer], committed=is_sure, now_s=self.world.network.now_s)

    def give_back(self, trainer: TrainerHost) -> None:
        self.table.give_back(self._leases[trainer.peer])

    def release(self, slot: int, generation: int, settled: Settled) -> Release:
        """A client has settled what this trainer has left."""
        self.gone.discard((slot, generation))
        return self.table.release_trainer(slot, generation, settled)
