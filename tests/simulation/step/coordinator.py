"""What the step's world has instead of clients and a data server: a ledger of samples and a simple coordinator.

Both are reliable, and no faults but those of their connections hit them: rounds and leases have worlds of their own,
and all of it runs together in `tests.simulation.swarm`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.simulation.step.hosts import STEPS_PER_ROUND, Envelope, Hello, Join, TrainerHost

from shoal.ids import StepKey
from shoal.swarm.step_operations import Decision
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.step import Fence, Fenced

if TYPE_CHECKING:
    from tests.simulation.step.world import World

NUM_SAMPLES = 20


@dataclass(slots=True)
class Sample:
    """free -> leased -> done -> recorded; doubt: its trainer died in the step `key`."""

    state: str = "free"
    holder: str = ""
    key: StepKey | None = None
    path: tuple[str, ...] = ()


class Ledger:
    """The data server: it lives as long as the run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.samples = [Sample() for _ in range(NUM_SAMPLES)]

    def lease(self, trainer: TrainerHost) -> int | None:
        if self.world.generations[trainer.slot] != trainer.generation:
            return None
        for index, sample in enumerate(self.samples):
            if sample.state == "free":
                self.samples[index] = Sample("leased", trainer.peer)
                return index
        return None

    def note(self, trainer: TrainerHost, key: StepKey, path: tuple[str, ...]) -> None:
        self.world.safety.opened(key, {peer: self.world.generations[peer] for peer in path})
        held = self._held(trainer)
        if held is not None:
            held.key, held.path = key, path

    def path_of(self, trainer: TrainerHost) -> tuple[str, ...]:
        """Where the trainer's attempt runs, as it has noted."""
        held = self._held(trainer)
        return ("", "") if held is None else held.path

    def under_way(self) -> dict[tuple[int, int, int], tuple[str, ...]]:
        """The paths of the steps that trainers have begun and not ended."""
        return {
            sample.key.step: sample.path
            for sample in self.samples
            if sample.state == "leased" and sample.key is not None
        }

    def acknowledge(self, trainer: TrainerHost) -> None:
        if (held := self._held(trainer)) is not None:
            held.state = "done"

    def give_back(self, trainer: TrainerHost) -> None:
        if (held := self._held(trainer)) is not None:
            held.state = "free"

    def trainer_died(self, peer: str) -> None:
        for sample in self.samples:
            if sample.state == "leased" and sample.holder == peer:
                sample.state = "free" if sample.key is None else "doubt"

    def _held(self, trainer: TrainerHost) -> Sample | None:
        if trainer.sample is None:
            return None
        sample = self.samples[trainer.sample]
        return sample if sample.state == "leased" and sample.holder == trainer.peer else None


class Coordinator:
    """Closes rounds, settles doubt, commits records."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.round = 1
        self.members: dict[str, int] = {}
        self.recorded_logs: dict[str, list[StepKey]] = {}
        self._joins: dict[str, Join] = {}
        self._resolved: dict[StepKey, Decision | None] = {}
        self._opened_s = 0.0
        self._closed_s: float | None = None
        # Replicas that must still answer the fence of a dead trainer; those that cannot are left to the record.
        self._unfenced: dict[str, set[str]] = {}
        world.network.start("K", self)

    def start(self) -> None:
        self._tick()
        self._repeat()

    def deliver(self, sender: str, message: object) -> None:
        if isinstance(message, Join) and message.round == self.round and self._closed_s is not None:
            self._joins[sender] = message
        elif isinstance(message, Fenced):
            self._on_fenced(sender, message)

    def lost(self, peer: str) -> None:
        self._joins.pop(peer, None)

    def fence(self, trainer: str) -> None:
        self._unfenced[trainer] = set(self.world.replica_peers)
        for peer in self.world.replica_peers:
            self.world.network.send("K", peer, Envelope(Fence(dict(self.world.generations))))

    def _on_fenced(self, replica: str, message: Fenced) -> None:
        for sample in self.world.ledger.samples:
            key = sample.key
            if sample.state != "doubt" or key is None or key.generation >= message.generations.get(key.trainer, 0):
                continue
            if key in message.committed:
                sample.state = "done"
            elif key not in message.in_doubt:
                waiting = self._unfenced[sample.holder]
                waiting.discard(replica)
                if not waiting:
                    sample.state = "free"

    def _repeat(self) -> None:
        self.world.network.on_host("K", 1.0, self._repeat)
        self._tell()
        if any(generation > 1 for generation in self.world.generations.values()):
            for peer in self.world.replica_peers:
                self.world.network.send("K", peer, Envelope(Fence(dict(self.world.generations))))

    def _tell(self) -> None:
        hello = Hello(self.round, self.members, self._closed_s is not None, dict(self._resolved))
        for peer in (*self.world.replica_peers, *self.world.trainer_peers()):
            self.world.network.send("K", peer, hello)

    def _tick(self) -> None:
        network = self.world.network
        network.on_host("K", 0.15, self._tick)
        if self._closed_s is None:
            if network.now_s - self._opened_s > 5 or all(self._is_done(peer) for peer in self.world.trainer_peers()):
                self._closed_s, self._joins, self._resolved = network.now_s, {}, {}
                self._tell()
            return
        # Who has died since prepares no record, whether its connection has ended or not.
        self._joins = {peer: join for peer, join in self._joins.items() if self._lives(peer, join.generation)}
        late = network.now_s - self._closed_s > 6
        live = [peer for peer in self.world.replica_peers if network.is_linked("K", peer)]
        # A replica that has committed what was settled as aborted joined too late: it is not in this record.
        joins = {
            peer: join
            for peer, join in self._joins.items()
            if not any(entry.key in self._resolved and self._resolved[entry.key] is None for entry in join.log)
        }
        complete = {peer[1] for peer in joins} == {str(stage) for stage in range(self.world.num_stages)}
        if complete and (late or all(peer in self._joins for peer in live)):
            self._settle_or_decide(joins)

    def _lives(self, peer: str, generation: int) -> bool:
        return peer in self.world.network.hosts and self.world.generations[peer] == generation

    def _is_done(self, peer: str) -> bool:
        trainer = self.world.network.hosts.get(peer)
        return isinstance(trainer, TrainerHost) and trainer.steps >= STEPS_PER_ROUND and trainer.round == self.round

    def _settle_or_decide(self, joins: dict[str, Join]) -> None:
        doubts = {key for join in joins.values() for key in join.in_doubt}
        for key in doubts - self._resolved.keys():
            held = [entry for join in joins.values() for entry in join.log if entry.key == key]
            self._resolved[key] = Decision(held[0].scale, held[0].lr, held[0].skipped) if held else None
        if not doubts:
            self._decide(joins)
        self._tell()

    def _decide(self, joins: dict[str, Join]) -> None:
        self.world.safety.recorded({peer: (join.generation, join.log) for peer, join in joins.items()})
        entries = {entry.key.step: entry for join in joins.values() for entry in join.log}
        samples = [entry.samples[0].start for entry in entries.values()]
        self.world.samples.record(SampleRange(0, sample, sample + 1) for sample in samples)
        for index, sample in enumerate(self.world.ledger.samples):
            if index in samples:
                sample.state = "recorded"
            elif sample.state in ("done", "doubt"):
                sample.state = "free"
        self.members = {peer: join.generation for peer, join in joins.items()}
        self.recorded_logs = {peer: [entry.key for entry in join.log] for peer, join in joins.items()}
        self.round += 1
        self._closed_s, self._resolved, self._opened_s = None, {}, self.world.network.now_s
