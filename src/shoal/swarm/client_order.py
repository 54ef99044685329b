"""Which clients come before this one, and when it is its turn: a pure machine.

    announced -> dialled -> up ... lost -> dialled now and then --(PATIENCE_S, and announced by nobody)--> gone
                             ^                    |
                             '--------------------'   its launcher has started it again

The client that trains comes first, then those that wait, in the order in which they have joined.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.ids import PeerId
from shoal.swarm.view import ClientPeer
from shoal.wire.messages.base import Hop

PATIENCE_S = 1.0
"""A client that was killed alone is back sooner, unless its machine is busy; then it steps down."""
REDIAL_S = 0.2


@dataclass(slots=True)
class _Ahead:
    """A client before this one; `since_s`: it cannot be reached since then, None: it can."""

    hop: Hop
    since_s: float | None
    dial_at_s: float
    is_announced: bool = True


class ClientOrder:
    """The clients before this one, as far as it knows.

    Attributes:
        wake_at_s: when to call `tick` if no event comes before (monotonic), after each of which it is to be called.
    """

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._ahead: dict[PeerId, _Ahead] = {}
        self.wake_at_s = math.inf

    @property
    def reachable(self) -> tuple[PeerId, ...]:
        """Those that are there."""
        return tuple(peer for peer, each in self._ahead.items() if each.since_s is None)

    def announced(self, clients: Iterable[ClientPeer], now_s: float) -> None:
        """These are all that are announced now; one that was lost is among them if it has announced itself since."""
        by_peer = {client.peer: client for client in clients}
        mine = by_peer.get(self._me)
        for each in self._ahead.values():
            each.is_announced = False
        for peer, client in by_peer.items():
            if peer == self._me or (mine is not None and client.place > mine.place):
                self._ahead.pop(peer, None)
                continue
            known = self._ahead.setdefault(peer, _Ahead(client.hop, now_s, now_s))
            known.hop, known.is_announced = client.hop, True

    def up(self, peer: PeerId) -> None:
        """There is a connection."""
        if peer in self._ahead:
            self._ahead[peer].since_s = None

    def lost(self, peer: PeerId, now_s: float) -> None:
        """The connection has ended, or none could be made."""
        if peer in self._ahead:
            each = self._ahead[peer]
            each.since_s = now_s if each.since_s is None else each.since_s
            each.dial_at_s = now_s + REDIAL_S

    def tick(self, now_s: float) -> list[Hop]:
        """Those that are to be dialled now; each is dialled again only when that has failed."""
        lost = [(each.since_s, each) for each in self._ahead.values() if each.since_s is not None]
        due = [each for _, each in lost if each.dial_at_s <= now_s]
        for each in due:
            each.dial_at_s = math.inf
        times = [each.dial_at_s for _, each in lost] + [since_s + PATIENCE_S for since_s, _ in lost]
        self.wake_at_s = min((time_s for time_s in times if time_s > now_s), default=math.inf)
        return [each.hop for each in due]

    def is_gone(self, peer: PeerId, now_s: float) -> bool:
        """Whether a client before this one is known, cannot be reached for a while, and does not announce itself."""
        each = self._ahead.get(peer)
        return each is not None and _is_gone(each, now_s)

    def gone_s(self, peer: PeerId, now_s: float) -> float:
        """Return for how long a client before this one cannot be reached; 0 if it is not known, or can be."""
        each = self._ahead.get(peer)
        return 0.0 if each is None or each.since_s is None else now_s - each.since_s

    def is_turn(self, now_s: float) -> bool:
        """Whether every client before this one that is known is gone."""
        return all(_is_gone(each, now_s) for each in self._ahead.values())


def _is_gone(ahead: _Ahead, now_s: float) -> bool:
    return ahead.since_s is not None and not ahead.is_announced and ahead.since_s + PATIENCE_S <= now_s
