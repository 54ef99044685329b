"""Corrects the client's view by what its connections show, and notes what broke and when steps went on.

A `transport.dispatch.Handler` that takes no message: it only looks at them, so it comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shoal.client.diary import Lost
from shoal.client.failovers import Failovers
from shoal.client.loss_notices import LossNotices
from shoal.client.trainers import TrainerPool
from shoal.clock import Clock
from shoal.control.membership import Membership
from shoal.ids import PeerId
from shoal.transport.base import Received
from shoal.wire.messages.control import StepReport


class Watch:
    """Sees every event of the client's endpoint before the others do.

    Attributes:
        seconds_to_first_step: from the launch to the first committed step; None before it.
    """

    def __init__(
        self,
        *,
        membership: Membership,
        trainers: TrainerPool,
        slots_of_replica: Callable[[PeerId], frozenset[int]],
        age_s: Callable[[], float],
        clock: Clock,
        notices: LossNotices,
        note: Callable[[Lost], None] = lambda _: None,
        is_moving: Callable[[PeerId], bool] = lambda _: False,
        dial: Callable[[PeerId], None] = lambda _: None,
    ) -> None:
        """Begin to watch.

        Args:
            trainers: only their reports count.
            slots_of_replica: returns the slots whose home pipeline runs over a peer.
            age_s: returns the seconds since the run was launched.
            note: writes the loss down.
            dial: tries once to connect with a server that was lost. This process may only have been frozen itself;
                without a connection the view ignores the server until its next announcement, seconds later.
            is_moving: whether a server is on its way to another stage; it then ends its connections but is not lost.
        """
        self.failovers = Failovers()
        self.seconds_to_first_step: float | None = None
        self.notices = notices
        self._note = note
        self._clock = clock
        self._membership = membership
        self._trainers = trainers
        self.slots_of_replica = slots_of_replica
        self._age_s = age_s
        self._is_moving = is_moving
        self._dial = dial

    def receive(self, event: Received) -> bool:
        """Look at step reports; takes nothing."""
        report = event.message
        if isinstance(report, StepReport) and self._trainers.slot_of(event.peer) == report.slot:
            self.step_committed(report)
        return False

    def step_committed(self, report: StepReport) -> None:
        """A trainer has committed a step; of one that is reported again nothing new follows."""
        at_s = self._age_s() - (self._clock.now_s() - report.at_s)
        if self.seconds_to_first_step is None:
            self.seconds_to_first_step = round(at_s, 3)
        self.failovers.step_committed(report.slot, at_s)
        self.notices.step_committed(report.slot, report.at_s)

    def lost(self, kind: str, slots: Iterable[int], at_s: float | None = None) -> None:
        """A process of this kind was lost, now or so many seconds after the launch, and these slots needed it."""
        loss = Lost(kind, tuple(slots), self._age_s() if at_s is None else at_s)
        self._note(loss)
        self.failovers.lost(loss.kind, loss.slots, loss.at_s)

    def data_server_lost(self) -> None:
        """The data server is lost: all trainers need it."""
        self.lost("data_server", self._trainers.present)
        self.notices.lost("the data server", self._trainers.present)

    def peer_lost(self, peer: PeerId) -> None:
        """A connection has ended, which beats whatever the registry says."""
        if (slot := self._trainers.slot_of(peer)) is not None:
            self.lost("trainer", {slot})
            self.notices.lost(f"trainer {slot}", {slot}, peer)
        server = self._membership.view.replica(peer)
        if server is not None and not self._is_moving(peer):
            slots = self.slots_of_replica(peer)
            self.lost("server", slots)
            others = [other for other in self._membership.view.by_stage(server.stage) if other.peer != peer]
            self.notices.server_lost(server, others, slots)
        self._membership.lost(peer)
        if server is not None:
            self._dial(peer)
