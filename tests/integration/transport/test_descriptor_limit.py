"""A process that may open no more files: what it has goes on, what is new fails by name until there is room."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anyio
from tests.integration.transport.samples import ALICE, BOB, CAROL, over_tcp, step, take

from shoal.transport.base import PeerLost, PeerUp, Received
from shoal.transport.dispatch import measured
from shoal.transport.limits import TransportLimits
from shoal.wire.messages.step import Opened

LIMITS = TransportLimits(dial_timeout_s=2.0)


@contextmanager
def no_file_may_be_opened(left: int = 0) -> Iterator[None]:
    """But for so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    most = max(*map(int, os.listdir("/proc/self/fd")), 200)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1 + left, hard))
    try:
        # The limit is on the number, and there may be gaps below it.
        while True:
            try:
                taken.append(os.dup(0))
            except OSError:
                break
        for descriptor in taken[len(taken) - left :]:
            os.close(descriptor)
        del taken[len(taken) - left :]
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_at_the_limit_of_files_connections_that_stand_go_on_and_new_ones_fail_by_name(host: Any) -> None:
    a, b, c = await host(ALICE, limits=LIMITS), await host(BOB, limits=LIMITS), await host(CAROL, limits=LIMITS)
    a.introduce(over_tcp(b))
    a.introduce(over_tcp(c))
    a.post(b.peer_id, Opened(step(1)))
    assert len(await take(b, 2)) == 2
    assert await take(a, 1) == [PeerUp(b.peer_id)]
    with no_file_may_be_opened():
        a.post(c.peer_id, Opened(step(2)))
        [lost] = await take(a, 1)
        assert isinstance(lost, PeerLost)
        assert "Too many open files" in lost.reason
        for number in range(20):
            a.post(b.peer_id, Opened(step(number)))
            assert await take(b, 1) == [Received(a.peer_id, Opened(step(number)))]
    a.post(c.peer_id, Opened(step(3)))
    assert await take(c, 2) == [PeerUp(a.peer_id), Received(a.peer_id, Opened(step(3)))]
    assert await take(a, 1) == [PeerUp(c.peer_id)]
    assert (a.counters["transport.lost"], b.counters["transport.lost"]) == (1, 0)


async def test_who_is_dialled_at_the_limit_of_files_goes_on_and_can_be_dialled_when_there_is_room(host: Any) -> None:
    a, b = await host(ALICE, limits=LIMITS), await host(BOB, limits=LIMITS)
    a.introduce(over_tcp(b))
    a.post(b.peer_id, Opened(step(1)))
    assert len(await take(b, 2)) == 2
    assert len(await take(a, 1)) == 1
    [address] = [each for each in b.addresses if each.startswith("tcp:")]
    _, host_name, port = address.split(":")
    # The system takes the connection in the listener's place; the listener cannot.
    stranger = socket.socket()
    with stranger, no_file_may_be_opened():
        stranger.settimeout(30)
        stranger.connect((host_name, int(port)))
        for number in range(20):
            a.post(b.peer_id, Opened(step(number)))
            assert await take(b, 1) == [Received(a.peer_id, Opened(step(number)))]
        # Not left hanging: it may try again.
        assert await anyio.to_thread.run_sync(stranger.recv, 1) == b""
    c = await host(CAROL, limits=LIMITS)
    c.introduce(over_tcp(b))
    c.post(b.peer_id, Opened(step(2)))
    assert await take(b, 2) == [PeerUp(c.peer_id), Received(c.peer_id, Opened(step(2)))]


async def test_the_last_descriptors_are_kept_for_files_and_no_connection_has_one(host: Any, tmp_path: Path) -> None:
    a, b, c = await host(ALICE, limits=LIMITS), await host(BOB, limits=LIMITS), await host(CAROL, limits=LIMITS)
    a.introduce(over_tcp(b))
    c.introduce(over_tcp(b))
    a.post(b.peer_id, Opened(step(1)))
    assert len(await take(b, 2)) == 2
    assert len(await take(a, 1)) == 1
    with no_file_may_be_opened(left=32):
        assert measured(b, None).gauges["process.crowded"] == 1
        for number in range(20):
            c.post(b.peer_id, Opened(step(number)))
            [lost] = await take(c, 1)
            assert isinstance(lost, PeerLost)
            assert "Too many open files" in lost.reason
            a.post(b.peer_id, Opened(step(number)))
            assert await take(b, 1) == [Received(a.peer_id, Opened(step(number)))]
        with ExitStack() as files:
            for number in range(16):
                files.enter_context((tmp_path / str(number)).open("w"))
    assert measured(b, None).gauges["process.crowded"] == 0
    c.post(b.peer_id, Opened(step(3)))
    assert await take(b, 2) == [PeerUp(c.peer_id), Received(c.peer_id, Opened(step(3)))]
