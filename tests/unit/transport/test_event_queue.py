"""The queue of an endpoint's events."""

from __future__ import annotations

import anyio
import pytest
from tests.alongside import alongside

from shoal.errors import LocalProtocolError
from shoal.ids import PeerId
from shoal.transport.base import PeerUp, TransportEvent
from shoal.transport.event_queue import EventQueue


def up(number: int) -> PeerUp:
    return PeerUp(PeerId(str(number)))


async def test_events_come_out_in_order_and_each_tells_when_it_is_taken() -> None:
    queue, taken = EventQueue(), list[int]()
    queue.put(up(0), lambda: taken.append(0))
    queue.put(up(1), lambda: taken.append(1))
    assert taken == []
    assert await anext(queue) == up(0)
    assert taken == [0]
    assert await anext(queue) == up(1)


async def test_a_waiting_consumer_is_woken_and_ends_with_the_queue() -> None:
    queue, got = EventQueue(), list[PeerUp]()

    async def consume() -> None:
        async for event in queue:
            assert isinstance(event, PeerUp)
            got.append(event)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consume)
        await anyio.wait_all_tasks_blocked()
        queue.put(up(0))
        await anyio.wait_all_tasks_blocked()
        assert got == [up(0)]
        queue.put(up(1))
        queue.close()
    assert got == [up(0)]
    queue.put(up(2))
    assert len(queue) == 0


async def test_a_second_waiting_consumer_is_a_mistake() -> None:
    queue = EventQueue()

    async def consume() -> None:
        with pytest.raises(StopAsyncIteration):
            await anext(queue)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consume)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(LocalProtocolError, match="one consumer"):
            await anext(queue)
        queue.close()


async def test_a_cancelled_consumer_loses_no_event() -> None:
    queue = EventQueue()
    with anyio.move_on_after(0):
        await anext(queue)
    queue.put(up(0))
    assert await anext(queue) == up(0)


async def test_a_full_queue_gives_other_tasks_a_turn() -> None:
    queue, turns = EventQueue(), list[int]()
    for number in range(200):
        queue.put(up(number))

    async def other() -> None:
        turns.append(len(queue))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        for _ in range(200):
            await anext(queue)
    assert turns[0] > 0


async def test_a_waiting_consumer_is_given_an_event_within_the_call() -> None:
    queue, got = EventQueue(), list[TransportEvent]()
    assert not queue.hand_over(up(0)), "nobody consumes"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(queue.consume, got.append)
        await anyio.wait_all_tasks_blocked()
        assert queue.hand_over(up(0))
        assert got == [up(0)]
        queue.put(up(1))
        assert got == [up(0)], "whoever puts may be the consumer itself"
        assert not queue.hand_over(up(2)), "it would overtake"
        await anyio.wait_all_tasks_blocked()
        assert got == [up(0), up(1)]
        queue.close()
        assert not queue.hand_over(up(3))


async def test_one_that_iterates_is_given_nothing_within_the_call() -> None:
    queue = EventQueue()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anext, queue)
        await anyio.wait_all_tasks_blocked()
        assert not queue.hand_over(up(0))
        queue.put(up(0))


async def test_many_events_within_one_turn_let_other_tasks_have_the_next() -> None:
    queue, got = EventQueue(), list[TransportEvent]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(queue.consume, got.append)
        await anyio.wait_all_tasks_blocked()
        for number in range(1000):
            if not queue.hand_over(up(number)):
                queue.put(up(number))
        assert 0 < len(got) < 100
        await anyio.wait_all_tasks_blocked()
        assert got == [up(number) for number in range(1000)]
        assert queue.hand_over(up(1000)), "with the queue empty it is the shortest way again"
        queue.close()


async def test_what_a_consumer_raises_within_the_call_ends_it_and_not_the_caller() -> None:
    queue = EventQueue()

    def take(event: TransportEvent) -> None:
        raise ZeroDivisionError(event)

    async def consume() -> None:
        with pytest.raises(ZeroDivisionError):
            await queue.consume(take)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consume)
        await anyio.wait_all_tasks_blocked()
        assert queue.hand_over(up(0))
        assert not queue.hand_over(up(1)), "it has failed, although it does not know yet"
        queue.put(up(1))
    assert await anext(queue) == up(1)


async def test_a_cancelled_consumer_is_given_no_more() -> None:
    queue, got = EventQueue(), list[TransportEvent]()
    async with alongside() as tasks:
        tasks.start_soon(queue.consume, got.append)
        await anyio.wait_all_tasks_blocked()
    assert not queue.hand_over(up(0))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anext, queue)
        await anyio.wait_all_tasks_blocked()
        assert not queue.hand_over(up(0)), "the next one iterates"
        queue.put(up(0))
    assert got == []
