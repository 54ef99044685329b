"""Processes that others hold: their end, their signals, how they ended; with pidfds and without."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import anyio
import pytest

from shoal.runtime.linux_calls import LinuxCall, has
from shoal.runtime.process_control import end_tagged, kill, next_ended, reap
from shoal.runtime.process_end import process_ended, wait_until_ended
from shoal.runtime.process_handle import ProcessHandle

pytestmark = pytest.mark.usefixtures("either_way")

# It says its number and sends its handle; a byte lets it end in good order, as a role does.
_HELD = """
import os, socket, sys
from shoal.runtime.process_handle import OwnHandle
ours = socket.socket(fileno=int(sys.argv[1]))
if sys.argv[2] == "orphan" and os.fork():
    os._exit(0)
handle = OwnHandle()
socket.send_fds(ours, [str(os.getpid()).encode()], [handle.descriptor])
handle.give_away()
code = ours.recv(1)
if code:
    handle.ends_with(code[0])
    os._exit(code[0])
ours.recv(1)
"""


class _Held:
    """A process that runs the program, and this end of its socket."""

    def __init__(self, kind: str) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            argv = [sys.executable, "-c", _HELD, str(theirs.fileno()), kind]
            self.process = subprocess.Popen(argv, pass_fds=[theirs.fileno()])
        if kind == "orphan":
            self.process.wait()
        data, fds, _, _ = socket.recv_fds(self.socket, 64, 1)
        self.handle = ProcessHandle(int(data), fds[0])


@pytest.fixture
def held(request: pytest.FixtureRequest) -> Iterator[_Held]:
    held = _Held(request.param)
    yield held
    held.handle.send_signal(signal.SIGKILL)
    held.handle.close()
    held.handle.close()
    held.socket.close()
    # Most tests have reaped it.
    held.process.poll()


@pytest.mark.parametrize("held", ["child"], indirect=True)
@pytest.mark.parametrize("code", [0, 3, 255])
async def test_the_exit_code_of_a_child_is_known_when_it_is_gone(held: _Held, code: int) -> None:
    held.socket.send(bytes([code]))
    with anyio.fail_after(20):
        await held.handle.until_gone()
    assert held.handle.reap() == code


@pytest.mark.parametrize("held", ["child"], indirect=True)
async def test_a_child_that_a_signal_ends_says_which(held: _Held) -> None:
    held.handle.send_signal(signal.SIGTERM)
    with anyio.fail_after(20):
        await held.handle.until_gone()
    assert held.handle.reap() == -signal.SIGTERM
    held.handle.send_signal(signal.SIGTERM)


@pytest.mark.parametrize("held", ["orphan"], indirect=True)
@pytest.mark.parametrize("code", [0, 3, None])
async def test_the_exit_code_of_a_process_that_is_init_s_is_what_it_has_said(held: _Held, code: int | None) -> None:
    if code is None:
        held.handle.send_signal(signal.SIGTERM)
    else:
        held.socket.send(bytes([code]))
    with anyio.fail_after(20):
        await held.handle.until_gone()
    if not has(LinuxCall.PIDFD):
        assert held.handle.reap() == (-signal.SIGKILL if code is None else code)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], env={**os.environ, "OF_THIS_TEST": str(os.getpid())}) as process:
        yield process
        process.kill()


async def test_the_end_of_a_process_is_awaited_and_its_exit_status_left(sleeper: subprocess.Popen[bytes]) -> None:
    with anyio.move_on_after(0.1) as waiting:
        await process_ended(sleeper.pid)
    assert waiting.cancelled_caught
    sleeper.kill()
    with anyio.fail_after(20):
        await process_ended(sleeper.pid)
    wait_until_ended(sleeper.pid)
    assert sleeper.wait() == -signal.SIGKILL
    wait_until_ended(sleeper.pid)
    with pytest.raises(ProcessLookupError):
        await process_ended(sleeper.pid)


def _spawned(*argv: str) -> int:
    return os.posix_spawnp(argv[0], argv, os.environ)


def test_children_that_have_ended_are_told_with_how_and_reaped_once() -> None:
    assert next_ended() is None
    pids = {_spawned("sh", "-c", f"exit {code}"): code for code in (0, 7)}
    left = dict(pids)
    while left:
        if ended := next_ended():
            assert left.pop(ended.pid) == ended.code
            reap(ended.pid)
            reap(ended.pid)
    assert next_ended() is None


def test_a_child_that_was_killed_is_told_with_the_signal() -> None:
    pid = _spawned("sleep", "600")
    kill(pid)
    while not (ended := next_ended()):
        pass
    assert ended == (pid, -signal.SIGKILL)
    reap(pid)


def test_whoever_has_an_entry_in_its_environment_is_ended(sleeper: subprocess.Popen[bytes]) -> None:
    end_tagged(f"OF_THIS_TEST={os.getpid()}")
    assert sleeper.wait() == -signal.SIGKILL
