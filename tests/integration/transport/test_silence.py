"""Frozen processes are lost after the deadline and are strangers when they wake; blocked ones blame nobody."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest
from tests.integration.transport.samples import ALICE, BOB, CHILD, over_tcp, step, take

from shoal.transport.base import PeerLost, PeerUp, Received
from shoal.transport.limits import TransportLimits
from shoal.transport.peers import StreamEndpoint
from shoal.wire.messages import Hop
from shoal.wire.messages.step import Opened


@asynccontextmanager
async def _spoken_with(a: StreamEndpoint, folder: Path, scheme: str = "") -> AsyncGenerator[anyio.abc.Process]:
    """A process with a peer that has answered the first message; whoever uses it ends it."""
    script = Path(__file__).with_name("peer_process.py")
    command = [sys.executable, str(script), str(folder / "child.sock")]
    async with await anyio.open_process(command, stderr=None) as process:
        assert process.stdout is not None
        _, *addresses = (await process.stdout.receive()).decode().split()
        child = CHILD.peer_id
        a.introduce(Hop(child, tuple(address for address in addresses if address.startswith(scheme))))
        a.post(child, Opened(step(1)))
        assert await take(a, 2) == [PeerUp(child), Received(child, Opened(step(1)))]
        yield process


@pytest.mark.parametrize("scheme", ["unix", "tcp"])
async def test_a_frozen_process_is_lost_and_can_dial_anew_when_it_wakes(host: Any, folder: Path, scheme: str) -> None:
    a = await host(ALICE, limits=TransportLimits(heartbeat_s=0.1, deadline_s=1.0))
    async with _spoken_with(a, folder, scheme) as process:
        child, pid = CHILD.peer_id, process.pid
        os.kill(pid, signal.SIGSTOP)
        a.post(child, Opened(step(2)))
        (lost,) = await take(a, 1)
        assert isinstance(lost, PeerLost)
        assert lost.reason.startswith("silent for ")
        assert lost.silent_s > 0.0
        assert a.metrics.counter("transport.lost", cause="silent").value == 1
        os.kill(pid, signal.SIGCONT)
        # What it says over the old connection is heard by nobody; it notices, and dials anew.
        assert await take(a, 2) == [PeerUp(child), Received(child, Opened(step(99)))]
        a.post(child, Opened(step(3)))
        assert await take(a, 1) == [Received(child, Opened(step(3)))]
        process.kill()


async def test_idle_connections_stay_open_and_heartbeats_are_not_counted(host: Any) -> None:
    limits = TransportLimits(heartbeat_s=0.05, deadline_s=0.3)
    a, b = await host(ALICE, limits=limits), await host(BOB, limits=limits)
    a.introduce(over_tcp(b))
    a.post(b.peer_id, Opened(step()))
    assert len(await take(b, 2)) == 2
    before = dict(a.sent_bytes), dict(b.sent_bytes)
    with anyio.move_on_after(1.0) as waiting:
        await anext(b.events())
    assert waiting.cancelled_caught
    assert (a.counters["transport.lost"], b.counters["transport.lost"]) == (0, 0)
    assert (dict(a.sent_bytes), dict(b.sent_bytes)) == before


async def test_an_event_loop_that_was_blocked_blames_nobody(host: Any, folder: Path) -> None:
    limits = TransportLimits(heartbeat_s=0.05, deadline_s=0.4)
    a = await host(ALICE, limits=limits)
    async with _spoken_with(a, folder) as process:
        child = CHILD.peer_id
        threading.Event().wait(1.5)  # the child's own deadline is longer
        a.post(child, Opened(step(2)))
        assert await take(a, 1) == [Received(child, Opened(step(2)))]
        assert a.counters["transport.lost"] == 0
        process.kill()


async def test_a_peer_that_computes_for_longer_than_the_deadline_is_not_lost(host: Any, folder: Path) -> None:
    a = await host(ALICE, limits=TransportLimits(heartbeat_s=0.1, deadline_s=1.0))
    script = Path(__file__).with_name("computing_peer.py")
    # Three times as long as the deadline on the thread that computes, and half as long with the whole process blocked.
    command = [sys.executable, str(script), str(folder / "child.sock"), "3.0", "0.5"]
    async with await anyio.open_process(command, stderr=None) as process:
        assert process.stdout is not None
        addresses = (await process.stdout.receive()).decode().split()
        child = CHILD.peer_id
        a.introduce(Hop(child, tuple(addresses)))
        a.post(child, Opened(step(1)))
        assert await take(a, 2) == [PeerUp(child), Received(child, Opened(step(1)))]
        assert a.counters["transport.lost"] == 0
        process.kill()


@pytest.mark.parametrize(("stands_still", "deadline_s"), [(False, 600.0), (True, 1.0)])
async def test_who_has_stood_still_knows_that_it_was_given_up_and_who_has_not_takes_a_peer_for_ended(
    host: Any, folder: Path, stands_still: bool, deadline_s: float
) -> None:
    a = await host(ALICE, limits=TransportLimits(heartbeat_s=0.05, deadline_s=deadline_s))
    async with _spoken_with(a, folder) as process:
        process.kill()
        if stands_still:
            # Nothing else runs in this process, as if it was stopped; the other end is closed meanwhile.
            threading.Event().wait(1.5 * deadline_s)
        [lost] = await take(a, 1)
        assert isinstance(lost, PeerLost)
        assert lost.silent_s == 0.0
        assert bool(lost.still_s) is stands_still
