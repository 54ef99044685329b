"""What an operator's page knows of the hosts, and what it has done there.

    a page asks --> hosts of which it is long ago are looked at, all at once --> what was seen last, with its age
    an order    --> what the command of the same name does, with the file as it is now --> its lines

Nobody looks while no page does. Of a host one order is carried out at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Final

import anyio.to_thread
from anyio.abc import TaskGroup

from shoal.cli.exits import DONE, INTERRUPTED
from shoal.cli.output import on_one_line, without_controls
from shoal.cli.remote.hosts_file import DescribedSwarm
from shoal.cli.remote.operate import told, units_of
from shoal.cli.remote.orders import ORDERS, Say, restarted_with
from shoal.cli.remote.probe import HostFacts, probe
from shoal.cli.remote.run_news import RunNews
from shoal.cli.remote.ssh import Ssh
from shoal.cli.remote.unit_messages import LookAtUnits, Units, UnitState
from shoal.cli.remote.units_there import ask_units
from shoal.clock import Clock
from shoal.errors import ConfigError, HostFailed

LOOK_S: Final = 4.0
"""What was seen is so old at least, when a host is looked at again."""
PROBE_S: Final = 60.0
"""The same of what changes slowly, such as the room on its disk."""
_WITHIN_S: Final = 30.0
_NUM_LINES: Final = 200
_MAX_COURSE: Final = 100


@dataclass(frozen=True)
class _Seen:
    """What a look at a host has come to.

    Attributes:
        facts: None: it was not reached.
        probed_s: when they were asked for.
        units: None: it has no installation that says how they are.
        problem: why something is not known, or empty.
    """

    facts: HostFacts | None = None
    probed_s: float = 0.0
    units: Units | None = None
    problem: str = ""


class HostBoard:
    """Is the `Operator` of an operator's page."""

    def __init__(
        self,
        swarm: DescribedSwarm,
        read: Callable[[], DescribedSwarm],
        hosts: Mapping[str, Ssh],
        tasks: TaskGroup,
        clock: Clock,
        say: Say,
    ) -> None:
        """Look at nothing yet.

        Args:
            swarm: what the file says; the page is of these hosts.
            read: returns what it says now, for an order.
            tasks: in which is looked, and orders are carried out.
            say: prints a line for a host.
        """
        self._swarm = swarm
        self._read = read
        self._hosts = hosts
        self._tasks = tasks
        self._clock = clock
        self._say = say
        self._news = RunNews(hosts[swarm.hosts.swarm.client], swarm.hosts.swarm.client, swarm.prefix)
        self._seen: dict[str, _Seen] = {}
        self._seen_s: dict[str, float] = {}
        self._looking: set[str] = set()
        self._busy: dict[str, str] = {}
        self._course: deque[tuple[float, str, str]] = deque(maxlen=_MAX_COURSE)

    @property
    def names(self) -> Collection[str]:
        """Of the hosts, in the file's order."""
        return self._hosts

    @property
    def orders(self) -> Collection[str]:
        """That can be given."""
        return ORDERS

    def board(self) -> dict[str, Any]:
        """Return what is known of all hosts; those of which it is old are looked at meanwhile."""
        for name in self._hosts:
            if name not in self._looking and self._clock.now_s() - self._seen_s.get(name, -LOOK_S) >= LOOK_S:
                self._looking.add(name)
                self._tasks.start_soon(self._look, name)
        course = [{"t": unix_s, "host": name, "says": text} for unix_s, name, text in self._course]
        return {"now": self._clock.unix_s(), "hosts": [self._row(name) for name in self._hosts], "course": course}

    async def logs(self, name: str) -> list[dict[str, Any]]:
        """Return the newest lines that the units of a host have said, or why they are not known."""
        asked = LookAtUnits(self._units_of(name), _NUM_LINES)
        if not asked.names:
            return []
        try:
            units = (await self._asked(name, asked)).units
        except HostFailed as error:
            return [{"unit": "", "lines": [on_one_line(str(error))]}]
        return [
            {"unit": on_one_line(unit.name), "lines": [without_controls(line) for line in unit.said]} for unit in units
        ]

    def order(self, name: str, order: str) -> str:
        """Begin to carry an order out; return why that is not possible now, or nothing."""
        concerned = restarted_with(self._swarm.hosts, (name,)) if order == "restart" else (name,)
        for each in concerned:
            if each in self._busy:
                return f"{each}: `{self._busy[each]}` is under way there"
        self._busy |= dict.fromkeys(concerned, order)
        self._tasks.start_soon(self._carry_out, name, order, concerned)
        return ""

    def run_news(self, last_id: str) -> AbstractAsyncContextManager[AsyncIterable[bytes] | None]:
        """Give what the run's own dashboard sends."""
        return self._news.opened(last_id)

    async def _carry_out(self, name: str, order: str, concerned: Collection[str]) -> None:
        self._note(name, f"shoal hosts {order} {name}" if order != "up" else "shoal up")
        try:
            swarm = await anyio.to_thread.run_sync(self._read)
            if _meant(swarm, name) != _meant(self._swarm, name):
                # What the page shows, and has asked about, would be another thing than what is done.
                raise ConfigError(f"the file names another run, client or way to {name} by now: start this page again")
            code = await ORDERS[order](swarm, (name,), self._note, clock=self._clock)
            self._note(name, f"{order}: {'not all of it could be done' if code else 'done'}")
        except (ConfigError, HostFailed, OSError) as error:
            self._note(name, f"error: {error}")
        finally:
            for each in concerned:
                del self._busy[each]
                self._seen_s.pop(each, None)  # looked at anew at once

    def _note(self, name: str, text: str) -> None:
        self._course.append((self._clock.unix_s(), name, on_one_line(text)))
        self._say(name, text)

    async def _look(self, name: str) -> None:
        try:
            self._seen[name] = await self._look_at(name, self._seen.get(name, _Seen()))
            self._seen_s[name] = self._clock.now_s()
        finally:
            self._looking.discard(name)

    async def _look_at(self, name: str, before: _Seen) -> _Seen:
        units, problem, asked = None, "", LookAtUnits(self._units_of(name))
        try:
            # Without names it would be all that its user has there, of other swarms as well.
            units = await self._asked(name, asked) if asked.names else Units(())
        except HostFailed as error:
            problem = on_one_line(str(error))
        now_s = self._clock.now_s()
        if asked.names and units is not None and before.facts is not None and now_s - before.probed_s < PROBE_S:
            return replace(before, units=units, problem="")
        try:
            # It also tells a host that is not reached from one where what should be there is not.
            return _Seen(await self._probed(name), now_s, units, problem)
        except HostFailed as error:
            return _Seen(problem=on_one_line(str(error)))

    async def _asked(self, name: str, request: LookAtUnits) -> Units:
        in_containers = self._swarm.hosts.image is not None
        return await ask_units(self._hosts[name], request, in_containers=in_containers, within_s=_WITHIN_S)

    async def _probed(self, name: str) -> HostFacts:
        file = self._swarm.hosts
        return await probe(self._hosts[name], file.hosts[name].python, self._clock, file.image)

    def _units_of(self, name: str) -> tuple[str, ...]:
        return units_of(self._swarm.hosts, name, self._swarm.prefix)

    def _row(self, name: str) -> dict[str, Any]:
        entry, seen = self._swarm.hosts.hosts[name], self._seen.get(name)
        units = () if seen is None or seen.units is None else seen.units.units
        facts = None if seen is None else seen.facts
        return {
            "name": name,
            "ssh": entry.ssh or name,
            "isClient": name == self._swarm.hosts.swarm.client,
            "servers": entry.servers,
            "device": entry.device or "auto",
            "ageS": self._clock.now_s() - self._seen_s[name] if name in self._seen_s else None,
            "isReached": None if seen is None else facts is not None,
            "problem": "" if seen is None else seen.problem,
            "system": "" if facts is None else on_one_line(facts.system),
            "gpus": None if facts is None else facts.gpus,
            "freeKb": None if facts is None else facts.free_kb,
            "version": "" if seen is None or seen.units is None else on_one_line(seen.units.version),
            "units": [_unit_row(unit) for unit in units],
            "busy": self._busy.get(name, ""),
        }


def _meant(swarm: DescribedSwarm, name: str) -> tuple[object, ...]:
    """Return what an order to a host is about, beside what it is to be there."""
    return swarm.prefix, swarm.hosts.swarm.client, swarm.hosts.destinations((name,)), swarm.hosts.ssh_command


def _unit_row(unit: UnitState) -> dict[str, Any]:
    said = on_one_line(unit.said[-1]) if unit.said else ""
    state = told(unit)
    return {
        "name": on_one_line(unit.name),
        "isRunning": unit.is_running,
        # One that was taken down has ended as by Ctrl-C.
        "isWell": unit.is_running or unit.code in (DONE, INTERRUPTED),
        "since": unit.since_unix_s,
        "state": state.removesuffix(f": {said}") if said else state,
        "said": said,
    }
