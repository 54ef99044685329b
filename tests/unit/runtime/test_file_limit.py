"""The limit of open files is raised as far as it goes, and what it means is said."""

from __future__ import annotations

import errno
import os
import resource

import pytest

from shoal.file_thread import WANTED_FILES, hint, remedy, said_by_disk
from shoal.runtime.file_limit import is_for_files, raise_file_limit, takes_connections

INFINITY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 524288), (WANTED_FILES, 524288)),
        ((1024, 4096), (4096, 4096)),
        ((1024, INFINITY), (WANTED_FILES, INFINITY)),
        ((WANTED_FILES + 1, 524288), None),
        ((INFINITY, INFINITY), None),
        ((100, 100), None),
    ],
)
def test_the_soft_limit_goes_up_to_what_is_wanted_or_allowed_and_never_down(
    before: tuple[int, int], after: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: before)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    assert raise_file_limit() == (after or before)[0]
    assert asked == ([] if after is None else [after])


def test_only_the_lack_of_files_is_explained() -> None:
    for number in (errno.EMFILE, errno.ENFILE):
        error = OSError(number, "Too many open files")
        assert "ulimit -n" in hint(error)
        assert said_by_disk(error, "log") == "Too many open files"
        assert remedy(error, "log", "another disk") == hint(error).removeprefix(": "), "no other disk would help"
    assert hint(OSError(errno.ENOSPC, "No space left on device")) == ""
    assert hint(ValueError("24")) == ""


@pytest.mark.parametrize(("limit", "last"), [(1024, 991), (65536, 65503), (64, 47), (4, 2), (0, -1), (INFINITY, 10**9)])
def test_the_last_descriptors_are_for_files_and_for_no_connection(
    limit: int, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for hard in (INFINITY, 65536):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (limit, hard))
        assert not is_for_files(last)
        assert is_for_files(last + 1) is (limit != INFINITY)


def test_of_the_few_that_a_process_may_ever_have_none_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for hard, is_kept in ((30, False), (127, False), (128, True)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (hard, hard))
        assert is_for_files(hard - 1) is is_kept


def test_a_process_takes_connections_until_one_would_get_such_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert takes_connections()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, INFINITY))
    with open(os.devnull) as file:
        for free, is_taken in ((991, True), (992, False)):
            monkeypatch.setattr(os, "open", lambda *_, free=free: os.dup2(file.fileno(), free))
            assert takes_connections() is is_taken
    monkeypatch.setattr(os, "open", _refused)
    assert not takes_connections()


def _refused(*_: object) -> int:
    raise OSError(errno.EMFILE, "Too many open files")
