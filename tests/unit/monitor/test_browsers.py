"""What each browser is told, and what one that comes back has missed."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import anyio
import msgspec
import pytest

from shoal.monitor.http.browsers import Browsers

pytestmark = pytest.mark.anyio

PAST = b'{"all":1}'


def hub() -> Browsers:
    return Browsers(lambda: PAST, lambda: 12.5)


def id_of(message: bytes) -> str:
    return message.decode().splitlines()[0].removeprefix("id: ")


async def first(browsers: Browsers, last_id: str = "") -> bytes:
    async with browsers.join(last_id) as messages:
        assert messages is not None
        return await anext(messages)


async def rest(messages: AsyncGenerator[bytes], number: int) -> list[bytes]:
    return [await anext(messages) for _ in range(number)]


async def test_a_new_browser_gets_the_past_and_then_what_comes() -> None:
    browsers = hub()
    browsers.tell("row", {"before": 1})
    async with browsers.join("") as messages:
        assert messages is not None
        browsers.tell("row", {"n": 1})
        browsers.tick()
        browsers.tell("event", {"n": 2})
        past, row, tick, event = await rest(messages, 4)
    assert past.endswith(b"event: past\ndata: " + PAST + b"\n\n")
    assert row.endswith(b'event: row\ndata: {"n":1}\n\n')
    assert tick == b"event: tick\ndata: 12.5\n\n"
    assert event.endswith(b'event: event\ndata: {"n":2}\n\n')


async def test_one_that_comes_back_gets_just_what_it_has_missed() -> None:
    browsers = hub()
    last_id = id_of(await first(browsers))
    for number in range(3):
        browsers.tell("row", number)
    missed = await first(browsers, last_id)
    assert [line for line in missed.splitlines() if line.startswith(b"data")] == [b"data: 0", b"data: 1", b"data: 2"]
    newest = id_of(missed.strip().split(b"\n\n")[-1])
    assert b"data" not in await first(browsers, newest)


@pytest.mark.parametrize(
    "last_id", ["", "x", "other-1", "-", "{start}-99", "{start}--1", "{start}-²", "{start}-" + "9" * 5000]
)
async def test_one_that_has_got_nothing_known_gets_all_of_it(last_id: str) -> None:
    browsers = hub()
    browsers.tell("row", 1)
    start = id_of(await first(browsers)).partition("-")[0]
    assert b"event: past" in await first(browsers, last_id.format(start=start))


async def test_what_is_kept_for_those_who_come_back_is_bounded() -> None:
    browsers = hub()
    last_id = id_of(await first(browsers))
    for _ in range(5):
        browsers.tell("row", "x" * 2**19)
    assert b"event: past" in await first(browsers, last_id)


async def test_one_that_does_not_read_is_dropped_and_costs_the_others_nothing() -> None:
    browsers = hub()
    is_dropped = anyio.Event()

    async def stuck() -> None:
        async with browsers.join("") as messages:
            assert messages is not None
            await anyio.Event().wait()
        is_dropped.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stuck)
        await anyio.wait_all_tasks_blocked()
        async with browsers.join("") as messages:
            assert messages is not None
            await anext(messages)
            for number in range(200):
                browsers.tell("row", number)
                told = await anext(messages)
                assert told.endswith(b"data: " + msgspec.json.encode(number) + b"\n\n")
            await is_dropped.wait()
            assert len(browsers) == 1


async def test_at_the_end_each_is_told_and_nothing_follows() -> None:
    browsers = hub()
    async with browsers.join("") as messages:
        assert messages is not None
        browsers.tell("row", 1)
        browsers.end()
        browsers.tell("row", 2)
        browsers.tick()
        told = [message async for message in messages]
    assert [message.split(b"\n")[1] for message in told] == [b"event: past", b"event: row", b"event: end"]
