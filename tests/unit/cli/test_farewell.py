"""A role that leaves has time as long as it says that it is at it, and no longer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest
from tests.alongside import alongside, until

from shoal.cli import farewell
from shoal.cli.exits import DONE, FAILED, INTERRUPTED
from shoal.cli.farewell import Farewell
from shoal.cli.local import HostRun
from shoal.clock import SystemClock
from shoal.config import load_config
from shoal.errors import ConnectionLost
from shoal.ids import RunId
from shoal.runtime.launcher_messages import StopRole
from shoal.runtime.role_handle import RoleHandle


class Role:
    """Stands for the handle of a role."""

    def __init__(self, *, serves: bool = True, hears: bool = True) -> None:
        self.serves = serves
        self.told: list[StopRole] = []
        self._hears = hears

    def send(self, message: StopRole) -> None:
        if not self._hears:
            raise ConnectionLost("it does not run now")
        self.told.append(message)


def handle(role: Role) -> RoleHandle:
    return cast(RoleHandle, role)


async def test_a_role_that_says_that_it_is_at_it_is_waited_for_until_it_ends() -> None:
    bye, role, is_over = Farewell(), Role(), anyio.Event()

    async def take() -> None:
        await bye.take(handle(role), "the reason")
        is_over.set()

    async with alongside(take):
        await until(lambda: role.told)
        for _ in range(5):
            bye.heard(handle(role))
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            assert not is_over.is_set()
        role.serves = False
        bye.heard(handle(role))
        await is_over.wait()
    assert role.told == [StopRole("the reason")]


@pytest.mark.parametrize("hears", [True, False])
async def test_one_that_is_silent_is_left_to_whoever_ends_it(hears: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farewell, "GRACE_S", 0.02)
    role = Role(hears=hears)
    await Farewell().take(handle(role))
    assert role.serves


async def test_one_that_does_not_serve_or_that_there_is_not_is_not_waited_for() -> None:
    role = Role(serves=False)
    await Farewell().take(handle(role))
    await Farewell().take(None)
    assert role.told == []


@pytest.mark.parametrize(
    ("exit_code", "hindered", "ends_with", "failure"),
    [
        (DONE, "", DONE, None),
        (DONE, "the disk takes nothing", FAILED, "the last checkpoint is not written: the disk takes nothing"),
        (INTERRUPTED, "the disk takes nothing", INTERRUPTED, None),
    ],
)
async def test_a_run_whose_last_checkpoint_a_disk_does_not_take_ends_with_an_exit_code_that_says_it(
    tmp_path: Path, exit_code: int, hindered: str, ends_with: int, failure: str | None
) -> None:
    host: Any = HostRun(load_config(), RunId("run"), tmp_path, SystemClock(), b"")
    host.exit_code = exit_code

    class Mirror(Role):
        last_error = ""

        def send(self, message: StopRole) -> None:
            self.last_error, self.serves = hindered, False

    host._mirror = Mirror()
    await host._last_words()
    assert (host.exit_code, host.failure) == (ends_with, failure)
