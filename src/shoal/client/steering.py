"""What users tell a run to do, from this host or from any other with the swarm's key. A `transport.dispatch.Handler`.

Steer -> the client has the run --> noted in the ledger, done -> Steered
                            |   '-> it is so already ------> Steered(already)
                            '-> it has not ----------------> Steered(refused)
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.client.checkpointing import Checkpointing
from shoal.client.ledger import Ledger
from shoal.client.pausing import Pausing
from shoal.client.succession import Succession
from shoal.events.run import CheckpointAsked, RunStopped
from shoal.ids import PeerId
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.control import MAX_SAID_CHARS, Order, Steer, Steered


class Steering:
    """The client's side of `shoal stop`, `pause`, `resume-run` and `checkpoint`."""

    def __init__(
        self,
        endpoint: Endpoint,
        ledger: Ledger,
        pausing: Pausing,
        checkpointing: Checkpointing,
        succession: Succession,
        *,
        stop: Callable[[], None],
    ) -> None:
        """Take orders.

        Args:
            succession: says whether this client has the run, and does not wait for its turn.
            stop: ends the run on this host, and so everywhere.
        """
        self._endpoint = endpoint
        self._ledger = ledger
        self._pausing = pausing
        self._checkpointing = checkpointing
        self._succession = succession
        self._stop = stop

    def receive(self, event: Received) -> bool:
        """Take an order; whoever reaches this endpoint is a member of the swarm, or its user on this host."""
        order = event.message
        if not isinstance(order, Steer):
            return False
        refused = self._refusal(order.what)
        already = not refused and not self._obey(order)
        answer = Steered(order.nonce, self._ledger.totals.progress.round, refused, already)
        self._endpoint.post(event.peer, answer)
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """Whoever has told something has gone."""

    def _refusal(self, what: Order) -> str:
        if not self._succession.has_turn:
            return _waits(what)
        if what == "checkpoint" and not self._checkpointing.has_mirrors:
            return "no mirror is there to write it: run `shoal mirror`, or start without --no-param-mirror-enable"
        return ""

    def _obey(self, order: Steer) -> bool:
        """Do it; return False if it is so already."""
        match order.what:
            case "stop":
                self._ledger.note(RunStopped(order.by))
                self._stop()
                return True
            case "pause":
                return self._pausing.pause(order.by)
            case "resume":
                return self._pausing.resume(order.by)
            case "checkpoint" if self._checkpointing.is_asked:
                return False
            case "checkpoint":
                self._ledger.note(CheckpointAsked(order.by))
                self._checkpointing.ask()
                return True


def _waits(what: Order) -> str:
    """Say why this client does not do it."""
    reason = "this host's client waits for its turn, another host has the run: give --initial-peers to reach that one"
    return (f"{reason}; Ctrl-C ends what runs here" if what == "stop" else reason)[:MAX_SAID_CHARS]
