"""What is wrong with peers that are there, by what they report and what the registry refuses; and what those had that
were lost.

    MetricReport --> memory, disk, files: `TroubleSeen`, `TroubleOver`      of one that is heard again: `LossExplained`
    membership   --> clocks:       `TroubleSeen`, `TroubleOver`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from shoal.client.ledger import Ledger
from shoal.client.totals import counted_by, counts_anew
from shoal.clock import Clock, Deadline
from shoal.control.membership import Membership
from shoal.events.incidents import (
    CLOCK,
    DISK,
    DISK_COSTS,
    FILES,
    MEMORY,
    Cause,
    LossExplained,
    TroubleOver,
    TroubleSeen,
)
from shoal.events.run import RoleCounted
from shoal.file_thread import remedy_of
from shoal.ids import PeerId
from shoal.swarm.view import PeerLabel
from shoal.telemetry.registry import base_name, totals_of
from shoal.wire.messages.control import MetricReport

_FROZEN_SHARE: Final = 0.5
"""Of the time for which a peer was silent; a process that has not run for so much of it was frozen itself."""
_REST_S: Final = 60.0
"""Trouble that was over is told anew only so long afterwards: a peer may say as often as it likes that it has some."""
_MEMORY, _COMMITTED, _STALLED = "step.out_of_memory", "step.committed", "process.stalled_ms"
_DISK, _FILES = "disk.failing", "process.crowded"


class Troubles:
    """Follows the peers of one run."""

    def __init__(self, ledger: Ledger, membership: Membership, host: str, clock: Clock) -> None:
        """Know of nothing that is wrong.

        Args:
            host: what people call this one, where those run that announce themselves to nobody.
        """
        self._ledger = ledger
        self._incidents = ledger.totals.incidents
        self._membership = membership
        self._host = host
        self._clock = clock
        self._rests: dict[tuple[Cause, PeerId], Deadline] = {}

    def reported(self, before: RoleCounted, now: MetricReport) -> None:
        """A peer has said what it has measured.

        Args:
            before: what it had counted when it said so the last time; nothing: it has not.
        """
        peer, counted = before.peer, counted_by(before.peer, now)
        is_anew = counts_anew(before, counted)
        if self._incidents.is_unexplained(peer):
            is_other = is_anew or (not before.counts and self._began_since_its_loss(counted))
            cause = Cause.ENDED if is_other else self._pause_of(peer, before.counts, now.counters)
            self._ledger.note(LossExplained(peer, cause))
        self._look_at_memory(peer, totals_of({} if is_anew else before.counts), totals_of(now.counters))
        called = PeerLabel(now.role or "peer", now.host or self._host, now.index)
        if now.gauges.get(_FILES):
            self._see(Cause.FILES, peer, called, FILES)
        else:
            self._over(Cause.FILES, peer)
        failing = {name: int(value) for name, value in now.gauges.items() if base_name(name) == _DISK and value}
        if failing:
            do = " and ".join(dict.fromkeys(map(remedy_of, failing.values())))
            unwritten = sorted(name.partition("=")[2].rstrip("}").replace("_", " ") for name in failing)
            costs = " and ".join(DISK_COSTS.get(what, f"{what} is not written") for what in unwritten)
            self._see(Cause.DISK, peer, called, DISK.format(who="{who}", what=", ".join(unwritten), do=do, costs=costs))
        else:
            self._over(Cause.DISK, peer)

    async def run(self) -> None:
        """Note whose records are refused because they are of another time, until cancelled."""
        while True:
            self._look_at_clocks(self._membership.clock_differences)
            await self._membership.changed()

    def _began_since_its_loss(self, counted: RoleCounted) -> bool:
        """Whether a process was started when its peer was lost already, by the clocks of both hosts.

        Of one that was lost before it had reported anything nothing else is known.
        """
        away_s = self._ledger.now_s() - self._incidents.began_s(counted.peer)
        return counted.started_unix_s > self._clock.unix_s() - away_s

    def _pause_of(self, peer: PeerId, before: Mapping[str, int], now: Mapping[str, int]) -> Cause:
        stalled_ms = totals_of(now)[_STALLED] - totals_of(before)[_STALLED]
        away_s = self._ledger.now_s() - self._incidents.began_s(peer)
        return Cause.FROZEN if stalled_ms / 1000 >= _FROZEN_SHARE * away_s else Cause.CUT

    def _look_at_memory(self, peer: PeerId, before: Mapping[str, int], now: Mapping[str, int]) -> None:
        if now[_MEMORY] > before[_MEMORY]:
            self._see(Cause.MEMORY, peer, PeerLabel("server", self._host), MEMORY)
        elif now[_COMMITTED] > before[_COMMITTED]:
            self._over(Cause.MEMORY, peer)

    def _look_at_clocks(self, differences: Mapping[PeerId, tuple[float, str]]) -> None:
        for peer, (ahead_s, name) in differences.items():
            way = "ahead of" if ahead_s > 0 else "behind"
            sentence = CLOCK.format(who="{who}", by_s=f"{abs(ahead_s):.0f}", way=way)
            self._see(Cause.CLOCK, peer, PeerLabel(name.partition(" ")[0] or "peer", self._host), sentence, name)
        for peer in self._incidents.troubled(Cause.CLOCK) - differences.keys():
            self._over(Cause.CLOCK, peer)

    def _see(self, cause: Cause, peer: PeerId, called: PeerLabel, sentence: str, who: str = "") -> None:
        self._rests = {known: rest for known, rest in self._rests.items() if not rest.expired()}
        if (cause, peer) in self._rests or peer in self._incidents.troubled(cause):
            return
        view, now_s = self._membership.view, self._ledger.now_s()
        name = who or (view.name_of(peer) if peer in view.labels else str(called))
        host = name.partition("@")[2].partition("#")[0] or self._host
        replica = view.replica(peer)
        stage = None if replica is None else replica.stage
        self._ledger.note(
            TroubleSeen(called.role, cause, peer, name, host, sentence.format(who=name), now_s, now_s, stage)
        )

    def _over(self, cause: Cause, peer: PeerId) -> None:
        if peer in self._incidents.troubled(cause):
            self._ledger.note(TroubleOver(cause, peer, self._ledger.now_s()))
            self._rests[cause, peer] = Deadline.after(self._clock, _REST_S)
