"""The rules of suspicion, each left out on purpose, with the first seed that notices. `test_mutants.py` runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.simulation.membership.world import World

from shoal.swarm.liveness import Activity, Liveness, Pulse


class TrustsItsOwnClock(Liveness[str]):
    """Counts the time in which it has not listened itself as silence of the others."""

    def tick(self, now_s: float, activity: Mapping[str, Activity]) -> Pulse[str]:
        gap_s = now_s - self._last_tick_s
        for link in self._silent_s:
            self._silent_s[link] += max(0.0, gap_s - 2 * self._heartbeat_s)
        return super().tick(now_s, activity)


class NeverSuspects(Liveness[str]):
    """Waits for the frozen for ever."""

    def tick(self, now_s: float, activity: Mapping[str, Activity]) -> Pulse[str]:
        return Pulse(super().tick(now_s, activity).idle, ())


class CountsSilenceTwice(Liveness[str]):
    """Takes half of the deadline for all of it."""

    def tick(self, now_s: float, activity: Mapping[str, Activity]) -> Pulse[str]:
        before = dict(self._silent_s)
        pulse = super().tick(now_s, activity)
        for link, silent_s in self._silent_s.items():
            self._silent_s[link] = silent_s + max(0.0, silent_s - before.get(link, 0.0))
        return pulse


def _make(liveness_class: type[Liveness[str]]) -> Callable[[int], World]:
    return lambda seed: World(seed, liveness_class)


MUTANTS: dict[str, tuple[Callable[[int], World], int]] = {
    mutant.__name__: (_make(mutant), first_seed)
    for mutant, first_seed in (
        (TrustsItsOwnClock, 11),
        (NeverSuspects, 0),
        (CountsSilenceTwice, 0),
    )
}
