"""The processes of a replay: started, listened to, ended; and what they say. For the replay they are one engine.

Each is a child of this process (`runtime.child`), and has a socket to every other one.

    replay                    process
      ReplayStart ------------->
      <---------- Found, StepDone    in the order of the actions
      <------------------ Reached    for each record, and once more when there is no further action
"""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Self

import msgspec

from shoal.errors import InvariantViolation, RemoteError, ShoalError
from shoal.replay.order import Action, Average
from shoal.replay.own_code import NOTHING_NAMED, NamedCode
from shoal.replay.verdict import Difference
from shoal.runtime.child import Child, ChildFailed
from shoal.runtime.role_spec import ExitStatus


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


Report = StepDone | Found | Reached


@dataclass(slots=True)
class _Process:
    """One of them, and what it has said that nobody has looked at."""

    child: Child[Report]
    reports: deque[Report | ChildFailed] = field(default_factory=deque[Report | ChildFailed])
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

    def __enter__(self) -> Self:
        """Start them all; they begin at once."""
        try:
            self._start(max(self._homes) + 1)
        except BaseException:  # a Ctrl-C too: no process may be left
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End them all."""
        self._end()

    def act(self, action: Action) -> Iterator[Difference]:
        """Wait for the end of a round where an action is one; yields what is not as the logs say.

        Raises:
            RemoteError: A process has ended early.
            ShoalError: As a process has failed.
        """
        return self._until(action.record.round) if isinstance(action, Average) else iter(())

    def finish(self) -> Iterator[Difference]:
        """Wait for what can be computed after the last round that has ended.

        Raises:
            RemoteError: A process has ended early.
            ShoalError: As a process has failed.
        """
        return self._until(None)

    def _until(self, round: int | None) -> Iterator[Difference]:
        found: list[Found] = []
        for process in self._processes:
            while (report := self._next(process)) != Reached(round):
                match report:
                    case Found():
                        found.append(report)
                    case ChildFailed() as failed:
                        raise failed.error()
                    case _:
                        raise InvariantViolation(f"process that has to come to {round} says {report}")
        # As one process would have found them. Those of one action are of one process, but for an average's stages.
        found.sort(key=lambda each: (each.action, each.difference.stage or 0))
        return (each.difference for each in found)

    def _next(self, process: _Process) -> Report | ChildFailed:
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
                    waiting.register(process.child.control, selectors.EVENT_READ, process)
            for key, _ in waiting.select():
                process: _Process = key.data
                said = process.child.read()
                process.is_ended = said is None
                for report in said or ():
                    if isinstance(report, StepDone):
                        self._on_step(report.round)
                    else:
                        process.reports.append(report)

    def _failure(self) -> ShoalError:
        """Why a process has ended early. One that has only lost another one ends without a word, and with code 0."""
        while True:
            for number, process in enumerate(self._processes):
                for report in process.reports:
                    if isinstance(report, ChildFailed):
                        return report.error()
                if process.is_ended and (code := process.child.death().code):
                    status = ExitStatus(code)
                    how = f"was {status}" if code < 0 else f"has failed, {status}"
                    return RemoteError(f"process {number} of the replay {how}; --processes 1 needs the least memory")
            if all(process.is_ended for process in self._processes):
                return RemoteError("the processes of the replay have ended early")
            self._read()

    def _start(self, number: int) -> None:
        ends: list[dict[int, socket.socket]] = [{} for _ in range(number)]
        with ExitStack() as handed_over:
            for one, other in combinations(range(number), 2):
                ends[one][other], ends[other][one] = map(handed_over.enter_context, socket.socketpair())
            for process, links in enumerate(ends):
                fds = {other: end.fileno() for other, end in links.items()}
                child = Child[Report]("shoal.replay.process", Report, pass_fds=tuple(fds.values()), new_session=True)
                self._processes.append(_Process(child))
                child.tell(ReplayStart(str(self._directory), process, self._homes, fds, self._named))

    def _end(self) -> None:
        processes, self._processes = self._processes, []
        for process in processes:
            process.child.close()
