"""Launchers that a template forks (tests/e2e/template.py), which has imported once for all tests of a worker."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.e2e.namespaces import namespace_of

from shoal.errors import RunFailed
from shoal.runtime.clean_interpreter import allocator_settings
from shoal.runtime.fork_server import _ONE_THREAD
from shoal.runtime.linux_calls import FORCE_PORTABLE
from shoal_lab.launched import Launched
from shoal_lab.parents_death import end_with_parent

ROOT = Path(__file__).parents[2]
_ROOM = {"ROOM_FOR_ENVIRONMENTS": "x" * (1 << 16)}
_READ_AT_A_START = {"PYTHONPATH", FORCE_PORTABLE}
"""What is in the environment of these runs the template would have had to know when it was started."""

_template: Template | None = None


class WarmProcess:
    """As much of a `subprocess.Popen` as tests ask of a launcher."""

    def __init__(self, arguments: Sequence[str], pid: int, status_fd: int) -> None:
        self.args = arguments
        self.pid = pid
        self.returncode: int | None = None
        self._status_fd = status_fd

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._status_fd], [], [], timeout_s)[0]:
            told = os.read(self._status_fd, 16)
            os.close(self._status_fd)
            # Of one whose template was killed nobody knows.
            self.returncode = int(told or -signal.SIGKILL)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Template:
    """The process that forks; made once it has imported."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.template", str(theirs.fileno())],
                cwd=ROOT,
                env={**os.environ, **allocator_settings(), **_ONE_THREAD, **_ROOM, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                preexec_fn=end_with_parent(signal.SIGTERM),
            )
        self._answer()

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes], namespace: str | None
    ) -> WarmProcess:
        """Have a launcher forked that runs a script or a module of the checkout.

        Args:
            namespace: of the host on which it runs; None: it runs on this machine.
        """
        wanted = {"arguments": [*arguments], "cwd": str(ROOT), "environment": {**environment}, "namespace": namespace}
        status_fd, theirs = os.pipe()
        try:
            socket.send_fds(self._requests, [json.dumps(wanted).encode()], [output.fileno(), theirs])
        finally:
            os.close(theirs)
        return WarmProcess(arguments, int(self._answer()), status_fd)

    def _answer(self) -> bytes:
        answer = self._requests.recv(64)
        if not answer:
            raise RunFailed(f"the template has ended with exit code {self._process.wait()}")
        return answer

    def close(self) -> None:
        self._requests.close()
        self._process.wait()


@contextlib.contextmanager
def template() -> Iterator[None]:
    """Have the launchers of this process forked by a template, where they can be."""
    global _template
    _template = Template()
    try:
        yield
    finally:
        _template.close()
        _template = None


class WarmLaunched(Launched):
    """A command that begins without importing, if the template could have imported for it."""

    def spawn(self, environment: Mapping[str, str], output: IO[bytes]) -> Any:
        namespace = namespace_of(self.prefix)
        is_known = namespace is not None or not self.prefix
        is_of_checkout = self.cwd == ROOT and _READ_AT_A_START.isdisjoint(self.environment)
        if _template is None or not is_known or not is_of_checkout:
            return super().spawn(environment, output)
        return _template.start(self.arguments, environment, output, namespace)
