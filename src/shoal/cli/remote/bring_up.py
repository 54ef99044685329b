"""`shoal up`: brings every host to what the file says, all at once, and waits until the run trains.

    each host:      probe --> problems? --> install --.
    client's host:  the client's unit --> it knows its addresses --> `shoal invite` --.
    other hosts:                                      `shoal join` takes it by standard input --> the servers' unit

What is so already is left alone. A host that fails says why, and keeps no other from going on, but for the client's.
"""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import anyio
import msgspec

from shoal.cli.exits import DONE, FAILED
from shoal.cli.output import on_one_line
from shoal.cli.remote.plan import Installation, Wanted, client_name, problems_of
from shoal.cli.remote.probe import UNITS, HostFacts, probe
from shoal.cli.remote.ssh import Ssh, connections
from shoal.cli.remote.unit_messages import AwaitPeers, LookAtUnits, Request, StartUnit, Unit, Units
from shoal.cli.remote.units_there import ask_units, running_of_other_kind, stop_other_kind
from shoal.clock import Clock
from shoal.control.swarm_status import SwarmStatus
from shoal.errors import MALFORMED, HostFailed

_INSTALL_S: Final = 1800.0
_PEERS_S: Final = 120.0
_TRAINS_S: Final = 600.0
_SERVERS_S: Final = 60.0
"""So long the rest of the servers is waited for, when the run trains."""
_COMMAND_S: Final = 60.0
_REPLACED_S: Final = 20.0
_VALID: Final = "10m"
_NO_SERVICES: Final = "it runs until this host restarts: its user has no systemd of their own"
_NO_RESTART: Final = "it runs until this host restarts: `shoal up` starts it again then"
_NOT_ALLOWED: Final = (
    "it runs until this host restarts: its user's services end with the login, until `sudo loginctl enable-linger "
    "$USER` there"
)
_FRESH_S: Final = 300.0
"""Installing may take longer on one host than an invitation is valid."""


@dataclass
class BringUp:
    """One call of `shoal up`, or of `shoal hosts restart`.

    Attributes:
        only: the hosts that are looked after; the others are as they are.
        say: prints a line for a host.
        resumes: the client goes on from the newest checkpoint that its host has.
        is_dry: the hosts are looked at and nothing is changed: it is said what would be.
    """

    wanted: Wanted
    only: Collection[str]
    clock: Clock
    say: Callable[[str, str], None]
    resumes: bool = False
    is_dry: bool = False
    _failed: set[str] = field(default_factory=set[str])
    _changed: set[str] = field(default_factory=set[str])
    _differs: set[str] = field(default_factory=set[str])
    _invitation: ClientInvitation = field(init=False)

    def __post_init__(self) -> None:
        self._invitation = ClientInvitation(self.clock)

    @property
    def _client_host(self) -> str:
        return self.wanted.file.swarm.client

    async def run(self) -> int:
        """Do it; return the exit code: 1 if a host has failed."""
        file = self.wanted.file
        targets = file.destinations({*self.only, self._client_host})
        began_s = self.clock.now_s()
        async with connections(targets, file.ssh_command, self.clock) as hosts:
            limiter = anyio.Semaphore(file.parallel)
            async with anyio.create_task_group() as tasks:
                for name, ssh in hosts.items():
                    tasks.start_soon(self._guarded, name, ssh, limiter)
            if self._changed and not self._failed and not self.is_dry:
                await self._until_training(hosts[self._client_host], began_s)
        if not self._changed | self._failed | self._differs:
            self.say("", "all hosts are as the file says: nothing was changed")
        elif self.is_dry:
            self.say("", "that was a look: nothing was changed")
        return FAILED if self._failed else DONE

    async def _guarded(self, name: str, ssh: Ssh, limiter: anyio.Semaphore) -> None:
        try:
            await self._host(name, ssh, limiter)
        except HostFailed as error:
            self._fail(name, str(error))
        finally:
            if name == self._client_host:
                self._invitation.settle()

    def _fail(self, name: str, why: str) -> None:
        self._failed.add(name)
        self.say(name, f"error: {why}")

    async def _host(self, name: str, ssh: Ssh, limiter: anyio.Semaphore) -> None:
        entry = self.wanted.file.hosts[name]
        # Whoever waits for the client's host keeps no other host from its turn.
        async with limiter:
            facts = await probe(ssh, entry.python, self.clock, self.wanted.file.image)
            if name not in self.only:
                await self._client(name, ssh, facts)
                return
            if problems := [*problems_of(entry, facts, self.wanted.installation)]:
                for problem in problems:
                    self._fail(name, problem)
                return
            await self._install(name, ssh, facts)
            if name == self._client_host:
                await self._client(name, ssh, facts)
        servers = self.wanted.servers(name, facts)
        if servers is not None:
            await self._servers(name, ssh, facts, servers)

    async def _install(self, name: str, ssh: Ssh, facts: HostFacts) -> None:
        installation, entry = self.wanted.installation, self.wanted.file.hosts[name]
        if installation.is_there(entry, facts):
            return
        self._changed.add(name)
        script = installation.script(entry, facts)
        if self.is_dry:
            sent = ""
            if isinstance(installation, Installation) and installation.wheel is not None:
                sent = f"send {installation.requirement}; "
            self.say(name, f"would install: {sent}{'; '.join(script.splitlines()[1:])}")
            return
        self.say(name, f"{installation.told(facts)} ({facts.system}); this may take minutes")
        began_s = self.clock.now_s()
        if isinstance(installation, Installation) and installation.wheel is not None:
            path = shlex.quote(f"{facts.home}/{installation.wheel_path(entry)}")
            folder = shlex.quote(f"{facts.home}/{installation.wheel_folder(entry)}")
            # Another operator may be at it, too: what there is under this name is whole.
            write = f"umask 077 && mkdir -p {folder} && cat > {path}.$$ && mv {path}.$$ {path}"
            sent = await ssh.run(write, installation.wheel, within_s=_INSTALL_S)
            _require(sent.code, sent.stderr, "the wheel cannot be written")
        done = await ssh.run("sh -s", script.encode(), within_s=_INSTALL_S)
        _require(done.code, done.stderr, "the installation has failed")
        self.say(name, f"installed in {self.clock.now_s() - began_s:.0f} s")

    async def _client(self, name: str, ssh: Ssh, facts: HostFacts) -> None:
        unit = self.wanted.client(name, facts)
        assert unit is not None
        if name in self.only:
            this_time = ("--resume",) if self.resumes else ()
            if not await self._start(name, ssh, facts, unit, this_time=this_time, replaces=False):
                return
        if self.is_dry or name in self._failed:
            return
        # Its own servers, too, wait for that.
        self._invitation.settle(partial(self._invited_by, ssh, unit))

    async def _invited_by(self, ssh: Ssh, client: Unit) -> str:
        """Return the text by which others join the client's run."""
        known = await self._ask(ssh, AwaitPeers(client.name, _PEERS_S), within_s=_PEERS_S + _COMMAND_S)
        if not known.changed:
            said = " | ".join(map(on_one_line, known.units[0].said))
            raise HostFailed(f"the client on {self._client_host} does not come up: {said or 'it says nothing'}")
        done = await ssh.run(self._beside_client(f"invite --for {_VALID}"), within_s=_COMMAND_S)
        _require(done.code, done.stderr, f"{self._client_host} makes no invitation")
        # A login shell may have something to say before.
        return done.stdout.decode(errors="replace").strip().splitlines()[-1]

    def _beside_client(self, command: str) -> str:
        """Return what has a shell on the client's host run a command of shoal where the client runs."""
        return self.wanted.installation.beside(client_name(self.wanted.prefix), command)

    async def _ask(self, ssh: Ssh, request: Request, python: str = "", *, within_s: float = _COMMAND_S) -> Units:
        in_containers = self.wanted.file.image is not None
        return await ask_units(ssh, request, python, in_containers=in_containers, within_s=within_s)

    async def _servers(self, name: str, ssh: Ssh, facts: HostFacts, unit: Unit) -> None:
        if self.is_dry:
            await self._start(name, ssh, facts, unit, replaces=True)
            return
        python = shlex.quote(self.wanted.python(name, facts))
        [now] = (await self._ask(ssh, LookAtUnits((unit.name,)), python)).units
        if not now.is_running:
            invitation = await self._invitation.text()
            if invitation is None:
                raise HostFailed(f"not joined: {self._client_host} has no client that could invite it")
            entry = self.wanted.file.hosts[name]
            command = self.wanted.installation.once(entry, facts, "join --invitation=- --remember-only")
            joined = await ssh.run(command, invitation.encode(), within_s=_COMMAND_S)
            _require(joined.code, joined.stderr, "it does not take the invitation")
        await self._start(name, ssh, facts, unit, replaces=True)

    async def _start(
        self, name: str, ssh: Ssh, facts: HostFacts, unit: Unit, *, replaces: bool, this_time: tuple[str, ...] = ()
    ) -> bool:
        """Have a unit run; return whether something runs now that can be asked as the file says."""
        in_containers = self.wanted.file.image is not None
        if self.is_dry:
            await self._would_start(name, ssh, facts, unit, replaces=replaces, this_time=this_time)
            return True
        if not replaces and await running_of_other_kind(ssh, (unit.name,), in_containers=in_containers):
            self._say_that_it_differs(name, unit)
            return False
        within_s = 2 * _COMMAND_S
        if ended := await stop_other_kind(
            ssh, (unit.name,), _REPLACED_S, in_containers=in_containers, within_s=within_s
        ):
            self.say(name, ended)
        # What podman runs for a user ends with the login as well, unless their services last.
        lasts = await self._has_lasting_systemd(ssh, facts)
        by_systemd = lasts and not in_containers
        python = shlex.quote(self.wanted.python(name, facts))
        done = await self._ask(ssh, StartUnit(unit, replaces, by_systemd, this_time), python, within_s=within_s)
        if done.differs:
            self._say_that_it_differs(name, unit)
        if done.changed:
            self._changed.add(name)
            self.say(name, f"{unit.name} {done.changed}")
            if unit.is_lasting and not by_systemd:
                no_services = _NO_RESTART if in_containers else _NO_SERVICES
                self.say(name, _NOT_ALLOWED if facts.has_user_units and not lasts else no_services)
        return True

    def _say_that_it_differs(self, name: str, unit: Unit) -> None:
        self._differs.add(name)
        self.say(
            name,
            f"{unit.name} runs as it was started, not as the file says now: it is left alone, since that would be "
            f"another run; `shoal hosts restart {name}` does it",
        )

    async def _would_start(
        self, name: str, ssh: Ssh, facts: HostFacts, unit: Unit, *, replaces: bool, this_time: tuple[str, ...]
    ) -> None:
        """Say what a start would do to what runs there now."""
        in_containers = self.wanted.file.image is not None
        is_known = facts.installed or in_containers
        [now] = (await self._ask(ssh, LookAtUnits((unit.name,)))).units if is_known else (None,)
        if await running_of_other_kind(ssh, (unit.name,), in_containers=in_containers):
            if not replaces:
                self._say_that_it_differs(name, unit)
                return
            verb = "restart"
        elif now is None or not now.is_running:
            verb = "start"
        elif now.digest == unit.digest():
            self.say(name, f"{unit.name} would be left as it is")
            return
        elif not replaces:
            self._say_that_it_differs(name, unit)
            return
        else:
            verb = "restart"
        self._changed.add(name)
        self.say(name, f"would {verb} {unit.name}, in ~/{UNITS}/{unit.name}: {shlex.join((*unit.argv, *this_time))}")

    async def _has_lasting_systemd(self, ssh: Ssh, facts: HostFacts) -> bool:
        """Whether the user has a systemd that goes on when nobody is logged in."""
        if not facts.has_user_units or facts.lingers:
            return facts.has_user_units
        return (await ssh.run("loginctl enable-linger", within_s=_COMMAND_S)).code == 0

    async def _until_training(self, ssh: Ssh, began_s: float) -> None:
        # With the prefix it is the run of this unit, and of no other that this user has there.
        watch = self._beside_client(f"status --watch --json --experiment-prefix {shlex.quote(self.wanted.prefix)}")
        said, trains_s = "", 0.0
        with anyio.move_on_after(_TRAINS_S) as scope:
            try:
                async for line in ssh.lines(watch):
                    if not line.startswith("{"):
                        continue  # said by a login shell
                    status = msgspec.json.decode(line, type=SwarmStatus)
                    trains_s = trains_s or (self.clock.now_s() if status.steps else 0.0)
                    is_late = trains_s and self.clock.now_s() - trains_s > _SERVERS_S
                    if trains_s and (is_late or _num_servers(status) >= self.wanted.file.num_servers):
                        took_s = self.clock.now_s() - began_s
                        shape = f"{len(status.stages)} stages, {_num_servers(status)} servers"
                        self.say("", f"run {status.run} trains, {took_s:.0f} s after the beginning: {shape}")
                        return
                    if status.state != said:
                        self.say("", f"run {status.run}: {status.state}")
                        said = status.state
            except (HostFailed, *MALFORMED) as error:
                self._fail(self._client_host, f"cannot be asked how the run is: {error}")
                return
        why = f"no step within {_TRAINS_S / 60:.0f} minutes" if scope.cancelled_caught else "the run has ended"
        self._fail(
            self._client_host, f"{why}: `shoal hosts status` and `shoal hosts logs {self._client_host}` say more"
        )


def _num_servers(status: SwarmStatus) -> int:
    """Count servers; one that has left, and is there again, may stand twice in what is known for some seconds."""
    names = {server.name for stage in status.stages for server in stage.replicas}
    return len(names | {server.name for server in status.waiting_servers})


def _require(code: int, stderr: str, what: str) -> None:
    if code:
        lines = [on_one_line(line) for line in stderr.splitlines() if line.strip()]
        # pip says the cause first, and then how it could be upgraded.
        told = [line for line in lines if line.lower().startswith(("error", "shoal: error", "[errno"))] or lines
        raise HostFailed(f"{what}: {told[-1] if told else f'exit code {code}'}")


class ClientInvitation:
    """The invitation of the client's run: asked for when it is needed, given to all that join, renewed when old."""

    def __init__(self, clock: Clock) -> None:
        """Begin where nobody knows yet whether there is a client."""
        self._clock = clock
        self._settled = anyio.Event()
        self._ask: Callable[[], Awaitable[str]] | None = None
        self._asking = anyio.Lock()
        self._text = ""
        self._asked_s = 0.0

    def settle(self, ask: Callable[[], Awaitable[str]] | None = None) -> None:
        """Say that the client's host is done, for good.

        Args:
            ask: returns an invitation; None: there is no client, unless one was named before.
        """
        self._ask = self._ask or ask
        self._settled.set()

    async def text(self) -> str | None:
        """Return what others join by, once the client's host is done; None if there is no client.

        Raises:
            HostFailed: the client makes none.
        """
        await self._settled.wait()
        if self._ask is None:
            return None
        async with self._asking:
            if not self._text or self._clock.now_s() - self._asked_s > _FRESH_S:
                self._text, self._asked_s = await self._ask(), self._clock.now_s()
        return self._text
