"""What each peer of a run measures, each by itself. Plain bookkeeping, no I/O.

    every role -- MetricReport --> the client's PeerNumbers --> `shoal status`
                                     '-- PeerMetrics --> the monitor's PeerNumbers --> its status, W&B

A peer must not fill this memory: so many peers, and of each only what the catalogue has, in one report.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec

from shoal.ids import PeerId
from shoal.telemetry.catalogue import CATALOGUE, MetricKind
from shoal.telemetry.registry import base_name, quantile, totals_of
from shoal.wire.messages.control import MetricReport

FRESH_S: Final = 6.0
"""Three times as long as from one report to the next: numbers that are older say nothing of now."""
MAX_PEERS: Final = 1024
"""Beyond, who has said nothing for the longest time is forgotten."""
_WINDOW_S: Final = 10.0
"""Speeds are those of so long a time."""
_SPEEDS: Final = {"step.samples": ("samples_per_s", 1.0), "device.busy_us": ("busy", 1e-6)}
"""Counters of which the speed is worth knowing: its name, and what one count is."""
_QUANTILES: Final = {"p50": 0.5, "p95": 0.95}

_Value = TypeVar("_Value")


@dataclass
class _Measured:
    """The last report of a peer, when it came, and the totals of its counters in the last seconds."""

    report: MetricReport
    heard_s: float
    totals: deque[tuple[float, Mapping[str, int]]] = field(default_factory=deque[tuple[float, Mapping[str, int]]])

    def take(self, report: MetricReport, now_s: float) -> None:
        self.report, self.heard_s = report, now_s
        totals = totals_of(report.counters)
        if self.totals and any(totals[name] < self.totals[-1][1][name] for name in _SPEEDS):
            self.totals.clear()  # another process, which counts from 0
        self.totals.append((now_s, totals))
        while len(self.totals) > 2 and self.totals[1][0] <= now_s - _WINDOW_S:
            self.totals.popleft()

    def speeds(self) -> dict[str, float]:
        (first_s, first), (last_s, last) = self.totals[0], self.totals[-1]
        if last_s <= first_s:
            return {}
        grown = {name: last[name] - first[name] for name in _SPEEDS if last[name]}
        return {_SPEEDS[name][0]: growth * _SPEEDS[name][1] / (last_s - first_s) for name, growth in grown.items()}


class PeerNumbers:
    """The numbers of all peers."""

    def __init__(self) -> None:
        self._peers: dict[PeerId, _Measured] = {}
        self._news: set[PeerId] = set()

    def take(self, peer: PeerId, report: MetricReport, now_s: float) -> None:
        """Take over a report, at this monotonic time."""
        known = self._peers.pop(peer, None) or _Measured(report, now_s)
        if not report.role:  # the answer to a question, which does not say what its peer is called
            called = known.report
            report = msgspec.structs.replace(report, role=called.role, host=called.host, index=called.index)
        known.take(_declared(msgspec.structs.replace(report, number=0)), now_s)
        self._peers[peer] = known
        self._news.add(peer)
        if len(self._peers) > MAX_PEERS:
            forgotten = next(iter(self._peers))
            del self._peers[forgotten]
            self._news.discard(forgotten)

    def heard_s(self, peer: PeerId) -> float | None:
        """Return when a peer has said its numbers, None if it has said none."""
        known = self._peers.get(peer)
        return None if known is None else known.heard_s

    def report_of(self, peer: PeerId) -> MetricReport | None:
        """Return the last report of a peer, None if it has made none."""
        known = self._peers.get(peer)
        return None if known is None else known.report

    def reports(self) -> dict[PeerId, MetricReport]:
        """Return the last report of each peer."""
        return {peer: known.report for peer, known in self._peers.items()}

    def news(self) -> dict[PeerId, MetricReport]:
        """Return the reports of those that were heard since this was asked for the last time."""
        news, self._news = self._news, set()
        return {peer: self._peers[peer].report for peer in sorted(news)}

    def values(self, peer: PeerId) -> dict[str, float]:
        """Return what a peer has measured by the names of the catalogue, labels summed up; and what follows from it.

        Which is the speeds `samples_per_s` and `busy` (the share of the time in which the device works), and of each
        histogram the median, as in `step.open_seconds/p50`, and the 95th percentile. Empty for a peer unheard of.
        """
        known = self._peers.get(peer)
        if known is None:
            return {}
        values = {name: float(total) for name, total in known.totals[-1][1].items()}
        for name, value in known.report.gauges.items():
            values[base_name(name)] = values.get(base_name(name), 0.0) + value
        values |= known.speeds()
        histograms = defaultdict[str, Counter[int]](Counter)
        for name, counts in known.report.histograms.items():
            histograms[base_name(name)].update(counts)
        for name, counts in histograms.items():
            for label, share in _QUANTILES.items():
                if (value := quantile(counts, share)) is not None:
                    values[f"{name}/{label}"] = value
        return values


def _declared(report: MetricReport) -> MetricReport:
    """Return what the catalogue has of a report."""
    return msgspec.structs.replace(
        report,
        counters=_of_kind(MetricKind.COUNTER, report.counters),
        gauges=_of_kind(MetricKind.GAUGE, report.gauges),
        histograms=_of_kind(MetricKind.HISTOGRAM, report.histograms),
    )


def _of_kind(kind: MetricKind, values: Mapping[str, _Value]) -> dict[str, _Value]:
    return {name: value for name, value in values.items() if _kind_of(name) is kind}


@functools.lru_cache(maxsize=4096)
def _kind_of(full_name: str) -> MetricKind | None:
    """Return what kind of number has this name, which peers say again and again; None: it is in no catalogue."""
    metric = CATALOGUE.get(base_name(full_name))
    return None if metric is None else metric.kind
