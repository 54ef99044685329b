"""Each role's counters on their way out: to the client while the role runs and when it ends, then into its own log.

A report is a `Metrics` message whose names begin with `COUNTERS`: the values only grow, and the client sums them up
over its peers. Nothing is sent while nothing has changed. At the end of a run, when roles still run that have counted
more since their last report, the client asks (`transport.dispatch`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio

from shoal.clock import Clock
from shoal.control.link_report import log_links
from shoal.events.base import emit
from shoal.events.links import RoleCounters, RoleLinks
from shoal.swarm.view import SwarmView
from shoal.transport.base import Endpoint
from shoal.transport.dispatch import counters_of
from shoal.wire.messages.base import Hop

logger = logging.getLogger(__name__)

INTERVAL_S = 2.0


@asynccontextmanager
async def counters_reported(
    endpoint: Endpoint, role: str, client: Callable[[], Hop | None], clock: Clock
) -> AsyncGenerator[None]:
    """Report this process's counters while the context is open and when it is left, and log them then.

    Args:
        endpoint: its registry holds all that the process counts.
        client: returns where the run's client is; None while that is not known. Only dialling needs the address.
    """

    told: dict[str, int] = {}

    def report() -> None:
        nonlocal told
        to, counts = client(), endpoint.metrics.counts()
        if to is None or counts == told:
            return
        told = counts
        if to.addresses:
            endpoint.introduce(to)
        endpoint.post(to.peer, counters_of(endpoint, role))

    async def report_on() -> None:
        while True:
            await clock.sleep_s(INTERVAL_S)
            report()

    async with counters_logged(endpoint), anyio.create_task_group() as tasks:
        tasks.start_soon(report_on)
        try:
            yield
        finally:
            # What is posted is written when the endpoint is closed, if the client is still there.
            report()
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
