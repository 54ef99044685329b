"""What wakes tasks that wait."""

from __future__ import annotations

import anyio

from shoal.runtime.waking import Signal, pass_on


async def test_all_who_wait_are_woken_and_who_comes_later_waits_for_the_next_time() -> None:
    signal = Signal()
    woken: list[str] = []

    async def wait(name: str) -> None:
        await signal.wait()
        woken.append(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, "a")
        tasks.start_soon(wait, "b")
        await anyio.wait_all_tasks_blocked()
        signal.notify()
        tasks.start_soon(wait, "late")
        await anyio.wait_all_tasks_blocked()
        assert sorted(woken) == ["a", "b"]
        signal.notify()
    assert sorted(woken) == ["a", "b", "late"]


async def test_what_comes_between_looking_and_waiting_is_in_the_event_that_was_kept_from_before() -> None:
    signal = Signal()
    coming = signal.coming
    signal.notify()
    await coming.wait()
    assert not signal.coming.is_set()


async def test_what_has_happened_before_or_meanwhile_is_taken_once_however_often_it_has() -> None:
    signal = Signal()
    signal.notify()
    signal.notify()
    await signal.take()
    taken: list[int] = []

    async def take() -> None:
        for number in range(2):
            await signal.take()
            taken.append(number)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take)
        await anyio.wait_all_tasks_blocked()
        assert taken == []
        signal.notify()
        await anyio.wait_all_tasks_blocked()
        assert taken == [0]
        signal.notify()
    assert taken == [0, 1]


async def test_who_is_no_longer_waiting_for_it_has_not_taken_it_and_what_is_forgotten_nobody_takes() -> None:
    signal = Signal()
    with anyio.move_on_after(0.0) as early:
        await signal.take()
    assert early.cancelled_caught
    signal.notify()
    assert signal.is_kept
    await signal.take()
    signal.notify()
    signal.forget()
    assert not signal.is_kept


async def test_a_signal_is_passed_on_each_time() -> None:
    one, other, taken = Signal(), Signal(), list[int]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pass_on, one.wait, other)
        for number in range(2):
            await anyio.wait_all_tasks_blocked()
            one.notify()
            await other.take()
            taken.append(number)
        tasks.cancel_scope.cancel()
    assert taken == [0, 1]
