"""Where `shoal join --code` looks for who has made the code, and how many can guess at it meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute

from shoal.cli import codes
from shoal.cli.codes import _MAX_ADDRESSES, _MAX_SERVICES, invitation_for
from shoal.control.pairing import Code, CodeOffer
from shoal.errors import ConfigError, ConnectionLost

TEXT = "shoal1:text"
TYPED = "7-482-913"
LOST, WRONG = ConnectionLost("not reached"), ConfigError("not taken")

pytestmark = pytest.mark.anyio


@dataclass
class Service:
    """What somebody has announced."""

    port: int
    addresses: tuple[str, ...] = ("127.0.0.1",)

    def parsed_addresses(self) -> list[str]:
        return list(self.addresses)


@pytest.fixture
def announce(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Service]], None]:
    """Say what is heard on the network."""

    def these(announced: list[Service]) -> None:
        async def services(_kind: str, _mark: str, read: Callable[[Any], object], _within_s: float) -> list[object]:
            return [found for service in announced if (found := read(service)) is not None]

        monkeypatch.setattr(codes, "services", services)

    return these


@dataclass
class Asked:
    """Stands for all who are asked for the invitation.

    Attributes:
        answers: of each port that does not give it.
        places: that were asked, in their order.
    """

    answers: dict[int, Exception] = field(default_factory=dict[int, Exception])
    places: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    async def take(self, host: str, port: int, code: Code) -> str:
        assert code == Code.parsed(TYPED)
        self.places.append((host, port))
        if port in self.answers:
            raise self.answers[port]
        return TEXT


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    made = Asked()
    monkeypatch.setattr(codes, "take", made.take)
    return made


async def test_strangers_who_announce_many_services_have_three_guesses(announce: Any) -> None:
    guesses = [CodeOffer(Code(7, f"{number:06d}"), "shoal1:forged") for number in range(10)]
    async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
        services: list[Service] = []
        for guess in guesses:
            listener = await stack.enter_async_context(await anyio.create_tcp_listener(local_host="127.0.0.1"))
            tasks.start_soon(listener.serve, guess.answer)
            services.append(Service(listener.extra(SocketAttribute.local_port), ("127.0.0.1",) * 3))
        announce(services)
        with pytest.raises(ConfigError, match=r"3 hosts of this network(.|\n)*new code(.|\n)*--at"):
            await invitation_for(TYPED, None, on_lan=True)
        tasks.cancel_scope.cancel()
    assert [guess.num_wrong for guess in guesses] == [1] * 3 + [0] * 7


async def test_whoever_does_not_take_the_code_is_asked_at_no_other_address(announce: Any, asked: Asked) -> None:
    announce([Service(1, ("a", "b", "c")), Service(2, ("d", "e"))])
    asked.answers[1] = WRONG
    assert await invitation_for(TYPED, None, on_lan=True) == TEXT
    assert asked.places == [("a", 1), ("d", 2)]


async def test_addresses_that_are_not_reached_are_no_guesses(announce: Any, asked: Asked) -> None:
    announce([Service(port, ("a", "b")) for port in range(1, 7)])
    asked.answers.update({1: LOST, 2: WRONG, 3: LOST, 4: LOST, 5: WRONG})
    assert await invitation_for(TYPED, None, on_lan=True) == TEXT
    assert len(asked.places) == 2 + 1 + 2 + 2 + 1 + 1


async def test_services_and_addresses_without_end_are_not_all_asked(announce: Any, asked: Asked) -> None:
    announce([Service(port, tuple(f"host{number}" for number in range(100))) for port in range(1, 100)])
    asked.answers.update(dict.fromkeys(range(1, 100), LOST))
    with pytest.raises(ConnectionLost, match="not reached"):
        await invitation_for(TYPED, None, on_lan=True)
    assert len(asked.places) == _MAX_SERVICES * _MAX_ADDRESSES


async def test_who_is_there_and_does_not_take_it_is_named_before_who_is_not(announce: Any, asked: Asked) -> None:
    announce([Service(1), Service(2)])
    asked.answers.update({1: WRONG, 2: LOST})
    with pytest.raises(ConfigError, match="not taken"):
        await invitation_for(TYPED, None, on_lan=True)


async def test_an_address_that_is_given_is_the_only_one(asked: Asked) -> None:
    asked.answers[40123] = WRONG
    with pytest.raises(ConfigError, match="not taken"):
        await invitation_for(TYPED, "192.0.2.7:40123", on_lan=True)
    assert asked.places == [("192.0.2.7", 40123)]
