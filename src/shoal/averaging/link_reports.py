"""What a replica says of its links in its join: the endpoint's measurements, for the order of the ring."""

from __future__ import annotations

from shoal.transport.base import Endpoint
from shoal.wire.messages.round import LinkReport

UNKNOWN_MBIT = 1e6
"""For a link whose rate is unknown yet: only its round trip counts then."""


def link_reports(endpoint: Endpoint) -> tuple[LinkReport, ...]:
    """Return what is known of the links with all peers, those of this host included."""
    reports: list[LinkReport] = []
    for peer, link in sorted(endpoint.links().items()):
        if endpoint.process_of(peer) is not None:
            reports.append(LinkReport(peer, 0.0, 0.0, is_local=True))
        elif link.round_trip_s is not None:
            rate = UNKNOWN_MBIT if link.receive_bytes_per_s is None else link.receive_bytes_per_s * 8e-6
            reports.append(LinkReport(peer, link.round_trip_s * 1e3, rate))
    return tuple(reports)
