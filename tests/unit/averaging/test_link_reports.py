"""From the endpoint's measurements to what a join says."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.averaging.link_reports import UNKNOWN_MBIT, link_reports
from shoal.ids import PeerId
from shoal.transport.link_meter import LinkEstimate
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork
from shoal.wire.messages.round import LinkReport

NEAR, FAR, NEW, SLOW = (PeerId(name) for name in ("near", "far", "new", "slow"))


class Measured(MemoryEndpoint):
    """Knows its links, and that one peer is on its host."""

    def links(self) -> Mapping[PeerId, LinkEstimate]:
        return {
            SLOW: LinkEstimate(0.2, 1e6),
            NEAR: LinkEstimate(0.0001, 1e9),
            FAR: LinkEstimate(0.1),
            NEW: LinkEstimate(),
        }

    def process_of(self, peer: PeerId) -> int | None:
        return 7 if peer == NEAR else None


def test_a_join_says_what_is_known_of_the_links_and_nothing_of_the_others() -> None:
    assert link_reports(Measured(MemoryNetwork(), PeerId("me"))) == (
        LinkReport(FAR, 100.0, UNKNOWN_MBIT),
        LinkReport(NEAR, 0.0, 0.0, True),
        LinkReport(SLOW, 200.0, 8.0),
    )
