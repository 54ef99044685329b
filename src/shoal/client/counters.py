"""What all roles of a run measure: counters summed up (refused connections, lost peers, ...), and each by itself.

every role -- MetricReport --> CounterTotals -- sums --> Reports, summary
     '<- AskCounters (at the end) --'   |  '-- what has changed --> Ledger
                                        '--> PeerNumbers -- each peer's --> monitor, `shoal status`
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import anyio

from shoal.client.ledger import Ledger
from shoal.client.reports import Reports
from shoal.client.totals import THIS_CLIENT, counted_by, counts_anew
from shoal.client.troubles import Troubles
from shoal.clock import Clock, wait_for_tick
from shoal.control.counter_report import INTERVAL_S
from shoal.control.membership import Membership
from shoal.control.peer_numbers import PeerNumbers
from shoal.events.run import RoleCounted
from shoal.ids import PeerId
from shoal.runtime.waking import Signal
from shoal.swarm.view import PeerLabel
from shoal.transport.base import Endpoint, Received
from shoal.transport.dispatch import Rest, dispatch, measured
from shoal.wire.messages.control import COUNTERS, MAX_VALUES, AskCounters, MetricReport, PeerMetrics

ANSWER_WITHIN_S: Final = 2.0
"""At the end of a run, for what roles have counted."""
# A peer must not fill this process's memory, nor the disk with what follows from its reports.
_MAX_PEERS: Final = 4096
_MOST_REPORTS: Final = 16
"""Of a peer between two looks; one is due, and one more when it is asked or was started again."""
# All that are asked at a time get one number; reports that nobody asked for have 0.
_ASKED: Final = 1
_ASKED_AGAIN: Final = 2


def ask_again(endpoint: Endpoint, peer: PeerId) -> None:
    """Have a peer report now, and not only when it is due."""
    endpoint.post(peer, AskCounters(_ASKED_AGAIN))


@dataclass(eq=False, repr=False)
class CounterTotals:
    """Gathers what peers have counted. A `transport.dispatch.Handler`.

    Attributes:
        reports: tells the monitor the sums whenever they have changed, and what a peer has measured.
        membership: lists the servers that are there: a run may end before one has reported for the first time.
        troubles: is told what a peer had counted before, and what it has measured until now.
        host: the name of this one: the monitor may hear of this process before the registry does.
    """

    endpoint: Endpoint
    clock: Clock
    ledger: Ledger
    reports: Reports
    membership: Membership
    troubles: Troubles
    host: str
    numbers: PeerNumbers = field(default_factory=PeerNumbers, init=False)
    _has_turn: bool = False
    # A peer may report often, so it is noted every few seconds what it has said last.
    _heard: dict[PeerId, RoleCounted] = field(default_factory=dict[PeerId, RoleCounted])
    _connected: set[PeerId] = field(default_factory=set[PeerId])
    _unanswered: set[PeerId] = field(default_factory=set[PeerId])
    _reports: Counter[PeerId] = field(default_factory=Counter[PeerId])
    _has_answered: Signal = field(default_factory=Signal)

    def totals(self) -> dict[str, int]:
        """Return the sums by name of what all processes have counted until now, this one included."""
        self.settle()
        return self.ledger.totals.counted.sums()

    def settle(self) -> None:
        """Note what has been heard of, and what this process has counted."""
        own = RoleCounted(THIS_CLIENT, self.endpoint.metrics.counts())
        heard, self._heard = (*self._heard.values(), own), {}
        for counted in heard:
            self._note(counted)

    def _note(self, counted: RoleCounted) -> None:
        if self.ledger.totals.counted.newest(counted.peer) != counted:
            self.ledger.note(counted)

    def receive(self, event: Received) -> bool:
        """Take a report."""
        message, peer = event.message, event.peer
        if not isinstance(message, MetricReport):
            return False
        if message.number == _ASKED:
            self._answered(peer)
        self._reports[peer] += 1
        if self._reports[peer] > _MOST_REPORTS:
            return True
        before, now = self._heard.get(peer) or self.ledger.totals.counted.newest(peer), counted_by(peer, message)
        self._take(before, message)
        known = self.ledger.totals.counted.latest.keys() | self._heard.keys()
        if peer in known or len(known) < _MAX_PEERS:
            self._heard[peer] = now
            if counts_anew(before, now):
                # At once: what its last process had counted is heard of no more.
                self._note(before)
                self._note(now)
            self._connected.add(peer)
        return True

    def _take(self, before: RoleCounted, report: MetricReport) -> None:
        self.numbers.take(before.peer, report, self.clock.now_s())
        self.troubles.reported(before, self.numbers.report_of(before.peer) or report)

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
            tasks.start_soon(dispatch, self.endpoint, (self, Rest()))
            with anyio.move_on_after(ANSWER_WITHIN_S):
                await self.ask()
            tasks.cancel_scope.cancel()
        if self._has_turn:
            self._tell_news()

    async def ask(self) -> None:
        """Have all who report, and are not lost, say what they have counted; returns when they have, or are lost."""
        self._unanswered = self._connected | {each.peer for each in self.membership.view.replicas}
        for peer in tuple(self._unanswered):  # one with too much unsent is lost at once
            self.endpoint.post(peer, AskCounters(_ASKED))
        while self._unanswered:
            await self._has_answered.wait()

    def _answered(self, peer: PeerId) -> None:
        self._unanswered.discard(peer)
        self._has_answered.notify()

    async def run(self) -> None:
        """Pass on and write down what has changed, until cancelled."""
        told: dict[str, int] = {}
        self._has_turn = True
        while True:
            await wait_for_tick(self.clock, INTERVAL_S)
            self._reports.clear()
            totals = self.totals()
            if totals != told:
                told = totals
                sums = {COUNTERS + name: float(count) for name, count in totals.items()}
                self.reports.post(dict(list(sums.items())[:MAX_VALUES]))
            self._tell_news()

    def _tell_news(self) -> None:
        """Tell the monitor what each peer has said since it was told the last time, and what this process measures."""
        if self.ledger.diary is not None:
            self.endpoint.metrics.gauge("disk.failing", what="client_state").set(self.ledger.diary.failure)
        own = measured(self.endpoint, PeerLabel("client", self.host))
        self._take(RoleCounted(self.endpoint.peer_id, {}), own)
        for peer, report in self.numbers.news().items():
            self.reports.pass_on(PeerMetrics(peer, report))
