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

    def add(self, value: float, weight: int) -> None:
        self.total += weight * value
        self.count += weight


@dataclass
class NumbersSoFar:
    """Numbers of the run that came one after the other, as if they had come at once.

    Attributes:
        steps: how many steps they are of.
        last: the last value of what does not come with each step.
    """

    steps: int = 0
    last: dict[str, float] = field(default_factory=dict[str, float])
    _of_steps: dict[str, _Mean] = field(default_factory=dict[str, _Mean])

    def add(self, values: Mapping[str, float], steps: int = 1) -> None:
        """Take numbers; what comes with each step is the mean of so many."""
        self.steps += steps
        for name, value in values.items():
            known = run_number(name)
            if known is not None and known.of_a_step:
                self._of_steps.setdefault(name, _Mean()).add(value, steps)
            else:
                self.last[name] = value

    @property
    def means(self) -> dict[str, float]:
        """The mean of what comes with each step."""
        return {name: mean.total / mean.count for name, mean in self._of_steps.items()}


@dataclass
class RowMaker:
    """Gathers what comes until a row is taken."""

    _run: NumbersSoFar = field(default_factory=NumbersSoFar)
    _told: dict[str, float] = field(default_factory=dict[str, float])
    _peers: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    _told_of: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])

    def add(self, values: Mapping[str, float], steps: int = 1) -> None:
        """Take numbers of the run; see `NumbersSoFar.add`."""
        self._run.add(values, steps)

    def measure(self, peer: str, values: Mapping[str, float]) -> None:
        """Take numbers of a peer."""
        self._peers[peer] = dict(values)

    def take(self, unix_s: float) -> MetricRow | None:
        """Return what has come since the last row; None if nothing has.

        A peer that has said just what it said before is there with no number: it was heard.
        """
        # The number of samples says where in the run a row is, so a row with any number of it has that one.
        last = self._run.last
        run = {name: value for name, value in last.items() if value != self._told.get(name)} | self._run.means
        if run and "samples" in (known := self._told | last):
            run["samples"] = known["samples"]
        peers = {name: self._news(name, values) for name, values in self._peers.items()}
        self._told |= last
        self._told_of |= self._peers
        for name in list(self._told_of)[: max(0, len(self._told_of) - _MAX_PEERS)]:
            del self._told_of[name]
        self._run, self._peers = NumbersSoFar(), {}
        return MetricRow(datetime.fromtimestamp(unix_s, UTC), run, peers) if run or peers else None

    def _news(self, peer: str, values: Mapping[str, float]) -> dict[str, float]:
        told = self._told_of.get(peer, {})
        return {name: value for name, value in values.items() if value != told.get(name)}
