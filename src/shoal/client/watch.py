"""Corrects the client's view by what its connections show, and notes what broke and when steps went on.

A `transport.dispatch.Handler` that takes no message: it only looks at them, so it comes first.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.client.failovers import Failovers
from shoal.client.trainers import TrainerPool
from shoal.control.membership import Membership
from shoal.ids import PeerId
from shoal.transport.base import Received
from shoal.wire.messages.control import StepReport


class Watch:
    """Sees every event of the client's endpoint before the others do.

    Attributes:
        failovers: what broke.
        seconds_to_first_step: from the launch to the first committed step, None before it.
    """

    def __init__(
        self,
        *,
        membership: Membership,
        trainers: TrainerPool,
        slots_of_replica: Callable[[PeerId], frozenset[int]],
        age_s: Callable[[], float],
    ) -> None:
        """Begin to watch.

        Args:
            membership: told of every lost connection.
            trainers: whose reports are believed.
            slots_of_replica: the slots whose home pipeline runs over a peer.
            age_s: seconds since the run was launched.
        """
        self.failovers = Failovers()
        self.seconds_to_first_step: float | None = None
        self._membership = membership
        self._trainers = trainers
        self._slots_of_replica = slots_of_replica
        self._age_s = age_s

    def receive(self, event: Received) -> bool:
        """Look at step reports; takes nothing."""
        report = event.message
        if isinstance(report, StepReport) and self._trainers.slot_of(event.peer) == report.slot:
            now_s = self._age_s()
            if self.seconds_to_first_step is None:
                self.seconds_to_first_step = now_s
            self.failovers.step_committed(report.slot, now_s)
        return False

    def peer_lost(self, peer: PeerId) -> None:
        """A connection has ended, which beats whatever the registry says."""
        if (slot := self._trainers.slot_of(peer)) is not None:
            self.failovers.lost("trainer", {slot}, self._age_s())
        elif self._membership.view.replica(peer) is not None:
            self.failovers.lost("server", self._slots_of_replica(peer), self._age_s())
        self._membership.lost(peer)
