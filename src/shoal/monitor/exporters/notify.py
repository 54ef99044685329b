"""A program of the user's that hears of warnings: for mail, chat, a pager.

It is started for each event of level WARNING or worse that the client notes, one at a time, and reads that event from
its standard input: one line of JSON, as `events.jsonl` has it. One that fails or hangs is named once for each time, and
costs the run nothing.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

from shoal.events.base import tell
from shoal.events.monitor import NotifyFailed
from shoal.monitor.exporters.base import FedThread, NotedEvent
from shoal.telemetry.rows import MetricRow

logger = logging.getLogger(__name__)

LEVELS: Final = frozenset({"WARNING", "ERROR", "CRITICAL"})
TIMEOUT_S: Final = 30.0
MAX_QUEUED: Final = 100
"""So many warnings wait for the program; of more than that only the first ones are told."""
_END_TIMEOUT_S: Final = 1.0
_MAX_REASON_CHARS: Final = 200


class NotifyCommand:
    """Starts the program, in a thread that waits for it."""

    def __init__(self, command: Sequence[str], notice: Callable[[str], None], timeout_s: float = TIMEOUT_S) -> None:
        """Prepare; nothing is started before the first warning.

        Args:
            command: the program and its arguments; no shell reads them.
            notice: called from the thread with a line for the user.
            timeout_s: after which the program is killed.
        """
        self._command = tuple(command)
        self._notice = notice
        self._timeout_s = timeout_s
        self._thread = FedThread[bytes]("notify", self._work, MAX_QUEUED)
        self._hanging: list[subprocess.Popen[bytes]] = []

    def row(self, row: MetricRow) -> None:
        """Numbers are no warnings."""

    def event(self, event: NotedEvent) -> None:
        """Have the program told of a warning."""
        if event.level in LEVELS:
            self._thread.put(event.line)

    def close(self, timeout_s: float) -> bool:
        """Wait until the program has been told of everything."""
        return self._thread.close(timeout_s)

    def _work(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            problem = self._problem_with(line)
            if problem:
                tell(logger, NotifyFailed(self._command[0], problem), self._notice)

    def _problem_with(self, line: bytes) -> str:
        """Start the program with a line; return why that did not work, or nothing."""
        self._hanging = [each for each in self._hanging if each.poll() is None]
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            return (error.strerror if isinstance(error, OSError) else None) or str(error)
        try:
            _, said = process.communicate(line + b"\n", self._timeout_s)
        except subprocess.TimeoutExpired:
            # With what it has started itself; one that runs as another user (sudo) ends when it likes.
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            try:
                process.communicate(timeout=_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._hanging.append(process)
            return f"it has not ended within {self._timeout_s:g} s"
        if process.returncode == 0:
            return ""
        lines = said.decode(errors="replace").strip().splitlines()
        return f"exit code {process.returncode}{f', {lines[-1]}' if lines else ''}"[:_MAX_REASON_CHARS]
