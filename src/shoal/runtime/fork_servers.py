"""The fork servers of one run, one after the other, and every process that any of them has started."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Container, Sequence
from pathlib import Path

from shoal.runtime.fork_messages import TAG_NAME
from shoal.runtime.fork_server_process import ForkServerProcess
from shoal.runtime.linux_calls import LinuxCall, has
from shoal.runtime.proc_files import ProcessStat
from shoal.runtime.process_control import kill
from shoal.runtime.process_info import descendants, has_environment, read_stat, with_environment


def tag_of(run_dir: Path) -> str:
    """Return the entry ("NAME=value") that every process of a run has in its environment."""
    return f"{TAG_NAME}={run_dir.name}"


class ForkServers:
    """The processes of a run, as the one that started them sees them; makes sure that nothing survives it.

    Making it starts the first fork server and does not wait: a launcher makes it first of all, so that the imports of
    the roles overlap with reading its own configuration. If the launcher fails before there is a supervisor, `kill`
    ends it.
    """

    def __init__(self, preload: Sequence[str], run_dir: Path | None = None) -> None:
        """Start the first fork server.

        Args:
            preload: modules to import before the first fork; none of them may start a thread.
            run_dir: is removed even when this process is killed.
        """
        self._preload = tuple(preload)
        self._run_dir = run_dir
        # Inherited by every process of the run, also by those that leave the session.
        self._tag = f"{TAG_NAME}={secrets.token_hex(8)}" if run_dir is None else tag_of(run_dir)
        self._servers = [ForkServerProcess(self._preload, self._run_dir, self._tag)]
        self._members: set[int] = set()
        self._ended = False

    def preload(self, modules: Sequence[str]) -> None:
        """Have fork servers import these as well, before the first role is forked; see `ForkServerProcess.preload`."""
        self._preload += tuple(modules)
        # If it has died already, its successor imports all of them.
        with contextlib.suppress(OSError):
            self.current.preload(modules)

    @property
    def current(self) -> ForkServerProcess:
        """The one that was started last."""
        return self._servers[-1]

    def start_again(self) -> ForkServerProcess:
        """Start the successor of one that has ended.

        Raises:
            OSError: the system refuses another process.
        """
        server = ForkServerProcess(self._preload, self._run_dir, self._tag)
        self._servers.append(server)
        return server

    def orphans(self, known: Container[int]) -> list[ProcessStat]:
        """Return the processes that dead parents have left, without those that are known."""
        members = self._find_members()
        if has(LinuxCall.PRCTL):
            me = os.getpid()
            return [stat for stat in members if stat.parent_pid == me and stat.pid not in known]
        parents = {stat.pid for stat in members} | {server.pid for server in self._servers if not server.reaped}
        return [stat for stat in members if stat.parent_pid not in parents and stat.pid not in known]

    def cut_lifelines(self) -> None:
        """Make every process of the run end; returns at once."""
        # While all of them live: one that has ended cannot be recognised any more if it left the session.
        self._find_members()
        for server in self._servers:
            server.cut_lifeline()

    def kill(self) -> None:
        """Kill and reap the fork server and every process of its run that is left; the second call does nothing.

        Roles that outlive their fork server are children of this process if that is a subreaper, and are reaped here.
        Blocks for the milliseconds that the kernel takes to end a killed process.
        """
        if self._ended:
            return
        self._ended = True
        self.cut_lifelines()
        self.current.kill_session()
        me = os.getpid()
        while left := self._find_members():
            for stat in left:
                kill(stat.pid)
            for stat in left:
                if stat.parent_pid == me:
                    os.waitpid(stat.pid, 0)
        self.current.reap()

    def _find_members(self) -> list[ProcessStat]:
        """Return the processes of the run, without the fork server, and remember them."""
        found: list[ProcessStat] = []
        servers = {server.pid for server in self._servers}
        running = {server.pid for server in self._servers if not server.reaped}
        for stat in self._candidates():
            # By any sign: a process that has ended has no environment any more, and neither has one in the middle of
            # an exec; one that left the session has its parent, until that has ended.
            known = stat.pid in self._members or stat.parent_pid in self._members | running or stat.session in servers
            if stat.pid not in running and (known or has_environment(stat.pid, self._tag)):
                self._members.add(stat.pid)
                found.append(stat)
        return found

    def _candidates(self) -> list[ProcessStat]:
        """Return what may be of the run: what descends from this process, and without a subreaper what is tagged."""
        found = descendants(os.getpid())
        if has(LinuxCall.PRCTL):
            return found
        known = {os.getpid(), *(stat.pid for stat in found)}
        tagged = [read_stat(pid) for pid in with_environment(self._tag) if pid not in known]
        return found + [stat for stat in tagged if stat is not None and not stat.has_ended]
