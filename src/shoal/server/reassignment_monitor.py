"""Hosts a server's replica, and carries out the order to move to another stage, in the same process.

    order --> build the new stage's replica --> drain --> end all connections --> load the new stage's state --> drop
                  |  (the old one serves)                  (the new one takes all events)  |            the old one
                  '--> it does not fit: stay                                               '--> in vain: go back

To everybody else a move is the end of one replica and the beginning of another of the same peer. So every connection
ends in between: that is what each protocol understands, and no message that was meant for the replica of the old stage
can reach that of the new one. What the new one then is, every newcomer is: it says what it holds, is given the record
that stands, and fetches its state. The registry names the new stage only then, and the state of the old one can be had
here until then: if its other holders die meanwhile, it is not lost.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import anyio
from anyio.abc import TaskGroup

from shoal.averaging.contents import Request
from shoal.averaging.member import RoundSwapped
from shoal.control.counter_report import log_links
from shoal.errors import ControlError, RoundAborted, ShoalError
from shoal.events.base import emit
from shoal.events.links import RoundLinks
from shoal.events.servers import ServerDrained, ServerGoesBack, ServerMoved, ServerMoving, ServerStays
from shoal.ids import PeerId
from shoal.pipeline.stage_worker import CapLowered
from shoal.runtime.role import leaves
from shoal.server.announcer import Announcer
from shoal.server.replica import LocalReplica
from shoal.swarm.round_effects import Relocate
from shoal.swarm.view import NO_BASE, SwarmView
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.round import Record

logger = logging.getLogger(__name__)

_DRAIN_S = 5.0
"""How long begun steps, and the end of a round that has begun, are waited for: then trainers go on over another one."""

_MISFITS = (MemoryError, RuntimeError, ShoalError)
"""What building or loading a replica raises where it does not fit; torch says RuntimeError when memory is exhausted."""

Rebuild = Callable[[int], Awaitable[LocalReplica]]
"""Builds a replica of a stage, on the device thread of the server."""


class _Host:
    """A replica that runs."""

    def __init__(self, replica: LocalReplica) -> None:
        self.replica = replica
        self.scope = anyio.CancelScope()
        self.ended = anyio.Event()


@dataclass(kw_only=True, eq=False, repr=False)
class ReassignmentMonitor:
    """The replica of a server, which one it may be. A `transport.dispatch.Handler`.

    Attributes:
        endpoint: this monitor takes its events.
        replica: which takes events now; it is announced, and `run` hosts it.
        view: returns the swarm as it is now.
        on_record: is told of each record that the replica has come to hold.
    """

    endpoint: Endpoint
    announcer: Announcer
    replica: LocalReplica
    rebuild: Rebuild
    view: Callable[[], SwarmView]
    num_stages: int
    on_record: Callable[[Record], None] = lambda _: None
    _connected: set[PeerId] = field(default_factory=set[PeerId])
    _hosts: dict[int, _Host] = field(default_factory=dict[int, _Host])
    _trial: LocalReplica | None = None
    _left: LocalReplica | None = None
    _failure: str = ""

    def __post_init__(self) -> None:
        self.announcer.announce(self.replica)

    @property
    def client(self) -> PeerId | None:
        """The run's client that the replica follows, while there is a connection with it."""
        client = self.replica.member.coordinator
        return client if client in self._connected else None

    # -- events

    def peer_up(self, peer: PeerId) -> None:
        """A connection stands."""
        self._connected.add(peer)

    def receive(self, event: Received) -> bool:
        """Give it to the replica; see `transport.dispatch.Handler`."""
        message = event.message
        if self._left is not None and isinstance(message, Request) and message.name.kind.leads_to_record:
            # Until the new replica has a state of its own, that of the old stage is still given to who needs it.
            return self._left.contents.receive(event)
        return any(handler.receive(event) for handler in self.replica.handlers)

    def peer_lost(self, peer: PeerId) -> None:
        self._connected.discard(peer)
        for replica in (self.replica, self._left):
            for handler in replica.handlers if replica is not None else ():
                handler.peer_lost(peer)

    # -- the life of a server

    async def run(self) -> None:
        """Host replicas until cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                self._start(tasks, self.replica)
                while True:
                    await self._next(tasks)
        finally:
            for host in self._hosts.values():
                host.replica.close()

    async def _next(self, tasks: TaskGroup) -> None:
        """Act on the next thing that happens to the replica."""
        match await self.replica.events.receive():
            case RoundSwapped(record):
                self.announcer.announce(self.replica)
                self.on_record(record)
                log_links(self.endpoint, partial(RoundLinks, round=record.round))
            case CapLowered():
                self.announcer.announce(self.replica)
            case Relocate() as order:
                await self._move(tasks, self.replica, order)
                # A module, its optimizer and its state refer to each other: without this they stay in memory.
                gc.collect()
            case _:
                pass

    def _start(self, tasks: TaskGroup, replica: LocalReplica) -> None:
        host = self._hosts[id(replica)] = _Host(replica)
        tasks.start_soon(self._host, host)

    async def _host(self, host: _Host) -> None:
        """Run a replica; while it is on trial it may fail alone."""
        try:
            with host.scope:
                await host.replica.run()
        except* _MISFITS as errors:
            if host.replica is not self._trial:
                raise
            first = next(leaves(errors))
            self._failure = f"{type(first).__name__}: {first}"
        finally:
            host.ended.set()

    async def _end(self, replica: LocalReplica) -> None:
        """Stop a replica and forget it."""
        host = self._hosts[id(replica)]
        host.scope.cancel()
        await host.ended.wait()
        replica.close()
        del self._hosts[id(replica)]

    async def _move(self, tasks: TaskGroup, old: LocalReplica, order: Relocate) -> None:
        """Carry out an order."""
        try:
            new = await self._build(old, order)
        except _MISFITS as error:
            emit(logger, ServerStays(old.stage, order.stage, str(error)))
            old.member.stay(str(error))
            return
        self._start(tasks, new)
        self._trial = new
        self.announcer.announce(old, serving=False)
        await self._drain(old, order.urgent)
        self._switch(old, new)
        self._left = given_up = old
        if not await self._loaded(new):
            emit(logger, ServerGoesBack(old.stage, order.stage, self._failure))
            await old.member.resume()
            self._switch(new, old)
            given_up = new
        self._trial = self._left = None
        await self._end(given_up)
        self.announcer.announce(self.replica)
        emit(logger, ServerMoved(old.stage, order.stage, self.replica.stage))

    async def _build(self, old: LocalReplica, order: Relocate) -> LocalReplica:
        """Build the new replica before anything is given up: what does not fit here costs nobody anything.

        Raises:
            ControlError: the server does not go; the coordinator knows more, but not everything.
            Exception: one of `_MISFITS`.
        """
        if self.announcer.pinned:
            raise ControlError(f"the user of this server has given it stage {old.stage}")
        if not 0 <= order.stage < self.num_stages:
            raise ControlError(f"there is no stage {order.stage}, the model has {self.num_stages}")
        me = self.endpoint.peer_id
        # Before the first round the coordinator sees servers that this one has yet to see, and nothing can be lost.
        has_trained = old.worker.num_committed > 0 or old.member.offered_round > 0
        if has_trained and all(replica.peer == me for replica in self.view().by_stage(old.stage)):
            raise ControlError(f"it is the last replica of stage {old.stage}")
        emit(logger, ServerMoving(old.stage, order.stage, order.urgent))
        return await self.rebuild(order.stage)

    async def _drain(self, old: LocalReplica, urgent: bool) -> None:
        """Finish what has begun: the round, if it is ending, and then the steps."""
        with anyio.move_on_after(_DRAIN_S) as timer:
            # A stage without a replica keeps every round from ending.
            while old.member.is_closing and not urgent:
                if isinstance(await old.events.receive(), RoundSwapped):
                    break
            while True:
                try:
                    await old.worker.close(old.worker.base_round + 1)
                except RoundAborted:
                    continue  # the next one has begun meanwhile
                break
        emit(logger, ServerDrained(old.stage, not timer.cancelled_caught))

    def _switch(self, old: LocalReplica, new: LocalReplica) -> None:
        """From now on `new` takes all events, on connections of its own."""
        new.member.succeed(old.member)
        self.replica = new
        old.worker.start_round(0)  # nothing may be opened or settled there any more
        peers, self._connected = self._connected, set()
        for peer in sorted(peers):
            self.endpoint.disconnect(peer, f"it serves stage {new.stage} from now on")
            for handler in old.handlers:
                handler.peer_lost(peer)

    async def _loaded(self, new: LocalReplica) -> bool:
        """Wait until the replica holds the state of its stage; False if it has failed."""
        while new.member.offered_round == NO_BASE:
            try:
                event = await new.events.receive()
            except anyio.EndOfStream:
                return False
            if isinstance(event, Relocate):
                new.member.stay("it has just come to its stage, and is loading")
        return True
