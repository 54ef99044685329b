"""The processes of a replay: started, listened to, ended; and what they say. For the replay they are one engine.

Each is a clean interpreter with one socket to this process (`runtime.frames`) and one to every other one. None of them
outlives this process: its lifeline is cut then.

    replay                    process
      ReplayStart ------------->
      <---------- Found, StepDone    in the order of the actions
      <------------------ Reached    for each record, and once more when there is no further action
      end of the stream ------->     ends at once, as by the lifeline
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from shoal.errors import InvariantViolation, RemoteError
from shoal.replay.order import Action, Average
from shoal.replay.own_code import NOTHING_NAMED, NamedCode
from shoal.replay.verdict import Difference
from shoal.runtime.clean_interpreter import start_interpreter
from shoal.runtime.frames import FrameReader, framed

_READ_BYTES = 1 << 16


class ReplayStart(msgspec.Struct, frozen=True):
    """The first and only message to a process.

    Attributes:
        process: the number of the receiver.
        homes: the process of each generation.
        link_fds: the receiver's ends of the sockets to all other processes.
        named: it may import.
    """

    directory: str
    process: int
    homes: list[int]
    link_fds: dict[int, int]
    named: NamedCode


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """A step is computed, as far as its first stage goes."""

    round: int


class Found(msgspec.Struct, frozen=True, tag=True):
    """Something is not as the logs say, by the action with this number."""

    action: int
    difference: Difference


class Reached(msgspec.Struct, frozen=True, tag=True):
    """A record's round is over; None: there is no further action."""

    round: int | None


class ReplayFailed(msgspec.Struct, frozen=True, tag=True):
    """It cannot go on."""

    reason: str


Report = StepDone | Found | Reached | ReplayFailed


@dataclass(slots=True)
class _Process:
    """One of them, our end of its socket, and what it has said that nobody has looked at."""

    popen: subprocess.Popen[bytes]
    control: socket.socket
    frames: FrameReader[Report] = field(default_factory=lambda: FrameReader[Report](Report))
    reports: deque[Report] = field(default_factory=deque[Report])
    is_ended: bool = False


class Processes:
    """All processes of a replay.

    Args:
        homes: the process of each generation; see `sharing.share_generations`.
        on_step: is told the round of each step that is computed.
        named: they may import.
    """

    def __init__(
        self, directory: Path, homes: Sequence[int], on_step: Callable[[int], None], named: NamedCode = NOTHING_NAMED
    ) -> None:
        self._directory = directory
        self._named = named
        self._homes = list(homes)
        self._on_step = on_step
        self._processes: list[_Process] = []
        self._lifeline_fd = -1

    def __enter__(self) -> Self:
        """Start them all; they begin at once."""
        try:
            self._start(max(self._homes) + 1)
        except BaseException:  # a Ctrl-C too: no process may be left
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End them all."""
        self._end()

    def act(self, action: Action) -> Iterator[Difference]:
        """Wait for the end of a round where an action is one; yields what is not as the logs say.

        Raises:
            RemoteError: A process has failed.
        """
        return self._until(action.record.round) if isinstance(action, Average) else iter(())

    def finish(self) -> Iterator[Difference]:
        """Wait for what can be computed after the last round that has ended.

        Raises:
            RemoteError: A process has failed.
        """
        return self._until(None)

    def _until(self, round: int | None) -> Iterator[Difference]:
        found: list[Found] = []
        for process in self._processes:
            while (report := self._next(process)) != Reached(round):
                match report:
                    case Found():
                        found.append(report)
                    case ReplayFailed(reason):
                        raise RemoteError(reason)
                    case _:
                        raise InvariantViolation(f"process that has to come to {round} says {report}")
        # As one process would have found them. Those of one action are of one process, but for an average's stages.
        found.sort(key=lambda each: (each.action, each.difference.stage or 0))
        return (each.difference for each in found)

    def _next(self, process: _Process) -> Report:
        """What a process says next; what others say meanwhile is kept, and steps are told."""
        while not process.reports:
            if process.is_ended:
                raise self._failure()
            self._read()
        return process.reports.popleft()

    def _read(self) -> None:
        """Wait until some have said something."""
        with selectors.DefaultSelector() as waiting:
            for process in self._processes:
                if not process.is_ended:
                    waiting.register(process.control, selectors.EVENT_READ, process)
            for key, _ in waiting.select():
                process: _Process = key.data
                try:
                    data = process.control.recv(_READ_BYTES)
                except ConnectionResetError:
                    data = b""
                process.is_ended = not data
                for report in process.frames.feed(data):
                    if isinstance(report, StepDone):
                        self._on_step(report.round)
                    else:
                        process.reports.append(report)

    def _failure(self) -> RemoteError:
        """Why a process has ended early. One that has only lost another one ends without a word, and with code 0."""
        while True:
            for number, process in enumerate(self._processes):
                for report in process.reports:
                    if isinstance(report, ReplayFailed):
                        return RemoteError(report.reason)
                if process.is_ended and (code := process.popen.wait()):
                    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has failed, exit code {code}"
                    return RemoteError(f"process {number} of the replay {how}; --processes 1 needs the least memory")
            if all(process.is_ended for process in self._processes):
                return RemoteError("the processes of the replay have ended early")
            self._read()

    def _start(self, number: int) -> None:
        ends: list[dict[int, socket.socket]] = [{} for _ in range(number)]
        read_fd, self._lifeline_fd = os.pipe()
        try:
            for one, other in combinations(range(number), 2):
                ends[one][other], ends[other][one] = socket.socketpair()
            for process, links in enumerate(ends):
                ours, theirs = socket.socketpair()
                with theirs:
                    fds = {other: end.fileno() for other, end in links.items()}
                    popen = start_interpreter(
                        "shoal.replay.process",
                        (theirs.fileno(), read_fd),
                        pass_fds=(theirs.fileno(), read_fd, *fds.values()),
                        new_session=True,
                    )
                self._processes.append(_Process(popen, ours))
                # If the process has ended, its missing answer says so.
                with suppress(BrokenPipeError, ConnectionResetError):
                    ours.sendall(framed(ReplayStart(str(self._directory), process, self._homes, fds, self._named)))
        finally:
            os.close(read_fd)
            for end in (end for links in ends for end in links.values()):
                end.close()

    def _end(self) -> None:
        processes, self._processes = self._processes, []
        for process in processes:
            process.control.close()
            process.popen.kill()
            process.popen.wait()
        if self._lifeline_fd >= 0:
            os.close(self._lifeline_fd)
            self._lifeline_fd = -1
