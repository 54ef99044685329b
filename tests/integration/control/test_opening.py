"""A client whose data server is not there yet answers whoever asks how the run is."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from shoal.cli.observing import ClientTarget
from shoal.client.service import data_server_started
from shoal.config import Config
from shoal.errors import ControlError
from shoal.identity import Identity
from shoal.ids import RunId
from shoal.runtime.control_pipe import ControlPipe, open_role_control
from shoal.runtime.launcher_messages import (
    FromRole,
    LauncherAnswer,
    LauncherReplies,
    RoleAsks,
    RoleDoes,
    StartDataServer,
    StopRole,
    ToRole,
)
from shoal.transport.unix import open_unix_endpoint
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import AskRun, AskStatus, RunStatus, TellRun

RUN = RunId("test-run")


@pytest.mark.parametrize("end", [LauncherAnswer(), LauncherAnswer("no such folder"), StopRole("")], ids=repr)
async def test_it_says_what_its_data_server_does_until_that_serves_or_the_run_is_to_end(
    tmp_path: Path, end: LauncherAnswer | StopRole
) -> None:
    peer, results = Identity.generate().peer_id, list[object]()
    target = ClientTarget(RUN, Hop(peer, (f"unix:{tmp_path}/c.sock",)))
    asked, ours = anyio.Event(), list[RoleAsks]()

    def deliver(message: Any) -> None:
        ours.append(message)
        asked.set()

    here, there = socket.socketpair()
    with here, there:
        launcher = ControlPipe[FromRole](deliver, FromRole)
        await launcher.open(here)
        async with (
            open_role_control(there) as control,
            open_unix_endpoint(peer_id=peer, run_id=RUN, role="client", path=tmp_path / "c.sock") as endpoint,
        ):

            async def wait() -> None:
                try:
                    results.append(await data_server_started(control, endpoint, Config(), is_new=True))
                except* ControlError as group:
                    results.append(str(group.exceptions[0]))

            async def state() -> str:
                answer, problem = await target.asked(AskStatus(0), RunStatus, 60.0)
                assert answer is not None, problem
                return answer.state

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await asked.wait()
                assert [each.request for each in ours] == [StartDataServer()]
                assert await state() == "starting: waiting for the data server"
                launcher.send(RoleDoes("making tokens of ./texts: 7 %"))
                while not control.doing:
                    await anyio.lowlevel.checkpoint()
                assert await state() == "starting: making tokens of ./texts: 7 %"
                answer, _ = await target.asked(AskRun(), TellRun, 0.05)
                assert answer is None, "it has nothing to tell of the run, and does not end of that"
                order: ToRole = end if isinstance(end, StopRole) else LauncherReplies(ours[0].id, end)
                launcher.send(order)
        await launcher.aclose()
    failed = "the data server could not be started: no such folder"
    assert results == [{LauncherAnswer(): True, StopRole(""): False}.get(end, failed)]
