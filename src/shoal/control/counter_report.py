"""What each role measures on its way out: to the client while the role runs and when it ends, then into its own log.

At the end of a run the client asks the roles that still run for what they have counted since (`transport.dispatch`).
What it has measured of its links a role logs as well, a server at each round boundary.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager

import anyio

from shoal.clock import Clock, wait_for_tick
from shoal.events.base import Event, emit
from shoal.events.links import RoleCounters, RoleLinks
from shoal.ids import PeerId
from shoal.swarm.view import PeerLabel, SwarmView
from shoal.transport.base import Endpoint
from shoal.transport.dispatch import measured
from shoal.transport.link_meter import LinkEstimate
from shoal.wire.messages.base import Hop

logger = logging.getLogger(__name__)

INTERVAL_S = 2.0
SELDOM_S = 6.0
"""Between two tries to reach a client that nobody announces: it may be cut off, and for longer than records live."""


@asynccontextmanager
async def counters_reported(
    endpoint: Endpoint, label: PeerLabel, client: Callable[[], Hop | None], clock: Clock
) -> AsyncGenerator[None]:
    """Report what this process measures while the context is open and when it is left, and log its counters then.

    Args:
        endpoint: its registry holds all that the process measures.
        label: what the process is called.
        client: returns where the run's client is; None while that is not known. Only dialling needs the address.
    """

    def report(to: Hop | None) -> None:
        if to is None:
            return
        if to.addresses:
            endpoint.introduce(to)
        endpoint.post(to.peer, measured(endpoint, label))

    async def report_on() -> None:
        lag = endpoint.metrics.histogram("process.loop_lag_seconds")
        known: Hop | None = None
        for turn in itertools.count():
            lag.observe(await wait_for_tick(clock, INTERVAL_S))
            announced = client()
            known = announced or known
            if announced is not None or not turn % round(SELDOM_S / INTERVAL_S):
                report(known)

    async with counters_logged(endpoint), anyio.create_task_group() as tasks:
        tasks.start_soon(report_on)
        try:
            yield
        finally:
            # What is posted is written when the endpoint is closed, if the client is still there.
            report(client())
            tasks.cancel_scope.cancel()


def client_hop(view: SwarmView) -> Hop | None:
    """Return where the client is, by what the swarm says."""
    return view.clients[0].hop if view.clients else None


@asynccontextmanager
async def counters_logged(endpoint: Endpoint) -> AsyncGenerator[None]:
    """Leave the counters and links of this process in its log when this context is left, however it is."""
    try:
        yield
    finally:
        emit(logger, RoleCounters(endpoint.metrics.counts()))
        log_links(endpoint, RoleLinks)


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
