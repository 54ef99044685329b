"""Heartbeats of one endpoint: one timer for all connections, on the event loop that also reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shoal.clock import Clock
from shoal.swarm.liveness import Activity, Liveness
from shoal.transport.connection import Connection
from shoal.transport.limits import TransportLimits
from shoal.wire.frame import encode_frame
from shoal.wire.messages.control import Heartbeat

# A frame's buffers may be shared by all connections: nobody writes to them.
_HEARTBEAT = bytes(encode_frame(Heartbeat())[0])


async def beat(
    standing: Callable[[], Iterable[Connection]],
    on_silent: Callable[[Connection, float], None],
    limits: TransportLimits,
    clock: Clock,
) -> None:
    """Send heartbeats on idle connections and report silent ones, until cancelled.

    Args:
        standing: returns the connections that have a peer.
        on_silent: closes a connection on which nothing was heard for so many seconds.
        limits: with the interval and the deadline.
        clock: for the ticks.
    """
    liveness = Liveness[Connection](heartbeat_s=limits.heartbeat_s, deadline_s=limits.deadline_s, now_s=clock.now_s())
    while True:
        await clock.sleep_s(limits.heartbeat_s)
        activity: dict[Connection, Activity] = {}
        for connection in standing():
            activity[connection] = Activity(connection.heard, connection.spoke, connection.reading)
            connection.heard = connection.spoke = False
        pulse = liveness.tick(clock.now_s(), activity)
        for connection in pulse.idle:
            connection.send([_HEARTBEAT])
            # A heartbeat is not activity: the next tick sends the next one.
            connection.spoke = False
        for connection, silent_s in pulse.dead:
            on_silent(connection, silent_s)
