"""As what pseudo-gradients travel in the next round, with `averaging_compression = auto`. Pure.

    round r: how long it was trained, its payloads, its links --> record r names a codec --> round r + 1

The finest codec is chosen whose payload gets over the slowest link of its stage in a small share of the round's time.
To go back to a finer one there has to be room, or measurements that vary would change the codec with every round.

The record says it, as it says which checkpoints are wanted: so all members encode alike, also after a takeover, and a
replay knows what they have encoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from shoal.config.diloco import DilocoConfig
from shoal.ids import PeerId
from shoal.wire.messages.round import Join

BLOCKING_SHARE = 0.05
"""Of a round's time, that may go by until its payloads are there."""
ROOM = 2.0
"""A finer codec must get along with so many times less."""


@dataclass(frozen=True, slots=True)
class CodecRule:
    """The rule of a run.

    Attributes:
        bytes_per_value: of each codec that may be chosen, the finest first.
        hidden_share: of a round, in which steps go on while payloads travel.
    """

    bytes_per_value: Mapping[str, float]
    hidden_share: float = 0.0

    @classmethod
    def of(cls, diloco: DilocoConfig) -> Self | None:
        """As a user has configured it; None: the codec is always the same."""
        choices = diloco.compression_choices
        return cls(choices, diloco.overlap_steps / diloco.inner_steps) if choices else None

    def chosen(self, before: str, joins: Mapping[PeerId, Join], trained_s: float | None) -> str:
        """Return the codec of the next round.

        Args:
            before: that of this round, as the record before names it.
            joins: of the members of all stages.
            trained_s: how long the round was trained; None: not known.
        """
        names = list(self.bytes_per_value)
        place = names.index(before) if before in names else 0
        links = [*_links(joins)]
        if trained_s is None or not links:
            return names[place]
        limit_s = (BLOCKING_SHARE + self.hidden_share) * trained_s
        for candidate, name in enumerate(names):
            size = self.bytes_per_value[name] / self.bytes_per_value[names[place]]
            takes_s = max(round_trip_s + size * payload_s for round_trip_s, payload_s in links)
            if takes_s * (ROOM if candidate < place else 1.0) <= limit_s:
                return name
        return names[-1]


def _links(joins: Mapping[PeerId, Join]) -> Iterator[tuple[float, float]]:
    """Of each link that its receiver has measured, the round trip, and how long this round's payload takes over it."""
    for receiver, join in joins.items():
        for link in join.links:
            sender = joins.get(link.peer)
            if sender is None or sender.payload is None or sender.stage != join.stage or link.peer == receiver:
                continue
            if link.is_local:
                yield 0.0, 0.0
            elif link.bandwidth_mbit > 0:
                yield link.round_trip_ms * 1e-3, sender.payload.num_bytes * 8e-6 / link.bandwidth_mbit
