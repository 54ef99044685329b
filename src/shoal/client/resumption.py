"""What an earlier start of a client has noted since the round began, counted again."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.client.chain_watch import ChainWatch
from shoal.client.counters import Counted
from shoal.client.diary import ChainsLeft, ClientStarted, Counts, Event, Lost, ServersMoved, StagesRestored
from shoal.client.reassignment import Reassignment
from shoal.client.stage_watch import StageWatch
from shoal.client.watch import Watch
from shoal.ids import PeerId
from shoal.wire.messages.control import StepReport


def count_again(
    events: Iterable[Event],
    me: PeerId,
    counted: Counted,
    watch: Watch,
    stages: StageWatch,
    chains: ChainWatch,
    reassignment: Reassignment,
) -> None:
    """Tell each part of a client what it has noted; what the trainers have reported is for `Reports` alone."""
    for event in events:
        match event:
            case StepReport():
                watch.step_committed(event)
            case Lost(kind, slots, at_s):
                watch.failovers.lost(kind, slots, at_s)
            case Counts(peer, counts):
                counted.take(peer, counts)
            case ClientStarted():
                counted.started_again(me)
            case StagesRestored(restored):
                stages.resume(restored)
            case ChainsLeft(left):
                chains.resume(left)
            case ServersMoved(number):
                reassignment.moved = number
            case _:
                pass
