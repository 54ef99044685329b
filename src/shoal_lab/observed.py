"""A running swarm as its log files show it: who is who, which steps were committed when and over which path.

Needs `--log-level=debug`, for the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from shoal.ids import StepKey
from shoal.runtime.process_info import command_line
from shoal_lab.event_log import EventLog, time_of
from shoal_lab.launched import Launched


class Step(NamedTuple):
    """A step that a trainer has committed; `at_s` is wall-clock time, as its log has it."""

    at_s: float
    slot: int
    generation: int
    number: int
    path: tuple[str, ...]
    samples: int = 0
    attempt: int = 0

    @property
    def key(self) -> StepKey:
        """As the step logs of replicas have it."""
        return StepKey(self.slot, self.generation, self.number, self.attempt)


@dataclass
class ObservedServer:
    """One server process slot of a host, through all its starts."""

    host: Launched
    index: int
    log: EventLog

    @property
    def role(self) -> str:
        """As the launcher calls it."""
        return f"server:{self.index}"

    @property
    def peer(self) -> str:
        """Its peer id, which its restarts keep."""
        return self._ready()["peer"]

    @property
    def stage(self) -> int:
        """The stage that it serves; where it is now, if it has moved since it was started."""
        return [event for event in self.log.read() if event["event"] in ("server.ready", "server.moved")][-1]["stage"]

    def swapped(self, after_s: float = 0.0) -> list[dict[str, Any]]:
        """Return the records that it has swapped in since a time."""
        return [event for event in self.log.named("round.swapped") if time_of(event) > after_s]

    def _ready(self) -> dict[str, Any]:
        return self.log.named("server.ready")[-1]


@dataclass
class Swarm:
    """One run: the host of its client, and the hosts of its servers (the same one on a single machine)."""

    client: Launched
    server_hosts: Sequence[Launched]
    num_slots: int
    _steps: dict[int, list[Step]] = field(default_factory=dict[int, list[Step]])
    _num_read: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def hosts(self) -> list[Launched]:
        """Every command of the run, once."""
        return list(dict.fromkeys((self.client, *self.server_hosts)))

    def events(self, process: str, name: str, after_s: float = 0.0) -> list[dict[str, Any]]:
        """Return the events of a process on the client's host, younger than a time."""
        return [event for event in self.client.log(process).named(name) if time_of(event) > after_s]

    @cached_property
    def servers(self) -> list[ObservedServer]:
        """All servers."""
        found: list[ObservedServer] = []
        for host in self.server_hosts:
            for path in sorted(host.require_log_dir().glob("server_*.log")):
                found.append(ObservedServer(host, int(path.stem.removeprefix("server_")), host.log(path.stem)))
        return found

    def steps(self, slot: int) -> list[Step]:
        """Return the steps that the trainers of a slot have committed, in the order of the log."""
        known = self._steps.setdefault(slot, [])
        unread = self.client.log(f"trainer_{slot}").read()[self._num_read.get(slot, 0) :]
        for event in unread:
            if event["event"] == "step.committed":
                _, generation, number, attempt = event["key"]
                path = tuple(event["path"])
                known.append(Step(time_of(event), slot, generation, number, path, event["samples"], attempt))
        self._num_read[slot] = self._num_read.get(slot, 0) + len(unread)
        return known

    def last_step(self, slot: int) -> Step:
        """Return the newest step of a slot."""
        return self.steps(slot)[-1]

    def users_of(self, peers: Collection[str]) -> frozenset[int]:
        """Return the slots whose last step ran over one of these peers."""
        return frozenset(slot for slot in range(self.num_slots) if set(self.last_step(slot).path) & set(peers))

    def begun_after(self, at_s: float) -> Callable[[Step], bool]:
        """Return whether a step was begun after a time: the one under way then may need nothing more of anybody."""

        def is_begun_after(step: Step) -> bool:
            before = [each for each in self.steps(step.slot) if at_s < each.at_s < step.at_s]
            return bool(before)

        return is_begun_after

    def longest_pause_s(self, from_s: float, to_s: float) -> float:
        """Return the longest time between two steps of the whole swarm, whoever committed them."""
        times = sorted(step.at_s for slot in range(self.num_slots) for step in self.steps(slot))
        inside = [time_s for time_s in times if from_s <= time_s <= to_s]
        return max((two - one for one, two in pairwise(inside)), default=0.0)

    def steps_between(self, from_s: float, to_s: float) -> list[Step]:
        """Return the steps that all trainers have committed between two times."""
        steps = (step for slot in range(self.num_slots) for step in self.steps(slot))
        return [step for step in steps if from_s < step.at_s <= to_s]

    def is_whole(self, server: ObservedServer, after_s: float) -> bool:
        """Whether a server has its state again after a time, and each trainer has since stepped over a path of its own.

        Which servers those paths have is not said: a spare may have taken the place of the one that was away.
        """
        return self.whole_at_s(server, after_s) is not None

    def whole_at_s(self, server: ObservedServer, after_s: float) -> float | None:
        """Return when that was; None if it is not yet so."""
        swapped = server.swapped(after_s)
        if not swapped:
            return None
        paths: dict[int, tuple[str, ...]] = {}
        # Old steps come first, and they are many.
        newest = [step for slot in range(self.num_slots) for step in self.steps(slot)[-200:]]
        for step in sorted(newest):
            if step.at_s > time_of(swapped[0]):
                paths[step.slot] = step.path
                used = [peer for path in paths.values() for peer in path]
                if len(paths) == self.num_slots and len(used) == len(set(used)):
                    return step.at_s
        return None

    def is_training(self) -> bool:
        """Whether each slot has committed a step and a round is recorded."""
        if self.client.log_dir is None or not self.events("client_0", "round.recorded"):
            return False
        return all(self.steps(slot) for slot in range(self.num_slots))

    def num_records(self, after_s: float = 0.0) -> int:
        """Return how many rounds were recorded since a time."""
        return len(self.events("client_0", "round.recorded", after_s))

    def records_between(self, from_s: float, to_s: float) -> int:
        """Return how many rounds were recorded between two times."""
        return self.num_records(from_s) - self.num_records(to_s)

    def processes(self) -> None:
        """Look at all processes, so that what they leave behind is known later."""
        for host in self.hosts:
            host.processes()


def p2pd_of(host: Launched) -> list[int]:
    """Return the libp2p daemons of a host: usually one, which one of its roles has."""
    return [pid for pid in host.processes() if "p2pd" in "".join(command_line(pid)[:1])]
