"""Peers of another version, in both directions, and other users of this host: refused, told why, and named."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from tests.integration.transport.samples import ALICE, CAROL, KEY, RUN, over_tcp, step, take
from tests.integration.transport.scene import refusals, talking
from tests.integration.transport.strangers import TIMEOUT_S, Stranger
from tests.linux_calls import needs

from shoal.errors import Offence
from shoal.runtime.linux_calls import LinuxCall
from shoal.transport.base import PeerLost, PeerUp, Received
from shoal.transport.tls import tls_contexts
from shoal.wire.handshake import PROTOCOL_VERSION, Hello, Refusal, encode_handshake
from shoal.wire.messages import Hop
from shoal.wire.messages.step import Opened


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
@pytest.mark.parametrize("over", ["unix", "tcp"])
async def test_a_dialler_of_another_version_is_refused_and_both_learn_who_must_upgrade(
    host: Any, strangers: list[Stranger], caplog: pytest.LogCaptureFixture, over: str, version: int
) -> None:
    async with talking(host) as scene:
        one = Stranger.over_tcp(scene.target) if over == "tcp" else Stranger.on_this_host(scene.target)
        strangers.append(one)
        if over == "tcp":
            await one.secure(CAROL)
        refusal = await one.greet(CAROL.peer_id, version=version)
        assert isinstance(refusal, Refusal)
        older = "this side" if version > PROTOCOL_VERSION else "the other side"
        says = f"speaks protocol version {version}, this side {PROTOCOL_VERSION}: upgrade {older}"
        assert says in refusal.reason
        assert await one.is_closed()
        await scene.has_refused(Offence.VERSION)
        assert says in refusals(caplog)[0]["reason"]
        assert scene.others == []


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
@pytest.mark.parametrize("over", ["unix", "tcp"])
@pytest.mark.parametrize("refuses", [False, True])
async def test_a_listener_of_another_version_is_not_talked_to(
    host: Any, folder: Path, over: str, version: int, refuses: bool
) -> None:
    said: Hello | Refusal = Hello(RUN, CAROL.peer_id, "test", (), 1, 2, 0)
    with socket.socket(socket.AF_UNIX if over == "unix" else socket.AF_INET) as listener:
        listener.bind(str(folder / "old.sock") if over == "unix" else ("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(TIMEOUT_S)
        where = f"unix:{folder}/old.sock" if over == "unix" else f"tcp:127.0.0.1:{listener.getsockname()[1]}"

        def serve() -> None:
            accepted = listener.accept()[0]
            accepted.settimeout(TIMEOUT_S)
            if over == "tcp":
                accepted = tls_contexts(CAROL, KEY).server.wrap_socket(accepted, server_side=True)
            with accepted:
                accepted.recv(4096)
                accepted.sendall(encode_handshake(Refusal("other version") if refuses else said, version))
                with suppress(OSError):
                    accepted.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        async with talking(host) as scene:
            scene.target.introduce(Hop(CAROL.peer_id, (where,)))
            scene.target.post(CAROL.peer_id, Opened(step()))
            await scene.until(lambda: scene.others, "the loss")
            older = "this side" if version > PROTOCOL_VERSION else "the other side"
            [lost] = scene.others
            assert isinstance(lost, PeerLost)
            assert f"version {version}, this side {PROTOCOL_VERSION}: upgrade {older}" in lost.reason
            await scene.has_refused(Offence.VERSION)
        await anyio.to_thread.run_sync(thread.join)


STRANGER_OF_ANOTHER_USER = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
one = socket.socket(socket.AF_UNIX)
one.settimeout(20)
try:
    one.connect(sys.argv[1])
except PermissionError:
    print("no permission")
else:
    print(one.recv(4096))
"""


@needs(LinuxCall.PEER_CREDENTIALS, "the mode is all that keeps others out, or getpeereid(3), which Linux lacks")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_another_user_of_this_host_gets_nothing_even_if_the_mode_let_it_in(
    host: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.chmod(folder, 0o755)
    async with talking(host) as scene:
        path = scene.target.addresses[0].rpartition(":")[2]
        command = [sys.executable, "-S", "-c", STRANGER_OF_ANOTHER_USER, path]

        def run() -> str:
            done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
            return done.stdout + done.stderr

        assert await anyio.to_thread.run_sync(run) == "no permission\n"
        await scene.goes_on()
        os.chmod(path, 0o666)
        assert "user 65534 has no access" in await anyio.to_thread.run_sync(run)
        await scene.has_refused(Offence.USER)
        assert "user 65534" in refusals(caplog)[0]["reason"]
        assert scene.others == []


async def test_of_two_processes_with_one_identity_neither_takes_the_other_s_place_again_and_again(
    host: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = await host(ALICE)
    copies = [await host(CAROL, path=folder / name) for name in ("original", "copy")]
    for number, one in enumerate(copies):
        one.introduce(over_tcp(target))
        one.post(ALICE.peer_id, Opened(step(number)))
        assert await take(one, 1) == [PeerUp(ALICE.peer_id)]
    original, copy = copies
    assert isinstance((await take(original, 1))[0], PeerLost)
    original.post(ALICE.peer_id, Opened(step(2)))
    [lost] = await take(original, 1)
    assert isinstance(lost, PeerLost)
    assert f"two processes use the peer id {CAROL.peer_id}" in lost.reason
    copy.post(ALICE.peer_id, Opened(step(3)))
    up, gone = PeerUp(CAROL.peer_id), PeerLost(CAROL.peer_id, "the peer connected anew", 0.0)
    first, second, last = (Received(CAROL.peer_id, Opened(step(number))) for number in (0, 1, 3))
    assert await take(target, 6) == [up, first, gone, up, second, last]
    assert [refused["offence"] for refused in refusals(caplog)] == ["identity"]
    # Where the copy is gone the original is no stranger.
    await copy.aclose()
    assert isinstance((await take(target, 1))[0], PeerLost)
    original.post(ALICE.peer_id, Opened(step(4)))
    assert await take(target, 2) == [up, Received(CAROL.peer_id, Opened(step(4)))]
