"""A coordinator of rounds as its client waits for it, for tests of rounds without a client."""

from __future__ import annotations

from shoal.averaging.coordinator import RoundCoordinator, RoundOutcome
from shoal.errors import RoundAborted
from shoal.swarm.round_effects import RoundReady


async def lead(coordinator: RoundCoordinator) -> RoundReady:
    """Become the coordinator; return from which record to go on."""
    coordinator.stand()
    return await ready(coordinator, 0)


async def finish_round(coordinator: RoundCoordinator, round: int) -> RoundOutcome:
    """Wait until the record of a round stands."""
    return coordinator.outcome(await ready(coordinator, round))


async def ready(coordinator: RoundCoordinator, round: int) -> RoundReady:
    """Wait until a round's record, or a later one, can be trained on; raise RoundAborted if others coordinate."""
    while (found := coordinator.ready) is None or found.tip.round < round:
        if not coordinator.leads:
            raise RoundAborted("another client coordinates the run")
        await coordinator.changed()
    return found
