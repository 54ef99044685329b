"""Which peers of the DHT to ask again whether they are there. Pure.

hivemind takes a peer out of its routing table when it does not answer once, and asks only those that are in it. After
hosts were cut off from each other nobody would have anybody of the other side in its table, so the two sides would not
find each other again. So each node remembers whom it knew, and asks them now and then.
"""

from __future__ import annotations

from collections.abc import Collection

FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 15.0
"""Between two questions to a peer that does not answer; each is twice the one before."""
MAX_KNOWN = 64
MAX_AT_ONCE = 3


class LostPeers:
    """Remembers the peers of one node by their names."""

    def __init__(self) -> None:
        # The time of the next question and the pause after it; None while the peer is present. The newest come last.
        self._known: dict[str, tuple[float, float] | None] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nobody was ever known."""
        return not self._known

    def due(self, present: Collection[str], now_s: float) -> list[str]:
        """Take note of who is present, and return who was, is not, and is to be asked now."""
        for peer in present:
            self._known.pop(peer, None)
            self._known[peer] = None
        for peer in list(self._known)[:-MAX_KNOWN]:
            del self._known[peer]
        lost = {peer: search or (now_s, FIRST_PAUSE_S) for peer, search in self._known.items() if peer not in present}
        asked = sorted((peer for peer in lost if lost[peer][0] <= now_s), key=lambda peer: lost[peer])[:MAX_AT_ONCE]
        for peer in asked:
            pause_s = lost[peer][1]
            lost[peer] = (now_s + pause_s, min(2 * pause_s, MAX_PAUSE_S))
        self._known |= lost
        return asked
