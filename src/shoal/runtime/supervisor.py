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
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import TracebackType

import anyio
import anyio.abc

from shoal.clock import Clock, Deadline, SystemClock
from shoal.errors import ConnectionLost, RemoteError, ShoalError
from shoal.runtime.control_pipe import ControlPipe
from shoal.runtime.fork_messages import (
    Exited,
    Forked,
    ForkFailed,
    ForkRole,
    Preloaded,
    PreloadFailed,
    Request,
    SignalRole,
)
from shoal.runtime.fork_server_process import ForkServerProcess
from shoal.runtime.mailbox import Mailbox
from shoal.runtime.process_control import set_subreaper
from shoal.runtime.role_handle import RoleHandle
from shoal.runtime.role_spec import KILLED, ExitStatus, RestartHistory, RoleSpec

_logger = logging.getLogger(__name__)

# How long a fork server may take to end everything below it before it is killed itself.
_END_TIMEOUT_S = 3.0
# How long a killed role may take to be reaped; the end of the run does not depend on it.
_KILL_TIMEOUT_S = 2.0


class _Launch:
    """One process of a role, from the request to fork it until it is reaped."""

    def __init__(self, number: int, pipe: ControlPipe) -> None:
        self.number = number
        self.pipe = pipe
        self.pid = 0
        self.error: ShoalError | None = None
        self.forked = anyio.Event()
        self.status: ExitStatus | None = None
        self.ended = anyio.Event()

    def fail(self, error: ShoalError) -> None:
        """Wake everybody who waits for this launch."""
        if self.status is None:
            self.error, self.status = error, KILLED
        self.forked.set()
        self.ended.set()


class Supervisor:
    """All roles of one run on one host; an async context, used once.

    When the context is left, in whatever way, no process of the run is left and all of them are reaped. If the fork
    server dies, the body is cancelled, all roles are killed, and the context raises `ConnectionLost`.
    """

    def __init__(
        self,
        *,
        run_dir: Path | None = None,
        preload: Sequence[str] = (),
        fork_server: ForkServerProcess | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Start the fork server, without waiting for it.

        Args:
            run_dir: directory that is removed even when this process is killed.
            preload: modules that the fork server imports before the first role is forked.
            fork_server: one that was started before; `run_dir` and `preload` are then its own.
            clock: for back-off and deadlines.
        """
        self._server = fork_server or ForkServerProcess(preload, run_dir)
        self._clock = clock or SystemClock()
        self._numbers = itertools.count()
        self._launches: dict[int, _Launch] = {}
        self._handles: list[RoleHandle] = []
        self._launch_by_handle: dict[RoleHandle, _Launch] = {}
        self._requests = Mailbox[tuple[Request, socket.socket | None]]()
        self._preloaded = anyio.Event()
        self._failure: ShoalError | None = None
        self._stopping = anyio.Event()
        self._context: AbstractAsyncContextManager[None] | None = None
        self._tasks: anyio.abc.TaskGroup | None = None

    @property
    def roles(self) -> Sequence[RoleHandle]:
        """All roles that were started, those that have ended included."""
        return tuple(self._handles)

    @property
    def fork_server_pid(self) -> int:
        """The process below which all roles of the run are."""
        return self._server.pid

    async def preloaded(self) -> None:
        """Wait until the fork server has imported its modules; `start` does this by itself.

        Raises:
            RemoteError: a module cannot be imported, or started a thread.
        """
        await self._preloaded.wait()
        if self._failure is not None:
            raise self._failure

    async def start(self, spec: RoleSpec) -> RoleHandle:
        """Start a role; returns as soon as its process exists, see `RoleHandle.ready` for more.

        Raises:
            RemoteError: the fork server cannot preload or cannot fork.
            ConnectionLost: the fork server is gone, or the supervisor is stopping.
        """
        await self.preloaded()
        if self._tasks is None or self._stopping.is_set():
            raise ConnectionLost(f"{spec} is not started: the supervisor is not running")
        handle = RoleHandle(spec)
        launch = await self._launch(handle)
        self._handles.append(handle)
        self._tasks.start_soon(self._keep, handle, launch, name=f"keep {spec}")
        return handle

    async def stop(self, grace_s: float, order: Iterable[Iterable[str]] = ()) -> None:
        """Ask all roles to leave, group after group, and kill those that have not within `grace_s` seconds in all.

        Args:
            grace_s: time for all groups together; 0 kills at once.
            order: groups of role names, first to leave first; roles that it does not name leave last.
        """
        self._stopping.set()
        deadline = Deadline.after(self._clock, grace_s)
        groups = [frozenset(group) for group in order]
        named = frozenset[str]().union(*groups)
        groups.append(frozenset(handle.spec.role for handle in self._handles if handle.spec.role not in named))
        for group in groups if grace_s > 0 else ():
            members = [handle for handle in self._handles if handle.spec.role in group]
            self._signal(members, signal.SIGTERM)
            with anyio.move_on_after(deadline.remaining_s()):
                for handle in members:
                    await handle.wait()
        late = [handle for handle in self._handles if handle.running]
        if late:
            _logger.warning(
                "supervisor.killing", extra={"roles": [str(role.spec) for role in late], "grace_s": grace_s}
            )
            self._signal(late, signal.SIGKILL)
            with anyio.move_on_after(_KILL_TIMEOUT_S):
                for handle in late:
                    await handle.wait()

    def kill(self, handle: RoleHandle) -> None:
        """Kill a role's process at once; its restart policy says what follows. Nothing happens if it has ended."""
        self._signal([handle], signal.SIGKILL)

    def _signal(self, handles: Iterable[RoleHandle], number: signal.Signals) -> None:
        for handle in handles:
            launch = self._launch_by_handle.get(handle)
            if handle.running and launch is not None:
                self._requests.put((SignalRole(launch.number, number), None))

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
                tasks.start_soon(self._receive_replies, name="fork server replies")
                tasks.start_soon(self._send_requests, name="fork server requests")
                yield
                self._stopping.set()
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            # Our own tasks raise nothing, so there is one error, the body's, which the task group has wrapped.
            if len(group.exceptions) != 1:
                raise
            raise (self._failure or group.exceptions[0]) from None
        finally:
            with anyio.CancelScope(shield=True):
                await self._end()
            set_subreaper(was_subreaper)
        if self._failure is not None:
            raise self._failure

    async def _end(self) -> None:
        """Leave no process; whoever still waits for a role learns that it was killed."""
        self._stopping.set()
        self._server.cut_lifeline()
        with anyio.move_on_after(_END_TIMEOUT_S) as timeout:
            await self._server.wait()
        if timeout.cancelled_caught:
            _logger.error("fork_server.killed", extra={"reason": "did not end", "timeout_s": _END_TIMEOUT_S})
        self._server.kill()
        for launch in self._launches.values():
            launch.fail(self._failure or ConnectionLost("the supervisor has ended"))
        for handle in self._handles:
            handle.finish(KILLED)
        self._requests.close()
        for _, control in self._requests.drain():
            if control is not None:
                control.close()

    async def _send_requests(self) -> None:
        async for request, control in self._requests:
            try:
                await self._server.send(request, None if control is None else control.fileno())
            except OSError:
                # The replies end as well, which is where the loss is handled.
                return
            finally:
                if control is not None:
                    control.close()

    async def _receive_replies(self) -> None:
        async for reply in self._server.replies():
            match reply:
                case Preloaded():
                    self._preloaded.set()
                case PreloadFailed(message):
                    self._lose(RemoteError(message))
                    return
                case Forked(number, pid):
                    launch = self._launches[number]
                    launch.pid = pid
                    launch.forked.set()
                case ForkFailed(number, message):
                    self._launches.pop(number).fail(RemoteError(message))
                case Exited(number, code):
                    launch = self._launches.pop(number)
                    launch.status = ExitStatus(code)
                    launch.ended.set()
        self._lose(ConnectionLost(f"the fork server (pid {self._server.pid}) has ended, so the run is ended"))

    def _lose(self, failure: ShoalError) -> None:
        """End the run: without a fork server, roles could be neither started nor reaped."""
        _logger.error("fork_server.lost", extra={"reason": str(failure)})
        self._failure = failure
        self._preloaded.set()
        for launch in self._launches.values():
            launch.fail(failure)
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()

    async def _launch(self, handle: RoleHandle) -> _Launch:
        """Have one process forked and connect its control pipe."""
        spec = handle.spec
        number = next(self._numbers)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        pipe = ControlPipe(handle.deliver)
        handle.connect(pipe)
        await pipe.open(ours)
        launch = self._launches[number] = _Launch(number, pipe)
        request = ForkRole(
            number=number,
            role=spec.role,
            index=spec.index,
            entry=spec.entry,
            payload=spec.payload,
            environment=dict(spec.environment),
            nice=spec.nice,
            output_path=str(spec.output_path or ""),
        )
        self._requests.put((request, theirs))
        try:
            await launch.forked.wait()
        finally:
            if launch.pid == 0:
                # Nobody will follow it: if it is forked after all, because only the wait was cancelled, it has to go.
                self._requests.put((SignalRole(number, signal.SIGKILL), None))
                await pipe.aclose()
        if launch.error is not None:
            raise launch.error
        handle.pid = launch.pid
        self._launch_by_handle[handle] = launch
        _logger.info("role.started", extra={"role": str(spec), "pid": launch.pid})
        return launch

    async def _keep(self, handle: RoleHandle, launch: _Launch) -> None:
        """Follow a role over all its launches to its end."""
        history = RestartHistory(handle.spec.restart)
        while True:
            status = await self._follow(handle, launch)
            # What has failed by itself before it ever served would not do better the next time.
            is_hopeless = status.code > 0 and not handle.was_ready
            if status.ok or is_hopeless or self._stopping.is_set():
                break
            delay_s = history.next_delay_s(self._clock.now_s())
            if delay_s is None:
                handle.emit("given_up", restarts=handle.restarts)
                break
            handle.emit("restarting", delay_s=delay_s, status=str(status))
            with anyio.move_on_after(delay_s):
                await self._stopping.wait()
                break
            try:
                launch = await self._launch(handle)
            except ShoalError as error:
                _logger.error("role.restart_failed", extra={"role": str(handle.spec), "reason": str(error)})
                handle.emit("error", kind=type(error).__name__, message=str(error))
                break
            handle.restarts += 1
            handle.emit("restarted")
            if self._stopping.is_set():
                self._signal([handle], signal.SIGTERM)
        handle.finish(status)

    async def _follow(self, handle: RoleHandle, launch: _Launch) -> ExitStatus:
        """Wait until one process has ended and everything that it said has been delivered."""
        try:
            await launch.pipe.closed.wait()
            await launch.ended.wait()
        finally:
            await launch.pipe.aclose()
        status = launch.status or KILLED
        level = logging.INFO if status.ok or self._stopping.is_set() else logging.WARNING
        fields = {"role": str(handle.spec), "pid": launch.pid, "status": str(status)}
        _logger.log(level, "role.exited", extra=fields)
        handle.exited(status)
        return status
