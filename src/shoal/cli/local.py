"""A whole swarm on one machine, from the launch to the summary: what `run_local.py` and `shoal run-local` do.

start all roles -> the client reports its summary (or a signal arrives, or a role fails for good) -> end all roles
-> write summary.json
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import TaskGroup

from shoal import log
from shoal.cli.afterwards import how_ended, left_commands
from shoal.cli.cuts import is_settled, log_cut, with_class_names, with_known_cut, with_profiled_cut
from shoal.cli.devices import devices_of_servers, unused_gpus
from shoal.cli.early import EarlyStart, ending_signals
from shoal.cli.exits import DONE, FAILED, INTERRUPTED, USER_ERROR
from shoal.cli.farewell import GRACE_S, Farewell
from shoal.cli.host import SwarmHost
from shoal.cli.host_network import HostNetwork
from shoal.cli.live import LiveView
from shoal.cli.run_files import (
    in_time,
    make_log_dir,
    new_run_id,
    no_unbegun_log_dir,
    remove_empty_outputs,
    write_config,
    write_summary,
)
from shoal.cli.run_folder import LAUNCHER, LOCAL_KEY, read_object
from shoal.clock import Clock, SystemClock, utc_iso
from shoal.config import Config
from shoal.control.maddrs import outward
from shoal.control.role_start import ResumedFrom
from shoal.data.places import require_here
from shoal.errors import ConfigError, ConnectionLost, ShoalError
from shoal.events.base import SUMMARY_FILE, Event, emit, tell
from shoal.events.hosts import CurvesNotDrawn, ReportNotWritten, RunEndedByError, RunInterrupted, SwarmMoved, SwarmOpen
from shoal.events.processes import ForkServerReady, RoleIsRestarting, RoleLost
from shoal.events.registry import IdentityCopied, LanUnannounced
from shoal.file_thread import FileThread, remedy, said_and_remedy, said_by_disk
from shoal.identity import Identity, create_swarm_key
from shoal.ids import RunId
from shoal.report.curves import write_curves
from shoal.report.page import write_page
from shoal.runtime import launcher_messages as messages
from shoal.runtime.process_info import process_age_s, tree_usage
from shoal.runtime.role_handle import RoleHandle
from shoal.runtime.supervisor import Supervisor

if TYPE_CHECKING:
    from shoal.cli.resuming import Resumption

logger = logging.getLogger(__name__)

UNHURRIED_S = 15.0
"""Time for all roles to leave a run that ends by itself: on a busy host what they say last takes seconds."""
LEAST_GRACE_S = 1.0
"""How much of that other roles have at least when client and mirror have left."""
USAGE_INTERVAL_S, USAGE_MAX_INTERVAL_S = 5.0, 60.0
"""Between looks at the memory of all processes, for the summary; it doubles, as each costs up to 0.1 s of a core."""
WATCH_INTERVAL_S = 1.0
"""Between looks at the run for the screen."""
ESSENTIAL = ("client", "data_server")
"""Roles whose end ends the run."""
_STAY = ("server", "mirror")
"""Roles that end by themselves only when somebody has sent them a SIGTERM, an order to leave for good."""
STOP_ORDER = (("client",), ("trainer", "baseline"), ("data_server",), ("server",), ("mirror",), ("monitor",))


def run_local(
    config: Config, early: EarlyStart, *, baseline: bool = False, resumption: Resumption | None = None
) -> int:
    """Run a swarm on this machine until training is done, and return the exit code.

    Args:
        early: runs already; the caller ends it.
        baseline: also train the plain loop beside the swarm.
        resumption: of the run that goes on, which has given `config`; None: a new run begins.

    Raises:
        ConfigError: the device or the data does not exist, or the log directory cannot be written.
    """
    require_here(config.data)
    devices = devices_of_servers(config)
    clock = SystemClock()
    config = with_known_cut(config if resumption is not None else with_class_names(config))
    run_id = new_run_id(config, clock) if resumption is None else resumption.run_id

    async def run() -> int:
        host = HostRun(config, run_id, log_dir, clock, swarm_key, devices, baseline, resumed=source)
        return await host.run(early)

    with no_unbegun_log_dir(config, run_id):
        if resumption is None:
            source = None
            log_dir = make_log_dir(config, run_id, is_local=True)
            swarm_key = create_swarm_key(log_dir / LOCAL_KEY)
        else:
            source, swarm_key, claim = resumption.source, resumption.swarm_key, early.run_dir.claim_folder
            log_dir = resumption.prepare(clock, partial(print, flush=True), is_local=True, claim=claim)
        log.configure(LAUNCHER, log_dir, config.log_level)
        early.require_uninterrupted()
        return anyio.run(run, backend_options={"use_uvloop": True})


@dataclass
class _PeakUsage:
    """The most processes and memory seen at one time."""

    processes: int = 0
    pss_bytes: int = 0

    def sample(self) -> None:
        try:
            usage = tree_usage(os.getpid())
        except OSError:
            return  # no file can be opened for a moment, which is no reason to end anything
        self.processes = max(self.processes, usage.num_processes)
        self.pss_bytes = max(self.pss_bytes, usage.pss_bytes)


@dataclass
class HostRun:
    """One run on the host of its client; `run` is called once.

    Attributes:
        log_dir: `logs/<run_id>`.
        baseline: whether the plain loop runs beside the swarm.
        network: how other hosts reach this one; None: there are no others.
        identity_of: see `SwarmHost`.
        invite: returns the lines to print once other hosts can join, from the monitor's addresses, and whether these
            are its first ones. The run then waits without a limit for servers of other hosts.
        succeeds: a client of another host has begun the run.
        resumed: from which checkpoint the run goes on; `log_dir` is prepared for that.
    """

    config: Config
    run_id: RunId
    log_dir: Path
    clock: Clock
    swarm_key: bytes
    devices: Sequence[str] = ()
    baseline: bool = False
    network: HostNetwork | None = None
    identity_of: Callable[[str, int], Identity] | None = None
    invite: Callable[[tuple[str, ...], bool], Iterable[str]] | None = None
    succeeds: bool = False
    resumed: ResumedFrom | None = None
    exit_code: int = FAILED
    is_unwanted: bool = False
    failure: str | None = None
    failure_kind: str = ""
    summary: Mapping[str, Any] | None = None
    usage: _PeakUsage = field(default_factory=_PeakUsage)
    _status: Mapping[str, float] = field(default_factory=dict[str, float])
    _ended: anyio.Event = field(default_factory=anyio.Event)
    _hurry: anyio.Event = field(default_factory=anyio.Event)
    _starting: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    _client: RoleHandle | None = None
    _client_followed: anyio.Event | None = None
    _mirror: RoleHandle | None = None
    _is_watched: bool = False
    _on_lan: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    _farewell: Farewell = field(default_factory=Farewell)
    _data_ready: anyio.Event = field(default_factory=anyio.Event)
    _baseline_done: anyio.Event = field(default_factory=anyio.Event)

    async def run(self, early: EarlyStart) -> int:
        # Signals are heard until nothing of the run is left: the first one ends it, a second one at once.
        early.preload_for(self.config)
        view = LiveView(self.config, self.run_id, self.log_dir)
        with anyio.open_signal_receiver(*ending_signals()) as signals:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch_signals, signals)
                with view:
                    try:
                        async with Supervisor(
                            fork_servers=early.fork_servers, clock=self.clock, notice=view.notice
                        ) as supervisor:
                            await self._supervise(supervisor, early, view)
                    except ShoalError as error:
                        self._fail(str(error), kind=type(error).__name__)
                tasks.cancel_scope.cancel()
        if self.summary is None and self.exit_code == DONE:
            self._fail("the client has ended without a summary; its log says why")
        await self._finish(view)
        return self.exit_code

    async def _finish(self, view: LiveView) -> None:
        """Leave the files of the run's end, and show how it has ended."""
        writes = FileThread("last files")
        try:
            # First what is worth most: whoever stops the run may be impatient.
            path = await in_time(writes, self._write_summary)
            curves = await in_time(writes, partial(self._written, write_curves, CurvesNotDrawn))
            commands = await in_time(writes, self._commands)
            page = partial(write_page, ended=how_ended(self._exit, self.failure), commands=commands)
            report = await in_time(writes, partial(self._written, page, ReportNotWritten))
            show = partial(view.finish, path=path, log_dir=self.log_dir, curves=curves, report=report)
            await in_time(writes, lambda: show(self.summary, self.failure))
        except TimeoutError:
            self._fail(
                f"{self.log_dir} does not answer, so that summary and report are not written there", kind="StorageError"
            )
            view.failed(self.failure)
        finally:
            writes.end()

    @property
    def _exit(self) -> str:
        if self.failure is not None:
            return "failed"
        return str((self.summary or {}).get("exit", "interrupted"))

    def _commands(self) -> list[str]:
        return left_commands(self.config, self.run_id, self.log_dir, self.summary, self.failure)

    async def _supervise(self, supervisor: Supervisor, early: EarlyStart, view: LiveView) -> None:
        host = SwarmHost(
            config=self.config,
            run_id=self.run_id,
            log_dir=self.log_dir,
            swarm_key=self.swarm_key,
            run_dir=early.run_dir,
            supervisor=supervisor,
            network=self.network,
            identity_of=self.identity_of,
        )
        early.announce(self.run_id, self.log_dir, host.hop("client"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(early.keep_run_dir)
            tasks.start_soon(self._watch_usage)
            tasks.start_soon(view.run)
            tasks.start_soon(self._start_roles, tasks, host, view)
            await self._ended.wait()
            self._starting.cancel()
            view.stopping(asked=self.is_unwanted)
            self.usage.sample()
            tasks.start_soon(self._stop_at_once, supervisor)
            begun_s = self.clock.now_s()
            await self._last_words()
            left_s = (GRACE_S if self.is_unwanted else UNHURRIED_S) - (self.clock.now_s() - begun_s)
            await supervisor.stop(max(LEAST_GRACE_S, left_s), STOP_ORDER)
            if self._client_followed is not None:
                # What it said last may still be on its way: an interrupted client says what was reached.
                with anyio.move_on_after(GRACE_S):
                    await self._client_followed.wait()
            tasks.cancel_scope.cancel()

    async def _last_words(self) -> None:
        """Have client and mirror leave first, as long as it takes.

        Unless it has ended itself, the client has mirrors write the last checkpoint, fetches the model, and tells
        servers of other hosts why the run is over. A mirror without a client writes what it has.
        """
        await self._farewell.take(self._client, self.failure or "")
        mirror = self._mirror
        if mirror is None or not mirror.serves:
            return
        await self._farewell.take(mirror)
        if mirror.last_error and self.exit_code == DONE:
            # The model may be there all the same; whoever goes on from the checkpoint is to know that it is not.
            self._fail(f"the last checkpoint is not written: {mirror.last_error}", kind="StorageError")

    async def _start_roles(self, tasks: TaskGroup, host: SwarmHost, view: LiveView) -> None:
        with self._starting:
            try:
                await self._start_each(tasks, host, view)
            except ShoalError as error:
                self._fail(
                    str(error), USER_ERROR if isinstance(error, ConfigError) else FAILED, kind=type(error).__name__
                )

    async def _start_each(self, tasks: TaskGroup, host: SwarmHost, view: LiveView) -> None:
        await host.supervisor.preloaded()
        emit(logger, ForkServerReady(round(process_age_s(os.getpid()), 2)))
        if self.devices and (unused := unused_gpus(self.config)):
            view.notice(unused)
        if self.resumed is None and not self.succeeds and (unread := self.config.model.unread_weights()):
            view.notice(unread)
        await self._settle_cut(host, view)
        tasks.start_soon(self._follow_monitor, tasks, await host.start_monitor(), host, view)
        expected = len(self.devices) if self.invite is None else self.config.servers.num_servers or 0
        patient = self.invite is not None
        client = self._client = await host.start_client(
            expected, patient=patient, succeeds=self.succeeds, resumed=self.resumed
        )
        self._client_followed = anyio.Event()
        tasks.start_soon(self._follow_client, tasks, client, host, view)
        for index, device in enumerate(self.devices):
            server = await host.start_server(index, expected_servers=len(self.devices), device=device)
            tasks.start_soon(self._follow, server, host, view)
        if self.config.param_mirror.enable:
            self._mirror = await host.start_mirror()
            tasks.start_soon(self._follow, self._mirror, host, view)
        if self.baseline:
            await self._data_ready.wait()
            tasks.start_soon(self._follow_baseline, await host.start_baseline(), host, view)
        else:
            self._baseline_done.set()

    async def _settle_cut(self, host: SwarmHost, view: LiveView) -> None:
        """Decide whether and where the model is cut, unless that is known: no role that needs it has started yet."""
        if not is_settled(self.config):
            self.config = host.config = await with_profiled_cut(self.config, host, view.notice)
            write_config(self.config, self.log_dir)
        log_cut(self.config)

    async def _announce_on_lan(self, maddrs: tuple[str, ...], scope: anyio.CancelScope) -> None:
        # A run of one machine has not loaded what announces.
        from shoal.control.lan import MAX_PEERS, FoundSwarm, announced

        swarm = FoundSwarm(self.config.experiment_prefix, outward(maddrs)[:MAX_PEERS], self.clock.unix_s())
        with scope:
            try:
                async with announced(self.swarm_key, swarm):
                    await anyio.Event().wait()
            except OSError as error:
                emit(logger, LanUnannounced(str(error)))

    async def _follow_monitor(self, tasks: TaskGroup, monitor: RoleHandle, host: SwarmHost, view: LiveView) -> None:
        ready, before = False, tuple[str, ...]()
        async for event in monitor.events:
            match event:
                case messages.MonitorReady(maddrs):
                    if before and self.invite is not None and not {*before} & {*maddrs}:
                        tell(logger, SwarmMoved(maddrs), view.notice)
                    lines = () if self.invite is None or {*before} == {*maddrs} else self.invite(maddrs, not before)
                    ready, before = True, maddrs
                    emit(logger, SwarmOpen(maddrs))
                    host.monitor_known(maddrs)
                    if self.invite is not None and self.config.network.lan:
                        # A monitor that was started again may be elsewhere.
                        self._on_lan.cancel()
                        self._on_lan = anyio.CancelScope()
                        tasks.start_soon(self._announce_on_lan, maddrs, self._on_lan)
                    for line in lines:
                        view.say(line)
                case messages.StatusChanged(values, at_s):
                    self._status = values
                    view.update(values, at_s)
                case _:
                    self._lives_on(event, monitor, host, view)
        # Without its first peer nobody joins the swarm; a swarm that stands does without it.
        await (self._follow(monitor, host, view) if ready else self._ended_early(monitor, host))

    async def _follow_client(self, tasks: TaskGroup, client: RoleHandle, host: SwarmHost, view: LiveView) -> None:
        async for event in client.events:
            self._farewell.heard(client)
            match event:
                case messages.RoleReady() if not self._is_watched and view.is_screen:
                    self._is_watched = True
                    tasks.start_soon(self._watch_run, host, view)
                case messages.RoleAsks():
                    started = await host.answer(client, event)
                    if started is not None:
                        tasks.start_soon(self._follow, started, host, view)
                    if isinstance(event.request, messages.StartDataServer):
                        tasks.start_soon(self._follow_data_server, client, event, host, view)
                case messages.RunUnwanted():
                    self._end_as_wanted(DONE)
                case messages.RunSummary(values):
                    self.summary = values
                    # All processes are still there: a run that is over before the next sample counts them as well.
                    self.usage.sample()
                case _:
                    self._lives_on(event, client, host, view)
        self._farewell.heard(client)
        if self._client_followed is not None:
            self._client_followed.set()
        status = await client.wait()
        if self.summary is not None and status.ok and not self._ended.is_set():
            await self._baseline_done.wait()
            if not self._ended.is_set():
                self.exit_code = DONE
                self._ended.set()
        await self._ended_early(client, host)

    async def _watch_run(self, host: SwarmHost, view: LiveView) -> None:
        """Ask the client how the run is, for as long as there is a screen to show it on."""
        # What takes part in no network has not loaded what asks.
        from shoal.cli.observing import ClientTarget
        from shoal.cli.watching import FinderOfLauncher, WatchedRun

        target = ClientTarget(self.run_id, host.hop("client"))
        watched = WatchedRun(FinderOfLauncher(self.config.experiment_prefix, target), self.clock, WATCH_INTERVAL_S)
        view.watch(lambda: watched.status)
        await watched.run()

    async def _follow_data_server(
        self, client: RoleHandle, request: messages.RoleAsks, host: SwarmHost, view: LiveView
    ) -> None:
        await host.answer_when_ready(client, request)
        view.starting("")
        self._data_ready.set()

    async def _follow_baseline(self, baseline: RoleHandle, host: SwarmHost, view: LiveView) -> None:
        await self._follow(baseline, host, view)
        self._baseline_done.set()

    async def _follow(self, role: RoleHandle, host: SwarmHost, view: LiveView) -> None:
        """If a role ends for good before the run: without some there is no run, without others it goes on."""
        async for event in role.events:
            self._farewell.heard(role)
            self._lives_on(event, role, host, view)
        self._farewell.heard(role)
        status = await role.wait()
        # What one role cannot do with this configuration, its successors could not do either.
        is_in_vain = status.code == USER_ERROR and not role.was_ready and role.spec.role != "mirror"
        if role.spec.role in ESSENTIAL or is_in_vain:
            await self._ended_early(role, host)
        elif self._ended.is_set():
            return
        elif (
            self.invite is None
            and role.spec.role == "server"
            and (left := self._num_servers(host)) < self.config.num_stages
        ):
            name = host.name_of(role)
            lost = f"{name} has ended ({role.last_error or status})"
            wanted = f"{left} of the {self.config.num_stages} servers that it takes are left, and none comes: {lost}"
            self._fail(wanted, kind="NoPipeline")
        elif not status.ok or role.spec.role in _STAY:
            tell(logger, RoleLost(host.name_of(role), str(status), role.last_error or str(status)), view.notice)

    def _num_servers(self, host: SwarmHost) -> int:
        """How many servers run here, are started again, or have yet to be started."""
        servers = [handle for handle in host.supervisor.roles if handle.spec.role == "server"]
        return len(self.devices) - len(servers) + sum(handle.running for handle in servers)

    def _lives_on(self, event: messages.RoleEvent, role: RoleHandle, host: SwarmHost, view: LiveView) -> None:
        """Pass on what a role tells the user; say that it has ended and will be back, and tell it then what it has to
        know."""
        match event:
            case messages.RoleExited(status) if not self._ended.is_set() and (
                not status.ok or role.spec.restart.serves_on
            ):
                host.exited(role)
            case messages.RoleRestarting(status=status) if not self._ended.is_set():
                tell(logger, RoleIsRestarting(host.name_of(role), role.last_error or str(status)), view.notice)
                if role.spec.role == "monitor":
                    view.outdated()
            case messages.RoleRestarted():
                host.restarted(role)
            case messages.JoinedDht(maddrs):
                host.joined(role, maddrs)
            case messages.UserNotice(text):
                view.notice(text)
            case messages.IdentityIsCopied(by, yields):
                tell(logger, IdentityCopied(host.name_of(role), by, yields), view.notice)
            case messages.RoleDoes(text) if role.was_ready:
                view.notice(text)
            case messages.RoleDoes(text):
                view.starting(text)
                if self._client is not None:
                    with suppress(ConnectionLost):
                        self._client.send(event)
            case _:
                pass

    async def _ended_early(self, role: RoleHandle, host: SwarmHost) -> None:
        status = await role.wait()
        if self._ended.is_set():
            return
        code = USER_ERROR if status.code == USER_ERROR else FAILED
        message = f"{host.name_of(role)} ended early: {role.last_error or status}"
        self._fail(message, code, role.last_kind or "ChildDied")

    def _fail(self, message: str, exit_code: int = FAILED, kind: str = "RunFailed") -> None:
        """The run has failed, for the first of the reasons that are given; `kind` is one of `shoal.errors`."""
        if self.failure is None:
            emit(logger, RunEndedByError(message))
            self.failure, self.failure_kind, self.exit_code = message, kind, exit_code
        self._ended.set()

    async def _watch_signals(self, signals: AsyncIterator[signal.Signals]) -> None:
        async for number in signals:
            emit(logger, RunInterrupted(number.name))
            if self._ended.is_set():
                self._hurry.set()
            else:
                self._end_as_wanted(INTERRUPTED)

    def _end_as_wanted(self, exit_code: int) -> None:
        """A user wants the run to end."""
        if not self._ended.is_set():
            self.is_unwanted, self.exit_code = True, exit_code
            self._ended.set()

    async def _stop_at_once(self, supervisor: Supervisor) -> None:
        await self._hurry.wait()
        await supervisor.stop(0.0)

    async def _watch_usage(self) -> None:
        interval_s = USAGE_INTERVAL_S
        while True:
            self.usage.sample()
            await self.clock.sleep_s(interval_s)
            interval_s = min(2 * interval_s, USAGE_MAX_INTERVAL_S)

    def _written(
        self, write: Callable[[Path, Config, RunId], Path | None], not_written: Callable[[str, str], Event]
    ) -> Path | None:
        """No picture and no report is worth a run: one that cannot be written is named, and that is all."""
        try:
            return write(self.log_dir, self.config, self.run_id)
        except OSError as error:
            reason = f"{said_by_disk(error, self.log_dir)}: {remedy(error, self.log_dir)}"
            emit(logger, not_written(error.filename or str(self.log_dir), reason))
        except ValueError as error:
            # The files of shoal itself are others by now: it was upgraded while the run went on.
            emit(logger, not_written(str(self.log_dir), str(error)))
        return None

    def _write_summary(self) -> Path | None:
        remove_empty_outputs(self.log_dir)
        own: dict[str, Any] = {
            "processes": self.usage.processes,
            "peak_pss_bytes": self.usage.pss_bytes,
            "seconds_total": round(process_age_s(os.getpid()), 3),
            "ended": utc_iso(self.clock.unix_s()),
            # To the client, a run that the launcher ends looks interrupted.
            "exit": self._exit,
            "failure": None,
        }
        if self.baseline:
            own |= {
                "loss_baseline": self._status.get("loss/baseline"),
                "eval_loss_baseline": self._status.get("loss/baseline_eval"),
            }
        if self.summary is not None:
            self.summary = {**self.summary, **own}
        if self.failure is not None:
            own["failure"] = {"kind": self.failure_kind, "text": self.failure, "remedy": self._commands()}
        # A client that has not got so far as to say anything has changed nothing of what it was resumed from.
        left = self.summary or {**read_object(self.log_dir / SUMMARY_FILE), "run_id": self.run_id}
        try:
            return write_summary(self.log_dir, {**left, **own})
        except OSError as error:
            where = error.filename or self.log_dir
            self._fail(f"cannot write the summary to {where} {said_and_remedy(error, self.log_dir)}")
            return None
