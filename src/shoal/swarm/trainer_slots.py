"""The trainers of a client: who is there, and who takes the place of one that is lost. Pure state, no I/O.

    lost --> start the next one ----------------------- launched --.
       '---> fence those before it (`swarm.takeover`) -- settled --+--> release --> its hello --> the rest of its steps
                                                                                      '-- too late: none in this round

A slot has one trainer at a time: its latest generation, from its hello on until its connection ends. Between rounds one
that is lost is only replaced when the next one begins: the record says what it has trained.

No sample is trained twice: what a replica has applied, or may yet apply, counts as done until the record. And only when
the launcher has ended the lost trainer is it known what nobody trains any more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from shoal.events.trainers import TrainerFenced, TrainerGivenUp, TrainerNotReplaced, TrainerReplaced, TrainerStale
from shoal.ids import PeerId, StepKey
from shoal.runtime.launcher_messages import StartTrainer
from shoal.swarm.step_operations import SendStepMessage
from shoal.swarm.takeover import Settled, TakeoverMachine, next_number
from shoal.wire.messages.base import Hop, StepRange
from shoal.wire.messages.control import TrainerHello
from shoal.wire.messages.feed import Released
from shoal.wire.messages.step import Fenced

MAX_PER_ROUND = 3
"""A slot whose trainers are lost more often than this in one round does no more steps in it."""


@dataclass(frozen=True, slots=True)
class ReleaseLeases:
    """Have the data server free what this generation has surely not trained; `released` takes its answer."""

    slot: int
    generation: int
    settled: Settled


@dataclass(frozen=True, slots=True)
class TrainerThere:
    """A slot's trainer has said hello."""

    slot: int
    generation: int
    hop: Hop


@dataclass(frozen=True, slots=True)
class GoOn:
    """A slot's trainer is to do these steps of the round."""

    slot: int
    steps: StepRange


SlotEffect = (
    StartTrainer
    | SendStepMessage
    | ReleaseLeases
    | TrainerThere
    | GoOn
    | TrainerFenced
    | TrainerReplaced
    | TrainerNotReplaced
    | TrainerGivenUp
    | TrainerStale
)
"""`launched` takes what comes of a `StartTrainer`; events are to be noted."""
SlotEffects = list[SlotEffect]


@dataclass(slots=True)
class _TrainerSlot:
    """One slot; `hop`: its trainer is there; `greeted`: the generation of the last hello, which named `round`;
    `refusal`: why the launcher could not start it; None: it has not answered yet."""

    generation: int
    hop: Hop | None = None
    greeted: int = 0
    round: int = 0
    is_booting: bool = False
    refusal: str | None = ""


class _Phase(Enum):
    SETTLING = auto()
    """The next trainer is being launched, and the last one's steps are asked for."""
    RELEASING = auto()
    GREETING = auto()
    """Only the hello is waited for."""


@dataclass(slots=True)
class _Replacement:
    """How far the place of a lost trainer is taken; `fencing` is None as soon as its steps are settled. Its successor
    boots meanwhile, so it has to say hello in time after `launched_s`, however long that takes."""

    generation: int
    begun_s: float
    launched_s: float
    next_step: int
    fencing: TakeoverMachine | None
    is_launched: bool
    phase: _Phase = _Phase.SETTLING
    settled: Settled | None = None
    silent_at_s: float = math.inf


@dataclass(slots=True)
class _TrainedRound:
    """The round that is trained; `in_doubt`: attempts that takeovers in it have left to the record."""

    round: int
    slots: frozenset[int]
    steps: StepRange
    named: Collection[PeerId] | None
    steady: set[PeerId]
    starts: dict[int, int] = field(default_factory=dict[int, int])
    replacements: dict[int, _Replacement] = field(default_factory=dict[int, _Replacement])
    in_doubt: frozenset[StepKey] = frozenset()


class TrainerSlots:
    """The machine of one client; a `swarm.machine.Machine`. Slots count from 0.

    Attributes:
        start_timeout_s: how long a started trainer may take to say hello.
    """

    def __init__(self, *, start_timeout_s: float, above: int = 0) -> None:
        """Start with no trainer.

        Args:
            above: how far generations begin above those in the records, as other hosts may have replaced trainers.
        """
        self.start_timeout_s = start_timeout_s
        self._above = above
        self._slots: dict[int, _TrainerSlot] = {}
        self._done: set[int] = set()
        self._live: tuple[PeerId, ...] = ()  # in a given order, as who is asked first must not depend on hashes
        self._training: _TrainedRound | None = None

    @property
    def present(self) -> Mapping[int, Hop]:
        """Slots whose trainer has said hello and is connected."""
        return {number: slot.hop for number, slot in self._slots.items() if slot.hop is not None}

    @property
    def generations(self) -> Mapping[int, int]:
        """The latest generation of each slot's trainer."""
        return {number: slot.generation for number, slot in self._slots.items()}

    @property
    def lowest(self) -> Mapping[int, int]:
        """The lowest generation of each slot that may still train in the round that is being ended."""
        return {number: slot.generation + (slot.hop is None) for number, slot in self._slots.items()}

    @property
    def wake_at_s(self) -> float:
        """When to call `tick` if no event comes before (monotonic)."""
        waits = () if self._training is None else self._training.replacements.values()
        return min((min(_fenced_at_s(each), each.silent_at_s) for each in waits), default=math.inf)

    def slot_of(self, peer: PeerId) -> int | None:
        """Return the slot whose trainer `peer` is."""
        return next((slot for slot, hop in self.present.items() if hop.peer == peer), None)

    def is_done(self, slot: int) -> bool:
        """Return whether nothing more is expected of a slot in this round: its steps are done, or it has no trainer."""
        return slot in self._done

    def silent(self, slots: Collection[int]) -> list[int]:
        """Return those slots whose latest trainer has not said hello. One that is lost after its hello has."""
        return [slot for slot in slots if self._slots[slot].greeted != self._slots[slot].generation]

    def launching(self, slots: Collection[int]) -> bool:
        """Return whether the launcher has yet to answer for one of these slots."""
        return any(self._slots[slot].refusal is None for slot in slots)

    def refusal(self, slot: int) -> str:
        """Return why the launcher could not start the latest trainer of a slot; empty: it could, so far."""
        return self._slots[slot].refusal or ""

    # -- which trainers there are

    def adopt(self, generations: Mapping[int, int], running: Collection[int]) -> None:
        """Take over the trainers that an earlier start of this client had started, before any message is taken.

        Args:
            generations: of the trainer that was ordered last in each slot.
            running: slots whose trainer has not ended; it says hello by itself.
        """
        self._slots = {
            slot: _TrainerSlot(generation, is_booting=slot in running) for slot, generation in generations.items()
        }

    @property
    def booting(self) -> list[int]:
        """Slots whose trainer was started, or runs, and is still to say hello."""
        return sorted(number for number, slot in self._slots.items() if slot.is_booting)

    def begin_above(self, lowest: Mapping[int, int], above: int) -> None:
        """Ignore from now on every trainer that was started earlier, here or by a client of another host.

        Args:
            lowest: the lowest generation of each slot that may still act, from the newest record.
            above: how often trainers of other hosts may have been replaced since that record.
        """
        known = self.generations
        self._slots = {
            slot: _TrainerSlot(max(known.get(slot, 0), lowest.get(slot, 0)) + above)
            for slot in lowest.keys() | known.keys()
        }
        self._above = max(self._above, above)

    def want(self, num_slots: int) -> list[StartTrainer]:
        """A round is to begin with slots 0..num_slots-1: start the trainers that are missing, and not on their way."""
        missing = [slot for slot in range(num_slots) if slot not in self._slots or self._slots[slot].hop is None]
        return [self._start(slot) for slot in missing if slot not in self._slots or not self._slots[slot].is_booting]

    def forgo(self, slots: Collection[int]) -> list[int]:
        """Wait no longer for the hellos of these slots; returns those that have said none, to be started anew later."""
        silent = self.silent(slots)
        for slot in silent:
            self._slots[slot].is_booting = False
        return silent

    def launched(self, slot: int, generation: int, error: str, now_s: float) -> SlotEffects:
        """The launcher has ended the trainer before and started this one; or it has not, and says why."""
        if slot in self._slots and self._slots[slot].generation == generation:
            self._slots[slot].refusal = error
            self._slots[slot].is_booting &= not error
        training = self._training
        replacement = None if training is None else training.replacements.get(slot)
        if training is None or replacement is None or replacement.generation != generation:
            return []
        if error:
            return self._leave(training, slot, error, now_s)
        replacement.is_launched, replacement.launched_s = True, now_s
        return self._advance(training, slot, now_s)

    # -- a round

    def nothing_done(self) -> None:
        """Steps, or an evaluation, begin: all of it is expected of each slot."""
        self._done.clear()

    def begin_round(
        self,
        round: int,
        slots: frozenset[int],
        steps: StepRange,
        named: Collection[PeerId] | None,
        steady: Collection[PeerId],
        now_s: float,
    ) -> SlotEffects:
        """A round is trained from now on, and who is lost in it is replaced.

        Args:
            steps: of each slot; there may be none, but an evaluation.
            named: the replicas that the round's trainers have been told of. It is read when a trainer is lost, so the
                caller adds replicas that come in meanwhile. None: an earlier start of this client told the trainers.
                One that it has not told, because it died while it took over, is there but has to be told.
            steady: replicas that were connected before any trainer was told of the round.
        """
        training = self._training = _TrainedRound(round, slots, steps, named, set(steady))
        effects: SlotEffects = []
        if named is None:
            for number in sorted(slots & self.present.keys() - self._done):
                slot = self._slots[number]
                if slot.round != round:
                    self._replace(training, number, slot.generation, now_s, is_launched=True)
            for number in sorted(training.replacements):
                effects += self._advance(training, number, now_s)
        return [*effects, *self._look(training, now_s)]

    def end_round(self) -> None:
        """The round is trained no longer; what is under way is not waited for."""
        self._training = None

    def finish(self, slot: int) -> None:
        """A slot's trainer has done all of its steps in this round."""
        self._done.add(slot)

    # -- events

    def receive(self, peer: PeerId, message: TrainerHello | Fenced, now_s: float) -> SlotEffects:
        """Take a trainer's hello, or a replica's answer to a fence."""
        if isinstance(message, TrainerHello):
            return self._hello(peer, message, now_s)
        training, effects = self._training, SlotEffects()
        if training is None:
            return effects
        for slot in message.generations:
            replacement = training.replacements.get(slot)
            if replacement is not None and replacement.fencing is not None:
                replacement.fencing.receive(peer, message)
                effects += self._advance(training, slot, now_s)
        return effects

    def lost(self, peer: PeerId, now_s: float) -> SlotEffects:
        """A connection has ended: a replica is not waited for, and what answers in its name may be its next start; a
        trainer is replaced if a round is trained that needs it."""
        slot, training = self.slot_of(peer), self._training
        self._live = tuple(other for other in self._live if other != peer)
        if slot is not None:
            self._slots[slot].hop = None
        if training is None:
            return []
        training.steady.discard(peer)
        return [*self._advance_all(training, now_s), *self._look(training, now_s)]

    def replicas(self, live: Collection[PeerId], now_s: float) -> SlotEffects:
        """These are all replicas that can be reached now."""
        self._live = tuple(live)
        return [] if self._training is None else self._advance_all(self._training, now_s)

    def released(self, answer: Released, last_reported: int, now_s: float) -> SlotEffects:
        """The data server has freed what a lost trainer has left.

        Args:
            last_reported: number of the last step that a trainer of the slot has reported; -1: none.
        """
        training, slot = self._training, answer.trainer
        replacement = None if training is None else training.replacements.get(slot)
        if training is None or replacement is None or replacement.phase is not _Phase.RELEASING:
            return []
        if replacement.settled is None or answer.generation < replacement.generation - 1:
            return []
        replacement.next_step = next_number(
            replacement.settled, training.steps, last_reported, answer.next_step, is_known=answer.is_known
        )
        self._await_hello(replacement)
        replaced = TrainerReplaced(slot, replacement.generation, replacement.next_step)
        return [replaced, *self._advance(training, slot, now_s)]

    def tick(self, now_s: float) -> SlotEffects:
        """Time has passed: see `wake_at_s`."""
        return [] if self._training is None else self._advance_all(self._training, now_s)

    # -- how it goes on

    def _hello(self, peer: PeerId, hello: TrainerHello, now_s: float) -> SlotEffects:
        slot = self._slots.get(hello.slot)
        if slot is None or hello.generation != slot.generation or hello.hop.peer != peer:
            return [TrainerStale(peer, hello.slot, hello.generation)]
        slot.hop, slot.greeted, slot.round, slot.is_booting = hello.hop, hello.generation, hello.round, False
        there = TrainerThere(hello.slot, hello.generation, hello.hop)
        if self._training is None or hello.slot not in self._training.replacements:
            return [there]
        return [there, *self._advance(self._training, hello.slot, now_s)]

    def _start(self, number: int) -> StartTrainer:
        """Start a slot's next trainer; earlier ones are not believed any more."""
        before = self._slots.get(number)
        generation = (self._above if before is None else before.generation) + 1
        self._slots[number] = _TrainerSlot(generation, is_booting=True, refusal=None)
        return StartTrainer(number, generation)

    def _look(self, training: _TrainedRound, now_s: float) -> SlotEffects:
        """Replace whoever is not there; give up a slot that has lost too many."""
        effects: SlotEffects = []
        for slot in sorted(training.slots - self.present.keys() - training.replacements.keys() - self._done):
            starts = training.starts.get(slot, 0)
            if starts >= MAX_PER_ROUND:
                self._done.add(slot)
                effects.append(TrainerGivenUp(slot, starts))
                continue
            training.starts[slot] = starts + 1
            start = self._start(slot)
            self._replace(training, slot, start.generation, now_s, is_launched=False)
            effects += [start, *self._advance(training, slot, now_s)]
        return effects

    def _replace(self, training: _TrainedRound, slot: int, generation: int, now_s: float, *, is_launched: bool) -> None:
        first, fencing = training.steps.first, None
        if training.steps:
            fencing = TakeoverMachine(slot, generation, training.round, now_s, left_to_record=training.in_doubt)
        training.replacements[slot] = _Replacement(generation, now_s, now_s, first, fencing, is_launched)

    def _advance_all(self, training: _TrainedRound, now_s: float) -> SlotEffects:
        effects: SlotEffects = []
        for slot in sorted(training.replacements):
            effects += self._advance(training, slot, now_s)
        return effects

    def _advance(self, training: _TrainedRound, slot: int, now_s: float) -> SlotEffects:
        """Go on with a replacement as far as it goes now."""
        replacement = training.replacements.get(slot)
        if replacement is None:
            return []
        effects = self._fence(training, slot, replacement, now_s)
        if replacement.phase is _Phase.SETTLING and replacement.is_launched and replacement.fencing is None:
            # What is free from here on nobody trains any more: the launcher has ended the last trainer.
            if replacement.settled is not None:
                replacement.phase = _Phase.RELEASING
                effects.append(ReleaseLeases(slot, replacement.generation - 1, replacement.settled))
            else:
                self._await_hello(replacement)
        if replacement.phase is _Phase.GREETING:
            effects += self._greet(training, slot, replacement, now_s)
        return effects

    def _fence(self, training: _TrainedRound, slot: int, replacement: _Replacement, now_s: float) -> SlotEffects:
        machine = replacement.fencing
        if machine is None:
            return []
        if not machine.is_over(self._live, now_s):
            return list(machine.asks(self._live, now_s))
        everyone = None if training.named is None else {*self._live, *training.named}
        settled = machine.settled(everyone, training.steady)
        replacement.fencing, replacement.settled = None, settled
        training.in_doubt |= settled.in_doubt
        return [
            TrainerFenced(
                slot=slot,
                lowest=replacement.generation,
                committed=len(settled.committed),
                in_doubt=len(settled.in_doubt),
                complete=settled.complete,
                after_s=round(now_s - replacement.begun_s, 3),
            )
        ]

    def _await_hello(self, replacement: _Replacement) -> None:
        replacement.phase = _Phase.GREETING
        replacement.silent_at_s = replacement.launched_s + self.start_timeout_s

    def _greet(self, training: _TrainedRound, slot: int, replacement: _Replacement, now_s: float) -> SlotEffects:
        if not self.silent([slot]):
            del training.replacements[slot]
            if self._slots[slot].hop is None:
                return self._look(training, now_s)  # it is lost already
            return [GoOn(slot, StepRange(replacement.next_step, training.steps.stop))]
        if now_s < replacement.silent_at_s:
            return []
        self.forgo([slot])
        return self._leave(training, slot, f"trainer {slot} was started but did not report; see its log", now_s)

    def _leave(self, training: _TrainedRound, slot: int, reason: str, now_s: float) -> SlotEffects:
        """The slot has no trainer in this round."""
        del training.replacements[slot]
        self._done.add(slot)
        return [TrainerNotReplaced(slot, reason), *self._look(training, now_s)]


def _fenced_at_s(replacement: _Replacement) -> float:
    return math.inf if replacement.fencing is None else replacement.fencing.wake_at_s
