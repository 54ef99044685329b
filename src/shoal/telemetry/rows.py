"""One second of a run in numbers: what all that look at it are made of. Pure.

    numbers of the run   --add-----.
    numbers of each peer --measure-+--> RowMaker --take, once a second--> MetricRow --> exporters

A row has what has come since the one before, and nothing else: what stands still is in no row, so that nothing old
looks fresh. Of a number that comes with each step a row has the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated

import msgspec

from shoal.telemetry.catalogue import run_number

METRICS_FILE, PEERS_FILE = "metrics.jsonl", "peers.jsonl"
"""Numbers of the run and of its peers, a row a line, in the run's folder on the client's host."""
_MAX_PEERS = 2048
"""Of so many it is remembered what they have said last; the numbers of any other are all told again."""


class MetricRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """What has come in about a second.

    Attributes:
        time: when the row was made.
        run: numbers of the run, see `catalogue.RUN`.
        peers: numbers of each peer by what it is called, see `control.peer_numbers.PeerNumbers.values`; of a server
            also its `stage`, and `held_round`, the newest round whose record it holds (-1: none).
    """

    time: Annotated[datetime, msgspec.Meta(tz=True)]
    run: dict[str, float]
    peers: dict[str, dict[str, float]] = {}

    def flat(self) -> dict[str, float]:
        """Return all numbers by one name each: `server 1@box2/step.committed`."""
        of_peers = {f"{peer}/{name}": value for peer, own in self.peers.items() for name, value in own.items()}
        return self.run | of_peers


@dataclass
class _Mean:
    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1


@dataclass
class RowMaker:
    """Gathers what comes until a row is taken."""

    _last: dict[str, float] = field(default_factory=dict[str, float])
    _means: dict[str, _Mean] = field(default_factory=dict[str, _Mean])
    _told: dict[str, float] = field(default_factory=dict[str, float])
    _peers: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    _told_of: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])

    def add(self, values: Mapping[str, float]) -> None:
        """Take numbers of the run."""
        for name, value in values.items():
            known = run_number(name)
            if known is not None and known.of_a_step:
                self._means.setdefault(name, _Mean()).add(value)
            else:
                self._last[name] = value

    def measure(self, peer: str, values: Mapping[str, float]) -> None:
        """Take numbers of a peer."""
        self._peers[peer] = dict(values)

    def take(self, unix_s: float) -> MetricRow | None:
        """Return what has come since the last row; None if nothing has.

        A peer that has said just what it said before is there with no number: it was heard.
        """
        # The number of samples says where in the run a row is, so a row with any number of it has that one.
        run = {name: value for name, value in self._last.items() if value != self._told.get(name)}
        run |= {name: mean.total / mean.count for name, mean in self._means.items()}
        if run and "samples" in (known := self._told | self._last):
            run["samples"] = known["samples"]
        peers = {name: self._news(name, values) for name, values in self._peers.items()}
        self._told |= self._last
        self._told_of |= self._peers
        for name in list(self._told_of)[: max(0, len(self._told_of) - _MAX_PEERS)]:
            del self._told_of[name]
        self._last, self._means, self._peers = {}, {}, {}
        return MetricRow(datetime.fromtimestamp(unix_s, UTC), run, peers) if run or peers else None

    def _news(self, peer: str, values: Mapping[str, float]) -> dict[str, float]:
        told = self._told_of.get(peer, {})
        return {name: value for name, value in values.items() if value != told.get(name)}
