"""How much memory an endpoint holds for each of its peers, and who gives way if it is too much. Decisions only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from shoal.ids import PeerId


class Holdings:
    """Of one kind.

    Attributes:
        total_bytes: for all peers together.
    """

    def __init__(self, source_of: Callable[[PeerId], str]) -> None:
        """Start without any.

        Args:
            source_of: returns the host at the other end of a peer's connection.
        """
        self.total_bytes = 0
        self._source_of = source_of
        self._bytes: dict[PeerId, int] = {}

    def __iter__(self) -> Iterator[PeerId]:
        """Go over those that there is any for, as they are now."""
        return iter(list(self._bytes))

    def __getitem__(self, peer: PeerId) -> int:
        """Return how many bytes there are for a peer."""
        return self._bytes.get(peer, 0)

    def note(self, peer: PeerId, num_bytes: int) -> None:
        """From now on there are so many bytes for a peer."""
        self.total_bytes += num_bytes - self._bytes.pop(peer, 0)
        if num_bytes:
            self._bytes[peer] = num_bytes

    def most(self) -> PeerId:
        """Return the peer with most, of the source with most: who comes under many names loses his own."""
        of_source: Counter[str] = Counter()
        for peer, num_bytes in self._bytes.items():
            of_source[self._source_of(peer)] += num_bytes
        return max(self._bytes, key=lambda peer: (of_source[self._source_of(peer)], self._bytes[peer]))
