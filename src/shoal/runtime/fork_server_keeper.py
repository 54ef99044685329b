"""Keeps a fork server running, has it fork, and follows what it forked, also beyond its death.

    start -> preloaded -> serving ----(it dies, or does not answer and is killed)----> roles adopted, successor started
                             ^                                                                        |
                             '------------------------------------------------------------------------'
                                                             it dies again and again, or cannot preload -> the run ends

A role's fork server says how the role has ended. When that one is dead, this process is the role's parent (as a
subreaper) and asks the kernel. Requests that a dead fork server has not served go to the next one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable

import anyio
import anyio.abc

from shoal.clock import Clock
from shoal.errors import ConnectionLost, RemoteError, ShoalError
from shoal.events.base import emit, tell
from shoal.events.processes import (
    ForkServerEnded,
    ForkServerKilled,
    ForkServerLost,
    ForkServerPreloaded,
    ForkServerRestarted,
)
from shoal.runtime.fork_messages import Exited, Forked, ForkFailed, Preloaded, PreloadFailed, Reply
from shoal.runtime.fork_server_process import ForkServerProcess
from shoal.runtime.fork_servers import ForkServers
from shoal.runtime.launch import Launch
from shoal.runtime.process_control import kill, reap
from shoal.runtime.process_end import process_ended
from shoal.runtime.process_handle import ProcessHandle
from shoal.runtime.role_spec import RestartHistory, RestartPolicy
from shoal.runtime.waking import Mailbox, Signal

_logger = logging.getLogger(__name__)

_RESTARTS = RestartPolicy(max_restarts=5, window_s=60.0, first_delay_s=0.2, max_delay_s=5.0)
# A fork takes milliseconds. A fork server that is only starved and is killed for it costs the imports of the next one.
_ANSWER_TIMEOUT_S = 10.0
# At the end of a run nothing is lost by killing it, even if it was only starved, and each second of waiting for it is
# taken from the roles' time to leave.
_LAST_ANSWER_TIMEOUT_S = 0.25
# From the end of its stream to the end of its process.
_EXIT_TIMEOUT_S = 1.0
# How long a fork server may take to end everything below it before it is killed itself.
_END_TIMEOUT_S = 3.0


class ForkServerKeeper:
    """The way from a launch to its process; `run` does the work.

    Attributes:
        failure: why no fork server can be started any more; None: one can be.
    """

    def __init__(self, servers: ForkServers, clock: Clock, notice: Callable[[str], None]) -> None:
        """Prepare.

        Args:
            servers: the first one runs already.
        """
        self._servers = servers
        self._clock = clock
        self._notice = notice
        self.failure: ShoalError | None = None
        self._launches: dict[int, Launch] = {}
        self._requests = Mailbox[Launch]()
        self._first_preloaded = anyio.Event()
        self._preloaded = anyio.Event()
        self._num_preloaded = 0
        self._stopping = anyio.Event()
        self._has_orphans = Signal()
        self._reason = ""
        self._patience: set[anyio.CancelScope] = set()
        self._tasks: anyio.abc.TaskGroup | None = None

    @property
    def pid(self) -> int:
        """The process that roles are forked from now, or were last."""
        return self._servers.current.pid

    async def preloaded(self) -> None:
        """Wait until the first fork server has imported its modules, or it does not matter any more.

        Raises:
            RemoteError: a module cannot be imported, or started a thread.
            ConnectionLost: the fork server died too often, or the run ends.
        """
        await self._first_preloaded.wait()
        if self.failure is not None:
            raise self.failure
        if self._stopping.is_set():
            raise ConnectionLost("no role is started any more: the supervisor is stopping")

    async def fork(self, launch: Launch) -> None:
        """Have a process forked, by the next fork server if this one dies over it.

        Raises:
            RemoteError: the system refused another process.
            ConnectionLost: the run ends.
        """
        if self._stopping.is_set():
            launch.fail(_refused(launch))
        else:
            self._launches[launch.request.number] = launch
            self._requests.put(launch)
        try:
            await launch.forked.wait()
        finally:
            if launch.waiting or launch.error is not None:
                # If it is forked after all, because only the wait was cancelled, it is killed: nobody would follow it.
                self._launches.pop(launch.request.number, None)
                launch.fail(ConnectionLost("nobody waits for it any more"))
        if launch.error is not None:
            raise launch.error

    def stop(self) -> None:
        """The roles are about to end: start nothing more, and be less patient with a fork server that hangs."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        # Whoever waits for it would start something.
        self._first_preloaded.set()
        for scope in self._patience:
            scope.deadline = min(scope.deadline, anyio.current_time() + _LAST_ANSWER_TIMEOUT_S)
        for launch in self._launches.values():
            if launch.waiting:
                launch.fail(_refused(launch))

    async def run(self) -> None:
        """Work until cancelled; returns only if there can be no fork server any more, see `failure`."""
        history = RestartHistory(_RESTARTS)
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self._end_orphans, name="orphans")
            while self.failure is None and not self._stopping.is_set():
                await self._serve(self._servers.current)
                await self._adopt(self._servers.current)
                await self._replace(history)
            if self.failure is not None:
                emit(_logger, ForkServerLost(str(self.failure)))
                self._fail_all(self.failure)
                self._tasks.cancel_scope.cancel()
            # Else the run ends, needs no fork server any more, and until it has ended the tasks follow its roles.

    async def end(self) -> None:
        """Leave no process, and nobody who waits for one."""
        self._servers.cut_lifelines()
        # One that still imports has started nothing, and may take seconds to hear of it.
        with anyio.move_on_after(_END_TIMEOUT_S if self._preloaded.is_set() else 0.0) as timeout:
            await self._servers.current.wait()
        if timeout.cancelled_caught and self._preloaded.is_set():
            emit(_logger, ForkServerKilled("did not end", _END_TIMEOUT_S))
        self._servers.kill()
        self._fail_all(self.failure or ConnectionLost("the supervisor has ended"))

    def _fail_all(self, error: ShoalError) -> None:
        self._first_preloaded.set()
        for launch in self._launches.values():
            launch.fail(error)

    async def _serve(self, server: ForkServerProcess) -> None:
        """Pass requests and replies on until the fork server is gone, and with it all who could speak for it."""
        # What was not served before comes first, in the order of the requests.
        self._requests = Mailbox[Launch]()
        for launch in self._launches.values():
            if launch.waiting:
                self._requests.put(launch)
        self._preloaded = anyio.Event()
        self._num_preloaded = 0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._send_requests, tasks, server, name="fork server requests")
            async for reply, descriptor in server.replies():
                self._receive(server, reply, descriptor)
            tasks.cancel_scope.cancel()

    async def _send_requests(self, tasks: anyio.abc.TaskGroup, server: ForkServerProcess) -> None:
        async for launch in self._requests:
            if not launch.waiting:
                continue
            # A copy: the launch may fail, and close its own, while this waits for room.
            control_fd = os.dup(launch.control_fd)
            try:
                await server.send(launch.request, control_fd)
            except OSError:
                # The replies end as well, which is where the loss is handled.
                return
            finally:
                os.close(control_fd)
            tasks.start_soon(self._expect_fork, server, launch)

    def _receive(self, server: ForkServerProcess, reply: Reply, descriptor: int) -> None:
        match reply:
            case Preloaded():
                self._num_preloaded += 1
                # Until then it imports, which may take longer than a fork server that hangs is waited for.
                if self._num_preloaded == server.num_preloads:
                    emit(_logger, ForkServerPreloaded(server.pid))
                    self._first_preloaded.set()
                    self._preloaded.set()
            case PreloadFailed(message):
                self._cannot_preload(message)
            case Forked(number, pid):
                launch, process = self._launches.get(number), ProcessHandle(pid, descriptor)
                if launch is None or self._tasks is None:
                    process.send_signal(signal.SIGKILL)
                    process.close()
                else:
                    launch.begin(process)
                    self._tasks.start_soon(self._follow, launch, server, name=f"follow {launch.request.spec.role}")
            case ForkFailed(number, message):
                self._fail_launch(number, message)
            case Exited(number, code):
                launch = self._launches.get(number)
                if launch is not None and not launch.waiting:
                    launch.exited(code)
                else:
                    self._fail_launch(number, "its process ended before it was the role's")

    def _cannot_preload(self, reason: str) -> None:
        """Give up: what has failed by itself would not do better the next time."""
        if not self._stopping.is_set():
            self.failure = RemoteError(f"the fork server cannot preload: {reason}")

    def _fail_launch(self, number: int, message: str) -> None:
        launch = self._launches.pop(number, None)
        if launch is not None:
            launch.fail(RemoteError(message))

    async def _expect_fork(self, server: ForkServerProcess, launch: Launch) -> None:
        await self._preloaded.wait()
        await self._expect(server, launch.forked)

    async def _follow(self, launch: Launch, server: ForkServerProcess) -> None:
        """Wait until a process has ended and it is known how."""
        try:
            await launch.until_gone()
            await self._expect(server, launch.settled)
            if launch.status is None:
                launch.reap()
        finally:
            launch.close()
        del self._launches[launch.request.number]
        self._has_orphans.notify()

    async def _expect(self, server: ForkServerProcess, answered: anyio.Event) -> None:
        """Wait for what the fork server has to say; if it does not, it hangs, and is killed."""
        timeout_s = _LAST_ANSWER_TIMEOUT_S if self._stopping.is_set() else _ANSWER_TIMEOUT_S
        with anyio.move_on_after(timeout_s) as scope:
            self._patience.add(scope)
            try:
                await answered.wait()
            finally:
                self._patience.discard(scope)
        if scope.cancelled_caught and not server.reaped:
            self._reason = "it did not answer and was killed"
            server.kill()
        await answered.wait()

    async def _end_orphans(self) -> None:
        """Kill and reap what dead roles leave behind where their fork server is dead as well: this is the parent then.

        Without a subreaper it is init's, whether the fork server lives or not, and the tag in its environment tells it.
        """
        while True:
            await self._has_orphans.take()
            # Again and again: the children of those that were killed come next.
            while found := self._servers.orphans({launch.pid for launch in self._launches.values()}):
                for stat in found:
                    kill(stat.pid)
                for stat in found:
                    with contextlib.suppress(ProcessLookupError):
                        await process_ended(stat.pid)
                    reap(stat.pid)

    async def _adopt(self, server: ForkServerProcess) -> None:
        """Become the one who says how the roles of a dead fork server end."""
        with anyio.move_on_after(_EXIT_TIMEOUT_S):
            await server.wait()
        server.kill()
        await server.wait()
        status = server.reap()
        self._reason = self._reason or str(status)
        if status.code > 0 and not self._preloaded.is_set():
            self._cannot_preload(f"{status}; its error output says why")
        adopted = [launch for launch in self._launches.values() if not launch.waiting]
        for launch in adopted:
            launch.settled.set()
        self._has_orphans.notify()
        if not self._stopping.is_set():
            emit(_logger, ForkServerEnded(server.pid, self._reason, len(adopted)))

    async def _replace(self, history: RestartHistory) -> None:
        """Start the next fork server, or give up, or do neither if the run ends."""
        ended, self._reason = self._reason, ""
        reason = ended
        has_served = self._preloaded.is_set()
        while self.failure is None and not self._stopping.is_set():
            delay_s = history.next_delay_s(self._clock.now_s())
            if delay_s is None:
                self.failure = ConnectionLost(
                    f"the fork server has ended {_RESTARTS.max_restarts + 1} times within {_RESTARTS.window_s:.0f} s "
                    f"(the last time: {reason}), so no role can be started any more, and the run is ended"
                )
                return
            # After one that has served for a while the next one comes at once: as long as there is none, only the
            # roles themselves would end with this process.
            with anyio.move_on_after(0.0 if has_served else delay_s):
                await self._stopping.wait()
            if self._stopping.is_set():
                return
            try:
                server = self._servers.start_again()
            except OSError as error:
                reason, has_served = f"it cannot be started: {error.strerror}", False
            else:
                tell(_logger, ForkServerRestarted(server.pid, ended), self._notice)
                return


def _refused(launch: Launch) -> ConnectionLost:
    spec = launch.request.spec
    return ConnectionLost(f"{spec.role} {spec.index} is not started: the supervisor is stopping")
