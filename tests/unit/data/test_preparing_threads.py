"""What a data server prepares at once, and what its thread does."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import anyio
import numpy as np
import pytest
from tests.alongside import alongside, until
from tests.linux_calls import needs
from tests.unit.data.host import Numbers

from shoal.data import preparing_threads
from shoal.data.element_file import ElementFile
from shoal.data.fields import Fields
from shoal.data.layout import BatchLayout
from shoal.data.pool import Pool
from shoal.data.preparation import Content, Job
from shoal.data.preparing_threads import QUICK_BYTES, PreparingThreads
from shoal.data.shuffle import PassOrder
from shoal.data.source import Array, DataSet, Indices, Source
from shoal.data.token_windows import TokenWindows
from shoal.errors import StorageError
from shoal.runtime.linux_calls import LinuxCall
from shoal.wire.messages.base import SampleRange

NUM_SAMPLES = QUICK_BYTES // 20 + 1  # one more than what is copied at once
FEW = Content((SampleRange(0, 3, 9),))
MANY = Content((SampleRange(0, 0, NUM_SAMPLES),))


class InMemory(Numbers):
    in_memory = True


class OfAFile(TokenWindows):
    """Sample i is the number i, and its label the one behind it, in a file."""

    def __init__(self, path: Path) -> None:
        np.arange(NUM_SAMPLES + 1, dtype=np.int32).tofile(path)
        super().__init__(ElementFile(path, "int32"), 1, 0, NUM_SAMPLES + 1)


@contextmanager
def preparing(source: Source) -> Iterator[tuple[PreparingThreads, list[Job], anyio.Event]]:
    dataset = DataSet("numbers", source, source, num_classes=NUM_SAMPLES)
    layout = BatchLayout.of(dataset, NUM_SAMPLES)
    filled: list[Job] = []
    any_filled = anyio.Event()

    def on_filled(job: Job) -> None:
        labels = layout.arrays(pool.memory(job.place), job.content.num_samples)[1]
        expected = order.indices(job.content.samples)
        if isinstance(source, OfAFile):
            expected, labels = expected + 1, labels[:, 0]
        assert np.array_equal(labels, expected)
        filled.append(job)
        any_filled.set()

    order = PassOrder(3, NUM_SAMPLES)
    with closing(Pool(place_bytes=layout.place_bytes, num_places=2)) as pool:
        yield (
            PreparingThreads(dataset=dataset, layout=layout, pool=pool, order=order, on_filled=on_filled),
            filled,
            any_filled,
        )


async def run_until_filled(thread: PreparingThreads, any_filled: anyio.Event) -> None:
    async with alongside(thread.run):
        await any_filled.wait()


async def test_a_small_batch_in_memory_is_copied_at_once_when_the_order_of_its_pass_is_drawn() -> None:
    with preparing(InMemory(NUM_SAMPLES)) as (thread, filled, any_filled):
        first = Job(FEW, 0)
        thread.begin(first)
        assert filled == []
        await run_until_filled(thread, any_filled)
        second = Job(FEW, 1)
        thread.begin(second)
        assert filled == [first, second]


@pytest.mark.parametrize(("source", "content"), [(InMemory, MANY), (Numbers, FEW)])
async def test_what_is_large_or_has_to_be_waited_for_is_prepared_in_the_thread(
    source: type[Numbers], content: Content
) -> None:
    with preparing(source(NUM_SAMPLES)) as (thread, filled, any_filled):
        thread.begin(Job(Content((SampleRange(0, 0, 1),)), 0))
        await run_until_filled(thread, any_filled)
        thread.begin(Job(content, 1))
        assert len(filled) == 1


def cached(monkeypatch: pytest.MonkeyPatch, *, places: int) -> list[int]:
    """As if the system had so many places of a file in its memory, whatever the file system; returns what was asked."""
    asked: list[int] = []

    def preadv(fd: int, parts: Sequence[memoryview], start: int, flags: int) -> int:
        assert flags == os.RWF_NOWAIT
        asked.append(start)
        if len(asked) > places:
            raise BlockingIOError
        return real(fd, parts, start)

    real = os.preadv
    monkeypatch.setattr(os, "preadv", preadv)
    return asked


@needs(LinuxCall.READ_CACHED, "a thread reads all files")
@pytest.mark.parametrize(("places", "at_once"), [(6, True), (5, False), (0, False)])
async def test_a_file_that_the_system_has_in_memory_is_read_at_once_and_otherwise_in_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: int, at_once: bool
) -> None:
    source = OfAFile(tmp_path / "numbers")
    with preparing(source) as (thread, filled, any_filled):
        first = Job(FEW, 0)
        thread.begin(first)
        assert filled == []
        await run_until_filled(thread, any_filled)
        asked = cached(monkeypatch, places=places)
        second = Job(FEW, 1)
        thread.begin(second)
        assert len(asked) == min(places + 1, 6)
        assert filled == ([first, second] if at_once else [first])
        async with alongside(thread.run):
            await until(lambda: filled == [first, second])
        assert len(asked) == min(places + 1, 6)


@needs(LinuxCall.READ_CACHED, "a thread reads all files")
def test_many_windows_of_a_file_are_left_to_the_thread_and_so_is_a_file_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = cached(monkeypatch, places=1000)
    path = tmp_path / "numbers"
    source = OfAFile(path)
    batch = source.fields.each(lambda spec: spec.empty(128))
    assert source.read_at_once(np.arange(128), batch)
    assert batch.labels[:, 0].tolist() == list(range(1, 129))
    assert len(asked) == 128
    assert not source.read_at_once(np.arange(129), source.fields.each(lambda spec: spec.empty(129)))
    assert len(asked) == 128
    os.truncate(path, 4 * 100)
    assert not source.read_at_once(np.arange(128), batch)
    with pytest.raises(StorageError, match="shorter than when it was opened"):
        source.read_into(np.arange(128), batch)


async def test_a_batch_that_a_disk_does_not_give_is_said_once_and_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Hung(Numbers):
        def read_into(self, indices: Indices, batch: Fields[Array]) -> None:
            answers.wait()
            super().read_into(indices, batch)

    answers = threading.Event()
    monkeypatch.setattr(preparing_threads, "SLOW_S", 0.01)
    with preparing(Hung(NUM_SAMPLES)) as (thread, filled, any_filled):
        thread.begin(Job(FEW, 0))
        async with alongside(thread.run):
            await until(lambda: "data_worker.slow" in caplog.messages)
            await anyio.sleep(0.03)
            answers.set()
            await any_filled.wait()
        assert len(filled) == 1
    assert caplog.messages == ["data_worker.slow"]
