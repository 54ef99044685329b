"""Which chains of records were left for another one: for the user, for the log, and for the summary.

ChainLeft -> "two sides of the swarm have met ..." -> noted in the diary -> summary.json
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from shoal.averaging.coordinator import CoordinatorEvent
from shoal.client.diary import LeftChain
from shoal.swarm.round_effects import ChainLeft


class ChainWatch:
    """Follows what becomes of the chains of one run."""

    def __init__(
        self, *, notice: Callable[[str], None], note: Callable[[tuple[LeftChain, ...]], None] = lambda _: None
    ) -> None:
        """Know of one chain.

        Args:
            notice: tells the user something that stays on the screen.
            note: writes down all chains that were left so far.
        """
        self._notice = notice
        self._note = note
        self._left: dict[str, LeftChain] = {}

    @property
    def left(self) -> tuple[LeftChain, ...]:
        """The chains that were left, in the order in which they were met."""
        return tuple(self._left.values())

    def resume(self, left: Iterable[LeftChain]) -> None:
        """Know again which ones an earlier start of this client has seen left."""
        self._left = {each.record: each for each in left}

    def as_json(self) -> list[dict[str, Any]]:
        """Return the chains that were left, for the summary."""
        return [msgspec.structs.asdict(each) for each in self.left]

    def take(self, event: CoordinatorEvent) -> None:
        """Take an event of the rounds."""
        if not isinstance(event, ChainLeft) or event.left.hash in self._left:
            return
        left = LeftChain(event.left.round, event.left.hash, event.common_round, event.num_samples, event.num_freed)
        self._left[left.record] = left
        self._note(self.left)
        first, last = left.common_round + 1, left.base_round
        lost = f"round {last}" if first == last else f"rounds {first} to {last}"
        self._notice(
            f"two sides of the swarm, which have gone on apart after round {left.common_round}, have met: the run goes "
            f"on from record {event.kept.round} ({event.kept.hash[:8]}); what the other side trained in {lost} is lost "
            f"({left.record[:8]}), and {left.samples_freed} samples that it alone has used are trained on again"
        )
