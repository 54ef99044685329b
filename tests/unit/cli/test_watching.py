"""A run is followed over one connection for as long as its client answers, and found again when it does not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
from tests.alongside import alongside, until
from tests.set_clock import ManualClock
from tests.unit.control.test_seen_peers import VIEW
from tests.unit.control.test_swarm_status import ANSWER

from shoal.cli.observing import ClientTarget
from shoal.cli.watching import FoundClient, WatchedRun, look_once
from shoal.control.seen_peers import seen_peers
from shoal.errors import BootstrapError, RemoteError
from shoal.identity import Identity
from shoal.ids import RunId
from shoal.swarm.view import SwarmView
from shoal.transport.base import Endpoint, Received
from shoal.transport.dispatch import dispatch
from shoal.transport.unix import open_unix_endpoint
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import AskRun, AskStatus, RunOver, ToldEvent


@dataclass
class Client:
    """Answers as a run's client does, with one more event each time."""

    path: Path
    endpoint: Endpoint
    asked: list[AskStatus] = field(default_factory=list)
    askers: list[Any] = field(default_factory=list)
    is_silent: bool = False
    answers: int = 0

    def receive(self, event: Received) -> bool:
        match event.message:
            case AskRun():
                self.askers.append(event.peer)
            case AskStatus() as question:
                self.asked.append(question)
                number = len(self.asked)
                since = question.since or 0
                told = tuple(
                    ToldEvent(each, "INFO", "x", f"event {each}") for each in range(1, number + 1) if each > since
                )
                answer = msgspec.structs.replace(
                    ANSWER, round=number, num_stages=2, peers=seen_peers(VIEW), events=told
                )
                if not self.is_silent:
                    self.answers += 1
                    self.endpoint.post(event.peer, answer)
            case _:
                return False
        return True

    def peer_lost(self, peer: Any) -> None:
        pass

    @property
    def target(self) -> ClientTarget:
        return ClientTarget("r-1", Hop(self.endpoint.peer_id, (f"unix:{self.path}",)))


@asynccontextmanager
async def a_client(path: Path) -> AsyncIterator[Client]:
    async with open_unix_endpoint(
        peer_id=Identity.generate().peer_id, run_id=RunId("r-1"), role="client", path=path
    ) as endpoint:
        client = Client(path, endpoint)
        async with alongside(lambda: dispatch(endpoint, (client,))):
            yield client


@dataclass
class Finder:
    """Where the client is, as a test says it; `found` is given out one after the other, the last one for ever."""

    start: ClientTarget | None = None
    found: list[FoundClient | BootstrapError] = field(default_factory=list)
    prefix: str = "sandbox"
    answers: int = 0
    looks: int = 0

    def first(self) -> ClientTarget | None:
        return self.start

    async def again(self) -> FoundClient:
        self.looks += 1
        found = self.found.pop(0) if len(self.found) > 1 else self.found[0]
        if isinstance(found, BootstrapError):
            raise found
        return found

    def answered(self, view: SwarmView) -> None:
        self.answers += 1


class Clock(ManualClock):
    async def sleep_s(self, duration_s: float) -> None:
        await super().sleep_s(duration_s)
        await anyio.lowlevel.checkpoint()


def gone(tmp_path: Path) -> ClientTarget:
    return ClientTarget("r-1", Hop(Identity.generate().peer_id, (f"unix:{tmp_path / 'gone'}",)))


async def test_one_look_asks_the_client_where_it_was_last_and_no_registry(tmp_path: Path) -> None:
    async with a_client(tmp_path / "c") as client:
        finder = Finder(client.target)
        status = await look_once(finder)
    assert (status.run, status.state, len(status.stages)) == ("r-1", ANSWER.state, 2)
    assert status.events[0].says == "event 1"
    assert (finder.looks, finder.answers) == (0, 1)


async def test_a_client_that_is_gone_is_looked_up(tmp_path: Path) -> None:
    async with a_client(tmp_path / "c") as client:
        finder = Finder(gone(tmp_path), [FoundClient(client.target, VIEW)])
        assert (await look_once(finder)).state == ANSWER.state
    assert finder.looks == 1
    finder = Finder(gone(tmp_path), [FoundClient(gone(tmp_path), VIEW)])
    status = await look_once(finder)
    assert status.state == "the client does not answer; 2 servers hold round 6, 1 server holds round 5"
    with pytest.raises(RemoteError, match="does not answer"):
        await look_once(Finder(gone(tmp_path), [FoundClient(gone(tmp_path))]))
    with pytest.raises(RemoteError, match="it is over"):
        await look_once(Finder(gone(tmp_path), [FoundClient(ended="it is over")]))


async def test_it_is_asked_again_and_again_over_one_connection_and_only_for_what_is_new(tmp_path: Path) -> None:
    async with a_client(tmp_path / "c") as client:
        watched = WatchedRun(Finder(client.target), Clock(), 1.0)
        async with alongside(watched.run):
            await until(lambda: watched.status is not None and (watched.status.round or 0) >= 5)
            assert watched.status is not None
            assert [event.says for event in watched.status.events][:5] == [f"event {number}" for number in range(1, 6)]
        assert [question.since for question in client.asked[:4]] == [0, 1, 2, 3]
        assert len(set(client.askers)) == 1


async def test_a_client_that_is_lost_leaves_its_last_numbers_with_their_age_until_another_one_answers(
    tmp_path: Path,
) -> None:
    clock = Clock()
    finder = Finder()
    watched = WatchedRun(finder, clock, 1.0)
    async with a_client(tmp_path / "second") as second, a_client(tmp_path / "first") as first:
        finder.start = first.target
        finder.found = [FoundClient(None, VIEW), BootstrapError("nobody"), FoundClient(second.target, VIEW)]
        said: list[str] = []
        watched.on_news = lambda: said.append(watched.status.state if watched.status else "")
        async with alongside(watched.run) as tasks:
            await until(lambda: said)
            await first.endpoint.aclose()
            await until(lambda: second.asked)
            tasks.cancel_scope.cancel()
    distinct = list(dict.fromkeys(said))
    assert distinct[0] == ANSWER.state
    assert distinct[1] == "the client does not answer; looking for it"
    assert distinct[2].startswith("the client does not answer; 2 servers hold round 6")
    assert watched.status is not None
    assert watched.status.round is not None


async def test_numbers_grow_old_while_the_client_is_silent(tmp_path: Path) -> None:
    clock = Clock()
    async with a_client(tmp_path / "c") as client:
        watched = WatchedRun(Finder(client.target), clock, 1.0)
        async with alongside(watched.run):
            await until(lambda: watched.status)
            client.is_silent = True
            await until(lambda: watched.status and watched.status.age_s > 60)
            assert watched.status is not None
            assert watched.status.round == client.answers


@pytest.mark.parametrize(("failure", "said"), [("", "run r-1 has ended"), ("no disk", "run r-1 has failed: no disk")])
async def test_the_clients_last_word_ends_it(tmp_path: Path, failure: str, said: str) -> None:
    async with a_client(tmp_path / "c") as client:
        watched = WatchedRun(Finder(client.target), Clock(), 1.0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watched.run)
            await until(lambda: client.askers and watched.status)
            client.endpoint.post(client.askers[0], RunOver(False, failure))
    assert watched.ended == said


async def test_a_run_that_was_never_found_is_an_error() -> None:
    watched = WatchedRun(Finder(None, [BootstrapError("nobody")]), Clock(), 1.0)
    with pytest.raises(BootstrapError, match="nobody"):
        await watched.run()
