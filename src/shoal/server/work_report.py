"""What a server tells its launcher of its work, for the terminal of whoever lends the machine.

    every few seconds, if it has changed    `WorkDone`
    a peer of the swarm falls silent        `PeerSilent`, then `PeerHeard`

The share of the work is that of the last record: what this server has trained of all that its stage has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.clock import Clock, wait_for_tick
from shoal.ids import PeerId
from shoal.log import failure
from shoal.runtime.launcher_messages import PeerHeard, PeerSilent, WorkDone
from shoal.server.replica import LocalReplica
from shoal.swarm.records import outcome_of
from shoal.swarm.view import SwarmView
from shoal.telemetry.registry import MetricRegistry, base_name
from shoal.transport.base import PeerLost
from shoal.wire.messages.round import Record

INTERVAL_S = 2.0


@dataclass(kw_only=True, eq=False, repr=False)
class WorkReport:
    """Of one server.

    Attributes:
        view: returns the swarm as it is now.
        metrics: of this process, which counts the samples of its steps.
    """

    peer: PeerId
    replica: Callable[[], LocalReplica]
    view: Callable[[], SwarmView]
    metrics: MetricRegistry
    clock: Clock
    tell: Callable[[WorkDone | PeerSilent | PeerHeard], None]
    _last_record: tuple[int, float] | None = None
    _has_heard_two: bool = False
    _of_record: dict[str, float] = field(default_factory=dict[str, float])
    _silent: dict[PeerId, str] = field(default_factory=dict[PeerId, str])

    def recorded(self, record: Record) -> None:
        """The replica holds this record now."""
        now_s = self.clock.now_s()
        outcome = outcome_of(record, self.replica().stage)
        if outcome is not None:
            weights = dict(zip(outcome.members, outcome.weights, strict=True))
            mine, total = weights.get(self.peer, 0), sum(weights.values())
            self._of_record["share"] = mine / total if total else 0.0
        follows = self._last_record is not None and self._last_record[0] == record.round - 1
        # A newcomer has fetched the first one, at any time of the round: how long that round took it does not know.
        if self._last_record is not None and follows and self._has_heard_two:
            samples = sum(len(trained) for trained in record.samples)
            self._of_record["run_samples_per_s"] = samples / max(now_s - self._last_record[1], 1e-3)
        self._last_record, self._has_heard_two = (record.round, now_s), follows

    def numbers(self) -> dict[str, float]:
        """Return what is known now, by name."""
        replica, view, gauges = self.replica(), self.view(), self.metrics.gauges()
        failing = [value for name, value in gauges.items() if base_name(name) == "disk.failing"]
        return {
            "stage": float(replica.stage),
            "round": float(replica.member.offered_round + 1),
            "steps": float(replica.worker.num_committed),
            "samples": float(self.metrics.totals()["step.samples"]),
            "alive_peers": float(view.num_peers),
            "disk_failing": float(failure() or max(failing, default=0.0)),
            **self._of_record,
        }

    async def run(self) -> None:
        """Say it now and then, until cancelled."""
        told: dict[str, float] = {}
        while True:
            numbers = self.numbers()
            if numbers != told:
                told = numbers
                self.tell(WorkDone(numbers))
            await wait_for_tick(self.clock, INTERVAL_S)

    def lost(self, lost: PeerLost) -> None:
        """A connection has ended; only a peer that says nothing any more is worth a word here."""
        name = self._name(lost.peer)
        if lost.silent_s and name and lost.peer not in self._silent:
            self._silent[lost.peer] = name
            self.tell(PeerSilent(lost.peer, name, lost.silent_s))

    def found(self, peer: PeerId) -> None:
        """There is a connection with a peer."""
        if name := self._silent.pop(peer, ""):
            self.tell(PeerHeard(peer, name))

    def _name(self, peer: PeerId) -> str:
        """What a peer that announces itself is called; trainers, which do not, are their client's to watch."""
        view = self.view()
        if (server := view.replica(peer)) is not None:
            return f"{view.name_of(peer)} (stage {server.stage})"
        return f"the client ({view.name_of(peer)})" if peer in {client.peer for client in view.clients} else ""
