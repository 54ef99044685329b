"""What a user tells a run, over the Unix socket of its client's host, and what the user reads."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import anyio
import pytest
from tests.unit.checkpoint.checkpoints import open_record, signed_record
from tests.unit.client.noted import NotedLedger

from shoal.cli.asking import ask_here
from shoal.client.checkpoints import Checkpointing
from shoal.client.steering import Pausing, Steering
from shoal.clock import SystemClock
from shoal.config import Config
from shoal.events.run import CheckpointAsked, RunPaused, RunResumed, RunStopped
from shoal.identity import Identity
from shoal.ids import RunId
from shoal.runtime.run_dir import RunNote
from shoal.transport.dispatch import dispatch
from shoal.transport.unix import open_unix_endpoint
from shoal.wire.messages.control import Order, Steer, Steered
from shoal.wire.messages.round import Record

pytestmark = pytest.mark.anyio


def kept(round: int) -> Record:
    return open_record(signed_record(round, [], keep=True))


class Host:
    """The client's host of a run, as far as it can be told something."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "client_0"
        self.identity = Identity.generate()
        self.note = RunNote(
            run_id="gpt-1",
            hosts="client",
            launcher_pid=1,
            begun_unix_s=0.0,
            log_dir="/logs",
            client=self.identity.peer_id,
            socket=str(self.path),
        )
        self.ledger = NotedLedger()
        self.has_turn = True
        self.stops = 0
        self.view = SimpleNamespace(mirrors=("a mirror",))
        self.checkpointing = Checkpointing(Config(), SystemClock(), SimpleNamespace(view=self.view))  # type: ignore[arg-type]
        # Whether the data server may lease, and how often the screens were told.
        self.leases: list[bool] = []
        self.shown = 0

    def pause(self, *, paused: bool) -> None:
        self.leases.append(not paused)

    def show(self) -> None:
        self.shown += 1

    def stop(self) -> None:
        self.stops += 1

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[None]:
        """Have the client listen."""
        async with open_unix_endpoint(
            peer_id=self.identity.peer_id, run_id=RunId(self.note.run_id), role="client", path=self.path
        ) as endpoint:
            stand_in: Any = SimpleNamespace
            pausing = Pausing(self.ledger, stand_in(pause=self.pause), stand_in(tell_swarm=self.show))
            succession: Any = self
            steering = Steering(endpoint, self.ledger, pausing, self.checkpointing, succession, stop=self.stop)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(dispatch, endpoint, (steering,))
                yield
                tasks.cancel_scope.cancel()

    async def told(self, order: Steer, within_s: float = 60.0) -> tuple[Steered | None, str]:
        return await ask_here(self.note, order, Steered, within_s, SystemClock())


async def test_a_stop_is_done_and_said_by_whom(tmp_path: Path) -> None:
    host = Host(tmp_path)
    async with host.listening():
        assert await host.told(Steer(7, "stop", "me@here")) == (Steered(7, 0), "")
    assert host.stops == 1
    assert host.ledger.noted == [RunStopped("me@here")]
    assert host.ledger.said == ["stopped by me@here"]


async def test_a_pause_and_its_end_are_done_once_and_said_by_whom(tmp_path: Path) -> None:
    host = Host(tmp_path)
    async with host.listening():
        assert await host.told(Steer(1, "resume", "me@here")) == (Steered(1, 0, already=True), "")
        assert await host.told(Steer(2, "pause", "me@here")) == (Steered(2, 0), "")
        assert await host.told(Steer(3, "pause", "you@there")) == (Steered(3, 0, already=True), "")
        assert host.ledger.totals.paused_by == "me@here"
        assert await host.told(Steer(4, "resume", "you@there")) == (Steered(4, 0), "")
    assert (host.leases, host.shown) == ([False, True], 2)
    assert [(type(event), event.by) for event in host.ledger.noted if isinstance(event, RunPaused | RunResumed)] == [
        (RunPaused, "me@here"),
        (RunResumed, "you@there"),
    ]
    assert host.ledger.said == ["paused by me@here: no step begins until `shoal resume-run`", "resumed by you@there"]


async def test_a_checkpoint_that_is_asked_for_is_one_of_the_next_record_alone(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.checkpointing.recorded(kept(1))
    async with host.listening():
        assert not host.checkpointing.is_due(2)
        assert await host.told(Steer(1, "checkpoint", "me@here")) == (Steered(1, 0), "")
        assert await host.told(Steer(2, "checkpoint", "you@there")) == (Steered(2, 0, already=True), "")
        assert host.checkpointing.is_due(2)
        host.checkpointing.recorded(kept(2))
        assert not host.checkpointing.is_due(3)
        host.view.mirrors = ()
        answer, _ = await host.told(Steer(3, "checkpoint", "me@here"))
        assert not host.checkpointing.is_due(10), "nobody would write it"
    assert answer is not None
    assert "no mirror is there to write it: run `shoal mirror`" in answer.refused
    assert host.ledger.noted == [CheckpointAsked("me@here")]


@pytest.mark.parametrize("what", get_args(Order))
async def test_a_client_that_waits_for_its_turn_steers_nobody_elses_run(tmp_path: Path, what: Order) -> None:
    host = Host(tmp_path)
    host.has_turn = False
    async with host.listening():
        answer, _ = await host.told(Steer(7, what, "me@here"))
    assert answer is not None
    assert answer.refused.startswith("this host's client waits for its turn")
    assert (host.stops, host.leases, host.ledger.noted) == (0, [], [])


async def test_a_client_that_is_just_started_again_is_dialled_until_it_listens(tmp_path: Path) -> None:
    host = Host(tmp_path)
    answers: list[Steered | None] = []

    async def tell() -> None:
        answers.append((await host.told(Steer(7, "stop", "me@here")))[0])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tell)
        await anyio.wait_all_tasks_blocked()
        async with host.listening():
            while not answers:
                await SystemClock().sleep_s(0.01)
    assert answers == [Steered(7, 0)]


async def test_a_run_that_ended_meanwhile_is_said_to_be_silent(tmp_path: Path) -> None:
    answer, problem = await Host(tmp_path).told(Steer(7, "stop", "me@here"), within_s=0.05)
    assert answer is None
    assert "No such file" in problem or "no answer" in problem
