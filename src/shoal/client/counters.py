"""The counters of all roles of a run, summed up: refused connections, dropped records, lost peers, ...

every role -- Metrics ("counters/...") --> CounterTotals -- sums --> Reports, summary
     '<------------- AskCounters (at the end) ---'    '-- what has changed --> diary
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import anyio

from shoal.clock import Clock
from shoal.control.counter_report import INTERVAL_S
from shoal.ids import PeerId
from shoal.transport.base import Endpoint, Received
from shoal.transport.dispatch import Rest, dispatch
from shoal.wire.messages.control import COUNTERS, AskCounters, Metrics

ANSWER_WITHIN_S: Final = 2.0
"""At the end of a run, for what roles have counted."""
# A peer must not fill this process's memory.
_MAX_PEERS: Final = 4096
_MAX_NAMES: Final = 200
_MAX_NAME_CHARS: Final = 128
_MAX_COUNT: Final = 1 << 53
# All that are asked at a time get one number; reports that nobody asked for have 0.
_ASKED: Final = 1


@dataclass
class Counted:
    """What the processes of a run have counted.

    Attributes:
        latest: what the last process of each peer has counted.
        earlier: the sum over that peer's earlier processes: a process that is started again counts from 0.
    """

    latest: dict[PeerId, dict[str, int]] = field(default_factory=dict[PeerId, dict[str, int]])
    earlier: dict[PeerId, dict[str, int]] = field(default_factory=dict[PeerId, dict[str, int]])

    def take(self, peer: PeerId, counts: Mapping[str, int]) -> None:
        """Take the newest counts of a peer."""
        before = self.latest.get(peer, {})
        if any(counts.get(name, 0) < count for name, count in before.items()):
            self.started_again(peer)
        self.latest[peer] = dict(counts)

    def started_again(self, peer: PeerId) -> None:
        """The peer's process has ended; the next one begins with nothing."""
        self.earlier[peer] = dict(Counter(self.earlier.get(peer, {})) + Counter(self.latest.pop(peer, {})))

    def sums(self) -> dict[str, int]:
        """Return the sums by name."""
        sums = Counter[str]()
        for counts in (*self.latest.values(), *self.earlier.values()):
            sums.update(counts)
        return dict(sorted(sums.items()))


class CounterTotals:
    """Gathers what peers have counted. A `transport.dispatch.Handler`."""

    def __init__(
        self,
        endpoint: Endpoint,
        tell: Callable[[Mapping[str, float]], None],
        clock: Clock,
        note: Callable[[PeerId, dict[str, int]], None] = lambda _peer, _counts: None,
    ) -> None:
        """Start with nothing but this process's own counters.

        Args:
            tell: passes the sums on to the monitor whenever they have changed.
            note: writes a process's counts down.
        """
        self._endpoint = endpoint
        self._tell = tell
        self._clock = clock
        self._note = note
        self._counted = Counted()
        self._connected: set[PeerId] = set()
        self._unanswered: set[PeerId] = set()
        self._all_answered = anyio.Event()

    @property
    def counted(self) -> Counted:
        """What all processes have counted until now, this one included."""
        self._counted.take(self._endpoint.peer_id, self._endpoint.metrics.counts())
        return self._counted

    def resume(self, counted: Counted) -> None:
        """Go on from what an earlier start of this client knew; its own process counted that as well."""
        self._counted = counted
        counted.started_again(self._endpoint.peer_id)

    def totals(self) -> dict[str, int]:
        """Return the sums by name."""
        return self.counted.sums()

    def receive(self, event: Received) -> bool:
        """Take a report of counters."""
        message, peer = event.message, event.peer
        if not isinstance(message, Metrics):
            return False
        known = self._counted.latest
        if peer in known or len(known) < _MAX_PEERS:
            counts = {
                name.removeprefix(COUNTERS): int(value)
                for name, value in message.values.items()
                if name.startswith(COUNTERS) and len(name) <= _MAX_NAME_CHARS and 0 <= value <= _MAX_COUNT
            }
            self._counted.take(peer, dict(list(counts.items())[:_MAX_NAMES]))
            self._connected.add(peer)
        if message.round == _ASKED:
            self._answered(peer)
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """What a lost peer has counted stands; it will answer nothing."""
        self._connected.discard(peer)
        self._answered(peer)

    async def gather(self) -> None:
        """Have the roles that still run say what they have counted; for when nobody else takes the endpoint's events.

        Whoever says nothing for a while, as a frozen process, is not waited for any longer.
        """
        async with anyio.create_task_group() as tasks:
            # What was posted for the rounds is of no use any more.
            tasks.start_soon(dispatch, self._endpoint, (self, Rest()))
            with anyio.move_on_after(ANSWER_WITHIN_S):
                await self.ask()
            tasks.cancel_scope.cancel()

    async def ask(self) -> None:
        """Have all who report, and are not lost, say what they have counted; returns when they have, or are lost."""
        self._unanswered, self._all_answered = set(self._connected), anyio.Event()
        for peer in self._unanswered:
            self._endpoint.post(peer, AskCounters(_ASKED))
        if self._unanswered:
            await self._all_answered.wait()

    def _answered(self, peer: PeerId) -> None:
        self._unanswered.discard(peer)
        if not self._unanswered:
            self._all_answered.set()

    async def run(self) -> None:
        """Pass on and write down what has changed, until cancelled."""
        told: dict[str, int] = {}
        noted = dict(self.counted.latest)
        while True:
            await self._clock.sleep_s(INTERVAL_S)
            latest = self.counted.latest
            for peer in [peer for peer, counts in latest.items() if noted.get(peer) != counts]:
                noted[peer] = latest[peer]
                self._note(peer, latest[peer])
            totals = self.totals()
            if totals != told:
                told = totals
                self._tell({COUNTERS + name: float(count) for name, count in totals.items()})
