"""The device thread: order, results, and what cancellation may not break."""

from __future__ import annotations

import threading

import anyio
import pytest

from shoal.runtime.device_thread import DeviceThread


async def test_calls_run_in_one_thread_in_the_order_handed_over() -> None:
    ran: list[tuple[int, str]] = []

    def note(number: int) -> None:
        ran.append((number, threading.current_thread().name))

    async with DeviceThread(name="gpu") as device, anyio.create_task_group() as tasks:
        for number in range(50):
            tasks.start_soon(device.run, note, number)
    assert [number for number, _ in ran] == list(range(50))
    assert {name for _, name in ran} == {"gpu_0"}


async def test_results_and_errors_reach_the_caller() -> None:
    async with DeviceThread() as device:
        assert await device.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await device.run(divmod, 1, 0)
        assert await device.run(divmod, 9, 3) == (3, 0)


async def test_the_initialiser_runs_first_and_in_the_thread() -> None:
    local = threading.local()

    def initialise() -> None:
        local.threads = 4

    async with DeviceThread(initialise) as device:
        assert await device.run(getattr, local, "threads") == 4
    assert not hasattr(local, "threads")


async def test_a_cancelled_call_that_has_not_begun_never_runs() -> None:
    ran: list[str] = []
    begun, release = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        release.wait()
        ran.append("first")

    async with DeviceThread() as device, anyio.create_task_group() as tasks:
        tasks.start_soon(device.run, block)
        await anyio.to_thread.run_sync(begun.wait)
        with anyio.move_on_after(0):
            await device.run(ran.append, "cancelled")
        release.set()
        await device.run(ran.append, "second")
    assert ran == ["first", "second"]


async def test_a_cancelled_call_that_has_begun_is_waited_for() -> None:
    begun, release, ended = threading.Event(), threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        release.wait()
        ended.set()

    async def wait_for_it(device: DeviceThread) -> None:
        try:
            await device.run(block)
        finally:
            assert ended.is_set()

    async with DeviceThread() as device:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_for_it, device)
            await anyio.to_thread.run_sync(begun.wait)
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.wait_all_tasks_blocked()
            assert not ended.is_set()
            release.set()
        assert await device.run(divmod, 7, 2) == (3, 1)


async def test_an_error_of_a_cancelled_call_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    begun, release = threading.Event(), threading.Event()

    def fail() -> None:
        begun.set()
        release.wait()
        raise ZeroDivisionError

    async with DeviceThread() as device, anyio.create_task_group() as tasks:
        tasks.start_soon(device.run, fail)
        await anyio.to_thread.run_sync(begun.wait)
        tasks.cancel_scope.cancel()
        release.set()
    assert [record.message for record in caplog.records] == ["device_thread.failed_after_cancel"]


async def test_who_waits_for_a_call_that_raises_stop_iteration_hears_of_it() -> None:
    async with DeviceThread() as device:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await device.run(next, iter(()))


async def test_closing_twice_or_unused_is_fine() -> None:
    device = DeviceThread()
    device.close()
    device.close()
    await device.aclose()
