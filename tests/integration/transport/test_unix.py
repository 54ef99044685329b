"""Endpoints over real Unix sockets: order, losses, limits, and peers that misbehave."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import pytest
from tests.alongside import until

from shoal.errors import ConfigError
from shoal.ids import PeerId, RunId
from shoal.runtime.run_dir import remove_dead_dir
from shoal.transport import peers
from shoal.transport.base import PeerLost, PeerUp, Received
from shoal.transport.limits import TransportLimits
from shoal.transport.peers import StreamEndpoint
from shoal.transport.unix import open_unix_endpoint
from shoal.wire.messages import Hop
from shoal.wire.messages.control import Heartbeat
from shoal.wire.messages.step import Forward, Opened, Refused

from .samples import CHILD, MIB, RUN, A, B, C, step, take, tensor


async def linked(endpoint: Any, **limits: int | float) -> tuple[StreamEndpoint, StreamEndpoint]:
    """Return two endpoints with a connection between them; both PeerUp are taken."""
    a = await endpoint(A, limits=TransportLimits(**limits))
    b = await endpoint(B, limits=TransportLimits(**limits))
    a.introduce(b.hop)
    a.post(B, Opened(step()))
    assert await take(b, 2) == [PeerUp(A), Received(A, Opened(step()))]
    assert await take(a, 1) == [PeerUp(B)]
    return a, b


async def test_posting_to_itself_delivers_a_copy(endpoint: Any) -> None:
    a = await endpoint(A)
    source = tensor(4)
    a.post(A, Forward(step(), 0), [source])
    source.data[0] = 9
    (received,) = await take(a, 1)
    assert isinstance(received, Received)
    assert bytes(received.tensors[0].data) == b"\1\1\1\1"


async def test_a_peer_that_cannot_be_dialled_is_lost_once_with_the_reason(endpoint: Any, folder: Path) -> None:
    a = await endpoint(A)
    a.post(C, Opened(step()))
    a.post(C, Opened(step()))
    assert await take(a, 1) == [PeerLost(C, "no known address")]
    a.introduce(Hop(C, (f"unix:{folder}/absent", "tcp:1.2.3.4:5")))
    a.post(C, Opened(step()))
    a.post(C, Opened(step()))
    a.post(A, Opened(step()))
    events = await take(a, 2)
    (lost,) = [event for event in events if isinstance(event, PeerLost)]
    assert "absent: No such file" in lost.reason
    assert "tcp:1.2.3.4:5" in lost.reason


async def test_a_socket_that_somebody_has_removed_is_made_again(
    endpoint: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, limits = folder / "of the run" / "a", TransportLimits(listen_again_s=0.01)
    path.parent.mkdir(mode=0o700)
    a = await endpoint(A, path=path, limits=limits)
    b = await endpoint(B)
    b.introduce(a.hop)
    b.post(A, Opened(step(1)))
    assert await take(a, 2) == [PeerUp(B), Received(B, Opened(step(1)))]
    shutil.rmtree(path.parent)
    path.parent.touch()  # for a moment it cannot be made either
    await until(lambda: [each.problem for each in _told_of(caplog) if each.problem])
    path.parent.unlink()
    await until(lambda: [each for each in _told_of(caplog) if not each.problem])
    assert (stat.S_IMODE(path.parent.stat().st_mode), stat.S_IMODE(path.stat().st_mode)) == (0o700, 0o600)
    assert not remove_dead_dir(path.parent), "other commands of this user see that somebody lives in it"
    c = await endpoint(C)
    c.introduce(a.hop)
    c.post(A, Opened(step(2)))
    b.post(A, Opened(step(3)))
    taken = await take(a, 3)
    assert all(each in taken for each in (PeerUp(C), Received(C, Opened(step(2))), Received(B, Opened(step(3)))))
    await a.aclose()
    assert not path.exists()
    assert remove_dead_dir(path.parent)


def _told_of(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if record.getMessage() == "transport.socket_gone"]


async def test_what_is_no_address_at_all_loses_its_peer_and_nobody_else(endpoint: Any) -> None:
    a, b = await linked(endpoint)
    a.introduce(Hop(C, ("unix:/a\0b",)))
    a.post(C, Opened(step()))
    assert await take(a, 1) == [PeerLost(C, "unix:/a\0b: it is no address: embedded null byte")]
    a.post(B, Opened(step(1)))
    assert await take(b, 1) == [Received(A, Opened(step(1)))]


async def test_peers_that_are_only_spoken_of_make_way_for_each_other(
    endpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_MAX_PEERS", 8)
    a, b = await linked(endpoint)
    for number in range(1000):
        a.introduce(Hop(PeerId(f"invented {number}"), ()))
    assert len(a.links()) <= 8
    a.post(B, Opened(step(1)))
    assert await take(b, 1) == [Received(A, Opened(step(1)))], "whom it has met it knows"
    c = await endpoint(C)
    a.introduce(c.hop)
    a.post(C, Opened(step()))
    assert await take(a, 1) == [PeerUp(C)]


async def test_a_peer_that_has_said_that_it_ends_is_not_dialled_once_it_is_gone_until_it_connects_anew(
    endpoint: Any,
) -> None:
    a, b = await linked(endpoint)
    a.leaves(B)
    a.post(B, Opened(step(1)))
    assert await take(b, 1) == [Received(A, Opened(step(1)))]
    b.disconnect(A, "at its end")
    assert await take(b, 1) == [PeerLost(A, "at its end")]
    assert await take(a, 1) == [PeerLost(B, "connection closed by the peer")]
    a.post(B, Opened(step(2)))
    assert a.counters["transport.dropped"] == 1
    b.post(A, Opened(step(3)))
    assert await take(a, 2) == [PeerUp(B), Received(B, Opened(step(3)))]
    a.post(B, Opened(step(4)))
    assert await take(b, 2) == [PeerUp(A), Received(A, Opened(step(4)))]


async def test_a_lost_peer_is_dialled_anew_after_the_loss_was_taken(endpoint: Any) -> None:
    a, b = await linked(endpoint)
    b.disconnect(A, "told to")
    assert await take(b, 1) == [PeerLost(A, "told to")]
    assert await take(a, 1) == [PeerLost(B, "connection closed by the peer")]
    b.post(A, Opened(step(1)))  # b never was introduced: it knows the address from a's hello
    assert await take(a, 2) == [PeerUp(B), Received(B, Opened(step(1)))]
    assert await take(b, 1) == [PeerUp(A)]
    b.disconnect(A, "again")
    b.post(A, Opened(step(2)))
    assert await take(b, 1) == [PeerLost(A, "again")]
    b.post(A, Opened(step(3)))
    assert await take(a, 3) == [
        PeerLost(B, "connection closed by the peer"),
        PeerUp(B),
        Received(B, Opened(step(3))),
    ]


async def test_a_restarted_peer_replaces_its_old_connection(endpoint: Any, folder: Path) -> None:
    a, b = await linked(endpoint)
    again = await endpoint(B, path=folder / "b2.sock")
    again.introduce(a.hop)
    again.post(A, Opened(step(1)))
    assert await take(a, 3) == [PeerLost(B, "the peer connected anew"), PeerUp(B), Received(B, Opened(step(1)))]
    assert await take(b, 1) == [PeerLost(A, "connection closed by the peer")]


async def test_a_killed_process_is_lost_at_once(endpoint: Any, folder: Path) -> None:
    a = await endpoint(A)
    script = Path(__file__).with_name("peer_process.py")
    path = folder / "child.sock"
    async with await anyio.open_process([sys.executable, str(script), str(path)], stderr=None) as process:
        assert process.stdout is not None
        pid, *_ = (await process.stdout.receive()).decode().split()
        child = CHILD.peer_id
        a.introduce(Hop(child, (f"unix:{path}",)))
        a.post(child, Forward(step(), 0), [tensor(MIB, 5)])
        up, echo = await take(a, 2)
        assert up == PeerUp(child)
        assert isinstance(echo, Received)
        assert bytes(echo.tensors[0].data) == bytes([5]) * MIB
        os.kill(int(pid), signal.SIGKILL)
        assert isinstance((await take(a, 1))[0], PeerLost)
        await process.wait()  # the kernel may close the connection before it closes the listening socket
        a.post(child, Opened(step()))
        (lost,) = await take(a, 1)
        assert isinstance(lost, PeerLost)
        assert "refused" in lost.reason


async def test_back_pressure_waits_for_a_slow_reader_and_a_deaf_one_is_overloaded(endpoint: Any) -> None:
    a, b = await linked(endpoint, high_water_bytes=MIB, max_queued_bytes=24 * MIB, max_unread_bytes=MIB)
    waited = anyio.Event()

    async def fill() -> None:
        a.post(B, Forward(step(), 0), [tensor(16 * MIB)])
        a.post(B, Forward(step(), 1), [tensor(4 * MIB)])
        await a.drained(B)
        waited.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fill)
        await anyio.wait_all_tasks_blocked()
        assert not waited.is_set()
        assert len(await take(b, 2)) == 2
        await waited.wait()
    await a.flushed(B)
    # Nobody takes what b receives now: b stops reading after one frame, and a's queue grows until a gives up.
    for microbatch in range(3):
        a.post(B, Forward(step(), microbatch), [tensor(10 * MIB)])
        if microbatch == 0:
            await a.flushed(B)
    assert b.counters["transport.lost"] == 0
    with anyio.move_on_after(0.2) as waiting:
        await a.flushed(B)
    assert waiting.cancelled_caught
    a.post(B, Forward(step(), 3), [tensor(10 * MIB)])
    (lost,) = await take(a, 1)
    assert isinstance(lost, PeerLost)
    assert (lost.peer, lost.reason.partition(":")[0]) == (B, "overloaded")
    a.post(A, Opened(step()))
    assert await take(a, 1) == [Received(A, Opened(step()))]


async def test_a_dialler_of_another_run_loses_the_peer_with_the_reason(endpoint: Any) -> None:
    a, b = await endpoint(A), await endpoint(B, run=RunId("other"))
    a.introduce(b.hop)
    a.post(B, Opened(step()))
    (lost,) = await take(a, 1)
    assert isinstance(lost, PeerLost)
    assert "refused by the peer: one side belongs to run 'other'" in lost.reason


async def test_an_address_where_another_peer_listens_is_not_used(endpoint: Any) -> None:
    a, b = await endpoint(A), await endpoint(B)
    a.introduce(Hop(C, b.addresses))
    a.post(C, Opened(step()))
    (lost,) = await take(a, 1)
    assert isinstance(lost, PeerLost)
    assert "got b" in lost.reason


async def test_where_a_peer_was_found_it_is_found_again_whatever_others_say(endpoint: Any, folder: Path) -> None:
    a, _ = await linked(endpoint)
    c = await endpoint(C)
    for said in (c.addresses, (f"unix:{folder}/absent",), ()):
        a.introduce(Hop(B, said))
        a.disconnect(B, "test")
        assert await take(a, 1) == [PeerLost(B, "test")]
        a.post(B, Opened(step(1)))
        assert await take(a, 1) == [PeerUp(B)]


async def test_a_peer_that_was_started_again_elsewhere_is_found_where_others_say(endpoint: Any, folder: Path) -> None:
    a, b = await linked(endpoint)
    await b.aclose()
    assert isinstance((await take(a, 1))[0], PeerLost)
    again = await endpoint(B, path=folder / "elsewhere.sock")
    a.introduce(again.hop)
    a.post(B, Opened(step(1)))
    assert await take(a, 1) == [PeerUp(B)]


async def test_a_listener_that_never_answers_is_given_up(endpoint: Any, folder: Path) -> None:
    a = await endpoint(A, limits=TransportLimits(dial_timeout_s=0.2))
    path = folder / "mute.sock"
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(path))
        mute.listen()
        a.introduce(Hop(C, (f"unix:{path}",)))
        a.post(C, Opened(step()))
        a.post(C, Opened(step()))
        await a.flushed(C)
        assert await take(a, 1) == [PeerLost(C, f"unix:{path}: no answer within 0.2 s")]


async def test_a_socket_in_use_or_with_an_impossible_path_is_a_clear_error(endpoint: Any, folder: Path) -> None:
    await endpoint(A)
    with pytest.raises(ConfigError, match="another process listens"):
        await endpoint(A)
    with pytest.raises(ConfigError, match="shorter folder"):
        await endpoint(B, path=folder / ("x" * 100))
    (folder / "file").write_text("precious")
    with pytest.raises(ConfigError, match="cannot listen"):
        await endpoint(B, path=folder / "file")
    assert (folder / "file").read_text() == "precious"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "stale.sock"))
    await endpoint(B, path=folder / "stale.sock")


async def test_errors_of_the_body_are_not_wrapped_and_heartbeats_not_passed_up(endpoint: Any, folder: Path) -> None:
    with pytest.raises(KeyError):
        async with open_unix_endpoint(peer_id=C, run_id=RUN, role="test", path=folder / "c.sock"):
            raise KeyError("mine")
    assert not (folder / "c.sock").exists()
    a, b = await linked(endpoint)
    a.post(B, Heartbeat())
    a.post(B, Refused(step(), "no"))
    assert await take(b, 1) == [Received(A, Refused(step(), "no"))]
