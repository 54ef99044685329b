"""What a page knows of a run: its newest numbers, curves, peers, rounds, and what has happened. Bounded, and pure but
for `read_chronicle`, which makes it of the files in the run's folder.

    rows of a second ------.                 .--> past: all of it, for a page that is opened
                           +--> Chronicle ---+
    lines of events.jsonl -'                 '--> news: what a page that is open adds

`static/store.js` takes both. Times are seconds of the wall clock; those in curves count from `begun`, to be short.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from shoal.config import Config
from shoal.errors import MALFORMED
from shoal.events.base import Event, catalogue, name_of
from shoal.events.incidents import explained_by
from shoal.events.run import EvaluationDone, RoundBegun, RoundRecorded, RoundShared
from shoal.monitor.exporters.base import NotedEvent, read_noted
from shoal.monitor.exporters.metrics_file import read_rows
from shoal.monitor.page.curve import Curve
from shoal.telemetry.rows import MetricRow

News = dict[str, Any]
DRAWN: Final = (
    *("accuracy", "grad_norm", "loss", "lr", "router"),
    *("samples_per_s", "step_s", "targets_per_s", "traffic"),
)
"""Numbers of the run that have a curve, by the part of their name before the slash."""
DRAWN_OF_PEERS: Final = ("samples_per_s", "busy", "sent_per_s", "received_per_s")
_RATES: Final = {"transport.sent_bytes": "sent_per_s", "transport.received_bytes": "received_per_s"}
_FRESH_S: Final = 15.0
"""A peer's traffic counts in the swarm's for so long; in `peers.jsonl` they are there every ten seconds."""
_MAX_CURVES, _BUCKETS = 32, 1000
_MAX_PEERS, _BUCKETS_OF_PEER = 1024, 128
_FEW_PEERS, _BUCKETS_OF_MANY = 24, 32
_MAX_EVENTS, _MAX_ROUNDS = 300, 1000
_COURSE: Final[Mapping[str, type[Event]]] = {
    name_of(kind): kind for kind in (RoundBegun, RoundShared, RoundRecorded, EvaluationDone)
}

_LAST_LINES: Final = 200
_WHOLE_FROM: Final = 1e5
"""From here on a number is told without decimals: fewer digits would be another time of day."""


@dataclass
class _PeerStory:
    """What a peer said last, and when it was heard; `rated_s` is since when its bytes are counted."""

    max_buckets: int
    heard_s: float = 0.0
    rated_s: float | None = None
    values: dict[str, float] = field(default_factory=dict[str, float])
    curves: dict[str, Curve] = field(default_factory=dict[str, Curve])

    def take(self, values: Mapping[str, float], at_s: float, begun_s: float) -> dict[str, float]:
        """Take what it says; return that with what follows from it."""
        told = {name: _short(value) for name, value in values.items()} | self._rates(values, at_s)
        self.values |= told
        after_s = round(at_s - begun_s, 1)
        self.heard_s = at_s
        for name in DRAWN_OF_PEERS:
            if name not in self.values:
                continue
            if name not in self.curves:
                self.curves[name] = Curve(self.max_buckets)
            self.curves[name].add((after_s, self.values[name]))
        return told

    def _rates(self, values: Mapping[str, float], at_s: float) -> dict[str, float]:
        """Return how fast its bytes have grown since the last time; nothing at first, or if they begin anew."""
        before_s, self.rated_s = self.rated_s, at_s
        if before_s is None or at_s <= before_s:
            return {}
        rates: dict[str, float] = {}
        for name, rate in _RATES.items():
            grown = values.get(name, self.values.get(name, 0.0)) - self.values.get(name, 0.0)
            if name in self.values and grown >= 0:
                rates[rate] = _short(grown / (at_s - before_s))
        return rates

    def form(self) -> dict[str, Any]:
        curves = {name: curve.form() for name, curve in self.curves.items()}
        return {"heard": self.heard_s, "values": self.values, "curves": curves}


@dataclass
class Chronicle:
    """All of a run that a page shows.

    Attributes:
        info: what the run is, see `info_of`.
        last_s: the time of the newest row; 0: there is none.
    """

    info: Mapping[str, Any]
    last_s: float = 0.0
    _begun_s: float = 0.0
    _samples: float = 0.0
    _now: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    _curves: dict[str, Curve] = field(default_factory=dict[str, Curve])
    _peers: dict[str, _PeerStory] = field(default_factory=dict[str, _PeerStory])
    _events: deque[News] = field(default_factory=lambda: deque[News](maxlen=_MAX_EVENTS))
    _rounds: dict[int, News] = field(default_factory=dict[int, News])
    _known: Mapping[str, type[Event]] = field(default_factory=catalogue)

    def row(self, row: MetricRow) -> News:
        """Take the numbers of a second; return what a page adds."""
        at_s = row.time.timestamp()
        self._begun_s = self._begun_s or at_s
        self.last_s = at_s
        peers = {name: self._measured(name, values, at_s) for name, values in row.peers.items()}
        run = {name: _short(value) for name, value in row.run.items() if not name.startswith("counters/")}
        if peers:
            run |= self._traffic(at_s)
        self._samples = run.get("samples", self._samples)
        for name, value in run.items():
            self._now[name] = (value, at_s)
            self._draw(name, value, at_s)
        return {"t": at_s, "begun": self._begun_s, "samples": self._samples, "run": run, "peers": peers}

    def event(self, event: NotedEvent) -> News | None:
        """Take what the client has noted; return what a page adds, None if nothing."""
        try:
            at_s = datetime.fromisoformat(event.time).timestamp()
        except ValueError:
            return None
        if (kind := _COURSE.get(event.event)) is not None:
            try:
                return self._course(msgspec.json.decode(event.line, type=kind), at_s)
            except MALFORMED:
                return None  # of another version
        if not event.says:
            return None
        known = self._known.get(explained_by(event.event, msgspec.json.decode(event.line, type=dict[str, Any])))
        why, do = ("", "") if known is None else (known.why, known.do)
        told = {"t": at_s, "level": event.level, "event": event.event, "says": event.says, "why": why, "do": do}
        self._events.append(told)
        return {"event": told}

    def past(self, now_s: float, *, ended: str = "", commands: Sequence[str] = ()) -> News:
        """Return all of it, as of now.

        Args:
            ended: how the run has ended; empty while it goes on.
            commands: what can be done then.
        """
        return {
            "now": now_s,
            "ended": ended,
            "commands": commands,
            "info": self.info,
            "begun": self._begun_s,
            "samples": self._samples,
            "run": self._now,
            "curves": {name: curve.form() for name, curve in self._curves.items()},
            "peers": {name: peer.form() for name, peer in self._peers.items()},
            "events": list(self._events),
            "rounds": list(self._rounds.values()),
        }

    def _draw(self, name: str, value: float, at_s: float) -> None:
        if name.partition("/")[0] not in DRAWN:
            return
        if name not in self._curves and len(self._curves) < _MAX_CURVES:
            self._curves[name] = Curve(_BUCKETS)
        if (curve := self._curves.get(name)) is not None:
            curve.add((round(at_s - self._begun_s, 1), int(self._samples), value))

    def _measured(self, name: str, values: Mapping[str, float], at_s: float) -> dict[str, float]:
        peer = self._peers.get(name)
        if peer is None:
            if len(self._peers) == _MAX_PEERS:
                del self._peers[min(self._peers, key=lambda each: self._peers[each].heard_s)]
            peer = _PeerStory(_BUCKETS_OF_PEER if len(self._peers) < _FEW_PEERS else _BUCKETS_OF_MANY)
            self._peers[name] = peer
        return peer.take(values, at_s, self._begun_s)

    def _traffic(self, at_s: float) -> dict[str, float]:
        """Return how much all peers that were heard lately send and receive."""
        fresh = [peer.values for peer in self._peers.values() if at_s - peer.heard_s < _FRESH_S]
        sums: dict[str, float] = {}
        for rate in _RATES.values():
            rates = [values[rate] for values in fresh if rate in values]
            if rates:
                sums[f"traffic/{rate}"] = _short(sum(rates))
        return sums

    def _course(self, event: Event, at_s: float) -> News:
        match event:
            case RoundBegun(number):
                self._forget_after(number - 1)
                news = {"begun": at_s, "trainers": event.trainers, "replicas": event.replicas}
            case RoundShared(number):
                news = {"shares": {str(slot): samples for slot, samples in event.samples.items()}}
                news |= {"waited_s": event.waited_s}
            case RoundRecorded(number):
                # Later ones are of a chain from which the run has not gone on.
                self._forget_after(number)
                samples = sum(part.samples for part in event.curve)
                sent_bytes = sum(event.sent_bytes.values())
                news = {"ended": at_s, "loss": event.loss, "duration_s": event.duration_s, "samples": samples}
                news |= {"sent_bytes": sent_bytes}
            case EvaluationDone(number):
                news = {"eval_loss": event.loss}
            case _:
                raise TypeError(f"{event.name} is none of a round")
        self._rounds[number] = self._rounds.get(number, {"round": number}) | news
        if len(self._rounds) > _MAX_ROUNDS:
            del self._rounds[min(self._rounds)]
        # A page shows the newest ones, and drops those that are gone here.
        return {"round": self._rounds[number], "last": max(self._rounds)}

    def _forget_after(self, number: int) -> None:
        for later in [each for each in self._rounds if each > number]:
            del self._rounds[later]


def info_of(config: Config, run_id: str) -> dict[str, Any]:
    """Return what a run is, in what a page says of it."""
    return {
        "run": run_id,
        "title": config.title,
        "stages": config.num_stages,
        "rounds": config.diloco.outer_steps,
        "loss_unit": config.loss_unit,
    }


def _short(value: float) -> float:
    """Return a number with as many digits as a picture shows, and what counts something as it is."""
    if abs(value) >= _WHOLE_FROM:
        return float(round(value))
    return value if value.is_integer() else float(f"{value:.5g}")


def read_chronicle(log_dir: Path, info: Mapping[str, Any]) -> tuple[Chronicle, frozenset[bytes]]:
    """Return what the run in this folder has left, and the last lines of `events.jsonl`, which it contains.

    Raises:
        OSError: its files cannot be read.
    """
    chronicle = Chronicle(info)
    for row in read_rows(log_dir):
        chronicle.row(row)
    last = deque[bytes](maxlen=_LAST_LINES)
    for event in read_noted(log_dir):
        chronicle.event(event)
        last.append(event.line)
    return chronicle, frozenset(last)
