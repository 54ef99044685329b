"""Who is at the other end of a Unix socket: what the kernel says, on Linux, on BSDs, and where it says nothing."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from tests.linux_calls import needs

from shoal.runtime.linux_calls import LinuxCall
from shoal.transport import unix
from shoal.transport.tcp import own_hosts
from shoal.transport.unix import other_end


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        yield one, other


class _Library:
    """A C library with a getpeereid(3)."""

    def __init__(self, user: int, result: int = 0) -> None:
        self._user, self._result = user, result

    def getpeereid(self, descriptor: int, user: Any, _group: Any) -> int:
        os.fstat(descriptor)
        user._obj.value = self._user
        ctypes.set_errno(errno.ENOTCONN if self._result else 0)
        return self._result


@needs(LinuxCall.PEER_CREDENTIALS, "the process is not known")
def test_linux_names_process_and_user(ends: tuple[socket.socket, socket.socket]) -> None:
    assert other_end(ends[0]) == (os.getpid(), os.getuid())


@pytest.mark.usefixtures("portable")
def test_a_system_with_getpeereid_names_the_user(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix.ctypes, "CDLL", lambda *_args, **_kwargs: _Library(1234))
    assert other_end(ends[0]) == (None, 1234)
    monkeypatch.setattr(unix.ctypes, "CDLL", lambda *_args, **_kwargs: _Library(1234, -1))
    with pytest.raises(OSError, match="getpeereid"):
        other_end(ends[0])


@pytest.mark.usefixtures("portable")
def test_of_a_system_with_neither_nothing_is_known(ends: tuple[socket.socket, socket.socket]) -> None:
    assert other_end(ends[0]) == (None, None)


def test_addresses_of_this_host_are_the_same_whoever_is_asked(request: pytest.FixtureRequest) -> None:
    native = own_hosts()
    request.getfixturevalue("portable")
    assert set(native) <= set(own_hosts())
