"""A whole swarm on one machine, from the launch to the summary: what `run_local.py` and `shoal run-local` do.

    start all roles -> the client reports its summary (or a signal arrives, or a role fails for good) -> end all roles
    -> write summary.json
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import TaskGroup

from shoal import log
from shoal.cli.devices import device_of_server
from shoal.cli.host import PRELOAD, SwarmHost
from shoal.cli.live import LiveView
from shoal.cli.run_files import make_log_dir, new_run_id, remove_empty_outputs, write_summary
from shoal.clock import Clock, SystemClock
from shoal.config import Config
from shoal.errors import ShoalError
from shoal.runtime.process_info import process_age_s, tree_usage
from shoal.runtime.role_handle import RoleHandle
from shoal.runtime.run_dir import RunDir
from shoal.runtime.supervisor import Supervisor

logger = logging.getLogger(__name__)

EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130
GRACE_S = 3.0
"""Time for all roles together to leave; a Ctrl-C has to be over within five seconds."""
USAGE_INTERVAL_S = 5.0
ESSENTIAL = ("client", "data_server")
"""Roles whose end ends the run."""
STOP_ORDER = (("client",), ("trainer", "baseline"), ("data_server",), ("server",), ("monitor",))


def run_local(config: Config, *, num_servers: int | None = None, baseline: bool = False) -> int:
    """Run a swarm on this machine until training is done, and return the exit code.

    Args:
        config: The resolved configuration.
        num_servers: Servers over all stages, instead of the configuration's number.
        baseline: Also train the plain loop beside the swarm.

    Raises:
        ConfigError: the log directory cannot be written, or the device does not exist.
    """
    if num_servers is not None:
        servers = config.servers.model_copy(update={"num_servers": num_servers})
        config = Config.model_validate({**dict(config), "servers": servers})
    return anyio.run(_LocalRun(config, baseline, SystemClock()).run, backend_options={"use_uvloop": True})


@dataclass
class _Usage:
    """The most processes and memory seen at one time."""

    processes: int = 0
    pss_bytes: int = 0

    def sample(self) -> None:
        usage = tree_usage(os.getpid())
        self.processes = max(self.processes, usage.num_processes)
        self.pss_bytes = max(self.pss_bytes, usage.pss_bytes)


@dataclass
class _LocalRun:
    """One run; `run` is called once."""

    config: Config
    baseline: bool
    clock: Clock
    exit_code: int = EXIT_FAILED
    failure: str | None = None
    summary: Mapping[str, Any] | None = None
    usage: _Usage = field(default_factory=_Usage)
    _ended: anyio.Event = field(default_factory=anyio.Event)
    _client_followed: anyio.Event = field(default_factory=anyio.Event)
    _baseline_done: anyio.Event = field(default_factory=anyio.Event)

    async def run(self) -> int:
        run_id = new_run_id(self.config, self.clock)
        log_dir = make_log_dir(self.config, run_id)
        log.configure("launcher", log_dir, terminal=False)
        with RunDir() as run_dir, LiveView(self.config, run_id, log_dir) as view:
            try:
                async with Supervisor(run_dir=run_dir.path, preload=PRELOAD, clock=self.clock) as supervisor:
                    host = SwarmHost(
                        config=self.config,
                        run_id=run_id,
                        log_dir=log_dir,
                        swarm_key=secrets.token_bytes(32),
                        run_dir=run_dir,
                        supervisor=supervisor,
                    )
                    await self._supervise(supervisor, host, view)
            except ShoalError as error:
                self._fail(str(error))
        remove_empty_outputs(log_dir)
        path = self._write_summary(log_dir)
        view.finish(self.summary, self.failure, path, log_dir)
        return self.exit_code

    async def _supervise(self, supervisor: Supervisor, host: SwarmHost, view: LiveView) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_signals, supervisor)
            tasks.start_soon(self._watch_usage)
            tasks.start_soon(self._start_roles, tasks, host, view)
            await self._ended.wait()
            self.usage.sample()
            view.stopping()
            # Signals are still heard: a second one makes this immediate. An interrupted client says what was reached.
            await supervisor.stop(GRACE_S, STOP_ORDER)
            with anyio.move_on_after(GRACE_S):
                await self._client_followed.wait()
            tasks.cancel_scope.cancel()

    async def _start_roles(self, tasks: TaskGroup, host: SwarmHost, view: LiveView) -> None:
        num_servers = self.config.num_servers
        monitor = await host.start_monitor()
        tasks.start_soon(self._follow_monitor, monitor, host, view)
        client = await host.start_client(num_servers)
        tasks.start_soon(self._follow_client, tasks, client, host, view)
        for index in range(num_servers):
            server = await host.start_server(
                index, expected_servers=num_servers, device=device_of_server(self.config.device, index)
            )
            tasks.start_soon(self._follow, server, view)
        if self.baseline:
            tasks.start_soon(self._follow_baseline, await host.start_baseline())
        else:
            self._baseline_done.set()

    async def _follow_monitor(self, monitor: RoleHandle, host: SwarmHost, view: LiveView) -> None:
        async for event in monitor.events:
            match event.name:
                case "ready":
                    host.initial_peers_known(tuple(event.fields["maddrs"]))
                case "status":
                    view.update(event.fields["status"])
                case "notice":
                    view.notice(event.fields["text"])
                case _:
                    pass
        await self._follow(monitor, view)

    async def _follow_client(
        self, tasks: TaskGroup, client: RoleHandle, host: SwarmHost, view: LiveView
    ) -> None:
        async for event in client.events:
            match event.name:
                case "request":
                    started = await host.answer(client, event)
                    if started is not None:
                        tasks.start_soon(self._follow, started, view)
                case "summary":
                    self.summary = event.fields["summary"]
                case _:
                    pass
        self._client_followed.set()
        status = await client.wait()
        if self.summary is not None and status.ok and not self._ended.is_set():
            await self._baseline_done.wait()
            self.exit_code = EXIT_DONE
            self._ended.set()
        await self._ended_early(client)

    async def _follow_baseline(self, baseline: RoleHandle) -> None:
        status = await baseline.wait()
        if not status.ok:
            logger.warning("baseline.failed", extra={"status": str(status)})
        self._baseline_done.set()

    async def _follow(self, role: RoleHandle, view: LiveView) -> None:
        """A role has ended before the run: without some there is no run, without others it goes on."""
        name = f"{role.spec.role} {role.spec.index}"
        if role.spec.role in ESSENTIAL:
            await self._ended_early(role)
            return
        status = await role.wait()
        if not self._ended.is_set():
            logger.warning("role.lost", extra={"role": name, "status": str(status)})
            view.notice(f"{name} has ended ({status}); the swarm goes on without it")

    async def _ended_early(self, role: RoleHandle) -> None:
        status = await role.wait()
        if self._ended.is_set():
            return
        self._fail(f"{role.spec.role} {role.spec.index} ended early: {role.last_error or status}")

    def _fail(self, message: str) -> None:
        if self.failure is None:
            logger.error("run.failed", extra={"reason": message})
            self.failure = message
        self._ended.set()

    async def _watch_signals(self, supervisor: Supervisor) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for number in signals:
                if self._ended.is_set():
                    await supervisor.stop(0.0)
                    return
                logger.info("run.interrupted", extra={"signal": number})
                self.exit_code = EXIT_INTERRUPTED
                self._ended.set()

    async def _watch_usage(self) -> None:
        while True:
            self.usage.sample()
            await self.clock.sleep_s(USAGE_INTERVAL_S)

    def _write_summary(self, log_dir: Path) -> Path | None:
        if self.summary is None:
            return None
        own = {
            "processes": self.usage.processes,
            "peak_pss_bytes": self.usage.pss_bytes,
            "seconds_total": round(process_age_s(os.getpid()), 3),
        }
        self.summary = {**self.summary, **own}
        return write_summary(log_dir, self.summary)
