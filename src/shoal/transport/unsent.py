"""What waits at an endpoint for peers that do not read: bounded, of each and of all together. Decisions only.

Only messages count, not their tensors: their memory is there anyway, and who sends many of them waits for `drained`. An
answer is made for whoever asks, as often as he asks.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.ids import PeerId
from shoal.transport.holdings import Holdings


class Unsent:
    """The messages that peers have not taken.

    Of a peer the number is exact whenever something is posted to it; later it may have taken some. So all are looked at
    again before anybody is lost for what they hold together.
    """

    def __init__(
        self,
        max_each_bytes: int,
        max_total_bytes: int,
        held_bytes: Callable[[PeerId], int],
        source_of: Callable[[PeerId], str],
    ) -> None:
        """Start without any.

        Args:
            held_bytes: returns how much waits for a peer now.
            source_of: returns the host at the other end of a peer's connection.
        """
        self._max_each_bytes = max_each_bytes
        self._max_total_bytes = max_total_bytes
        self._held_bytes_of = held_bytes
        self._held = Holdings(source_of)

    def posted(self, peer: PeerId, num_bytes: int) -> tuple[PeerId, str] | None:
        """Count a message that has to wait.

        Returns:
            The peer that is to be lost for it, and why; None: there is room. Where all together hold too much, it is
            the one that holds most, of the source that holds most: who comes under many names loses his own.
        """
        held_bytes = self._held_bytes_of(peer)
        # A message for who has taken all before is taken, however long it is.
        if held_bytes and held_bytes + num_bytes > self._max_each_bytes:
            return peer, f"{held_bytes} bytes of messages wait for it, and no more than {self._max_each_bytes} may"
        self._held.note(peer, held_bytes + num_bytes)
        if self._held.total_bytes <= self._max_total_bytes:
            return None
        for other in self._held:
            if other != peer:
                self._held.note(other, self._held_bytes_of(other))
        if self._held.total_bytes <= self._max_total_bytes:
            return None
        most = self._held.most()
        all_hold = (
            f"{self._held.total_bytes} bytes of messages wait for all peers, "
            f"and no more than {self._max_total_bytes} may"
        )
        return most, f"{all_hold}: {self._held[most]} of them for this one"
