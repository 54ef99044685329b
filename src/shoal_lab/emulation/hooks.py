"""A role with what it is to pretend: deaths, and the pace of a server's device."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.clock import Clock, SystemClock
from shoal.control.role_start import RoleStart
from shoal.pipeline.device_operations import Operations
from shoal.pipeline.role_hooks import RoleHooks
from shoal.transport.dispatch import Handler
from shoal_lab.emulation.death_points import DeathPoints, DeathWatch
from shoal_lab.emulation.device_pace import DevicePace, emulated_pace
from shoal_lab.emulation.operations import MortalOperations, PacedOperations


class EmulatedRole(RoleHooks):
    """Hooks with deaths, a pace, or both."""

    def __init__(self, clock: Clock, *, deaths: DeathPoints | None = None, pace: DevicePace | None = None) -> None:
        self._clock, self._deaths, self._pace = clock, deaths, pace

    def handlers(self, handlers: Sequence[Handler]) -> Sequence[Handler]:
        """Have somebody watch for the points of deaths before the others see a message."""
        return (DeathWatch(self._deaths), *handlers) if self._deaths else handlers

    def operations(self, plain: Operations) -> Operations:
        """Return them with their pace, and dying in the middle."""
        if self._pace is not None:
            plain = PacedOperations(plain, self._pace, self._clock)
        return MortalOperations(plain, self._deaths) if self._deaths else plain

    def reached(self, point: str, number: int) -> None:
        """Die here if that was to be."""
        if self._deaths is not None:
            self._deaths.reached(point, number)


def emulated(start: RoleStart) -> RoleHooks:
    """Return the hooks of a role of which the section `emulation` says something."""
    emulation = start.config().emulation
    return EmulatedRole(
        SystemClock(),
        deaths=DeathPoints(emulation.deaths_of(start.role, start.index), start.log_path.parent),
        pace=emulated_pace(emulation.call_s, emulation.sample_times_of(start.index)),
    )
