"""One run, looked at once or for as long as somebody wants to, over one connection with its client.

    first() --> ask --answer--> SwarmStatus, again every interval
                 '- lost, or no answer --> again(): the registry, or the note of a run of this host --> ask ...

While there is no answer the last numbers stand, older and older, and the state says what else is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final, Protocol

import anyio
import msgspec

from shoal.cli.observing import ClientTarget, SwarmObserver, target_here
from shoal.cli.run_files import written_config
from shoal.cli.runs_here import living_runs
from shoal.clock import Clock
from shoal.control.run_end import how_it_ended
from shoal.control.seen_peers import view_of
from shoal.control.swarm_status import EventStatus, SwarmStatus, swarm_status
from shoal.errors import BootstrapError, RemoteError
from shoal.runtime.run_dir import RunNote
from shoal.swarm.view import SwarmView
from shoal.transport.base import Endpoint, PeerLost, Received, TransportEvent
from shoal.wire.messages.control import MAX_TOLD_EVENTS, AskRun, AskStatus, RunOver, RunStatus

_FIRST_S: Final = 2.0
"""So long a client may take that is where it was last; then the registry is asked."""
_ANSWER_S: Final = 10.0
_AGAIN_S: Final = 2.0


@dataclass(frozen=True)
class FoundClient:
    """Where a run is: its client (None: it has none), what the registry says (None: that was not asked), if it has
    ended how, in words, and if its client cannot answer yet why."""

    target: ClientTarget | None = None
    view: SwarmView | None = None
    ended: str = ""
    problem: str = ""


class Finder(Protocol):
    """Finds the client of a run."""

    @property
    def prefix(self) -> str:
        """The user's name of the experiment."""
        ...

    def first(self) -> ClientTarget | None:
        """Return where the client most likely is, at once; None: that has to be looked up."""
        ...

    async def again(self) -> FoundClient:
        """Look it up. Raises BootstrapError if that is not possible now."""
        ...

    def answered(self, view: SwarmView) -> None:
        """The client of this view has answered."""
        ...


@dataclass(frozen=True)
class SwarmFinder:
    """Finds it by the swarm's key: where it was last, else by the registry."""

    observer: SwarmObserver

    @property
    def prefix(self) -> str:
        return self.observer.config.experiment_prefix

    def first(self) -> ClientTarget | None:
        return self.observer.known()

    async def again(self) -> FoundClient:
        """Raises BootstrapError: the swarm cannot be joined, or announces no run."""
        view = await self.observer.registry()
        run = view.run
        is_over = run is not None and run.ended and not view.clients
        return FoundClient(
            self.observer.client_of(view), view, f"run {run.run_id} has ended" if run and is_over else ""
        )

    def answered(self, view: SwarmView) -> None:
        self.observer.remember(view)


@cache
def _prefix_of(log_dir: str) -> str:
    """Return the prefix of a run by its folder; it is asked for with each answer."""
    return written_config(Path(log_dir)).experiment_prefix


class FinderBesideScout(SwarmFinder):
    """A host of servers needs to ask nobody: its scout keeps where the client is."""

    async def again(self) -> FoundClient:
        return FoundClient(self.first())

    def answered(self, view: SwarmView) -> None:
        pass


@dataclass(frozen=True)
class FinderHere:
    """Finds the client of a run of this host."""

    note: RunNote

    @property
    def prefix(self) -> str:
        return _prefix_of(self.note.log_dir)

    def first(self) -> ClientTarget | None:
        return target_here(self.note)

    async def again(self) -> FoundClient:
        if any(note.run_id == self.note.run_id for note in living_runs()):
            return FoundClient(target_here(self.note), problem=self._why_silent())
        return FoundClient(ended=f"run {self.note.run_id} has ended; its folder is {self.note.log_dir}")

    def _why_silent(self) -> str:
        is_there = Path(self.note.socket).exists()
        return "" if is_there else "it is being started; ask again in some seconds"

    def answered(self, view: SwarmView) -> None:
        pass


@dataclass(frozen=True)
class FinderOfLauncher:
    """The launcher of a client knows where it is: it is started again there."""

    prefix: str
    target: ClientTarget

    def first(self) -> ClientTarget | None:
        return self.target

    async def again(self) -> FoundClient:
        return FoundClient(self.target)

    def answered(self, view: SwarmView) -> None:
        pass


async def look_once(finder: Finder) -> SwarmStatus:
    """Return how a run is now.

    Raises:
        BootstrapError: the swarm cannot be joined, or announces no run; says why.
        RemoteError: the client of a run of this host does not answer.
    """
    if (target := finder.first()) is not None:
        answer, _ = await target.asked(AskStatus(0), RunStatus, _FIRST_S)
        if answer is not None:
            return _status(finder, target, answer)
    found = await finder.again()
    answer, problem = None, ""
    if (target := found.target) is not None:
        answer, problem = await target.asked(AskStatus(0), RunStatus, _ANSWER_S)
        if answer is not None:
            return _status(finder, target, answer)
        problem = await target.why_unreachable() or problem
    if found.view is None:
        raise RemoteError(found.ended or f"the client of this run does not answer: {found.problem or problem}")
    return swarm_status(finder.prefix, found.view, None, problem)


def _status(finder: Finder, target: ClientTarget, answer: RunStatus) -> SwarmStatus:
    view = view_of(answer, target.run_id, target.hop)
    finder.answered(view)
    return swarm_status(finder.prefix, view, answer, "")


@dataclass
class WatchedRun:
    """Follows a run.

    Attributes:
        on_news: called after each answer, and when something else is known.
        ended: how the run has ended, in words; empty while it goes on.
    """

    finder: Finder
    clock: Clock
    interval_s: float
    on_news: Callable[[], None] = lambda: None
    ended: str = ""
    _status: SwarmStatus | None = None
    _taken_s: float = 0.0
    _events: dict[int, EventStatus] = field(default_factory=dict[int, EventStatus])

    @property
    def status(self) -> SwarmStatus | None:
        """What is known, with the age that it has now; None: nothing yet."""
        if self._status is None:
            return None
        age_s = max(0.0, self.clock.now_s() - self._taken_s)
        return msgspec.structs.replace(self._status, age_s=age_s, events=tuple(self._events.values()))

    async def run(self) -> None:
        """Follow it until it has ended, or this is cancelled.

        Raises:
            BootstrapError: it was not found, from the beginning.
        """
        target = self.finder.first()
        while True:
            if target is not None:
                await self._follow(target)
            if not self.ended:
                target = await self._look_again()
            if self.ended:
                return
            await self.clock.sleep_s(_AGAIN_S)

    async def _follow(self, target: ClientTarget) -> None:
        """Ask a client for as long as it answers."""
        link = _Link(self, target)
        async with target.opened() as endpoint, anyio.create_task_group() as tasks:
            endpoint.introduce(target.hop)
            # So it says when the run is over.
            endpoint.post(target.hop.peer, AskRun())
            tasks.start_soon(endpoint.events().consume, link.take)
            tasks.start_soon(self._ask, endpoint, link)
            with anyio.move_on_after(_FIRST_S if self._status is None else _ANSWER_S):
                await link.answered.wait()
            if link.answered.is_set():
                await link.lost.wait()
            else:
                self.lost("no answer")
            tasks.cancel_scope.cancel()

    async def _ask(self, endpoint: Endpoint, link: _Link) -> None:
        while True:
            if not link.is_asked:
                link.is_asked = True
                endpoint.post(link.target.hop.peer, AskStatus(link.newest))
            await self.clock.sleep_s(self.interval_s)

    def answer(self, target: ClientTarget, answer: RunStatus) -> None:
        """Take over what a client says."""
        self._take(_status(self.finder, target, answer))

    def lost(self, reason: str) -> None:
        """There is no client any more: say so beside what it has said last."""
        if self._status is not None and self._status.client is not None:
            client = msgspec.structs.replace(self._status.client, answers=False, problem=reason)
            state = "the client does not answer; looking for it"
            self._status = msgspec.structs.replace(self._status, client=client, state=state)
        self.on_news()

    async def _look_again(self) -> ClientTarget | None:
        try:
            found = await self.finder.again()
        except BootstrapError as error:
            if self._status is None:
                raise
            self.lost(str(error))
            return None
        self.ended = found.ended
        if found.view is not None:
            self._registry_says(found.view)
        return found.target

    def _registry_says(self, view: SwarmView) -> None:
        known = self._status
        problem = "" if known is None or known.client is None else known.client.problem
        status = swarm_status(self.finder.prefix, view, None, problem)
        if known is None or known.round is None or known.run != status.run:
            # There are no numbers of a client of this run that would stand.
            self._take(status)
        else:
            # The client's numbers stand until it, or another one, says newer ones.
            self._status = msgspec.structs.replace(known, state=status.state, client=status.client)
            self.on_news()

    def _take(self, status: SwarmStatus) -> None:
        self._events |= {event.number: event for event in status.events}
        self._events = dict(sorted(self._events.items())[-MAX_TOLD_EVENTS:])
        self._status, self._taken_s = status, self.clock.now_s()
        self.on_news()


class _Link:
    """One connection with a client.

    Attributes:
        is_asked: an answer is on its way.
        newest: number of the newest event that it has told.
    """

    def __init__(self, watch: WatchedRun, target: ClientTarget) -> None:
        self.target = target
        self.answered, self.lost = anyio.Event(), anyio.Event()
        self.is_asked = False
        self.newest = 0
        self._watch = watch

    def take(self, event: TransportEvent) -> None:
        client = self.target.hop.peer
        match event:
            case Received(peer, RunStatus() as answer) if peer == client:
                self.is_asked = False
                self.newest = max([self.newest, *(told.number for told in answer.events)])
                self._watch.answer(self.target, answer)
                self.answered.set()
            case Received(peer, RunOver(interrupted, failure)) if peer == client:
                self._watch.ended, _ = how_it_ended(self.target.run_id, interrupted=interrupted, failure=failure)
                self.answered.set()
                self.lost.set()
            case PeerLost(peer, reason) if peer == client:
                self._watch.lost(reason)
                self.answered.set()
                self.lost.set()
            case _:
                pass
