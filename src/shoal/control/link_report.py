"""What a role has measured of its links, in its log: a server's at each round boundary, everybody's at the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from shoal.events.base import Event, emit
from shoal.ids import PeerId
from shoal.transport.base import Endpoint
from shoal.transport.link_meter import LinkEstimate

logger = logging.getLogger(__name__)


def log_links(endpoint: Endpoint, event: Callable[[dict[str, dict[str, float]]], Event]) -> None:
    """Log what is known of the links with all peers, if anything.

    Args:
        event: is made of what is known.
    """
    links = link_fields(endpoint.links())
    if links:
        emit(logger, event(links))


def link_fields(links: Mapping[PeerId, LinkEstimate]) -> dict[str, dict[str, float]]:
    """Return what is known, by peer, in the units in which people think of links."""
    known: dict[str, dict[str, float]] = {}
    for peer, link in links.items():
        values: dict[str, float] = {}
        if link.round_trip_s is not None:
            values["round_trip_ms"] = round(link.round_trip_s * 1e3, 3)
        if link.receive_bytes_per_s is not None:
            values["receive_mbit_per_s"] = round(link.receive_bytes_per_s * 8 / 1e6, 1)
        if values:
            known[peer] = values
    return known
