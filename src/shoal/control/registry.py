"""This peer's side of the registry: its own records are kept alive, everybody's are read into a `Membership`.

Nothing that trains waits for the DHT. Own records are stored when they change and every `RENEW_S`; all topics are read
as often as `read_pace` says, which depends on whether somebody waits for others to appear.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Protocol

import anyio

from shoal.clock import Clock, SystemClock, until_tick_s
from shoal.control.copied_key import CopyWatch
from shoal.control.membership import Membership, sequence_at
from shoal.control.read_pace import SLOW_READ_S, ReadPace
from shoal.control.records import (
    TTL_S,
    GoneRecord,
    Record,
    StageRecord,
    VerifiedRecord,
    seal,
    topic_of,
    topics,
    with_addresses,
    with_maddrs,
)
from shoal.control.view_builder import is_server_topic
from shoal.errors import BootstrapError, InvariantViolation
from shoal.events.base import emit
from shoal.events.registry import (
    ClockCaughtUp,
    RegistryDhtBack,
    RegistryDhtLost,
    RegistryDhtUnreachable,
    RegistryReadGivenUp,
    RegistryStoreRefused,
)
from shoal.identity import Identity
from shoal.ids import PeerId
from shoal.log import FloodGate
from shoal.runtime.waking import Signal
from shoal.swarm.view import SwarmView

logger = logging.getLogger(__name__)

RENEW_S = 10.0
RETRY_S = 1.0
READ_TIMEOUT_S = 15.0
"""Of a read, which takes milliseconds, and seconds where peers are gone: strangers may name others without end."""
_OLD_SHARE, _MAX_OLD_S = 0.5, 1.0
"""What another process of the host has got may be as old as a share of the time since this one has asked, and at most
so old: what is read has two seconds to spare before it looks as if it would expire (`read_pace`)."""
_FAREWELL_TIMEOUT_S = 1.0
# Two records of one topic in the same instant still have to differ in expiry, or the DHT keeps the first.
_EXPIRY_STEP_S = 0.001


class Reachable(Protocol):
    """How a `DhtNode` is, wherever it runs."""

    @property
    def alive(self) -> bool:
        """Whether the node can reach others."""
        ...

    @property
    def maddrs(self) -> tuple[str, ...]:
        """Where others can join through the node."""
        ...

    @property
    def clock_difference_s(self) -> float | None:
        """By how much the clocks of others are ahead of this host's, where that is too much; else None."""
        ...


class RecordStore(Reachable, Protocol):
    """What the registry needs of a `DhtNode`."""

    @property
    def clock_differences(self) -> Mapping[PeerId, tuple[float, str]]:
        """By how much the clocks of those peers are ahead of this host's whose records are refused for it, and what
        they are called; empty where that is not known."""
        ...

    async def store(self, topic: str, value: bytes, expires_unix_s: float) -> bool:
        """Store a sealed record of this peer; return whether it was taken."""
        ...

    async def get(self, topics: tuple[str, ...], holders: int | None, age_s: float) -> tuple[VerifiedRecord, ...]:
        """Return all believable records under these topics; asks so many who hold them, or everybody who may.

        What another process of this host has got does as well, if it asked at most `age_s` seconds ago.
        """
        ...

    async def revive(self) -> None:
        """Start again.

        Raises:
            BootstrapError: it cannot.
        """
        ...


class Registry:
    """Advertises this peer and watches the others."""

    def __init__(
        self,
        store: RecordStore,
        identity: Identity,
        namespace: str,
        num_stages: int,
        clock: Clock,
        membership: Membership | None = None,
        addresses: Callable[[], tuple[str, ...]] | None = None,
        copied: Callable[[VerifiedRecord, bool], None] = lambda by, yields: None,
    ) -> None:
        """Prepare; `run` does the work.

        Args:
            num_stages: gives the number of topics to watch.
            membership: the registry feeds it; None: a new one.
            addresses: returns where this peer can be dialled now; None: always where its records say.
            copied: is told of a record that another process has signed with the key of this peer, and lives; and
                whether this one is to be somebody else. At most once for each of both.
        """
        self.membership = membership or Membership(clock)
        self._store = store
        self._identity = identity
        self._namespace = namespace
        self._topics = topics(num_stages)
        self._clock = clock
        self._addresses = addresses
        self._copied = copied
        self._copies = CopyWatch(identity.peer_id)
        self._own: dict[str, Record] = {}
        self._dirty: set[str] = set()
        self._wake = Signal()
        self._sequence = self._first_sequence = 0
        self._last_expiry_unix_s: dict[str, float] = {}
        self._gate = FloodGate(logger, clock)

    @property
    def clock_difference_s(self) -> float | None:
        return self._store.clock_difference_s

    def advertise(self, record: Record, *, at_once: bool = True) -> None:
        """Announce a record in place of the one of the same kind.

        Args:
            record: not a `GoneRecord`; see `withdraw`.
            at_once: False leaves it to the next renewal, for numbers that change with every step.

        Raises:
            InvariantViolation: a `GoneRecord`.
        """
        topic = topic_of(record)
        if topic is None:
            raise InvariantViolation("a GoneRecord is announced by withdraw()")
        if isinstance(record, StageRecord):
            # The old topic's record is not taken back: it is older, so it does not count, and there is no gap.
            self._own = {t: r for t, r in self._own.items() if not is_server_topic(t)}
        self._own[topic] = record
        if at_once:
            self._dirty.add(topic)
            self._wake.notify()

    async def conclude(self, record: Record) -> None:
        """Announce a last record that `withdraw` does not take back: it stands until it expires; bounded.

        Raises:
            InvariantViolation: a `GoneRecord`.
        """
        topic = topic_of(record)
        if topic is None:
            raise InvariantViolation("a GoneRecord is announced by withdraw()")
        self._own.pop(topic, None)
        with anyio.move_on_after(_FAREWELL_TIMEOUT_S, shield=True):
            await self._publish(topic, record)

    async def withdraw(self) -> None:
        """Take all own records back, so that others need not wait for their expiry; bounded."""
        leaving, self._own = self._own, {}
        with anyio.move_on_after(_FAREWELL_TIMEOUT_S, shield=True):
            for topic in leaving:
                await self._publish(topic, GoneRecord())

    async def run(self) -> None:
        """Renew and read until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._renew)
            tasks.start_soon(self._watch)

    async def _renew(self) -> None:
        pause_s = RENEW_S
        while True:
            with anyio.move_on_after(until_tick_s(self._clock, pause_s)) as timer:
                await self._wake.take()
            due = set(self._own) if timer.cancelled_caught else self._dirty & set(self._own)
            self._dirty = set()
            for topic in due:
                # It may have been withdrawn or replaced while another one was stored.
                record = self._own.get(topic)
                if record is not None and not await self._publish(topic, record):
                    self._dirty.add(topic)
            pause_s = RETRY_S if self._dirty else RENEW_S

    async def _publish(self, topic: str, record: Record) -> bool:
        now_unix_s = self._clock.unix_s()
        self._sequence = max(self._sequence + 1, sequence_at(now_unix_s))
        self._first_sequence = self._first_sequence or self._sequence
        expires_unix_s = max(now_unix_s + TTL_S, self._last_expiry_unix_s.get(topic, 0.0) + _EXPIRY_STEP_S)
        self._last_expiry_unix_s[topic] = expires_unix_s
        peer = self._identity.peer_id
        record = with_maddrs(record, self._store.maddrs)
        if self._addresses is not None:
            record = with_addresses(record, self._addresses())
        # The own view need not wait for the network.
        self.membership.update([VerifiedRecord(topic, peer, self._sequence, expires_unix_s, record)])
        value = seal(
            self._identity, self._namespace, topic, record, sequence=self._sequence, expires_unix_s=expires_unix_s
        )
        stored = await self._store.store(topic, value, expires_unix_s)
        if not stored:
            # It is tried again soon, and a neighbour may have it: nobody has to do anything.
            self._gate.emit(RegistryStoreRefused(topic), topic)
        return stored

    async def _watch(self) -> None:
        pace, seen = ReadPace(), self.membership.view
        holders: int | None = None
        asked_s = self._clock.now_s()
        while True:
            age_s = min(_MAX_OLD_S, _OLD_SHARE * (self._clock.now_s() - asked_s))
            asked_s = self._clock.now_s()
            if self._store.alive:
                await self._read(holders, age_s)
            elif await self._revived():
                pace = ReadPace()
                await self._read(None, 0.0)
            else:
                await self._clock.sleep_s(RETRY_S)
                continue
            awaited, view = self.membership.awaited, self.membership.view
            expires_in_s = self.membership.next_expiry_unix_s - self._clock.unix_s()
            pause_s = pace.pause_s(awaited=awaited, changed=view != seen, expires_in_s=expires_in_s)
            holders, seen = pace.holders, view
            if awaited:
                await self._clock.sleep_s(pause_s)
            elif not await self._pause(pause_s, view):
                holders = None

    async def _read(self, holders: int | None, age_s: float) -> None:
        with anyio.move_on_after(READ_TIMEOUT_S) as timer:
            found = await self._store.get(self._topics, holders, age_s)
            for opened in found:
                self._look_for_copy(opened)
            # What it has said itself is known; the rest is of a process that is another one.
            me, begun = self._identity.peer_id, self._first_sequence or math.inf
            self.membership.update(each for each in found if each.peer != me or each.sequence < begun)
            self.membership.clocks(self._store.clock_differences)
        if timer.cancelled_caught:
            emit(logger, RegistryReadGivenUp(READ_TIMEOUT_S))
        ahead_s = self._store.clock_difference_s
        if ahead_s is not None and (behind_s := SystemClock.catch_up(ahead_s)):
            emit(logger, ClockCaughtUp(round(behind_s)))
            self._dirty |= set(self._own)
            self._wake.notify()

    def _look_for_copy(self, opened: VerifiedRecord) -> None:
        own = next((record for record in self._own.values() if type(record) is type(opened.record)), None)
        yields = self._copies.look(opened, own)
        if yields is not None:
            self._copied(opened, yields)

    async def _pause(self, pause_s: float, seen: SwarmView) -> bool:
        """Wait, but not much longer once a peer is lost or found, a caller waits for a change, or the node dies.

        Returns:
            Whether none of these has happened.
        """

        def is_calm() -> bool:
            return self._store.alive and not self.membership.awaited and self.membership.view == seen

        while pause_s > 0 and is_calm():
            with anyio.move_on_after(until_tick_s(self._clock, min(pause_s, SLOW_READ_S))):
                await self.membership.until_awaited()
            pause_s -= SLOW_READ_S
        return is_calm()

    async def _revived(self) -> bool:
        emit(logger, RegistryDhtLost())
        try:
            await self._store.revive()
        except BootstrapError as error:
            emit(logger, RegistryDhtUnreachable(str(error)))
            return False
        emit(logger, RegistryDhtBack())
        self._dirty |= set(self._own)
        self._wake.notify()
        return True
