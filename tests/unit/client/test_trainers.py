"""Which trainers are started, and when one counts as there."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
from tests.unit.client.noted import NotedLedger

from shoal.client.trainers import TrainerPool
from shoal.clock import SystemClock
from shoal.errors import ControlError
from shoal.ids import PeerId
from shoal.runtime.launcher_messages import LauncherAnswer, StartTrainer
from shoal.transport.base import Received
from shoal.transport.memory import MemoryNetwork
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import TrainerHello, TrainerStuck


def hello(slot: int, generation: int, *, hop: str | None = None) -> Received:
    name = f"T{slot}"
    return Received(PeerId(name), TrainerHello(slot, generation, Hop(PeerId(hop or name), (f"memory:{name}",))))


class Launcher:
    """Starts trainers by calling `on_start(slot, generation)`."""

    def __init__(self) -> None:
        self.started: list[tuple[int, int]] = []
        self.on_start: Callable[[int, int], None] = lambda _slot, _generation: None
        self.error: str | None = None

    async def request(self, asked: StartTrainer) -> LauncherAnswer:
        assert isinstance(asked, StartTrainer)
        self.started.append((asked.slot, asked.generation))
        self.on_start(asked.slot, asked.generation)
        return LauncherAnswer(self.error or "")


def make_pool(launcher: Launcher, start_timeout_s: float = 5.0, above: int = 0) -> TrainerPool:
    endpoint = MemoryNetwork().endpoint(PeerId("client"))
    ledger = NotedLedger()
    return TrainerPool(
        endpoint=endpoint, launcher=launcher, ledger=ledger, start_timeout_s=start_timeout_s, above=above
    )


def say_hello(pool: TrainerPool) -> Callable[[int, int], None]:
    return lambda slot, generation: (pool.receive(hello(slot, generation)), None)[1]


async def test_only_slots_without_a_trainer_get_one() -> None:
    launcher = Launcher()
    pool = make_pool(launcher)
    launcher.on_start = say_hello(pool)
    await pool.ensure(2)
    await pool.ensure(3)
    assert launcher.started == [(0, 1), (1, 1), (2, 1)]
    assert sorted(pool.present) == [0, 1, 2]
    assert pool.slot_of(PeerId("T1")) == 1
    assert pool.slot_of(PeerId("T7")) is None


async def test_a_lost_trainer_is_followed_by_the_next_generation() -> None:
    launcher = Launcher()
    pool = make_pool(launcher)
    launcher.on_start = say_hello(pool)
    await pool.ensure(2)
    pool.peer_lost(PeerId("T0"))
    pool.peer_lost(PeerId("somebody"))
    assert list(pool.present) == [1]
    await pool.ensure(2)
    assert launcher.started[2:] == [(0, 2)]
    assert pool.generations == {0: 2, 1: 1}


async def test_a_trainer_that_is_lost_right_after_its_hello_is_not_waited_for() -> None:
    launcher = Launcher()
    pool = make_pool(launcher)
    async with anyio.create_task_group() as tasks:

        async def come_and_go() -> None:
            await anyio.wait_all_tasks_blocked()
            pool.receive(hello(0, 1))
            pool.peer_lost(PeerId("T0"))

        tasks.start_soon(come_and_go)
        await pool.ensure(1)
    assert not pool.present


@pytest.mark.parametrize("stale", [hello(0, 0), hello(0, 2), hello(1, 1), hello(0, 1, hop="somebody")])
async def test_a_hello_that_was_not_asked_for_is_ignored(stale: Received) -> None:
    launcher = Launcher()
    pool = make_pool(launcher)

    def answer(slot: int, generation: int) -> None:
        assert pool.receive(stale)
        assert not pool.present
        pool.receive(hello(slot, generation))

    launcher.on_start = answer
    await pool.ensure(1)
    assert list(pool.present) == [0]


async def test_hellos_that_go_on_and_were_not_asked_for_leave_a_few_lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SystemClock, "now_s", lambda _: 0.0)
    pool = make_pool(Launcher())
    caplog.clear()  # what a test before has made loud
    for generation in range(30):
        assert pool.receive(hello(0, generation + 1))
    assert [record.getMessage() for record in caplog.records] == ["trainer.stale"] * 5


async def test_other_messages_are_not_taken() -> None:
    assert not make_pool(Launcher()).receive(Received(PeerId("T0"), TrainerStuck(0, 1, ())))


async def test_a_trainer_that_cannot_be_started_is_an_error_with_the_reason() -> None:
    launcher = Launcher()
    launcher.error = "no memory"
    with pytest.raises(ControlError, match=r"trainer 0 .* no memory"):
        await make_pool(launcher).ensure(2)


async def test_silence_of_all_trainers_is_an_error_that_names_them() -> None:
    with pytest.raises(ControlError, match=r"trainers \[0, 1\]"):
        await make_pool(Launcher(), start_timeout_s=0.01).ensure(2)


async def test_the_run_goes_on_without_a_silent_trainer_and_tries_again_later() -> None:
    launcher = Launcher()
    pool = make_pool(launcher, start_timeout_s=0.01)
    launcher.on_start = lambda slot, generation: slot == 0 and pool.receive(hello(slot, generation))
    await pool.ensure(2)
    assert list(pool.present) == [0]
    launcher.on_start = say_hello(pool)
    await pool.ensure(2)
    assert sorted(pool.present) == [0, 1]
    assert launcher.started[2:] == [(1, 2)]


async def test_trainers_that_run_are_adopted_and_not_started_again() -> None:
    launcher = Launcher()
    pool = make_pool(launcher)
    launcher.on_start = say_hello(pool)
    pool.adopt({0: 2, 1: 1, 2: 4}, [0, 2])
    async with anyio.create_task_group() as tasks:

        async def return_later() -> None:
            for slot, generation in ((0, 2), (1, 1), (2, 4)):
                await anyio.wait_all_tasks_blocked()
                message = TrainerHello(slot, generation, Hop(PeerId(f"T{slot}"), ("memory:T",)), round=3 + slot)
                pool.receive(Received(PeerId(f"T{slot}"), message))

        tasks.start_soon(return_later)
        await pool.returned(60.0)
    assert [pool.round_of(slot) for slot in (0, 2, 5)] == [3, 5, 0]
    pool.peer_lost(PeerId("T1"))
    await pool.ensure(3)
    assert launcher.started == [(1, 2)]


async def test_an_adopted_trainer_that_does_not_come_back_is_replaced() -> None:
    launcher = Launcher()
    pool = make_pool(launcher)
    launcher.on_start = say_hello(pool)
    pool.adopt({0: 1}, [0])
    await pool.returned(0.01)
    await pool.ensure(1)
    assert launcher.started == [(0, 2)]


async def test_trainers_of_a_client_that_succeeds_others_come_after_all_of_theirs() -> None:
    launcher = Launcher()
    pool = make_pool(launcher, above=1000)
    launcher.on_start = say_hello(pool)
    pool.begin_above({1: 1007}, 1000)
    await pool.ensure(2)
    assert launcher.started == [(0, 1001), (1, 2008)]


async def test_after_another_chain_was_chosen_all_trainers_are_started_anew() -> None:
    launcher = Launcher()
    pool = make_pool(launcher)
    launcher.on_start = say_hello(pool)
    await pool.ensure(2)
    pool.begin_above({1: 1007}, 1000)
    assert not pool.present
    assert pool.receive(hello(0, 1)), "an earlier one is not believed"
    assert not pool.present
    await pool.ensure(2)
    assert launcher.started == [(0, 1), (1, 1), (0, 1002), (1, 2008)]
