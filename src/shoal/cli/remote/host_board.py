"""`shoal up --ui`: the dashboard's page with a part for the hosts, served on the operator's machine, for them alone.

    a page asks --> hosts of which it is long ago are looked at, all at once --> what was seen last, with its age
    an order    --> what the command of the same name does, with the file as it is now --> its lines

Nobody looks while no page does. Of a host one order is carried out at a time.
"""

from __future__ import annotations

import socket
import tempfile
from collections import deque
from collections.abc import AsyncIterable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from shoal.cli.exits import DONE, INTERRUPTED
from shoal.cli.output import on_one_line, without_controls
from shoal.cli.remote.hosts_file import DescribedSwarm
from shoal.cli.remote.operate import told, units_of
from shoal.cli.remote.orders import ORDERS, Say, restarted_with
from shoal.cli.remote.probe import HostFacts, probe
from shoal.cli.remote.run_news import RunNews
from shoal.cli.remote.ssh import Ssh, connections
from shoal.cli.remote.unit_messages import LookAtUnits, Units, UnitState
from shoal.cli.remote.units_there import ask_units
from shoal.clock import Clock
from shoal.errors import ConfigError, HostFailed
from shoal.monitor.http.access import URL_FILE, Access

LOOK_S: Final = 4.0
"""What was seen is so old at least, when a host is looked at again."""
PROBE_S: Final = 60.0
"""The same of what changes slowly, such as the room on its disk."""
_WITHIN_S: Final = 30.0
_NUM_LINES: Final = 200
_MAX_COURSE: Final = 100
_HOST: Final = "127.0.0.1"


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


@dataclass(eq=False, repr=False)
class HostBoard:
    """Is the `Operator` of an operator's page.

    Attributes:
        swarm: what the file says; the page is of these hosts.
        read: returns what it says now, for an order.
        tasks: in which is looked, and orders are carried out.
    """

    swarm: DescribedSwarm
    read: Callable[[], DescribedSwarm]
    hosts: Mapping[str, Ssh]
    tasks: TaskGroup
    clock: Clock
    say: Say
    _seen: dict[str, _Seen] = field(default_factory=dict[str, _Seen])
    _seen_s: dict[str, float] = field(default_factory=dict[str, float])
    _looking: set[str] = field(default_factory=set[str])
    _busy: dict[str, str] = field(default_factory=dict[str, str])
    _course: deque[tuple[float, str, str]] = field(default_factory=lambda: deque(maxlen=_MAX_COURSE))

    def __post_init__(self) -> None:
        client = self.swarm.hosts.swarm.client
        self._news = RunNews(self.hosts[client], client, self.swarm.prefix)

    @property
    def names(self) -> Collection[str]:
        """Of the hosts, in the file's order."""
        return self.hosts

    @property
    def orders(self) -> Collection[str]:
        """That can be given."""
        return ORDERS

    def board(self) -> dict[str, Any]:
        """Return what is known of all hosts; those of which it is old are looked at meanwhile."""
        for name in self.hosts:
            if name not in self._looking and self.clock.now_s() - self._seen_s.get(name, -LOOK_S) >= LOOK_S:
                self._looking.add(name)
                self.tasks.start_soon(self._look, name)
        course = [{"t": unix_s, "host": name, "says": text} for unix_s, name, text in self._course]
        return {"now": self.clock.unix_s(), "hosts": [self._row(name) for name in self.hosts], "course": course}

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
        concerned = restarted_with(self.swarm.hosts, (name,)) if order == "restart" else (name,)
        for each in concerned:
            if each in self._busy:
                return f"{each}: `{self._busy[each]}` is under way there"
        self._busy |= dict.fromkeys(concerned, order)
        self.tasks.start_soon(self._carry_out, name, order, concerned)
        return ""

    def run_news(self, last_id: str) -> AbstractAsyncContextManager[AsyncIterable[bytes] | None]:
        """Give what the run's own dashboard sends."""
        return self._news.opened(last_id)

    async def _carry_out(self, name: str, order: str, concerned: Collection[str]) -> None:
        self._note(name, f"shoal hosts {order} {name}" if order != "up" else "shoal up")
        try:
            swarm = await anyio.to_thread.run_sync(self.read)
            if _meant(swarm, name) != _meant(self.swarm, name):
                # What the page shows, and has asked about, would be another thing than what is done.
                raise ConfigError(f"the file names another run, client or way to {name} by now: start this page again")
            code = await ORDERS[order](swarm, (name,), self._note, clock=self.clock)
            self._note(name, f"{order}: {'not all of it could be done' if code else 'done'}")
        except (ConfigError, HostFailed, OSError) as error:
            self._note(name, f"error: {error}")
        finally:
            for each in concerned:
                del self._busy[each]
                self._seen_s.pop(each, None)  # looked at anew at once

    def _note(self, name: str, text: str) -> None:
        self._course.append((self.clock.unix_s(), name, on_one_line(text)))
        self.say(name, text)

    async def _look(self, name: str) -> None:
        try:
            self._seen[name] = await self._look_at(name, self._seen.get(name, _Seen()))
            self._seen_s[name] = self.clock.now_s()
        finally:
            self._looking.discard(name)

    async def _look_at(self, name: str, before: _Seen) -> _Seen:
        units, problem, asked = None, "", LookAtUnits(self._units_of(name))
        try:
            # Without names it would be all that its user has there, of other swarms as well.
            units = await self._asked(name, asked) if asked.names else Units(())
        except HostFailed as error:
            problem = on_one_line(str(error))
        now_s = self.clock.now_s()
        if asked.names and units is not None and before.facts is not None and now_s - before.probed_s < PROBE_S:
            return replace(before, units=units, problem="")
        try:
            # It also tells a host that is not reached from one where what should be there is not.
            file = self.swarm.hosts
            facts = await probe(self.hosts[name], file.hosts[name].python, self.clock, file.image)
            return _Seen(facts, now_s, units, problem)
        except HostFailed as error:
            return _Seen(problem=on_one_line(str(error)))

    async def _asked(self, name: str, request: LookAtUnits) -> Units:
        in_containers = self.swarm.hosts.image is not None
        return await ask_units(self.hosts[name], request, in_containers=in_containers, within_s=_WITHIN_S)

    def _units_of(self, name: str) -> tuple[str, ...]:
        return units_of(self.swarm.hosts, name, self.swarm.prefix)

    def _row(self, name: str) -> dict[str, Any]:
        entry, seen = self.swarm.hosts.hosts[name], self._seen.get(name)
        units = () if seen is None or seen.units is None else seen.units.units
        facts = None if seen is None else seen.facts
        return {
            "name": name,
            "ssh": entry.ssh or name,
            "isClient": name == self.swarm.hosts.swarm.client,
            "servers": entry.servers,
            "device": entry.device or "auto",
            "ageS": self.clock.now_s() - self._seen_s[name] if name in self._seen_s else None,
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


async def serve_page(
    swarm: DescribedSwarm, read: Callable[[], DescribedSwarm], port: int, say: Say, *, clock: Clock
) -> int:
    """Serve the page until Ctrl-C.

    Args:
        read: returns what it says now.
        port: of this machine; if it is taken, any that is free.

    Raises:
        ConfigError: the web server is not installed here.
    """
    try:
        # Takes a moment, and is for this command alone.
        from shoal.monitor.http.hosts import operator_app
        from shoal.monitor.http.server import answering
    except ImportError as error:
        raise ConfigError(
            "the page needs packages that are not installed on this machine: pip install 'shoal[dashboard]'"
        ) from error
    file = swarm.hosts
    with tempfile.TemporaryDirectory(prefix="shoal-page-") as folder, _listener(port) as listener:
        access = Access(Path(folder), f"hosts of {swarm.prefix}", "the folder that its terminal names")
        targets = file.destinations(file.hosts)
        async with connections(targets, file.ssh_command, clock) as hosts, anyio.create_task_group() as tasks:
            board = HostBoard(swarm, read, hosts, tasks, clock, say)
            async with answering(listener, operator_app(access, board)):
                access.serves(listener.getsockname()[1])
                say("", f"page: {access.url}")
                say(
                    "",
                    f"it is there until Ctrl-C; the address can be opened once, the next one is in {folder}/{URL_FILE}",
                )
                await anyio.Event().wait()
    raise AssertionError("nobody sets that event")


def _listener(port: int) -> socket.socket:
    try:
        return socket.create_server((_HOST, port))
    except OSError:
        return socket.create_server((_HOST, 0))
