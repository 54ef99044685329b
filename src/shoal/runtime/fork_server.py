"""The fork server: imports what all roles need once, then forks them; `python -m shoal.runtime.fork_server`.

    supervisor --(socket: requests, replies)--> fork server --fork--> role, role, role ... --> p2pd, wandb-core
        '------------(lifeline: a pipe that closes with the supervisor)----'--------'

It has one thread and no event loop, because a process that forks must have neither. It is the subreaper of its roles:
processes that a dead role leaves behind become its children and are killed at once. When the supervisor ends, in
whatever way, it kills every process of the run, removes the run directory and ends. So closing the lifeline is also how
an orderly run takes it down: there is one way to end, and every run uses it.

If it dies itself, its roles go on as children of the supervisor, which starts another fork server for the next ones
(`shoal.runtime.fork_server_keeper`). That one ends the run as this one would have, so it has to find processes that do
not descend from it: by the tag in the environment that all processes of a run have inherited.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import random
import select
import shutil
import signal
import socket
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from shoal.clock import SystemClock
from shoal.errors import InvariantViolation
from shoal.file_thread import FileThread
from shoal.runtime.fork_messages import (
    TAG_NAME,
    Configure,
    Exited,
    Forked,
    ForkFailed,
    ForkRole,
    Preloaded,
    PreloadFailed,
    Reply,
    Request,
)
from shoal.runtime.frames import FrameReader, framed
from shoal.runtime.lifeline import watched_by_signal
from shoal.runtime.process_control import (
    end_descendants,
    end_tagged,
    kill,
    next_ended,
    reap,
    set_process_title,
    set_subreaper,
)
from shoal.runtime.process_handle import OwnHandle
from shoal.runtime.process_info import descendants, thread_names
from shoal.runtime.role import run_role
from shoal.runtime.role_spec import RoleSpec

# Set before the first import: torch, numpy and pyarrow's allocator start their threads while they are imported. Roles
# choose later.
_ONE_THREAD = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
_READ_BYTES = 1 << 16
_IMPORT_THRESHOLD = (20_000, 10, 10)


@dataclass(frozen=True, slots=True)
class ForkedRole:
    """What a child has to do once it has left the fork server's loop."""

    spec: RoleSpec
    control_fd: int
    lifeline_fd: int
    run_dir: str
    handle: OwnHandle

    def run(self) -> int:
        """Turn this process, fresh from the fork, into its role; return the exit code."""
        spec = self.spec
        set_process_title(spec.role, spec.index)
        if spec.nice:
            # Before any thread or process of its own: each inherits it.
            os.nice(spec.nice)
        if spec.output_path:
            print_to(Path(spec.output_path))
        random.seed()
        control = socket.socket(fileno=self.control_fd)
        return run_role(spec.entry, spec.payload, control, self.lifeline_fd, self.run_dir)


def print_to(path: Path) -> None:
    """Have a file take what this process prints: nothing does while its disk does not answer, or if it is read-only."""

    def take() -> None:
        _print_to(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))

    opened = FileThread("output", path=path).do(take)
    if not opened.done() or opened.exception() is not None:
        _print_to(os.open(os.devnull, os.O_WRONLY))


def _print_to(descriptor: int) -> None:
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


class ForkServer:
    """The loop between the supervisor's requests and the ends of children."""

    def __init__(self, requests_fd: int, lifeline_fd: int, run_dir: str) -> None:
        """Take over the two descriptors that the supervisor passed in, and the directory that ends with it, if any."""
        self._requests = socket.socket(fileno=requests_fd)
        self._lifeline_fd = lifeline_fd
        self._frames: FrameReader[Request] = FrameReader(Request)
        self._unserved: deque[Request] = deque()
        self._control_fds: deque[int] = deque()
        self._number_by_pid: dict[int, int] = {}
        self._run_dir = run_dir
        self._child_ended_fd, self._wakeup_fd = os.pipe()
        os.set_blocking(self._child_ended_fd, False)
        os.set_blocking(self._wakeup_fd, False)

    def serve(self) -> ForkedRole | None:
        """Serve until the supervisor is gone; returns None then, and in each forked child the role that it is."""
        set_process_title("fork_server")
        set_subreaper(True)
        # Ctrl-C is the supervisor's to handle. SIGTERM stays blocked into the roles, until they have a handler for it;
        # here, that makes a signal to all processes of the run end the roles in good order rather than their parent.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        with watched_by_signal(self._lifeline_fd, self._exit_at_once):
            ready = self._preload()
        if not ready:
            return None
        signal.signal(signal.SIGCHLD, lambda _signal, _frame: None)
        signal.set_wakeup_fd(self._wakeup_fd, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._lifeline_fd, select.POLLIN)
        poll.register(self._child_ended_fd, select.POLLIN)
        poll.register(self._requests, select.POLLIN)
        while True:
            # Before the first wait too: requests may have come together with what was to be imported.
            while self._unserved:
                request = self._unserved.popleft()
                if isinstance(request, Configure):
                    if not self._import(request):
                        return None
                    continue
                role = self._fork(request, self._control_fds.popleft())
                if role is not None:
                    return role
            readable = {fd for fd, _ in poll.poll()}
            if self._lifeline_fd in readable:
                self._end_run()
                return None
            if self._child_ended_fd in readable:
                self._reap()
            if self._requests.fileno() in readable and not self._receive():
                # The lifeline is cut in the same moment: what is left to do stands there.
                poll.unregister(self._requests)

    def _preload(self) -> bool:
        """Import what the first request names; returns whether forks can be served."""
        while not self._unserved:
            if not self._receive():
                return False
        configure = self._unserved.popleft()
        if not isinstance(configure, Configure):
            raise InvariantViolation(f"the first request is {type(configure).__name__}, not Configure")
        return self._import(configure)

    def _import(self, configure: Configure) -> bool:
        """Import modules that all roles share which are forked later; returns whether forks can be served."""
        SystemClock.began_unix_s = configure.began_unix_s
        # Modules stay: looking for garbage among them as often as usual takes 0.25 of the 1.85 s that they need. Never
        # to look would save 0.1 s more, but leave holes in memory, which each role fills with 5 MB of its own.
        usual = gc.get_threshold()
        gc.set_threshold(*_IMPORT_THRESHOLD)
        for name in configure.preload:
            try:
                module, _, text = name.partition(":")
                imported = importlib.import_module(module)
                if text:
                    imported.preload(text)
            except ImportError as error:
                self._send(PreloadFailed(f"cannot import {name}: {error}"))
                return False
            except OSError as error:
                # Of multiprocessing's semaphores, which hivemind makes.
                hint = "see whether /dev/shm is there and can be written"
                self._send(PreloadFailed(f"cannot import {name}: {error}: {hint}"))
                return False
        threads = thread_names()
        if len(threads) > 1:
            self._send(
                PreloadFailed(f"importing {configure.preload} started threads, so roles cannot be forked: {threads}")
            )
            return False
        # What lives now is shared with every child; the collector must not touch (and so copy) those pages.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*usual)
        self._send(Preloaded())
        return True

    def _receive(self) -> bool:
        """Read what has arrived; returns False at the end of the stream."""
        try:
            data, fds, _flags, _address = socket.recv_fds(self._requests, _READ_BYTES, 1)
        except ConnectionResetError:
            return False
        for fd in fds:
            os.set_inheritable(fd, False)
        self._control_fds.extend(fds)
        self._unserved.extend(self._frames.feed(data))
        return bool(data)

    def _fork(self, request: ForkRole, control_fd: int) -> ForkedRole | None:
        try:
            pid = os.fork()
        except OSError as error:
            os.close(control_fd)
            self._send(ForkFailed(request.number, f"cannot fork {request.spec.role}: {error.strerror}"))
            return None
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            handle = self._announce(request.number)
            self._requests.close()
            os.close(self._child_ended_fd)
            os.close(self._wakeup_fd)
            return ForkedRole(request.spec, control_fd, self._lifeline_fd, self._run_dir, handle)
        os.close(control_fd)
        self._number_by_pid[pid] = request.number
        return None

    def _announce(self, number: int) -> OwnHandle:
        """Say, in the child, that it exists: a fork server that is killed now could not say it any more."""
        handle = OwnHandle()
        # A frame this small is written whole, so it cannot mix with one of the parent.
        with contextlib.suppress(OSError):
            socket.send_fds(self._requests, [framed(Forked(number, os.getpid()))], [handle.descriptor])
        handle.give_away()
        return handle

    def _reap(self) -> None:
        """Reap what has ended, report roles, and kill what they left behind."""
        os.read(self._child_ended_fd, _READ_BYTES)
        any_ended = False
        while ended := next_ended():
            number = self._number_by_pid.pop(ended.pid, None)
            if number is not None:
                self._send(Exited(number, ended.code))
            # Only now: if this process were killed in between, nobody could say any more how the role has ended.
            reap(ended.pid)
            any_ended = True
        if any_ended:
            me = os.getpid()
            for stat in descendants(me):
                if stat.parent_pid == me and stat.pid not in self._number_by_pid:
                    kill(stat.pid)

    def _send(self, reply: Reply) -> None:
        try:
            self._requests.sendall(framed(reply))
        except OSError:
            # The supervisor is gone, which the lifeline says as well.
            return

    def _end_run(self) -> None:
        end_descendants(self._number_by_pid)
        end_tagged(f"{TAG_NAME}={os.environ[TAG_NAME]}")
        if self._run_dir:
            shutil.rmtree(self._run_dir, ignore_errors=True)

    def _exit_at_once(self) -> None:
        self._end_run()
        os._exit(1)


def main() -> None:
    """Serve; in a forked child, run its role. The arguments: descriptors of socket and lifeline, the run directory."""
    os.environ.update(_ONE_THREAD)
    requests_fd, lifeline_fd = (int(argument) for argument in sys.argv[1:3])
    role = ForkServer(requests_fd, lifeline_fd, sys.argv[3]).serve()
    if role is None:
        return
    code = role.run()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    role.handle.ends_with(code)
    # Not sys.exit: what the preloaded libraries registered to run at exit belongs to the fork server.
    os._exit(code)


if __name__ == "__main__":
    main()
