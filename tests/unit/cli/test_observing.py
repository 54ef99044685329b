"""An order goes to the client where it was found last, and to the one of the registry if that one does not obey."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.alongside import alongside
from tests.set_clock import ManualClock
from tests.unit.control.test_seen_peers import VIEW

from shoal.cli.observing import ClientTarget, SwarmObserver
from shoal.config import Config
from shoal.errors import ConfigError
from shoal.identity import Identity
from shoal.ids import RunId
from shoal.swarm.view import SwarmView
from shoal.transport.base import Endpoint, Received
from shoal.transport.dispatch import dispatch
from shoal.transport.unix import open_unix_endpoint
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import Steer, Steered

RUN = RunId("r-1")


@dataclass
class Client:
    """Is steered, or waits for its turn."""

    endpoint: Endpoint
    target: ClientTarget
    refused: str = ""
    heard: list[int] = field(default_factory=list)

    def receive(self, event: Received) -> bool:
        assert isinstance(event.message, Steer)
        self.heard.append(event.message.nonce)
        self.endpoint.post(event.peer, Steered(event.message.nonce, 3, self.refused, False))
        return True

    def peer_lost(self, peer: Any) -> None:
        pass


@asynccontextmanager
async def a_client(path: Path, refused: str = "") -> AsyncIterator[Client]:
    async with open_unix_endpoint(
        peer_id=Identity.generate().peer_id, run_id=RUN, role="client", path=path
    ) as endpoint:
        client = Client(endpoint, ClientTarget(RUN, Hop(endpoint.peer_id, (f"unix:{path}",))), refused)
        async with alongside(lambda: dispatch(endpoint, (client,))):
            yield client


class Observer(SwarmObserver):
    """Knows one client, and finds another one in the registry."""

    def __init__(self, known: ClientTarget | None, announced: ClientTarget | None) -> None:
        super().__init__(Config(), bytes(32), ManualClock())
        self.__dict__.update(known_target=known, announced=announced, num_looks=0, num_remembered=0)

    def known(self) -> ClientTarget | None:
        return self.__dict__["known_target"]

    async def registry(self) -> SwarmView:
        self.__dict__["num_looks"] += 1
        return VIEW

    def client_of(self, view: SwarmView) -> ClientTarget | None:
        return self.__dict__["announced"]

    def remember(self, view: SwarmView) -> None:
        self.__dict__["num_remembered"] += 1


async def told(observer: Observer, wanted: str = "") -> tuple[str, Steered | None, str]:
    return await observer.tell(wanted, Steer(7, "pause", "me@here"), Steered, lambda answer: not answer.refused)


def test_the_registry_is_not_asked_where_the_client_is_still_where_it_was(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_client(tmp_path / "known") as client:
            observer = Observer(client.target, None)
            assert await told(observer, "r-") == ("r-1", Steered(7, 3, "", False), "")
            assert (client.heard, observer.__dict__["num_looks"]) == ([7], 0)

    anyio.run(scenario)


@pytest.mark.parametrize("known", ["gone", "waits for its turn", "of another run"])
def test_a_client_that_does_not_lead_any_more_is_looked_up_in_the_registry(tmp_path: Path, known: str) -> None:
    async def scenario() -> None:
        async with a_client(tmp_path / "new") as leading, a_client(tmp_path / "old", "it waits") as waiting:
            nowhere = ClientTarget(RUN, Hop(Identity.generate().peer_id, (f"unix:{tmp_path / 'nowhere'}",)))
            other = ClientTarget("q-2", waiting.target.hop)
            at = {"gone": nowhere, "waits for its turn": waiting.target, "of another run": other}[known]
            observer = Observer(at, leading.target)
            assert await told(observer) == ("r-1", Steered(7, 3, "", False), "")
            assert len(leading.heard) == 1
            assert len(waiting.heard) == (known == "waits for its turn")
            assert observer.__dict__["num_remembered"] == 1

    anyio.run(scenario)


def test_a_run_that_is_not_there_is_said_and_nobody_is_told_anything(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_client(tmp_path / "other") as client:
            observer = Observer(client.target, client.target)
            with pytest.raises(ConfigError, match="no run mine there"):
                await told(observer, "mine")
            assert client.heard == []

    anyio.run(scenario)
