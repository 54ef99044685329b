"""What a trainer is told when it starts."""

from __future__ import annotations

from shoal.config.start import RoleStart
from shoal.wire.messages.base import Hop


class TrainerSpec(RoleStart, frozen=True, kw_only=True):
    """Start parameters of a trainer.

    Attributes:
        slot: The pipeline that is its home, 0-based; also its number in step ids.
        generation: Counts the starts of this slot's trainer in the run, from 1.
        client: The one that started it.
        data_server: Of this host.
    """

    slot: int
    generation: int
    client: Hop
    data_server: Hop


class BaselineSpec(RoleStart, frozen=True, kw_only=True):
    """Start parameters of the plain loop that runs beside a swarm.

    Attributes:
        data_server: Of this host.
        monitor: Gets the losses.
        device: Torch device, resolved.
    """

    data_server: Hop
    monitor: Hop
    device: str
