"""What users tell a run to do, from this host or from any other with the swarm's key. A `transport.dispatch.Handler`.

    Steer -> the client has the run --> noted in the ledger, done -> Steered
                                |   '-> it is so already ------> Steered(already)
                                '-> it has not ----------------> Steered(refused)

    pause, resume --> noted in the ledger, and so known to the next start of this client
                 '--> the data server leases nothing, or leases again
                 '--> the boundary of the round, and the screens

In a pause what is under way ends as always: steps that have their batch, an average, an evaluation. Nobody leaves, and
trainers wait for their next batch as long as it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.client.checkpoints import Checkpointing
from shoal.client.data_link import DataLink
from shoal.client.ledger import Ledger
from shoal.client.reports import Reports
from shoal.client.succession import Succession
from shoal.events.run import CheckpointAsked, RunPaused, RunResumed, RunStopped
from shoal.runtime.waking import Signal
from shoal.transport.base import Endpoint, Received
from shoal.transport.dispatch import Handler
from shoal.wire.messages.control import MAX_SAID_CHARS, Order, Steer, Steered


@dataclass(eq=False, repr=False)
class Steering(Handler):
    """The client's side of `shoal stop`, `pause`, `resume-run` and `checkpoint`.

    Attributes:
        succession: says whether this client has the run, and does not wait for its turn.
        stop: ends the run on this host, and so everywhere.
    """

    endpoint: Endpoint
    ledger: Ledger
    pausing: Pausing
    checkpointing: Checkpointing
    succession: Succession
    stop: Callable[[], None]

    def receive(self, event: Received) -> bool:
        """Take an order; whoever reaches this endpoint is a member of the swarm, or its user on this host."""
        order = event.message
        if not isinstance(order, Steer):
            return False
        refused = self._refusal(order.what)
        already = not refused and not self._obey(order)
        answer = Steered(order.nonce, self.ledger.totals.progress.round, refused, already)
        self.endpoint.post(event.peer, answer)
        return True

    def _refusal(self, what: Order) -> str:
        if not self.succession.has_turn:
            return _waits(what)
        if what == "checkpoint" and not self.checkpointing.has_mirrors:
            return "no mirror is there to write it: run `shoal mirror`, or start without --no-param-mirror-enable"
        return ""

    def _obey(self, order: Steer) -> bool:
        """Do it; return False if it is so already."""
        match order.what:
            case "stop":
                self.ledger.note(RunStopped(order.by))
                self.stop()
                return True
            case "pause":
                return self.pausing.pause(order.by)
            case "resume":
                return self.pausing.resume(order.by)
            case "checkpoint" if self.checkpointing.is_asked:
                return False
            case "checkpoint":
                self.ledger.note(CheckpointAsked(order.by))
                self.checkpointing.ask()
                return True


def _waits(what: Order) -> str:
    """Say why this client does not do it."""
    reason = "this host's client waits for its turn, another host has the run: give --initial-peers to reach that one"
    return (f"{reason}; Ctrl-C ends what runs here" if what == "stop" else reason)[:MAX_SAID_CHARS]


class Pausing:
    """Whether the run is paused. Only this pauses it.

    Attributes:
        changed: notified when it is paused or resumed.
    """

    def __init__(self, ledger: Ledger, data: DataLink, reports: Reports) -> None:
        """Go on as the ledger says: it knows what earlier starts of this client were told."""
        self.changed = Signal()
        self._ledger = ledger
        self._data = data
        self._reports = reports

    @property
    def is_paused(self) -> bool:
        """Whether no step may begin now."""
        return self._ledger.totals.time.is_paused

    @property
    def by(self) -> str:
        """Who has paused it; empty while it is not paused."""
        return self._ledger.totals.paused_by if self.is_paused else ""

    def pause(self, by: str) -> bool:
        """Pause the run; returns False if it is paused already.

        Raises:
            StorageError: the next start of this client could not know it.
        """
        if self.is_paused:
            return False
        self._ledger.note(RunPaused(by, self._ledger.now_s()))
        self._tell()
        return True

    def resume(self, by: str) -> bool:
        """Let the run go on; returns False if it is not paused. Raises as `pause` does."""
        if not self.is_paused:
            return False
        self._ledger.note(RunResumed(by, self._ledger.now_s()))
        self._tell()
        return True

    def _tell(self) -> None:
        self._data.pause(paused=self.is_paused)
        self.changed.notify()
        self._reports.tell_swarm()
