"""Trainers that have said hello, for tests of what else a client does."""

from __future__ import annotations

from shoal.ids import PeerId
from shoal.swarm.trainer_slots import TrainerSlots
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import TrainerHello


def present_trainers(num_slots: int) -> TrainerSlots:
    """Return slots 0, 1, ... whose trainers are peers T0, T1, ..."""
    slots = TrainerSlots(start_timeout_s=5.0)
    for start in slots.want(num_slots):
        peer = PeerId(f"T{start.slot}")
        slots.receive(peer, TrainerHello(start.slot, start.generation, Hop(peer, ("memory:T",))), 0.0)
    return slots
