"""What a scout says of the run that it watches."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import cast

import anyio
import pytest
from anyio.abc import TaskGroup
from msgspec.structs import replace
from tests.alongside import alongside, until

from shoal.clock import SystemClock
from shoal.config import config_to_json
from shoal.config.load import load_config
from shoal.control import run_end, scout
from shoal.control.membership import Membership
from shoal.control.records import (
    ClientRecord,
    GoneRecord,
    MonitorRecord,
    Record,
    RunRecord,
    StageRecord,
    VerifiedRecord,
)
from shoal.control.registry import Registry
from shoal.control.role_start import RoleStart
from shoal.control.run_end import RunWatch
from shoal.control.run_question import RunTeller
from shoal.control.scout import _running, _tell_peers, _watch
from shoal.errors import BootstrapError, ConnectionLost
from shoal.ids import PeerId
from shoal.runtime.launcher_messages import FromRole, InitialPeers, RunAnnounced, RunConcluded
from shoal.swarm.view import Run
from shoal.transport.dispatch import dispatch
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import RunOver, TellRun


class Board:
    """Where a scout reads what others announce, and what it announces itself."""

    def __init__(self) -> None:
        self.membership = Membership(SystemClock())
        self.own: RunRecord | None = None

    def advertise(self, record: RunRecord) -> None:
        self.own = record
        self._update(1, record)

    async def withdraw(self) -> None:
        self.own = None
        self._update(2, GoneRecord())

    def _update(self, sequence: int, record: RunRecord | GoneRecord) -> None:
        self.membership.update([VerifiedRecord("run", PeerId("S"), sequence, SystemClock().unix_s() + 100, record)])


KEPT = RunRecord("r", 2, 5.0, kept=True)


def _start(timeout_s: float) -> RoleStart:
    config = load_config(None, [f"--network.bootstrap-timeout-s={timeout_s}", "--experiment-prefix=sandbox"])
    return RoleStart(
        run_id="",
        role="scout",
        index=0,
        config_json=config_to_json(config),
        identity_key=b"i" * 32,
        swarm_key=b"k" * 32,
        socket_path="/nowhere",
        log_dir="/nowhere",
    )


START, PATIENT = _start(0.1), _start(60.0)


class Told:
    """What the launcher is told."""

    def __init__(self) -> None:
        self.events: list[FromRole] = []

    def tell(self, message: FromRole) -> None:
        self.events.append(message)


CLIENT, SCOUT = PeerId("C"), PeerId("S")
ANNOUNCED = RunRecord("r", 2, 1.0)


class Scene:
    """A scout that watches, its registry, and a client that it can reach."""

    def __init__(self, tasks: TaskGroup) -> None:
        self.board, self.told, self.tasks = Board(), Told(), tasks
        self.network = MemoryNetwork()
        self.endpoint = self.network.endpoint(SCOUT)
        self.watch = RunWatch("r", self.endpoint, self.board.membership, SystemClock())
        self.confirmed = False
        self.questions: list[str] = []
        self.over = anyio.Event()
        self._sequence = 0

    def hear(self, topic: str, record: Record, peer: PeerId = CLIENT) -> None:
        self._sequence += 1
        expires_unix_s = SystemClock().unix_s() + 100
        self.board.membership.update([VerifiedRecord(topic, peer, self._sequence, expires_unix_s, record)])

    def start_client(self) -> MemoryEndpoint:
        client = self.network.endpoint(CLIENT)
        self.tasks.start_soon(dispatch, client, (RunTeller(client, {}, lambda: CLIENT),))
        self.hear("client", ClientRecord(("memory:C",), 1.0))
        self.hear("run", ANNOUNCED)
        return client

    async def is_replaced_by(self, run: Run) -> bool:
        self.questions.append(run.run_id)
        return self.confirmed

    async def watches(self) -> None:
        await _watch(self.board, KEPT, self.watch, self.is_replaced_by, self.told)
        self.over.set()


@asynccontextmanager
async def watching() -> AsyncIterator[Scene]:
    async with anyio.create_task_group() as tasks:
        scene = Scene(tasks)
        tasks.start_soon(dispatch, scene.endpoint, (scene.watch,))
        tasks.start_soon(scene.watch.run)
        tasks.start_soon(scene.watches)
        yield scene
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("last", "reason", "ended_well"),
    [
        (RunOver(False, ""), "run r has ended", True),
        (RunOver(True, ""), "run r has ended (interrupted at its client)", True),
        (RunOver(False, "no disk"), "run r has failed: no disk", False),
    ],
)
async def test_the_launcher_hears_from_the_client_how_a_run_ends(last: RunOver, reason: str, ended_well: bool) -> None:
    async with watching() as scene:
        client = scene.start_client()
        await anyio.wait_all_tasks_blocked()
        assert scene.watch.client == CLIENT
        assert scene.told.events == []
        client.post(SCOUT, last)
        await scene.over.wait()
    assert scene.told.events == [RunConcluded(reason, ended_well)]


@pytest.mark.parametrize(
    "said",
    [
        replace(ANNOUNCED, ended=True),
        RunRecord("other", 2, 0.0),
        RunRecord("other", 2, 0.0, ended=True),
        RunRecord("other", 2, 0.0, kept=True),
        GoneRecord(),
    ],
    ids=repr,
)
@pytest.mark.parametrize("by", [CLIENT, PeerId("evil")])
async def test_nothing_that_the_registry_says_makes_a_host_leave(said: Record, by: PeerId) -> None:
    """Neither while the client is there nor without it."""
    async with watching() as scene:
        scene.start_client()
        await anyio.wait_all_tasks_blocked()
        scene.hear("run", said, by)
        await anyio.wait_all_tasks_blocked()
        assert scene.told.events == [], "its client is connected"
        assert not scene.questions
        scene.network.kill(CLIENT)
        await anyio.wait_all_tasks_blocked()
        assert not scene.over.is_set()
        assert [said for said in scene.told.events if not isinstance(said, RunAnnounced)] == []


async def test_a_client_that_is_announced_no_more_is_found_again_though_the_registry_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_end, "ASK_AGAIN_S", 0.01)
    monkeypatch.setattr(run_end, "SELDOM_S", 0.02)
    async with watching() as scene:
        scene.start_client()
        await anyio.wait_all_tasks_blocked()
        scene.hear("client", GoneRecord())
        scene.hear("run", GoneRecord())
        scene.network.kill(CLIENT)
        await anyio.wait_all_tasks_blocked()
        assert scene.told.events == [RunAnnounced(False)]
        client = scene.network.endpoint(CLIENT)
        scene.tasks.start_soon(dispatch, client, (RunTeller(client, {}, lambda: CLIENT),))
        while scene.watch.client is None:
            await scene.watch.changed()
        await anyio.wait_all_tasks_blocked()
    assert scene.told.events == [RunAnnounced(False), RunAnnounced(True)]


async def test_a_run_is_left_for_another_when_that_ones_client_says_so_and_this_ones_is_gone() -> None:
    async with watching() as scene:
        scene.start_client()
        await anyio.wait_all_tasks_blocked()
        scene.confirmed = True
        scene.hear("run", RunRecord("other", 2, 0.0), PeerId("D"))
        await anyio.wait_all_tasks_blocked()
        assert not scene.over.is_set()
        scene.network.kill(CLIENT)
        await scene.over.wait()
    assert scene.questions == ["other"]
    assert scene.told.events == [RunConcluded("a new run, other, has begun in place of r", False)]


async def test_a_run_that_is_silent_is_not_over_and_may_come_back() -> None:
    kept: list[RunRecord | None] = []
    async with watching() as scene:
        scene.hear("run", ANNOUNCED)
        await anyio.wait_all_tasks_blocked()
        for record in (GoneRecord(), ANNOUNCED):
            scene.hear("run", record)
            await anyio.wait_all_tasks_blocked()
            kept.append(scene.board.own)
    assert kept == [KEPT, None], "while no client announces the run, the scout does, so that the next one finds it"
    told = scene.told.events
    assert told == [RunAnnounced(False), RunAnnounced(True)]


async def test_a_client_that_is_lost_is_asked_again_until_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_end, "ASK_AGAIN_S", 0.01)
    async with watching() as scene:
        scene.start_client()
        await anyio.wait_all_tasks_blocked()
        scene.network.kill(CLIENT)
        while scene.watch.client is not None:
            await anyio.lowlevel.checkpoint()
        scene.start_client()
        while scene.watch.client is None:
            await anyio.lowlevel.checkpoint()
    assert scene.told.events == []


@dataclass
class Silent:
    """A registry in which no run is announced."""

    clock_difference_s: float | None
    membership: Membership


@pytest.mark.parametrize(
    ("difference_s", "message"),
    [
        (3600.0, "an initial peer answered, but the clock there is about 3600 s ahead of this host's"),
        (-7200.4, "an initial peer answered, but the clock there is about 7200 s behind this host's"),
        (None, "none of them knew a run with experiment_prefix = sandbox"),
    ],
)
async def test_who_finds_no_run_is_told_when_the_clocks_are_the_reason(
    difference_s: float | None, message: str
) -> None:
    silent = Silent(difference_s, Membership(SystemClock()))
    with pytest.raises(BootstrapError, match=message):
        await _running(cast("Registry", silent), START)


async def test_a_run_is_found_when_a_peer_of_it_confirms_it_and_never_by_its_record_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that is dead is announced for a while, and a forged record would be as well."""
    asked: list[tuple[str, tuple[PeerId, ...]]] = []

    async def ask(_start: object, run_id: str, hops: Sequence[Hop]) -> tuple[PeerId, TellRun]:
        asked.append((run_id, tuple(hop.peer for hop in hops)))
        if CLIENT in asked[-1][1]:
            raise ConnectionLost("C: refused")
        return hops[0].peer, TellRun(b"true", None, SystemClock().unix_s())

    monkeypatch.setattr(scout, "ask_run", ask)
    board = Silent(None, Membership(SystemClock()))
    expires_unix_s = SystemClock().unix_s() + 100
    records: list[tuple[str, str, Record]] = [
        ("C", "run", RunRecord("evil", 2, 0.0)),
        ("C", "client", ClientRecord(("memory:C",), 0.0)),
        ("K", "run", RunRecord("r", 2, 1.0, kept=True)),
    ]
    board.membership.update(
        VerifiedRecord(topic, PeerId(peer), 1, expires_unix_s, said) for peer, topic, said in records
    )
    async with anyio.create_task_group() as tasks:

        async def serve() -> None:
            await until(lambda: asked)
            record = StageRecord(("memory:V",), 1.0, stage=0)
            board.membership.update([VerifiedRecord("stage.0", PeerId("V"), 1, expires_unix_s, record)])

        tasks.start_soon(serve)
        run, told = await _running(cast("Registry", board), PATIENT)
    assert (run.run_id, told.config) == ("r", b"true")
    assert asked == [("evil", (CLIENT,)), ("r", (PeerId("V"),))]


@pytest.mark.parametrize(("ahead_s", "is_refused"), [(0.0, False), (13.0, False), (17.0, True), (-45.0, True)])
async def test_a_host_of_another_time_serves_no_run_that_it_finds(
    ahead_s: float, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(_start: object, run_id: str, hops: Sequence[Hop]) -> tuple[PeerId, TellRun]:
        return hops[0].peer, TellRun(b"true", None, SystemClock().unix_s() + ahead_s)

    monkeypatch.setattr(scout, "ask_run", ask)
    board = Silent(None, Membership(SystemClock()))
    for topic, record in (("run", ANNOUNCED), ("client", ClientRecord(("memory:C",), 0.0))):
        board.membership.update([VerifiedRecord(topic, CLIENT, 1, SystemClock().unix_s() + 100, record)])
    refused = (
        pytest.raises(BootstrapError, match=r"clock there is about .* set the clock") if is_refused else nullcontext()
    )
    with refused:
        await _running(cast("Registry", board), START)


async def test_who_reaches_no_peer_of_a_run_is_told_which_port_to_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(*_: object) -> tuple[PeerId, TellRun]:
        raise ConnectionLost("C: tcp:10.0.0.1:5: no answer")

    monkeypatch.setattr(scout, "ask_run", ask)
    board = Silent(None, Membership(SystemClock()))
    for topic, record in (("run", ANNOUNCED), ("client", ClientRecord(("tcp:10.0.0.1:5",), 0.0))):
        board.membership.update([VerifiedRecord(topic, CLIENT, 1, SystemClock().unix_s() + 100, record)])
    with pytest.raises(BootstrapError, match=r"run r is announced.*network\.data_port.*10\.0\.0\.1:5"):
        await _running(cast("Registry", board), START)


async def test_the_launcher_is_told_where_the_swarm_can_be_joined_whenever_that_changes() -> None:
    membership, told = Membership(SystemClock()), Told()
    async with alongside() as tasks:
        tasks.start_soon(_tell_peers, membership, told)
        for number in (1, 2):
            await anyio.wait_all_tasks_blocked()
            record = MonitorRecord(("unix:/m",), 1.0, maddrs=(f"/m{number}",))
            expires_unix_s = SystemClock().unix_s() + 100
            membership.update([VerifiedRecord("monitor", PeerId("M"), number, expires_unix_s, record)])
        await anyio.wait_all_tasks_blocked()
    assert told.events == [InitialPeers(("/m1",)), InitialPeers(("/m2",))]
