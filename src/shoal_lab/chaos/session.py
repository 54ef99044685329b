"""One swarm under faults: starts it, does to it what the plan says, sees what each fault costs, and ends it.

launched -> trains -> [ strike -> steps again -> whole again ] ... -> last faults got over -> Ctrl-C -> Evidence
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from shoal.clock import Clock, utc_iso
from shoal.ids import StepKey
from shoal_lab.chaos.plan import PlannedFault
from shoal_lab.faults.deaths import KINDS, Strike, begin
from shoal_lab.launched import END_S, START_S, launched, until
from shoal_lab.observed import Step, Swarm
from shoal_lab.verdict import Evidence, samples_of

RECOVERY_S = 60.0
"""How long, after the last fault, trainers may take to step again; far more than any limit that is promised."""
ROUNDS_AFTER = 3
"""The round of the last fault ends, and two whole ones follow, before samples are counted."""
_LOOK_S = 0.05
TRAINING_FLAGS = (
    "--no-wandb",
    "--log-level=debug",
    "--num-servers=5",
    "--data.holdout-fraction=0.01",
    "--diloco.inner-steps=20",
    "--diloco.outer-steps=1000000",
)
"""What makes a swarm of the configuration: two stages with two replicas and a spare, which trains until it is ended."""


@dataclass
class Injected:
    """A fault that was done.

    Attributes:
        after_s: since the faults began; later than planned where the victim was not there.
        held_until_s: when the fault is to be undone from outside; None: it has ended.
        seconds: by trainer that was hit, from the fault to the trainer's next step that got over it.
        whole_s: from the fault until the swarm was as before; None: not seen, as another fault came first.
    """

    planned: PlannedFault
    strike: Strike
    after_s: float
    held_until_s: float | None = None
    seconds: dict[int, float] = field(default_factory=dict[int, float])
    whole_s: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether each trainer that it hit has got over it."""
        return self.held_until_s is None and not self.waiting

    @property
    def waiting(self) -> frozenset[int]:
        """The trainers that it hit and that have not got over it."""
        return self.strike.hit - self.seconds.keys()

    def as_json(self) -> dict[str, Any]:
        """Return it as it stands in the log."""
        return {
            "number": self.planned.number,
            "kind": self.planned.kind,
            "planned_s": self.planned.at_s,
            "after_s": round(self.after_s, 3),
            "victim": self.strike.victim,
            "held_s": self.planned.held_s,
            "step_after_s": {str(slot): round(seconds, 3) for slot, seconds in sorted(self.seconds.items())},
            "whole_after_s": None if self.whole_s is None else round(self.whole_s, 3),
        }


@dataclass(frozen=True)
class RunOutcome:
    """A run that has ended.

    Attributes:
        missed: planned faults whose victim did not come until the end.
        trained_s: how long the run was measured: from the moment in which it trained, as long as the plan says.
        samples: trained in that time.
        kept_samples: those of them that the model has kept. A step may have died in one of S stages with a replica;
            each of its samples then counts one S-th less.
    """

    evidence: Evidence
    faults: Sequence[Injected]
    missed: Sequence[PlannedFault]
    trained_s: float
    samples: int
    kept_samples: float

    @property
    def samples_per_s(self) -> float:
        """The throughput: samples of committed steps in each second, whatever became of them."""
        return self.samples / self.trained_s

    @property
    def kept_per_s(self) -> float:
        """The goodput: samples in each second that the model has learnt from and not lost again."""
        return self.kept_samples / self.trained_s


@contextmanager
def swarm_of_one_host(directory: Path, num_slots: int, flags: Sequence[str]) -> Generator[Swarm]:
    """Yield a swarm that trains on this machine; nothing of it is left afterwards.

    Args:
        directory: receives everything that the swarm writes.
        flags: of `shoal run-local`.

    Raises:
        RunFailed: it did not begin to train.
    """
    with launched(directory, *flags) as run:
        swarm = Swarm(run, [run], num_slots)

        def trains() -> bool:
            run.require_running()
            return swarm.is_training()

        until(trains, 2 * START_S, "training")
        yield swarm


@dataclass(eq=False, repr=False)
class Chaos:
    """Does the faults of a plan to a swarm that trains.

    Attributes:
        log: gets one line when a fault is done, and one when the swarm has got over it.
        on_change: is told at the same moments.
    """

    swarm: Swarm
    plan: Sequence[PlannedFault]
    clock: Clock
    _: KW_ONLY
    log: Path
    on_change: Callable[[Injected], None] = lambda _: None

    def __post_init__(self) -> None:
        self._plan = list(self.plan)
        self._injected: list[Injected] = []
        self._began_s = 0.0
        self._began_unix_s = 0.0

    def run(self, for_s: float) -> RunOutcome:
        """Do all faults, let the swarm get over them, interrupt it, and return what came of it.

        Raises:
            RecordRejected: a step log or a record is damaged.
            RunFailed: the run has ended by itself, or did not end.
        """
        swarm = self.swarm
        self._began_s, self._began_unix_s = self.clock.now_s(), self.clock.unix_s()
        try:
            self._watch(lambda: self._elapsed_s >= for_s)
            self._watch_until(lambda: all(each.is_over for each in self._injected))
            # What a fault has left out of its round is free again, and is trained in the rounds after it.
            over_unix_s = self.clock.unix_s()
            self._watch_until(lambda: not self._injected or swarm.num_records(over_unix_s) >= ROUNDS_AFTER)
        finally:
            for each in self._injected:
                self._release(each)
        steps = swarm.steps_between(self._began_unix_s, self._began_unix_s + for_s)
        swarm.client.interrupt()
        code = swarm.client.ends(END_S)
        evidence = Evidence(swarm, code, swarm.client.leftovers())
        samples, kept = sum(step.samples for step in steps), kept_samples(steps, samples_of(evidence).lost)
        return RunOutcome(evidence, tuple(self._injected), tuple(self._plan), for_s, samples, kept)

    def _watch_until(self, holds: Callable[[], bool]) -> None:
        """Watch until something holds, but not for ever: the verdict says what does not."""
        deadline_s = self._elapsed_s + RECOVERY_S
        self._watch(lambda: holds() or self._elapsed_s >= deadline_s)

    @property
    def _elapsed_s(self) -> float:
        return self.clock.now_s() - self._began_s

    def _watch(self, is_enough: Callable[[], bool]) -> None:
        """Do what is due and see what comes of it. Files and processes tell nobody when they change."""
        pause = threading.Event()
        while not is_enough():
            self.swarm.client.require_running()
            if self._plan and self._elapsed_s >= self._plan[0].at_s and self._inject(self._plan[0]):
                self._plan.pop(0)
            for each in self._injected:
                self._look(each)
            pause.wait(_LOOK_S)

    def _inject(self, planned: PlannedFault) -> bool:
        """Do it; returns False if the victim is not there, because it has not come back from a fault before."""
        strike = begin(KINDS[planned.kind], self.swarm, Random(planned.dice))
        if strike is None:
            return False
        injected = Injected(planned, strike, strike.at_s - self._began_unix_s)
        if planned.held_s:
            injected.held_until_s = self._elapsed_s + planned.held_s
        self._injected.append(injected)
        self._say("chaos.fault", injected)
        return True

    def _look(self, injected: Injected) -> None:
        if injected.held_until_s is not None and self._elapsed_s >= injected.held_until_s:
            self._release(injected)
        if injected.whole_s is not None:
            return
        strike, was_over = injected.strike, injected.is_over
        for slot in strike.hit - injected.seconds.keys():
            if (step := strike.next_step(self.swarm, slot)) is not None:
                injected.seconds[slot] = step.at_s - strike.at_s
        if injected.is_over and strike.healed():
            injected.whole_s = self.clock.unix_s() - strike.at_s
        if injected.is_over and (not was_over or injected.whole_s is not None):
            self._say("chaos.recovered" if injected.whole_s is None else "chaos.whole", injected)

    def _release(self, injected: Injected) -> None:
        if injected.held_until_s is not None:
            injected.held_until_s = None
            injected.strike.undo()

    def _say(self, event: str, injected: Injected) -> None:
        line = {"time": utc_iso(self.clock.unix_s()), "event": event, **injected.as_json()}
        with self.log.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.on_change(injected)


def kept_samples(steps: Iterable[Step], lost: Mapping[int, Collection[StepKey]]) -> float:
    """Return how many samples of these steps the model has kept, each stage by its share.

    Args:
        steps: those that trainers have committed.
        lost: by stage, the steps that it has no part in (`Audit.lost`).
    """
    kept = 0.0
    for step in steps:
        num_lost = sum(step.key in of_stage for of_stage in lost.values())
        kept += step.samples * (1 - num_lost / len(step.path))
    return kept


def not_got_over(outcome: RunOutcome) -> list[str]:
    """Return which faults trainers have not got over, and which were planned and not done."""
    stuck = [
        f"fault {each.planned.number} ({each.strike.victim}): no step of trainers {sorted(each.waiting)}"
        for each in outcome.faults
        if each.waiting
    ]
    return stuck + [f"fault {each.number} ({each.kind}): its victim did not come back" for each in outcome.missed]
