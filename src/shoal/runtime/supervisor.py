"""The supervisor: the launcher's hold on all processes of a run; starts roles, starts them again, ends everything.

    start -> forked -> "ready" ... -> exited --(failed, policy allows)--> pause -> forked -> ...
                                        '--(done, given up, stopping)--> finished

It decides nothing but restarts. What an event of a role means, and who is started when, is the launcher's.
"""

from __future__ import annotations

import itertools
import logging
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import TracebackType

import anyio
import anyio.abc

from shoal.clock import Clock, Deadline, SystemClock
from shoal.errors import ConnectionLost, RemoteError, ShoalError
from shoal.events.base import emit
from shoal.events.processes import RoleProcessEnded, RoleRestartFailed, RoleStarted, SupervisorKilling
from shoal.file_thread import hint
from shoal.runtime.control_pipe import ControlPipe
from shoal.runtime.fork_messages import ForkRole
from shoal.runtime.fork_server_keeper import ForkServerKeeper
from shoal.runtime.fork_servers import ForkServers
from shoal.runtime.launch import Launch
from shoal.runtime.launcher_messages import FromRole, RoleFailed, RoleGivenUp, RoleRestarted, RoleRestarting
from shoal.runtime.process_control import set_subreaper
from shoal.runtime.role_handle import RoleHandle
from shoal.runtime.role_spec import KILLED, ExitStatus, RestartHistory, RoleSpec

_logger = logging.getLogger(__name__)

# How long a killed role may take to be reaped; the end of the run does not depend on it.
_KILL_TIMEOUT_S = 2.0


class Supervisor:
    """All roles of one run on one host; an async context, used once.

    When the context is left, in whatever way, no process of the run is left and all of them are reaped. If the fork
    server dies, another one is started and the roles go on. Only if it dies again and again, or cannot preload, the
    body is cancelled, all roles are killed, and the context raises why.
    """

    def __init__(
        self,
        *,
        run_dir: Path | None = None,
        preload: Sequence[str] = (),
        fork_servers: ForkServers | None = None,
        clock: Clock | None = None,
        notice: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Start the fork server, without waiting for it.

        Args:
            run_dir: is removed even when this process is killed.
            preload: modules that the fork server imports before it forks the first role.
            fork_servers: started earlier, with a `run_dir` and `preload` of their own; None: start them now.
            notice: shows the user a line about what concerns no single role.
        """
        self._clock = clock or SystemClock()
        servers = fork_servers or ForkServers(preload, run_dir)
        self._keeper = ForkServerKeeper(servers, self._clock, notice)
        self._numbers = itertools.count()
        self._handles: list[RoleHandle] = []
        self._launch_by_handle: dict[RoleHandle, Launch] = {}
        self._stopping = anyio.Event()
        self._context: AbstractAsyncContextManager[None] | None = None
        self._tasks: anyio.abc.TaskGroup | None = None

    @property
    def roles(self) -> Sequence[RoleHandle]:
        """All roles that were started, those that have ended included."""
        return tuple(self._handles)

    @property
    def stopping(self) -> bool:
        """Whether it stops, and starts nothing any more."""
        return self._stopping.is_set()

    async def preloaded(self) -> None:
        """Wait until the fork server has imported its modules; `start` does this by itself.

        Raises:
            RemoteError: a module cannot be imported, or started a thread.
            ConnectionLost: it died too often, or the supervisor is stopping.
        """
        await self._keeper.preloaded()

    async def start(self, spec: RoleSpec) -> RoleHandle:
        """Start a role; returns as soon as its process exists, see `RoleHandle.ready` for more.

        Raises:
            RemoteError: the fork server cannot preload or cannot fork, or no more files may be opened.
            ConnectionLost: the fork server is gone, or the supervisor is stopping.
        """
        self._running_tasks(spec)
        await self.preloaded()
        tasks = self._running_tasks(spec)
        handle = RoleHandle(spec)
        try:
            launch = await self._launch(handle)
        except OSError as error:
            raise RemoteError(f"{spec} cannot be started: {error.strerror or error}{hint(error)}") from error
        self._handles.append(handle)
        tasks.start_soon(self._keep, handle, launch, name=f"keep {spec}")
        return handle

    async def stop(self, grace_s: float, order: Iterable[Iterable[str]] = ()) -> None:
        """Ask all roles to leave, group after group, and kill those that have not left within `grace_s` seconds in all.

        The wait for a group is half of the time that is left, so that a role that hangs leaves time to the groups after
        it. The role itself has until the end.

        Args:
            grace_s: for all groups together; 0 kills at once.
            order: groups of role names, first to leave first; roles that it does not name leave last.
        """
        self._stopping.set()
        self._keeper.stop()
        deadline = Deadline.after(self._clock, grace_s)
        groups = [frozenset(group) for group in order]
        named = frozenset[str]().union(*groups)
        groups.append(frozenset(handle.spec.role for handle in self._handles if handle.spec.role not in named))
        for group in groups if grace_s > 0 else ():
            members = [handle for handle in self._handles if handle.spec.role in group]
            self._signal(members, signal.SIGTERM)
            await _ended(members, deadline.remaining_s() / 2)
        await _ended(self._handles, deadline.remaining_s())
        late = [handle for handle in self._handles if handle.running]
        if late:
            emit(_logger, SupervisorKilling([str(role.spec) for role in late], grace_s))
            self._signal(late, signal.SIGKILL)
            await _ended(late, _KILL_TIMEOUT_S)

    def kill(self, handle: RoleHandle) -> None:
        """Kill a role's process at once; its restart policy says what follows. Nothing happens if it has ended."""
        self._signal([handle], signal.SIGKILL)

    def _running_tasks(self, spec: RoleSpec) -> anyio.abc.TaskGroup:
        if self._tasks is None or self._stopping.is_set():
            raise ConnectionLost(f"{spec} is not started: the supervisor is not running")
        return self._tasks

    def _signal(self, handles: Iterable[RoleHandle], number: signal.Signals) -> None:
        for handle in handles:
            launch = self._launch_by_handle.get(handle)
            if handle.running and launch is not None:
                launch.send_signal(number)

    async def __aenter__(self) -> Supervisor:
        self._context = self._run()
        await self._context.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        if self._context is None:
            return None
        return await self._context.__aexit__(kind, error, traceback)

    @asynccontextmanager
    async def _run(self) -> AsyncGenerator[None, None]:
        was_subreaper = set_subreaper(True)
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                tasks.start_soon(self._keep_fork_server, name="fork server")
                yield
                self._stopping.set()
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            # Our own tasks raise nothing, so there is one error, the body's, which the task group has wrapped.
            if len(group.exceptions) != 1:
                raise
            raise (self._keeper.failure or group.exceptions[0]) from None
        finally:
            with anyio.CancelScope(shield=True):
                await self._end()
            set_subreaper(was_subreaper)
        if self._keeper.failure is not None:
            raise self._keeper.failure

    async def _end(self) -> None:
        """Leave no process; whoever still waits for a role learns that it was killed."""
        self._stopping.set()
        await self._keeper.end()
        for handle in self._handles:
            handle.finish(KILLED)

    async def _keep_fork_server(self) -> None:
        """End the run if it has to do without a fork server: roles could neither be started nor started again."""
        await self._keeper.run()
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()

    async def _launch(self, handle: RoleHandle) -> Launch:
        """Have one process forked and connect its control pipe."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        pipe = ControlPipe(handle.deliver, FromRole)
        handle.connect(pipe)
        launch = Launch(ForkRole(next(self._numbers), handle.spec), theirs, pipe)
        try:
            await pipe.open(ours)
            await self._keeper.fork(launch)
        finally:
            if launch.pid == 0:
                await pipe.aclose()
        handle.pid = launch.pid
        self._launch_by_handle[handle] = launch
        emit(_logger, RoleStarted(str(handle.spec), launch.pid))
        return launch

    async def _keep(self, handle: RoleHandle, launch: Launch) -> None:
        """Follow a role over all its launches to its end."""
        history = RestartHistory(handle.spec.restart)
        while True:
            status = await self._follow(handle, launch)
            # What has failed by itself before it ever served would not do better the next time.
            has_said_all = handle.spec.restart.only_killed or handle.last_kind in handle.spec.restart.last_words
            is_hopeless = status.code > 0 and (has_said_all or not handle.was_ready)
            is_done = status.ok and not handle.spec.restart.serves_on
            if is_done or is_hopeless or self._stopping.is_set():
                break
            again = await self._launch_again(handle, history, status)
            if again is None:
                break
            launch = again
            handle.restarts += 1
            handle.events.put(RoleRestarted())
            if self._stopping.is_set():
                self._signal([handle], signal.SIGTERM)
        handle.finish(status)

    async def _launch_again(self, handle: RoleHandle, history: RestartHistory, status: ExitStatus) -> Launch | None:
        """Start a role that has ended so, as often as its policy allows; None: it is given up, or everything stops."""
        failure = ""
        while True:
            has_failed = status.code > 0 and not failure
            delay_s = history.next_delay_s(self._clock.now_s(), has_failed=has_failed)
            if delay_s is None:
                break
            if not failure:
                handle.events.put(RoleRestarting(status))
            with anyio.move_on_after(delay_s):
                await self._stopping.wait()
                return None
            try:
                return await self._launch(handle)
            except (ShoalError, OSError) as error:  # for a moment there may be too many processes, or files
                if self._stopping.is_set():
                    return None
                failure = str(error)
                emit(_logger, RoleRestartFailed(str(handle.spec), failure))
        handle.events.put(RoleFailed(failure) if failure else RoleGivenUp())
        return None

    async def _follow(self, handle: RoleHandle, launch: Launch) -> ExitStatus:
        """Wait until one process has ended and everything that it said has been delivered."""
        try:
            await launch.pipe.closed.wait()
            await launch.ended.wait()
        finally:
            await launch.pipe.aclose()
        status = launch.status or KILLED
        level = logging.INFO if status.ok or self._stopping.is_set() else logging.WARNING
        emit(_logger, RoleProcessEnded(str(handle.spec), launch.pid, str(status)), level=level)
        handle.exited(status)
        return status


async def _ended(handles: Iterable[RoleHandle], within_s: float) -> None:
    """Wait until these roles have ended for good, but not longer than that."""
    with anyio.move_on_after(within_s):
        for handle in handles:
            await handle.wait()
