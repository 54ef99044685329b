"""An invitation for who says a short code: once, and for nobody who guesses."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest
from anyio.abc import SocketAttribute, SocketStream
from spake2 import SPAKE2_A
from tests.alongside import until

from shoal.control import pairing
from shoal.control.pairing import MAX_WRONG, Code, CodeOffer, take
from shoal.errors import ConfigError, ConnectionLost
from shoal.identity import seal_content

TEXT = "shoal1:" + "a" * 200
CODE = Code(7, "482913")
WRONG = Code(7, "482914")

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def answering(answer: Callable[[SocketStream], Awaitable[None]]) -> AsyncGenerator[int]:
    """Have this answer every connection; gives its port."""
    with anyio.fail_after(240):
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(listener.serve, answer)
            yield listener.extra(SocketAttribute.local_port)
            tasks.cancel_scope.cancel()


async def _said(port: int, *parts: bytes) -> bytes:
    """Send something and return all that is answered until the end."""
    answered = b""
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        for part in parts:
            await stream.send(part)
        await stream.send_eof()
        try:
            while True:
                answered += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return answered


async def test_who_says_the_code_gets_it_and_then_nobody() -> None:
    offer = CodeOffer(CODE, TEXT)
    async with answering(offer.answer) as port:
        assert await take("127.0.0.1", port, CODE) == TEXT
        await offer.wait()
        assert (offer.taken_by, offer.num_wrong) == ("127.0.0.1", 0)
        with pytest.raises(ConfigError, match="wrong, used up or too old"):
            await take("127.0.0.1", port, CODE)


async def test_after_three_wrong_ones_nobody_gets_it() -> None:
    refused: list[str] = []
    offer = CodeOffer(CODE, TEXT, refused.append)
    async with answering(offer.answer) as port:
        for _ in range(MAX_WRONG):
            with pytest.raises(ConfigError, match="wrong, used up or too old"):
                await take("127.0.0.1", port, WRONG)
        await offer.wait()
        with pytest.raises(ConfigError):
            await take("127.0.0.1", port, CODE)
    assert (offer.taken_by, refused) == ("", ["127.0.0.1"] * MAX_WRONG)


async def test_a_wrong_one_costs_the_right_one_nothing() -> None:
    offer = CodeOffer(CODE, TEXT)
    async with answering(offer.answer) as port:
        with pytest.raises(ConfigError):
            await take("127.0.0.1", port, WRONG)
        assert await take("127.0.0.1", port, CODE) == TEXT


async def test_of_many_that_guess_at_once_three_are_heard() -> None:
    offer = CodeOffer(CODE, TEXT)
    async with answering(offer.answer) as port, anyio.create_task_group() as tasks:

        async def guess() -> None:
            with pytest.raises(ConfigError):
                await take("127.0.0.1", port, WRONG)

        for _ in range(12):
            tasks.start_soon(guess)
    assert (offer.num_wrong, offer.taken_by) == (MAX_WRONG, "")


@pytest.mark.parametrize(
    "parts",
    [
        (b"",),
        (b"GET / HTTP/1.1\r\n\r\n",),
        (b"shoal code 2\n" + os.urandom(65),),
        (b"shoal code 1\n",),
        (b"shoal code 1\n", b"A" + bytes(32), os.urandom(32)),
        (b"shoal code 1\n", b"A" + b"\xff" * 32, os.urandom(32)),
        # No point of the curve.
        (b"shoal code 1\n", b"A\x02" + bytes(31), os.urandom(32)),
        (b"shoal code 1\n", b"B" + os.urandom(32), os.urandom(32)),
    ],
)
async def test_junk_is_no_try_and_hears_no_invitation(parts: tuple[bytes, ...]) -> None:
    offer = CodeOffer(CODE, TEXT)
    async with answering(offer.answer) as port:
        assert len(await _said(port, *parts)) <= 33
        assert (offer.num_wrong, offer.is_over) == (0, False)
        assert await take("127.0.0.1", port, CODE) == TEXT


async def test_who_connects_and_is_gone_at_once_ends_no_offer() -> None:
    offer = CodeOffer(CODE, TEXT)
    async with answering(offer.answer) as port:

        def knock() -> None:
            for _ in range(300):
                with socket.create_connection(("127.0.0.1", port)) as one:
                    # Closed by a reset: a scanner of ports has heard enough.
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        await anyio.to_thread.run_sync(knock)
        assert await take("127.0.0.1", port, CODE) == TEXT
    assert offer.num_wrong == 0


async def test_what_was_heard_on_the_way_does_not_serve_again() -> None:
    heard: list[bytes] = []
    offer = CodeOffer(CODE, TEXT)
    async with answering(offer.answer) as port:

        async def relay(stream: SocketStream) -> None:
            async with stream, await anyio.connect_tcp("127.0.0.1", port) as further:
                heard.append(await stream.receive())
                await further.send(heard[-1])
                await stream.send(await further.receive())
                heard.append(await stream.receive())
                await further.send(heard[-1])
                heard.append(await further.receive())
                await stream.send(heard[-1])

        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as between,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(between.serve, relay)
            assert await take("127.0.0.1", between.extra(SocketAttribute.local_port), CODE) == TEXT
            tasks.cancel_scope.cancel()
    assert TEXT.encode() not in b"".join(heard)
    again = CodeOffer(CODE, TEXT)
    async with answering(again.answer) as port:
        assert len(await _said(port, *heard[:2])) == 33
        assert (again.num_wrong, again.taken_by) == (1, "")


async def test_who_lacks_the_code_cannot_pass_for_who_has_made_it() -> None:
    async def answer(stream: SocketStream) -> None:
        """Knows nothing, and takes every MAC for the right one."""
        async with stream:
            hello = await stream.receive()
            own = pairing.SPAKE2_B(b"7-000-000", idA=b"joins", idB=b"invites")
            await stream.send(own.start())
            key = own.finish(hello[-33:])
            await stream.receive()
            sealed = seal_content(key, pairing._SEAL, TEXT.encode())
            await stream.send(len(sealed).to_bytes(2, "big") + sealed)

    async with answering(answer) as port:
        with pytest.raises(ConfigError, match="is not where this code was made"):
            await take("127.0.0.1", port, CODE)


async def test_who_hears_the_code_and_is_silent_has_had_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    async def late(*_: object) -> str:
        raise TimeoutError

    monkeypatch.setattr(pairing, "_sealed_text", late)
    offer = CodeOffer(CODE, TEXT)
    async with answering(offer.answer) as port:
        with pytest.raises(ConfigError, match="has not answered"):
            await take("127.0.0.1", port, CODE)


async def test_who_answers_with_junk_before_the_code_is_shown_has_had_no_guess() -> None:
    async def answer(stream: SocketStream) -> None:
        async with stream:
            await stream.send(b"HTTP/1.1 400 Bad Request".ljust(64))
            await stream.receive()

    async with answering(answer) as port:
        with pytest.raises(ConnectionLost, match="is not where a code was made"):
            await take("127.0.0.1", port, CODE)


async def test_of_many_connections_of_one_address_some_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "_MAX_OF_ONE", 2)
    offer = CodeOffer(CODE, TEXT)
    async with answering(offer.answer) as port:
        silent = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(2)]
        await until(lambda: offer._served.total() == 2)
        with pytest.raises(ConnectionLost, match="is busy"):
            await take("127.0.0.1", port, CODE)
        for stream in silent:
            await stream.aclose()
        await until(lambda: offer._served.total() == 0)
        assert not offer._served, "nothing is kept of who has gone"
        assert await take("127.0.0.1", port, CODE) == TEXT


async def test_where_nobody_listens_is_said() -> None:
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port: int = listener.extra(SocketAttribute.local_port)
    with pytest.raises(ConnectionLost, match=f"127.0.0.1:{port} cannot be reached"):
        await take("127.0.0.1", port, CODE)


@pytest.mark.parametrize("host", ["a" * 64, "..", "\ud800"])
async def test_a_name_that_none_can_have_is_nowhere(host: str) -> None:
    with pytest.raises(ConnectionLost, match="cannot be reached"):
        await take(host, 4000, CODE)


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        (("::ffff:192.0.2.7", 4000, 0, 0), "192.0.2.7"),
        (("192.0.2.7", 4000), "192.0.2.7"),
        (("2001:db8::7", 4000, 0, 0), "2001:db8::7"),
        ("/run/socket", "/run/socket"),
    ],
)
def test_an_address_of_ipv4_is_the_same_over_a_socket_for_both_kinds(address: object, peer: str) -> None:
    stream: Any = SimpleNamespace(extra=lambda _attribute, _default: address)
    assert pairing._peer_of(stream) == peer


@pytest.mark.parametrize("text", ["7-482-913", "7-482913", " 7-482 913\n", "07-4-8-2-9-1-3"])
def test_a_code_is_read_as_people_type_it(text: str) -> None:
    assert Code.parsed(text) == CODE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "482913",
        "7-48291",
        "7-4829131",
        "x-482913",
        "7-48291x",
        "777-482913",
        "7-",
        "²-482913",
        "7-48291²",
        "7-48291٣",
    ],
)
def test_what_is_no_code_is_none(text: str) -> None:
    assert Code.parsed(text) is None


def test_new_codes_differ_and_are_read_again() -> None:
    codes = [Code.new() for _ in range(50)]
    assert [Code.parsed(str(code)) for code in codes] == codes
    assert len({code.digits for code in codes}) > 40


def test_the_element_has_the_length_that_is_read() -> None:
    assert len(SPAKE2_A(b"x").start()) == pairing._ELEMENT_BYTES
