"""The control pipe over a real socket pair: lines, replies, and streams that are out of step."""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Iterator
from typing import Any

import anyio
import msgspec
import pytest
from tests.set_clock import SetClock

from shoal.errors import ConnectionLost
from shoal.runtime.control_pipe import ControlPipe, RoleControl, open_role_control
from shoal.runtime.launcher_messages import (
    FromRole,
    InitialPeers,
    LauncherAnswer,
    LauncherReplies,
    RoleAsks,
    RoleLeaving,
    ServerReady,
    StartTrainer,
    StopRole,
    ToRole,
    UserNotice,
)
from shoal.runtime.waking import Mailbox

_OF_ANY_RECORD = vars(logging.makeLogRecord({})).keys()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(60)
        yield ours, theirs


def _lines(ours: socket.socket, count: int) -> list[dict[str, Any]]:
    with ours.makefile("rb") as stream:
        return [json.loads(stream.readline()) for _ in range(count)]


def _say(ours: socket.socket, *said: ToRole) -> None:
    for message in said:
        ours.sendall(msgspec.json.encode(message) + b"\n")


async def test_a_role_writes_one_json_object_a_line(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    async with open_role_control(theirs) as control:
        control.tell(UserNotice("a\nb"))
        control.tell(ServerReady(3))
    assert _lines(ours, 2) == [{"type": "UserNotice", "text": "a\nb"}, {"type": "ServerReady", "stage": 3}]


async def test_a_role_that_leaves_says_so_for_an_hour_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaping(SetClock):
        async def sleep_s(self, duration_s: float) -> None:
            self.now += duration_s

    control, clock, told = RoleControl(), Leaping(now=0.0), list[FromRole]()
    monkeypatch.setattr(control, "tell", told.append)
    await control.say_it_leaves(clock)
    assert (clock.now, set(told)) == (3600.0, {RoleLeaving()})


async def test_orders_stop_and_replies_are_told_apart(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    async with open_role_control(theirs) as control:
        answers: dict[int, LauncherAnswer] = {}

        async def ask(slot: int) -> None:
            answers[slot] = await control.request(StartTrainer(slot, 1))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, 1)
            tasks.start_soon(ask, 2)
            await anyio.wait_all_tasks_blocked()
            asked = [msgspec.convert(line, RoleAsks) for line in _lines(ours, 2)]
            assert [each.request for each in asked] == [StartTrainer(1, 1), StartTrainer(2, 1)]
            # Answered in the other order, split in the middle of a line, with a reply that nobody waits for.
            _say(ours, LauncherReplies(99, LauncherAnswer()), LauncherReplies(asked[1].id, LauncherAnswer("two")))
            _say(ours, InitialPeers(("/m",)))
            ours.sendall(b'{"type": "StopRole", "rea')
            await anyio.wait_all_tasks_blocked()
            assert not control.stopping.is_set()
            ours.sendall(b'son": "why"}\n')
            _say(ours, LauncherReplies(asked[0].id, LauncherAnswer("one")))
            await control.stopping.wait()
        assert answers == {1: LauncherAnswer("one"), 2: LauncherAnswer("two")}
        assert control.stop_reason == "why"
        assert await anext(control.orders) == InitialPeers(("/m",))


@pytest.mark.parametrize(
    ("garbage", "logged"),
    [
        (b"not json\n", "not json"),
        (b"[1, 2]\n", "object"),
        (b'{"maddrs": []}\n', "type"),
        (b'{"type": "Dance", "maddrs": []}\n', "Invalid value 'Dance'"),
        (b'{"type": "InitialPeers"}\n', "InitialPeers.*missing required field `maddrs`"),
        (b'{"type": "InitialPeers", "maddrs": 1}\n', "InitialPeers.*Expected `array`"),
        (b'{"type": "ServerReady", "stage": 1}\n', "Invalid value 'ServerReady'"),
        (b"x" * ((4 << 20) + 1), "size_bytes"),
    ],
)
async def test_what_is_no_message_of_the_pipe_ends_it_and_is_named_in_the_log(
    garbage: bytes, logged: str, pair: tuple[socket.socket, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = pair
    ours.setblocking(False)
    received = Mailbox[ToRole]()
    one, other = ControlPipe(received.put, ToRole), ControlPipe(received.put, ToRole)
    await one.open(theirs)
    await other.open(ours)
    transport = other._transport
    assert transport is not None
    behind = msgspec.json.encode(StopRole("it is never read")) + b"\n" if garbage.endswith(b"\n") else b""
    transport.write(garbage + behind)
    await one.closed.wait()
    await other.closed.wait()
    received.close()
    assert [message async for message in received] == []
    [record] = caplog.records
    assert record.message.startswith("control_pipe.")
    said = " ".join(f"{name}={value}" for name, value in sorted(vars(record).items()) if name not in _OF_ANY_RECORD)
    assert re.search(logged, said), said
    with pytest.raises(ConnectionLost):
        one.send(StopRole(""))
