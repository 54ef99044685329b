"""Where the numbers and events of a run come together, and from where they go on.

Metrics of the run -> Status -----> status events for the terminal view, some two a second at most
                        '-----.
PeerMetrics -> PeerNumbers ---+--> a row a second --> exporters: files, W&B
Noted, by the client ------------> an event ---------'
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import anyio
import anyio.to_thread
import msgspec

from shoal.clock import Clock, Deadline, wait_for_tick
from shoal.control.peer_numbers import MAX_PEERS, PeerNumbers
from shoal.control.registry import Registry
from shoal.errors import MALFORMED, RemoteProtocolError
from shoal.events.base import emit
from shoal.events.monitor import ExportUnfinished, PeersMeasured
from shoal.ids import PeerId
from shoal.monitor.exporters.base import Exporter, Newest, PeerReport, noted_event
from shoal.monitor.status import Status
from shoal.runtime.control_pipe import RoleControl
from shoal.runtime.launcher_messages import StatusChanged
from shoal.runtime.waking import Signal
from shoal.swarm.view import PeerLabel, SwarmView
from shoal.telemetry.rows import RowMaker
from shoal.transport.base import Received
from shoal.wire.messages.control import MetricReport, Metrics, Noted, PeerMetrics

logger = logging.getLogger(__name__)

STATUS_INTERVAL_S: Final = 0.5
ROW_INTERVAL_S: Final = 1.0
_GONE_S: Final = 30.0
"""Who has said nothing for so long has no newest numbers."""
_CLOSE_TIMEOUT_S: Final = 2.0


class Gatherer:
    """Takes messages with numbers and events, and hands these on. A `transport.dispatch.Handler`."""

    def __init__(self, status: Status, exporters: Sequence[Exporter], clock: Clock, client: PeerId) -> None:
        """Start with nothing.

        Args:
            client: of this host, which alone passes on what others have measured and what has happened.
        """
        self._client = client
        self._peers = PeerNumbers()
        self._view = self._named = SwarmView()
        self._labels: dict[PeerId, PeerLabel] = {}
        self._status = status
        self._exporters = exporters
        self._clock = clock
        self._rows = RowMaker()
        self._changed = Signal()
        self._news = Signal()

    def receive(self, event: Received) -> bool:
        """Take a message if it holds numbers or an event; see `transport.dispatch.Handler`.

        Raises:
            RemoteProtocolError: the sender speaks for another peer, and is not the client; or what it says of an event
                has not the form of one.
        """
        match event.message:
            case PeerMetrics() as passed_on:
                self._require_client(event.peer)
                self._peers.take(passed_on.peer, passed_on.report, self._clock.now_s())
                self._called(passed_on.peer, passed_on.report)
            case Noted() as noted:
                self._require_client(event.peer)
                self._hand_on(noted.line)
                return True
            case Metrics() as numbers:
                if numbers.role == "client":
                    self._require_client(event.peer)
                # Nobody speaks for another peer.
                own = msgspec.structs.replace(numbers, peer=event.peer)
                self._rows.add(self._status.add(own, self._clock.now_s()), own.steps)
                self._changed.notify()
            case _:
                return False
        self._news.notify()
        return True

    def measured(self, peers: Iterable[PeerId]) -> dict[str, dict[str, float]]:
        """Return what these peers have measured, by what each is called; of a server also where it is in the run."""
        reports = self._peers.reports()
        return {self._name_of(peer, reports[peer]): self._peers.values(peer) | self._place(peer) for peer in peers}

    def newest(self) -> Newest:
        """Return the newest numbers; of peers that have said any just now."""
        now_s = self._clock.now_s()
        fresh = (
            PeerReport(self._name_of(peer, report), report)
            for peer, report in self._peers.reports().items()
            if now_s - (self._peers.heard_s(peer) or 0.0) < _GONE_S
        )
        return Newest(self._status.values, tuple(fresh))

    def peer_lost(self, peer: PeerId) -> None:
        """What a client says of the swarm counts as long as it is there."""
        if self._status.lost(peer):
            self._changed.notify()

    async def follow(self, registry: Registry) -> None:
        """Take over the registry's view whenever it changes."""
        while True:
            self._view = await registry.membership.changed()
            self._name_all()
            self._status.seen(self._view)
            self._changed.notify()

    async def report(self, control: RoleControl) -> None:
        """Send the status to the launcher when it has changed: at once, or at a tick at most `STATUS_INTERVAL_S` after
        the one before, until cancelled."""
        rest = Deadline.after(self._clock, 0.0)
        while True:
            await self._changed.take()
            await wait_for_tick(self._clock, rest.remaining_s())
            self._changed.forget()
            control.tell(StatusChanged(self._status.values, dict(self._status.at_s)))
            rest = Deadline.after(self._clock, STATUS_INTERVAL_S)

    async def export(self) -> None:
        """Hand a row to the exporters at the last tick within `ROW_INTERVAL_S` of the first news that are in it, until
        cancelled."""
        while True:
            await self._news.take()
            await wait_for_tick(self._clock, ROW_INTERVAL_S)
            self._news.forget()
            self._export_row()

    async def aclose(self) -> None:
        """Hand on the last numbers, leave in the log what each peer has measured, and finish all exports; bounded."""
        self._export_row()
        emit(logger, PeersMeasured(self.measured(self._peers.reports())))
        async with anyio.create_task_group() as tasks:
            for exporter in self._exporters:
                tasks.start_soon(_close, exporter)

    def _called(self, peer: PeerId, report: MetricReport) -> None:
        """Note what a peer says that it is called; the registry knows most, and not trainers and the data server."""
        if report.host is None:
            return
        label = PeerLabel(report.role, report.host, report.index)
        if self._labels.get(peer) == label:
            return
        if report.role == "trainer":
            # Each start of a slot's trainer is another peer: the newest has its name.
            self._labels = {other: its for other, its in self._labels.items() if its != label}
        self._labels[peer] = label
        while len(self._labels) > MAX_PEERS:
            del self._labels[next(iter(self._labels))]
        self._name_all()

    def _name_all(self) -> None:
        self._named = replace(self._view, labels={**self._labels, **self._view.labels})

    def _name_of(self, peer: PeerId, report: MetricReport) -> str:
        return self._named.name_of(peer, report.role or "peer")

    def _place(self, peer: PeerId) -> dict[str, float]:
        replica = self._view.replica(peer)
        if replica is None:
            return {}
        return {"stage": float(replica.stage), "held_round": float(replica.base_round)}

    def _require_client(self, peer: PeerId) -> None:
        if peer != self._client:
            raise RemoteProtocolError(f"{peer} tells what others have measured or done: only the client does")

    def _hand_on(self, line: str) -> None:
        try:
            event = noted_event(line.encode())
        except MALFORMED as error:
            raise RemoteProtocolError(f"what the client has noted is no event: {error}") from error
        for exporter in self._exporters:
            exporter.event(event)

    def _export_row(self) -> None:
        for peer, values in self.measured(self._peers.news()).items():
            self._rows.measure(peer, values)
        row = self._rows.take(self._clock.unix_s())
        if row is not None:
            for exporter in self._exporters:
                exporter.row(row)


async def _close(exporter: Exporter) -> None:
    if not await anyio.to_thread.run_sync(exporter.close, _CLOSE_TIMEOUT_S):
        emit(logger, ExportUnfinished(type(exporter).__name__, _CLOSE_TIMEOUT_S))
