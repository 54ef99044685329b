"""Samples that cannot be read: what another one stands in for, and what the system gives when it is asked again."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import numpy as np
import pytest
from tests.set_clock import ManualClock
from tests.unit.data.host import Numbers

from shoal.data.checked_samples import CheckedSamples
from shoal.data.fields import Fields
from shoal.data.skipped_samples import SkippedSamples
from shoal.data.source import Array, Indices
from shoal.errors import StorageError

BAD = 3
OF_THE_SYSTEM = ["EIO", "ESTALE", "EMFILE", "ENFILE", "ENOMEM", "EAGAIN", "ENOBUFS", "ETIMEDOUT", "ENOTCONN"]


class Raising(Numbers):
    """Reading the bad sample raises, as many times as is said."""

    def __init__(self, raised: Callable[[], Exception], times: int) -> None:
        super().__init__(10)
        self.raised, self.left = raised, times

    def read_into(self, indices: Indices, batch: Fields[Array]) -> None:
        if BAD in indices and self.left:
            self.left -= 1
            raise self.raised()
        super().read_into(indices, batch)


def checked(source: Numbers, clock: ManualClock) -> tuple[CheckedSamples, SkippedSamples]:
    skipped = SkippedSamples("numbers", 10, 0.5, lambda event: None)
    return CheckedSamples(source, "training sample", skipped, "numbers", 10, clock), skipped


def of_the_system(name: str) -> OSError:
    number = getattr(errno, name)
    return OSError(number, os.strerror(number), "a.png")


def wrapped(error: Exception) -> Exception:
    """As a library raises what it has met."""
    try:
        try:
            raise error
        except OSError as cause:
            raise ValueError("no picture") from cause
    except ValueError as found:
        return found


@pytest.mark.parametrize("name", OF_THE_SYSTEM)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_sample_that_the_system_does_not_give_at_once_is_read_again(name: str, is_wrapped: bool) -> None:
    def raised() -> Exception:
        return wrapped(of_the_system(name)) if is_wrapped else of_the_system(name)

    clock = ManualClock()
    source, skipped = checked(Raising(raised, times=4), clock)
    for _ in range(2):
        assert source.read(np.arange(10)).labels.tolist() == list(range(10))
    # What it raises for a whole batch is looked for sample by sample.
    assert len(clock.slept_s) == 3
    assert clock.slept_s == sorted(clock.slept_s)
    assert not skipped.take_new()


@pytest.mark.parametrize(
    ("name", "advice"), [("EIO", "network file system"), ("EMFILE", "ulimit -n"), ("ENOMEM", "free memory")]
)
def test_one_that_it_never_gives_ends_with_what_to_do_and_nothing_stands_in_its_place(name: str, advice: str) -> None:
    clock = ManualClock()
    source, skipped = checked(Raising(lambda: of_the_system(name), times=1000), clock)
    says = rf"training sample 3 of .* numbers is not read, .* \[Errno {getattr(errno, name)}\] .*a\.png.*{advice}"
    with pytest.raises(StorageError, match=says):
        source.read(np.arange(10))
    assert len(clock.slept_s) == 5
    assert not skipped.take_new()
    assert source.read(np.array([2, 4])).labels.tolist() == [2, 4]


@pytest.mark.parametrize(
    "raised",
    [
        lambda: FileNotFoundError(errno.ENOENT, "No such file or directory", "a.png"),
        lambda: PermissionError(errno.EACCES, "Permission denied", "a.png"),
        lambda: OSError(errno.EINVAL, "Invalid argument", "a.png"),
        lambda: OSError("cannot identify image file"),
        lambda: ValueError("broken picture"),
    ],
)
def test_in_place_of_one_whose_file_is_bad_stands_the_next_one(raised: Callable[[], Exception]) -> None:
    clock = ManualClock()
    source, skipped = checked(Raising(raised, times=1000), clock)
    assert source.read(np.arange(10)).labels.tolist() == [0, 1, 2, 4, 4, 5, 6, 7, 8, 9]
    assert [each.which for each in skipped.take_new()] == ["training sample 3"]
    assert not clock.slept_s


async def test_an_event_loop_does_not_stand_still_for_it() -> None:
    clock = ManualClock()
    source, skipped = checked(Raising(lambda: of_the_system("EIO"), times=1000), clock)
    with pytest.raises(StorageError):
        source.read(np.arange(10))
    assert not clock.slept_s
    assert not skipped.take_new()


def test_memory_that_is_missing_is_no_fault_of_a_sample() -> None:
    source, skipped = checked(Raising(MemoryError, times=1), ManualClock())
    with pytest.raises(MemoryError):
        source.read(np.arange(10))
    assert not skipped.take_new()
    assert source.read(np.arange(10)).labels.tolist() == list(range(10))
