"""A client waits for the servers that it needs, as long as it was told to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from tests.unit.client.noted import NotedLedger

from shoal.averaging.coordinator import Leading, RoundCoordinator
from shoal.client import gathering
from shoal.client.gathering import all_hold, is_where_it_was, lead, mirrored, wait_for_servers
from shoal.client.ledger import Ledger
from shoal.clock import SystemClock
from shoal.config import Config
from shoal.control.membership import Membership
from shoal.errors import NoPipeline
from shoal.events.base import Event
from shoal.events.mirror import MirrorsBehind
from shoal.events.stages import ServersFewer
from shoal.ids import PeerId

CONFIG = Config.model_validate({"model_pipeline": {"stages": 2}, "network": {"bootstrap_timeout_s": 0.01}})


class Unled:
    """Stands for a coordinator that no server answers before `answered` is set."""

    def __init__(self) -> None:
        self.leads = False
        self.answered = anyio.Event()

    def stand(self) -> None:
        self.leads = True

    async def leading(self) -> Leading:
        await self.answered.wait()
        return Leading(3, None, {}, "")


async def _lead(coordinator: Unled, **options: Any) -> Leading:
    return await lead(cast(RoundCoordinator, coordinator), Membership(SystemClock()), CONFIG, **options)


class Mirroring:
    """Stands for a coordinator one of whose mirrors gets another stage whenever that is waited for, up to a number."""

    round = 6

    def __init__(self, stages: int, gets: int) -> None:
        self.lacks = list(range(stages))
        self.gets = gets

    @property
    def unmirrored(self) -> frozenset[tuple[PeerId, int]]:
        return frozenset((PeerId("M"), stage) for stage in self.lacks)

    async def changed(self) -> None:
        if not self.gets:
            await anyio.sleep_forever()
        self.gets -= 1
        self.lacks.pop()


@pytest.mark.parametrize(("gets", "is_said"), [(3, False), (2, True), (0, True)])
async def test_mirrors_are_waited_for_as_long_as_they_get_further(
    monkeypatch: pytest.MonkeyPatch, gets: int, is_said: bool
) -> None:
    monkeypatch.setattr(gathering, "_NO_FURTHER_S", 0.01)
    noted: list[Event] = []
    ledger = SimpleNamespace(note=noted.append)
    await mirrored(cast(RoundCoordinator, Mirroring(3, gets)), cast(Ledger, ledger))
    assert noted == ([MirrorsBehind(5, 1, 0.01)] if is_said else [])


async def test_stages_without_servers_are_named_when_they_do_not_come_in_time() -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(NoPipeline, match="no replica serves stage 0, 1")):
        await _lead(Unled(), patient=False)


def test_a_client_gives_servers_that_compile_more_time() -> None:
    flow = {"stages": 2, "compile": True, "compile_timeout_s": 50.0}
    assert CONFIG.servers_timeout_s == CONFIG.network.bootstrap_timeout_s
    patient = Config.model_validate({"model_pipeline": flow, "network": {"bootstrap_timeout_s": 3.0}})
    assert patient.servers_timeout_s == 53.0


async def test_a_patient_client_waits_for_servers_however_long_it_takes() -> None:
    coordinator = Unled()
    async with anyio.create_task_group() as tasks:

        async def answer_late() -> None:
            with anyio.move_on_after(10 * CONFIG.network.bootstrap_timeout_s):
                await anyio.sleep_forever()
            coordinator.answered.set()

        tasks.start_soon(answer_late)
        assert (await _lead(coordinator, patient=True)).base_round == 3
    assert coordinator.leads


class Told:
    """Stands for a coordinator that hears of one more holder each time that it is asked."""

    def __init__(self, *holders: PeerId) -> None:
        self.left = list(holders)
        self.holders: dict[PeerId, int] = {}

    async def changed(self) -> None:
        if not self.left:
            await anyio.sleep_forever()
        self.holders[self.left.pop(0)] = 0


@pytest.mark.parametrize("comes", [True, False])
async def test_a_resumed_run_begins_with_all_servers_that_are_there_unless_one_takes_long(comes: bool) -> None:
    a, b = PeerId("a"), PeerId("b")
    membership = SimpleNamespace(view=SimpleNamespace(replicas=[SimpleNamespace(peer=a), SimpleNamespace(peer=b)]))
    coordinator = Told(a, b) if comes else Told(a)
    network = {"bootstrap_timeout_s": 60.0 if comes else 0.01}
    config = Config.model_validate({"model_pipeline": {"stages": 2}, "network": network})
    await all_hold(cast(RoundCoordinator, coordinator), cast(Membership, membership), config)
    assert coordinator.holders.keys() == ({a, b} if comes else {a})


def test_a_client_that_resumes_goes_on_where_the_checkpoint_was_and_nowhere_else() -> None:
    kept, newer = Leading(4, None, {}, "kept"), Leading(6, None, {}, "newer")
    assert is_where_it_was(None, "kept", kept, succeeds=False)
    assert not is_where_it_was(None, "kept", newer, succeeds=False), "servers that are there hold what is newer"
    assert is_where_it_was(None, "", Leading(0, None, {}, "D0"), succeeds=False)


async def test_a_client_goes_on_with_fewer_servers_than_were_started_if_each_stage_has_one() -> None:
    async def never(_: object) -> None:
        await anyio.sleep_forever()

    view = SimpleNamespace(replicas=(1, 2), max_pipelines=lambda _: 1)
    membership = cast(Membership, SimpleNamespace(view=view, wait_for=never))
    ledger = NotedLedger()
    await wait_for_servers(membership, CONFIG, ledger, cast(RoundCoordinator, None), 4, patient=False)
    assert ledger.noted == [ServersFewer(4, 2)]
