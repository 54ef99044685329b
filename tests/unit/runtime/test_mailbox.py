"""The queue between callbacks and a task."""

from __future__ import annotations

import anyio

from shoal.runtime.waking import Mailbox


async def test_items_come_in_order_and_the_iteration_ends_after_close() -> None:
    mailbox = Mailbox[int]()
    mailbox.put(1)
    mailbox.put(2)
    mailbox.close()
    mailbox.put(3)
    assert [item async for item in mailbox] == [1, 2]


async def test_a_waiting_reader_is_woken_by_an_item_and_by_the_end() -> None:
    mailbox = Mailbox[int]()
    read: list[int] = []

    async def reader() -> None:
        async for item in mailbox:
            read.append(item)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader)
        for item in range(3):
            await anyio.wait_all_tasks_blocked()
            assert read == list(range(item))
            mailbox.put(item)
        await anyio.wait_all_tasks_blocked()
        mailbox.close()
    assert read == [0, 1, 2]
