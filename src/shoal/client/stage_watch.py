"""Which stages nobody serves while a run goes on, and which had to be restored: for the user, and for who waits.

Stuck((1,)) -> "training has stopped ..." -> said again now and then -> Stuck(()) -> "... training goes on"
                          '-> Restored -> what is lost
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import anyio
import msgspec

from shoal.averaging.coordinator import CoordinatorEvent
from shoal.client.diary import RestoredStage
from shoal.clock import Clock
from shoal.swarm.round_effects import Restored, Stuck

logger = logging.getLogger(__name__)

REPEAT_S = 30.0
"""Between messages while training waits."""


class StageWatch:
    """Follows the stages of one run.

    Attributes:
        missing: stages that have no server now.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        notice: Callable[[str], None],
        note: Callable[[tuple[RestoredStage, ...]], None] = lambda _: None,
        repeat_s: float = REPEAT_S,
    ) -> None:
        """Begin with all stages served.

        Args:
            notice: tells the user something that stays on the screen.
            note: writes down all stages that were restored so far.
            repeat_s: pause between messages while training waits.
        """
        self.missing: tuple[int, ...] = ()
        self._clock = clock
        self._notice = notice
        self._note = note
        self._repeat_s = repeat_s
        self._restored: dict[tuple[int, int], RestoredStage] = {}
        self._changed = anyio.Event()
        self._since_s = 0.0

    def take(self, event: CoordinatorEvent) -> None:
        """Take an event of the rounds."""
        match event:
            case Stuck(stages):
                self._miss(stages)
            case Restored():
                self._restore(event)
            case _:
                pass

    async def incomplete(self) -> None:
        """Wait until some stage is served by nobody."""
        while not self.missing:
            await self._changed.wait()

    async def complete(self) -> None:
        """Wait until every stage is served."""
        while self.missing:
            await self._changed.wait()

    async def run(self) -> None:
        """Say now and then what training waits for, until cancelled."""
        while True:
            await self.incomplete()
            changed = self._changed
            with anyio.move_on_after(self._repeat_s) as timer:
                await changed.wait()
            if timer.cancelled_caught:
                waited_s = round(self._clock.now_s() - self._since_s)
                self._notice(f"no replica serves {_name(self.missing)} since {waited_s} s; training waits for servers")

    @property
    def restored(self) -> tuple[RestoredStage, ...]:
        """What was restored, in the order of the rounds and stages."""
        return tuple(self._restored[key] for key in sorted(self._restored))

    def resume(self, restored: Iterable[RestoredStage]) -> None:
        """Know again what an earlier start of this client has seen restored."""
        self._restored = {(each.in_round, each.stage): each for each in restored}

    def as_json(self) -> list[dict[str, Any]]:
        """Return what was restored, for the summary."""
        return [msgspec.structs.asdict(each) | {"lost_rounds": list(each.lost_rounds)} for each in self.restored]

    def _miss(self, stages: Sequence[int]) -> None:
        before, self.missing = self.missing, tuple(stages)
        if not stages:
            logger.info("training.resumed", extra={"stages": before})
            self._notice(f"{_name(before)} {_is(before)} served again: training goes on")
        elif not before:
            self._since_s = self._clock.now_s()
            logger.warning("training.stopped", extra={"stages": stages})
            self._notice(f"training has stopped: no replica serves {_name(stages)}; it waits for servers")
        else:
            # It stands as it stood; only what it waits for is another.
            logger.info("training.waits", extra={"stages": stages})
            self._notice(f"training waits for servers of {_name(stages)} now")
        self._changed.set()
        self._changed = anyio.Event()

    def _restore(self, event: Restored) -> None:
        stage, basis, in_round = event.stage, event.basis, event.round + 1
        if basis is None:
            self._restored.pop((in_round, stage), None)
            self._note(self.restored)
            self._notice(f"a server has come back with the state of stage {stage}: it stands, nothing of it is lost")
            return
        first, last = basis.round + 1, event.round
        rounds = f"round {last}" if first == last else f"rounds {first} to {last}"
        origin = (
            f"its state after round {basis.round}" if basis.round else "its initial parameters (seed, configuration)"
        )
        self._restored[in_round, stage] = RestoredStage(stage, in_round, (first, last), basis.hashes.parameters)
        self._note(self.restored)
        self._notice(
            f"the state of stage {stage} is lost: no server holds it any more; what it learnt in {rounds} is gone, "
            f"and it starts again from {origin}"
        )


def _is(stages: Sequence[int]) -> str:
    return "are" if len(stages) > 1 else "is"


def _name(stages: Sequence[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
