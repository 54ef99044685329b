"""Heartbeats of one endpoint: one timer for all connections, on the event loop that also reads them.

Now and then a heartbeat asks for an answer, also on a connection that is not idle: that measures the round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shoal.clock import Clock
from shoal.swarm.liveness import Activity, Liveness
from shoal.transport.connection import Connection
from shoal.transport.limits import TransportLimits
from shoal.wire.frame import encode_frame
from shoal.wire.messages.control import Heartbeat

# All connections share it: nobody writes to the head of a frame without payload.
_HEARTBEAT = encode_frame(Heartbeat())
_STALL_S = 1.0


async def beat(
    standing: Callable[[], Iterable[Connection]],
    on_silent: Callable[[Connection, float], None],
    limits: TransportLimits,
    clock: Clock,
    on_stall: Callable[[float], None] = lambda _: None,
) -> None:
    """Send heartbeats on idle connections and report silent ones, until cancelled.

    Args:
        standing: returns the connections that have a peer.
        on_stall: is told of a pause (seconds) in which this process has not run.
        on_silent: closes a connection on which nothing was heard for this time (seconds).
    """
    liveness = Liveness[Connection](
        heartbeat_s=limits.heartbeat_s,
        deadline_s=limits.deadline_s,
        max_deadline_s=limits.max_deadline_s,
        now_s=clock.now_s(),
    )
    while True:
        # Not at a tick of all: what others say at theirs would come just after it, and a silence count for longer.
        due_s = clock.now_s() + limits.heartbeat_s
        await clock.sleep_s(limits.heartbeat_s)
        if clock.now_s() - due_s >= _STALL_S:
            on_stall(clock.now_s() - due_s)
        activity: dict[Connection, Activity] = {}
        for connection in standing():
            activity[connection] = Activity(
                connection.heard,
                connection.spoke,
                listening=connection.reading,
                peer=connection.peer,
                is_waited_for=connection.is_waited_for,
            )
            connection.heard = connection.spoke = False
        pulse = liveness.tick(clock.now_s(), activity)
        for connection, silent_s in pulse.dead:
            on_silent(connection, silent_s)
            del activity[connection]
        for connection in activity:
            # A ping behind what is queued here would measure the queue; of whom nobody waits for, nobody wants to know.
            meter = connection.meter if connection.is_waited_for and not connection.queued_bytes else None
            ping = meter.ping() if meter is not None else 0
            if ping or connection in pulse.idle:
                connection.send(encode_frame(Heartbeat(ping=ping)) if ping else _HEARTBEAT)
                # A heartbeat is not activity: the next tick sends the next one.
                connection.spoke = False


def on_heartbeat(connection: Connection, heartbeat: Heartbeat, max_queued_bytes: int) -> None:
    """Answer a heartbeat that asks for it, and time one that answers.

    Args:
        max_queued_bytes: with more queued, the heartbeat gets no answer: the peer may ask without ever reading.
    """
    if heartbeat.ping and connection.queued_bytes <= max_queued_bytes:
        connection.send(encode_frame(Heartbeat(pong=heartbeat.ping)))
    if heartbeat.pong and connection.meter is not None:
        connection.meter.pong(heartbeat.pong)
