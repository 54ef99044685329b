"""The control pipe over a real socket pair: lines, replies, and streams that are out of step."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import anyio
import pytest

from shoal.errors import ConnectionLost
from shoal.runtime.control_pipe import ControlPipe, Message, open_role_control
from shoal.runtime.mailbox import Mailbox

pytestmark = pytest.mark.anyio


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(60)
        yield ours, theirs


def _lines(ours: socket.socket, count: int) -> list[Message]:
    with ours.makefile("rb") as stream:
        return [json.loads(stream.readline()) for _ in range(count)]


async def test_a_role_writes_one_json_object_a_line(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    async with open_role_control(theirs) as control:
        control.ready(addresses=["a\nb"])
        control.event("step", number=3)
    assert _lines(ours, 2) == [{"event": "ready", "addresses": ["a\nb"]}, {"event": "step", "number": 3}]


async def test_messages_stop_and_replies_are_told_apart(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    with anyio.fail_after(240):
        async with open_role_control(theirs) as control:
            answers: dict[str, Message] = {}

            async def ask(name: str) -> None:
                answers[name] = await control.request(name)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, "one")
                tasks.start_soon(ask, "two")
                await anyio.wait_all_tasks_blocked()
                asked = _lines(ours, 2)
                # Answered in the other order, split in the middle of a line, with a reply that nobody waits for.
                ours.sendall(b'{"reply": 99}\n' + json.dumps({"reply": asked[1]["id"], "to": 2}).encode() + b"\n")
                ours.sendall(b'{"peers": [1]}\n{"stop": "grace')
                await anyio.wait_all_tasks_blocked()
                assert not control.stopping.is_set()
                ours.sendall(b'ful"}\n' + json.dumps({"reply": asked[0]["id"], "to": 1}).encode() + b"\n")
                await control.stopping.wait()
            assert answers == {"one": {"to": 1}, "two": {"to": 2}}
            assert await anext(control.messages) == {"peers": [1]}


@pytest.mark.parametrize("garbage", [b"not json\n", b"[1, 2]\n", b"x" * ((4 << 20) + 1)])
async def test_what_is_no_json_object_closes_the_pipe(
    garbage: bytes, pair: tuple[socket.socket, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = pair
    ours.setblocking(False)
    received = Mailbox[Message]()
    one, other = ControlPipe(received.put), ControlPipe(received.put)
    await one.open(theirs)
    await other.open(ours)
    transport = other._transport
    assert transport is not None
    transport.write(garbage)
    with anyio.fail_after(240):
        await one.closed.wait()
        await other.closed.wait()
    received.close()
    assert [message async for message in received] == []
    assert caplog.records[0].message.startswith("control_pipe.")
    with pytest.raises(ConnectionLost):
        one.send({})
