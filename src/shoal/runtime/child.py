"""A child: a process that works for the one that has started it, and speaks with it by typed messages.

    Child (here)                     Parent (there)
      tell(order) ------------------>  orders
      hear() <-----------------------  say(answer) , as often as it likes
      hear() raises <---------------   an error of shoal leaves the context: it arrives with its class and its words
      hear() raises ChildDied <------  the process has ended in any other way

It is a clean interpreter and not a fork, because its parent may have threads. It has one end of a socket and the read
end of a lifeline, whose write end only its parent has: so it cannot outlive its parent, also in the middle of an order.
What the messages are, each pair of programs says in a module of its own, as structs with tags. Batches do not travel by
them: a child is handed the descriptor of shared memory.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from math import inf
from types import UnionType
from typing import Final, Generic, Self, TypeVar

import msgspec

import shoal.errors
from shoal.clock import SystemClock
from shoal.errors import ChildDied, DeadlineExceeded, RemoteError, ShoalError
from shoal.runtime.clean_interpreter import start_interpreter
from shoal.runtime.frames import FrameReader, framed, received
from shoal.runtime.lifeline import watch_in_thread
from shoal.runtime.process_end import process_ended
from shoal.runtime.process_info import cpu_s, read_stat
from shoal.runtime.role_spec import ExitStatus

LOOK_S: Final = 1.0
"""Between two looks at a child that may stand still."""

STILL_S: Final = 2.0
"""So long a process has to stand still before something is done about it."""

_END_S: Final = 5.0
"""Longer than a process takes to end that has closed its socket."""

_SHOWN_LINES: Final = 40
_READ_BYTES: Final = 1 << 16

_Order = TypeVar("_Order")
_Answer = TypeVar("_Answer", bound=msgspec.Struct)


class ChildFailed(msgspec.Struct, frozen=True, tag=True):
    """The last that a child says: an error of shoal, for people.

    Attributes:
        kind: the name of its class in `shoal.errors`.
    """

    kind: str
    message: str

    @classmethod
    def of(cls, error: ShoalError) -> ChildFailed:
        """Return what is said of an error; one that is more than its message is said to be of the class above it."""
        kind = next(each for each in type(error).__mro__ if each.__init__ is ShoalError.__init__)
        return cls(kind.__name__, str(error))

    def error(self) -> ShoalError:
        """Return the error again, to be raised here."""
        kind: object = getattr(shoal.errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, ShoalError):
            return kind(self.message)
        return RemoteError(self.message)


class Stillness:
    """What looks at one process have found: one that was sent SIGSTOP neither ends nor says so.

    A look is the letter that the system has for a process. A program that slows others down (cpulimit) stops them and
    lets them go on many times a second: what has computed between two looks does not stand still. The caller has not
    reaped the process, so that the number is its own.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._since_s: float | None = None
        self._computed_s = 0.0

    def look(self, now_s: float) -> bool:
        """Look, and return whether it stands still for `STILL_S`, as far as looks tell."""
        stat = read_stat(self._pid)
        if stat is None or not stat.is_stopped:
            self._since_s = None
            return False
        computed_s = cpu_s(self._pid)
        if self._since_s is None or computed_s != self._computed_s:
            self._since_s, self._computed_s = now_s, computed_s
        return now_s - self._since_s >= STILL_S


class Child(Generic[_Answer]):
    """One process. As a context it is killed and reaped when that is left, however that happens.

    Attributes:
        pid: its number, which no other process has until it is closed.
        control: this end of its socket.
    """

    def __init__(
        self,
        module: str,
        kinds: UnionType | type[_Answer],
        arguments: Sequence[object] = (),
        *,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        keeps_output: bool = False,
        new_session: bool = False,
    ) -> None:
        """Start it, which takes about a millisecond.

        Args:
            module: run as the program; it has a `Parent`.
            kinds: what it answers: structs with tags.
            arguments: what it finds in `sys.argv` from 3 on.
            pass_fds, environment, new_session: see `start_interpreter`.
            keeps_output: what it prints is kept, for `ChildDied`; else it goes where the output of this process goes.

        Raises:
            OSError: the system refuses another process.
        """
        self._module = module
        self._frames: FrameReader[_Answer | ChildFailed] = FrameReader(kinds | ChildFailed)
        self._heard: deque[_Answer | ChildFailed] = deque()
        self._clock = SystemClock()
        with ExitStack() as kept, ExitStack() as handed_over:
            ours, theirs = socket.socketpair()
            self.control = kept.enter_context(ours)
            handed_over.enter_context(theirs)
            lifeline_read_fd, lifeline_fd = os.pipe()
            kept.callback(os.close, lifeline_fd)
            handed_over.callback(os.close, lifeline_read_fd)
            self._output = kept.enter_context(tempfile.TemporaryFile()) if keeps_output else None
            fds = (theirs.fileno(), lifeline_read_fd)
            self._process = start_interpreter(
                module,
                [*fds, *arguments],
                pass_fds=[*fds, *pass_fds],
                environment=environment,
                output=self._output,
                new_session=new_session,
            )
            self._kept = kept.pop_all()
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tell(self, order: msgspec.Struct) -> None:
        """Give it an order, and wait until it is on its way. If it is gone, `hear` says so."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.control.sendall(framed(order))

    def hear(self, *, within_s: float = inf, stands_still: Callable[[], None] | None = None) -> _Answer:
        """Return what it says next, waiting for it.

        Args:
            stands_still: called when it does, and again only after it has gone on.

        Raises:
            ShoalError: what the child has raised.
            ChildDied: it has ended.
            DeadlineExceeded: it has said nothing in time. It goes on.
        """
        until_s = self._clock.now_s() + within_s
        stillness, is_still = Stillness(self.pid), False
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        while not self._heard:
            left_s = max(0.0, until_s - self._clock.now_s())
            if poll.poll(min(left_s, LOOK_S) * 1000):
                heard = self.read()
                if heard is None:
                    raise self.death()
                self._heard += heard
            elif not left_s:
                raise DeadlineExceeded(f"the process {self._module} has said nothing within {within_s:g} s")
            elif stands_still is not None:
                was_still, is_still = is_still, stillness.look(self._clock.now_s())
                if is_still and not was_still:
                    stands_still()
        answer = self._heard.popleft()
        if isinstance(answer, ChildFailed):
            raise answer.error()
        return answer

    def read(self) -> Sequence[_Answer | ChildFailed] | None:
        """Wait for bytes from it, and return the messages that are complete now; None: it says nothing more.

        For those who listen to several children, with `control` in a selector; not together with `hear`.
        """
        data = b""
        with suppress(ConnectionResetError):
            data = self.control.recv(_READ_BYTES)
        return self.complete(data) if data else None

    def complete(self, data: bytes) -> Sequence[_Answer | ChildFailed]:
        """Return the messages that are complete with bytes that were received from `control` in another way."""
        return self._frames.feed(data)

    def death(self) -> ChildDied:
        """Return how it has ended, if it says nothing more; waits a moment for the end."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        code = self._process.returncode
        how = "hangs at its end" if code is None else f"has ended ({ExitStatus(code)})"
        lines: list[str] = []
        if self._output is not None:
            self._output.seek(0)
            lines = self._output.read().decode(errors="replace").splitlines()[-_SHOWN_LINES:]
        return ChildDied("\n".join([f"the process {self._module} {how}", *lines]), code, tuple(lines))

    def kill(self) -> None:
        """Kill it, from any thread; `hear` says that it has ended. Nothing happens if it has."""
        self._process.kill()

    async def ended(self) -> None:
        """Return when it has ended."""
        # `kill` reaps one that has ended before.
        if self._process.returncode is None:
            await process_ended(self.pid)

    def close(self, grace_s: float = 0.0) -> ExitStatus:
        """Kill and reap it, and return how it ended; nothing of it is left. A second call does nothing more.

        Args:
            grace_s: it gets so long to end by itself, after it has read the end of its orders.
        """
        if grace_s > 0:
            self.control.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        self._process.kill()
        status = ExitStatus(self._process.wait())
        self._kept.close()
        return status


def ask(module: str, question: msgspec.Struct, kind: type[_Answer], *, within_s: float) -> _Answer:
    """Have a process answer one question, and end it.

    Args:
        module: see `Child`.

    Raises:
        ShoalError: what the process has raised.
        ChildDied: it has ended without an answer; with what it has printed.
        DeadlineExceeded: it has not answered in time.
        OSError: the system refuses another process.
    """
    with Child[_Answer](module, kind, keeps_output=True) as child:
        child.tell(question)
        return child.hear(within_s=within_s)


class Parent(Generic[_Order]):
    """The process that has started this one as a `Child`; within this context this one works for it.

    An error of shoal that leaves the context is told, and raised there. That the parent is gone ends it silently.

    Attributes:
        orders: what it tells, waiting for it; they end when it has no more.
    """

    def __init__(self, kinds: UnionType | type[_Order]) -> None:
        """Take over what the parent has handed over, and end with it from now on.

        Args:
            kinds: of its orders: structs, with tags if there are several.
        """
        control_fd, lifeline_fd = (int(argument) for argument in sys.argv[1:3])
        if os.getsid(0) != os.getpid():
            # A terminal's Ctrl-C, or a signal to the whole run, reaches both: the parent decides when this one ends.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        watch_in_thread(lifeline_fd, "")
        self._control = socket.socket(fileno=control_fd)
        self.orders: Iterator[_Order] = received(self._control, kinds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        with self._control, suppress(BrokenPipeError, ConnectionResetError):
            if isinstance(error, ShoalError):
                self.say(ChildFailed.of(error))
        return isinstance(error, ShoalError | BrokenPipeError | ConnectionResetError)

    def say(self, answer: msgspec.Struct) -> None:
        """Answer, and wait until that is on its way."""
        self._control.sendall(framed(answer))
