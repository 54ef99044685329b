"""In the middle of a round: a lost trainer's place is taken by its next generation, at the step where it stopped.

    lost -> raise the generation -> start the next trainer, which ends the old one --> its hello
                 '-> fence the old one ------------------'-> release its leases ---------'-> the rest of its steps

No sample is trained twice: what a replica has applied, or may yet apply, counts as done until the record. What is known
of that, and what follows from it, is decided in `swarm/takeover.py` and `swarm/lease.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

import anyio
from anyio.abc import TaskGroup

from shoal.client.data_link import DataLink
from shoal.client.fencing import Fencing
from shoal.client.ledger import Ledger
from shoal.client.reports import Reports
from shoal.client.trainers import TrainerPool
from shoal.errors import ControlError
from shoal.events.trainers import TrainerGivenUp, TrainerNotReplaced, TrainerReplaced
from shoal.ids import PeerId
from shoal.swarm.takeover import Settled, next_number
from shoal.wire.messages.base import StepRange

MAX_PER_ROUND = 3
"""A slot whose trainers are lost more often than this in one round does no more steps in it."""

GoOn = Callable[[int, StepRange], None]
"""Starts a slot's trainer with these steps."""


class Takeover:
    """Replaces the trainers that are lost in a round."""

    def __init__(
        self, *, trainers: TrainerPool, reports: Reports, fencing: Fencing, data: DataLink, ledger: Ledger
    ) -> None:
        self._trainers = trainers
        self._reports = reports
        self._fencing = fencing
        self._data = data
        self._ledger = ledger

    def begin_round(self, round: int, named: Collection[PeerId] | None, connected: Collection[PeerId]) -> None:
        """See `Fencing.begin_round`."""
        self._fencing.begin_round(round, named, connected)

    async def run(
        self,
        slots: frozenset[int],
        steps: StepRange,
        go_on: GoOn,
        idle: frozenset[int] = frozenset(),
    ) -> None:
        """Replace lost trainers until cancelled.

        Args:
            go_on: lets a new trainer do the rest of a slot's steps.
            idle: slots whose trainer runs but was not told of the round, because a client died while it took over.
        """
        taken = Counter[int]()
        busy: set[int] = set()

        async def replace(slot: int, is_there: bool) -> None:
            try:
                await self._replace(slot, steps, go_on, is_there)
            except ControlError as error:
                self._ledger.note(TrainerNotReplaced(slot, str(error)))
                self._reports.excuse(slot)
            busy.discard(slot)
            look(tasks)

        def look(tasks: TaskGroup) -> None:
            for slot in sorted(slots - self._trainers.present.keys() - busy):
                if self._reports.is_done(slot):
                    continue
                if taken[slot] >= MAX_PER_ROUND:
                    self._ledger.note(TrainerGivenUp(slot, taken[slot]))
                    self._reports.excuse(slot)
                    continue
                taken[slot] += 1
                busy.add(slot)
                tasks.start_soon(replace, slot, False)

        async with anyio.create_task_group() as tasks:
            busy.update(idle)
            for slot in sorted(idle):
                tasks.start_soon(replace, slot, True)
            while True:
                look(tasks)
                await self._trainers.changed()

    async def _replace(self, slot: int, steps: StepRange, go_on: GoOn, is_there: bool) -> None:
        """Start the slot's next trainer, unless it is there, and settle the last one's steps meanwhile.

        Raises:
            ControlError: the launcher could not start it, or it did not say hello.
        """
        generation = self._trainers.generations[slot] if is_there else self._trainers.advance(slot)
        settled, next_step = None, steps.first
        async with anyio.create_task_group() as tasks:
            if not is_there:
                tasks.start_soon(self._trainers.start, slot, generation)
            if steps:
                settled = await self._fencing.settle(slot, generation)
        # The launcher has ended the last trainer by now: what is free, nobody trains any more.
        if settled is not None:
            next_step = await self._release(slot, generation, steps, settled)
        if not await self._trainers.arrived(slot):
            raise ControlError(f"trainer {slot} was started but did not report; see its log")
        go_on(slot, StepRange(next_step, steps.stop))

    async def _release(self, slot: int, generation: int, steps: StepRange, settled: Settled) -> int:
        """Free what the trainer before `generation` has surely not trained; return the number to go on with."""
        released = await self._data.release(slot, generation - 1, settled)
        last = self._reports.last_number(slot)
        next_step = next_number(settled, steps, last, released.next_step, is_known=released.is_known)
        self._ledger.note(TrainerReplaced(slot, generation, next_step))
        return next_step
