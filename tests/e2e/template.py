"""Forks launchers that have nothing left to import: `python -m tests.e2e.template`, started by tests/e2e/warm.py.

    pytest --(socket: what to start)--> template --fork--> launcher --fork--> fork server --fork--> roles

A launcher that a user starts imports for a second, and its fork server for three: too long for each of a hundred runs.
What is forked here is that launcher at the moment when it would begin, and that fork server when it has imported. All
that follows is theirs. The second fork server of a launcher is started as ever, because by then it has an event loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import json
import logging
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.e2e.namespaces import enter

from shoal.cli.early import PRELOAD
from shoal.runtime import fork_server, fork_server_process
from shoal.runtime.clean_interpreter import start_interpreter
from shoal.runtime.process_control import next_ended, reap
from shoal.runtime.process_info import thread_names
from shoal_lab.parents_death import end_with_parent

MODULES = (
    *PRELOAD,
    "shoal.cli.app",
    "shoal.cli.client_host",
    "shoal.cli.local",
    "shoal.cli.observing",
    "shoal.cli.server_host",
)
_REQUEST_BYTES = 1 << 20


class ForkedServer:
    """As much of a `subprocess.Popen` as a launcher asks of its fork server."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


class Template:
    """The loop between what is asked for and the ends of launchers."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._status_fds: dict[int, int] = {}
        self._child_ended_fd, self._wakeup_fd = os.pipe()
        for fd in (self._child_ended_fd, self._wakeup_fd):
            os.set_blocking(fd, False)
        # What libraries have opened, a program of its own would have opened as well.
        self._kept = _descriptors() - {requests.fileno(), self._child_ended_fd, self._wakeup_fd}

    def serve(self) -> Callable[[], int] | None:
        """Serve until pytest is gone; returns None then, and in each forked child what it has to run."""
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._wakeup_fd, warn_on_full_buffer=False)
        self._requests.send(b"ready")
        while True:
            readable, _, _ = select.select([self._requests, self._child_ended_fd], [], [])
            if self._child_ended_fd in readable:
                os.read(self._child_ended_fd, _REQUEST_BYTES)
                while ended := next_ended():
                    # Its number is another's only when it is known that it has ended.
                    status_fd = self._status_fds.pop(ended.pid)
                    with suppress(BrokenPipeError):  # whoever started it has not waited
                        os.write(status_fd, str(ended.code).encode())
                    os.close(status_fd)
                    reap(ended.pid)
            if self._requests in readable:
                data, fds, _, _ = socket.recv_fds(self._requests, _REQUEST_BYTES, 2)
                if not data:
                    return None
                output_fd, status_fd = fds
                pid = os.fork()
                if pid == 0:
                    return self._launcher(json.loads(data), output_fd)
                os.close(output_fd)
                self._status_fds[pid] = status_fd
                self._requests.send(str(pid).encode())

    def _launcher(self, wanted: Mapping[str, Any], output_fd: int) -> Callable[[], int]:
        """Make this process, fresh from the fork, what `Launched.spawn` would have started."""
        end_with_parent(signal.SIGTERM)()
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        _close_all_but(self._kept)
        os.chdir(wanted["cwd"])
        _take_environment(wanted["environment"])
        if wanted["namespace"] is not None:
            enter(wanted["namespace"], os.environ["XDG_RUNTIME_DIR"])
        kept = self._kept

        def start_first(
            module: str,
            arguments: Sequence[object],
            *,
            pass_fds: Sequence[int],
            environment: Mapping[str, str] | None = None,
            **options: Any,
        ) -> Any:
            fork_server_process.start_interpreter = start_interpreter
            if len(thread_names()) > 1 or asyncio._get_running_loop() is not None:
                return start_interpreter(module, arguments, pass_fds=pass_fds, environment=environment, **options)
            pid = os.fork()
            if pid == 0:
                _end_with(lambda: _fork_server(arguments, kept | {*pass_fds}, environment or {}))
            return ForkedServer(pid)

        fork_server_process.start_interpreter = start_first
        return lambda: _run(wanted["arguments"])


def _fork_server(arguments: Sequence[object], kept: set[int], environment: Mapping[str, str]) -> int:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _close_all_but(kept)
    _take_environment({**os.environ, **environment})
    sys.argv = ["fork_server", *map(str, arguments)]
    fork_server.main()
    return 0


def _run(arguments: Sequence[str]) -> int:
    """Run a script, or a module behind -m, as Python would."""
    is_module = arguments[0] == "-m"
    sys.argv = [*arguments[is_module:]]
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__")
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def _end_with(program: Callable[[], int]) -> None:
    """End this process with what a program returns, and without what imported libraries do at an exit."""
    code = 1
    try:
        code = program()
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _descriptors() -> set[int]:
    """All that are open here."""
    return {fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_open(fd)}


def _is_open(fd: int) -> bool:
    """Whether it still is: one was only open to read the list."""
    with suppress(OSError):
        os.fstat(fd)
        return True
    return False


def _close_all_but(kept: set[int]) -> None:
    for fd in _descriptors() - kept - {0, 1, 2}:
        os.close(fd)


def _take_environment(environment: Mapping[str, str]) -> None:
    """Have the environment that a program would have been started with, also for whoever reads it in /proc.

    There the kernel shows what stands where it put the environment of the template, which has room for it.
    """
    os.environ.clear()
    os.environ.update(environment)
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    shown = b"\0".join(b"=".join(pair) for pair in os.environb.items())
    if len(shown) >= end - start:
        raise ValueError(f"an environment of {len(shown)} bytes, and room for {end - start}")
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def main() -> None:
    """Import, then serve; in a forked child, be the launcher. The argument: the descriptor of the socket."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    program = Template(requests).serve()
    if program is not None:
        _end_with(program)


if __name__ == "__main__":
    main()
