"""Whose reports count, who is waited for, and what the monitor hears."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from msgspec import structs
from tests.alongside import alongside
from tests.set_clock import PassingClock
from tests.unit.client.noted import NotedLedger
from tests.unit.client.present import present_trainers

from shoal.client.counters import CounterTotals
from shoal.client.divergence import ALONE_IN_A_ROW, Divergence
from shoal.client.reports import MAX_FIGURES, STEPS_TOGETHER_S, Reports
from shoal.clock import SystemClock
from shoal.config.diloco import DilocoConfig
from shoal.events.run import (
    DataSized,
    EvaluationDone,
    PipelineSkips,
    RoundBegun,
    ShareEvaluated,
    StepReported,
    TrainerFinished,
)
from shoal.events.trainers import StepRefused
from shoal.ids import PeerId, StageIndex, StepKey
from shoal.runtime.waking import Signal
from shoal.swarm.routing import Pipeline
from shoal.swarm.trainer_slots import TrainerSlots
from shoal.swarm.view import Replica, SwarmView
from shoal.transport.base import Received
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork
from shoal.wire.messages import Message
from shoal.wire.messages.base import Hop, RouterReport
from shoal.wire.messages.control import EvalReport, Metrics, StepReport, TrainerDone, TrainerStuck, UpdateReplicas

pytestmark = pytest.mark.anyio


class _Enough(Exception):
    """The second sleep."""


class _OneTick(SystemClock):
    """Sleeps once, for no time."""

    slept = False

    async def sleep_s(self, duration_s: float) -> None:
        if self.slept:
            raise _Enough
        self.slept = True


HOPS = tuple(Hop(PeerId(f"server{slot}"), ("unix:/s",)) for slot in (0, 1))
PIPELINES = tuple(Pipeline(slot, (hop,)) for slot, hop in enumerate(HOPS))
NUMBERS = {"pipelines": 2.0, "alive_peers": 5.0, "missing_stages": 0.0, "paused": 0.0, "replicas/0": 2.0}


class _Swarm:
    """Two servers of one stage, and the homes that are made of them."""

    def __init__(self) -> None:
        self.view = SwarmView(tuple(Replica(hop, 0.0, stage=StageIndex(0)) for hop in HOPS))
        self.pipelines = PIPELINES
        self.times_told = 0
        self.has_changed = Signal()

    def tell_trainers(self) -> None:
        self.times_told += 1

    async def changed(self) -> None:
        await self.has_changed.wait()


@dataclass
class Desk:
    reports: Reports
    clock: PassingClock
    slots: TrainerSlots
    monitor: MemoryEndpoint
    client: MemoryEndpoint
    ledger: NotedLedger
    swarm: _Swarm

    def hear(self, slot: int, message: Message) -> bool:
        return self.reports.receive(Received(PeerId(f"T{slot}"), message))

    def begin_round(self, round: int, steps: int = 4) -> None:
        """As the round loop does."""
        self.ledger.note(RoundBegun(round, steps, 2, 2, 4))
        self.reports.begin_round(round, PIPELINES)
        self.ledger.noted.clear()

    def lose(self, slot: int) -> None:
        """As a dispatcher does: the machine of the trainers first."""
        self.slots.lost(PeerId(f"T{slot}"), 0.0)
        self.reports.peer_lost(PeerId(f"T{slot}"))

    async def metrics(self) -> list[dict[str, float]]:
        return [message.values for message in await self.messages()]

    async def messages(self) -> list[Metrics]:
        """All that the monitor was sent until now, and has not been asked for yet."""
        self.monitor.post(self.monitor.peer_id, Metrics("end", self.monitor.peer_id, 0, {}))
        found: list[Metrics] = []
        async for event in self.monitor.events():
            if isinstance(event, Received) and isinstance(event.message, Metrics):
                if event.message.role == "end":
                    break
                found.append(event.message)
        return found


@pytest.fixture
async def desk() -> Desk:
    network = MemoryNetwork()
    endpoint, monitor = network.endpoint(PeerId("client")), network.endpoint(PeerId("monitor"))
    clock, ledger, slots = PassingClock(), NotedLedger(), present_trainers(2)
    swarm: Any = _Swarm()
    reports = Reports(
        endpoint=endpoint,
        monitor=monitor.hop,
        trainers=slots,
        homes=swarm,
        membership=swarm,
        num_stages=1,
        ledger=ledger,
        divergence=Divergence(DilocoConfig()),
        clock=clock,
    )
    ledger.note(DataSized(100, 10))
    desk = Desk(reports, clock, slots, monitor, endpoint, ledger, swarm)
    desk.begin_round(1)
    return desk


def step(slot: int, number: int = 0) -> StepReport:
    return StepReport(slot, 1, StepKey(slot, 1, number, 0), 4, 4, 5.0, 1.0, 0.1, False, 0.5, 7.0 + number)


def done(slot: int, round: int = 1) -> TrainerDone:
    return TrainerDone(slot, round, 1, 4, {"control": 1})


async def test_reports_of_the_slots_own_trainer_count(desk: Desk) -> None:
    assert desk.hear(1, step(1))
    assert desk.hear(0, EvalReport(0, 3, 30.0, 10, 10))
    assert (desk.reports.progress.steps, desk.reports.progress.samples) == (1, 4)
    assert desk.reports.progress.eval_losses == {3: 3.0}


@pytest.mark.parametrize(
    "message",
    [step(0), EvalReport(0, 1, 0.0, 10, 10), done(0), TrainerStuck(0, 1, (1,))],
    ids=lambda m: type(m).__name__,
)
async def test_reports_for_another_slot_are_taken_and_ignored(desk: Desk, message: Message) -> None:
    for slot in (1, 7):
        assert desk.hear(slot, message)
    assert desk.reports.progress.steps == 0
    assert not desk.reports.progress.eval_losses
    assert not desk.reports.progress.sent_bytes
    assert desk.swarm.times_told == 0


async def test_a_stranger_that_goes_on_reporting_leaves_a_few_lines(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(30):
        assert desk.hear(7, step(0))
    assert [record.getMessage() for record in caplog.records] == ["report.stranger"] * 5


async def test_what_is_no_report_is_left_to_others(desk: Desk) -> None:
    assert not desk.hear(0, UpdateReplicas(()))


async def test_since_when_servers_refuse_a_step_counts_from_the_last_one_that_was_committed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert desk.reports.refused_since_s is None
    first_s = now_s = 100.0
    monkeypatch.setattr(desk.ledger, "run_s", lambda: now_s)
    desk.hear(0, TrainerStuck(0, 1, (), "ValueError: odd\nnumber"))
    assert desk.reports.refusal == "ValueError: odd number"
    now_s += 60.0
    desk.hear(0, TrainerStuck(0, 1, (), "ValueError: odd\nnumber"))
    assert desk.reports.refused_since_s == first_s
    desk.hear(1, step(1))
    assert desk.reports.refused_since_s == first_s + 60.0, "another trainer goes on"
    desk.hear(0, step(0))
    assert (desk.reports.refused_since_s, desk.reports.refusal) == (None, "")


async def test_all_steps_are_refused_while_each_trainer_that_has_something_left_waits(desk: Desk) -> None:
    desk.begin_round(1)
    desk.hear(0, TrainerStuck(0, 1, (1,)))
    assert not desk.reports.is_refused, "another one trains"
    desk.hear(1, TrainerStuck(1, 1, (), "OutOfMemoryError"))
    assert desk.reports.is_refused
    desk.hear(1, step(1))
    assert not desk.reports.is_refused
    desk.hear(1, done(1))
    assert desk.reports.is_refused, "the other one still waits"
    desk.begin_round(2)
    assert not desk.reports.is_refused
    assert (desk.reports.refusal, desk.reports.refused_since_s) == ("", None), "of a round that is over"


async def test_the_model_fails_if_it_does_for_each_trainer_that_has_something_left(desk: Desk) -> None:
    desk.begin_round(1)
    fails = TrainerStuck(0, 1, (), "ValueError: odd\nnumber (/own/net.py line 9)", is_model=True)
    desk.hear(0, fails)
    assert desk.reports.mistake == "", "another one trains"
    desk.hear(1, TrainerStuck(1, 1, (), "OutOfMemoryError"))
    assert (desk.reports.is_refused, desk.reports.mistake) == (True, "")
    desk.hear(1, structs.replace(fails, slot=1))
    assert desk.reports.mistake == "ValueError: odd number (/own/net.py line 9)"
    desk.hear(1, step(1))
    changed = desk.reports.refused_changed.coming
    desk.hear(1, done(1))
    assert changed.is_set(), "who waits for that looks again"
    assert desk.reports.is_refused
    assert desk.reports.mistake == "", "a server may have done the step of the other one since"
    desk.hear(0, fails)
    assert desk.reports.mistake
    desk.hear(0, TrainerStuck(0, 1, (1,)))
    assert desk.reports.mistake == "", "now its servers are lost"
    desk.hear(0, structs.replace(fails, refusal=""))
    assert desk.reports.mistake == "", "nobody has said what is wrong"
    desk.hear(0, fails)
    desk.hear(1, structs.replace(fails, slot=1))
    desk.begin_round(2)
    assert desk.reports.mistake == "", "of a round that is over"
    desk.hear(0, fails)
    desk.hear(1, structs.replace(fails, slot=1))
    assert desk.reports.mistake
    desk.lose(1)
    desk.slots.want(2)
    assert desk.reports.mistake == "", "the next trainer of the other slot may do better"


async def test_a_stuck_trainer_has_all_be_told_who_may_be_used(desk: Desk) -> None:
    desk.hear(0, TrainerStuck(0, 1, (1,)))
    assert desk.swarm.times_told == 1


async def test_that_no_server_can_compute_a_step_is_said_once_until_one_can(desk: Desk) -> None:
    refused = TrainerStuck(0, 1, (), "ValueError: odd\nnumber")
    for message in (refused, refused, step(0), refused):
        desk.hear(0, message)
    assert desk.swarm.times_told == 3
    told = [event for event in desk.ledger.noted if isinstance(event, StepRefused)]
    assert told == [StepRefused(0, "ValueError: odd number")] * 2


async def test_a_pipeline_that_alone_computes_no_numbers_is_said_once_with_its_servers(desk: Desk) -> None:
    def hear(slot: int, number: int, *, skipped: bool) -> list[PipelineSkips]:
        report = structs.replace(step(slot, number), skipped=skipped)
        assert desk.hear(slot, report)
        told = [event for event in desk.ledger.noted if isinstance(event, PipelineSkips)]
        desk.ledger.noted.clear()
        return told

    told = [hear(slot, number, skipped=slot == 1) for number in range(3 * ALONE_IN_A_ROW) for slot in (0, 1)]
    assert [index for index, each in enumerate(told) if each] == [2 * ALONE_IN_A_ROW + 1], "as many of the other one"
    [said] = told[2 * ALONE_IN_A_ROW + 1]
    assert said == PipelineSkips(1, ALONE_IN_A_ROW, desk.swarm.view.name_of(HOPS[1].peer))
    # Where all skip it is no fault of a server; and a step that is trained begins the row anew.
    last = 3 * ALONE_IN_A_ROW
    assert not hear(1, last, skipped=False)
    alike = range(last + 1, last + 2 * ALONE_IN_A_ROW)
    assert not [event for number in alike for slot in (0, 1) for event in hear(slot, number, skipped=True)]


def waits(desk: Desk, slots: frozenset[int]) -> bool:
    return not all(desk.slots.is_done(slot) for slot in slots)


async def test_all_trainers_of_the_round_are_waited_for(desk: Desk) -> None:
    both = frozenset({0, 1})
    desk.hear(0, done(0))
    assert waits(desk, both)
    assert not waits(desk, frozenset({0}))
    desk.hear(1, done(1, round=0))
    assert waits(desk, both), "that was the round before"
    desk.hear(1, done(1))
    assert not waits(desk, both)
    desk.begin_round(2)
    assert waits(desk, both)


async def test_a_lost_trainer_is_waited_for_until_its_slot_is_excused(desk: Desk) -> None:
    desk.hear(0, done(0))
    desk.lose(1)
    assert waits(desk, frozenset({0, 1}))
    assert not desk.slots.is_done(1)
    desk.slots.finish(1)
    assert desk.slots.is_done(1)
    assert not waits(desk, frozenset({0, 1}))


async def test_the_last_reported_step_of_a_slot_is_known(desk: Desk) -> None:
    assert desk.reports.last_number(0) == -1
    desk.hear(0, step(0))
    assert (desk.reports.last_number(0), desk.reports.last_number(1)) == (0, -1)


async def test_the_last_evaluation_is_no_round(desk: Desk) -> None:
    desk.begin_round(2, steps=0)
    assert desk.reports.progress.round == 1
    desk.hear(0, done(0, round=2))
    assert not waits(desk, frozenset({0}))


async def test_a_monitor_that_was_lost_is_left_alone_for_a_while(desk: Desk) -> None:
    desk.reports.peer_lost(PeerId("monitor"))
    desk.reports.post({"early": 1.0})
    desk.clock.now += 1.0
    desk.reports.post({"late": 1.0})
    assert await desk.metrics() == [{"late": 1.0}]


async def test_the_monitor_hears_of_steps_and_of_complete_evaluations(desk: Desk) -> None:
    desk.hear(0, step(0))
    desk.hear(0, EvalReport(0, 0, 4.0, 4, 4))
    desk.hear(1, EvalReport(1, 0, 26.0, 6, 6))
    of_step, of_evaluation = await desk.metrics()
    assert of_step["loss/train"] == 5.0
    assert of_step["pipelines"] == 2.0
    assert of_evaluation == {"loss/eval": 3.0, "samples": 4.0}


async def test_numbers_of_steps_that_follow_each_other_soon_are_told_together_and_none_is_kept_back(desk: Desk) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.reports.run)
        await anyio.wait_all_tasks_blocked()
        await desk.messages()
        for number, loss in enumerate((5.0, 4.0, 1.0)):
            desk.hear(0, structs.replace(step(0, number), loss=loss))
        await anyio.wait_all_tasks_blocked()
        [first] = await desk.messages()
        assert (first.steps, first.values["step"], first.values["loss/train"]) == (1, 1.0, 5.0)
        desk.clock.pass_s(STEPS_TOGETHER_S)
        await anyio.wait_all_tasks_blocked()
        [others] = await desk.messages()
        assert (others.steps, others.values["step"], others.values["loss/train"]) == (2, 3.0, 2.5)
        assert others.values["pipelines"] == 2.0
        # What comes beside steps is told at once, after what came before it.
        desk.hear(0, step(0, 3))
        desk.reports.post({"share/0": 1.0})
        assert [message.values.get("step") for message in await desk.messages()] == [4.0, None]
        desk.hear(0, step(0, 4))
        tasks.cancel_scope.cancel()
    assert [message.values["step"] for message in await desk.messages()] == [5.0]


async def test_what_steps_have_come_to_is_told_at_a_tick(desk: Desk) -> None:
    async with alongside(desk.reports.run):
        await anyio.wait_all_tasks_blocked()
        desk.clock.pass_s(0.3)
        desk.hear(0, step(0, 0))
        desk.clock.pass_s(0.1)
        desk.hear(0, step(0, 1))
        await anyio.wait_all_tasks_blocked()
        await desk.messages()
        desk.clock.pass_s(0.61)
        await anyio.wait_all_tasks_blocked()
        assert [message.values["step"] for message in await desk.messages()] == [2.0]


async def test_what_routers_have_come_to_is_noted_by_layer_and_told_in_two_numbers(desk: Desk) -> None:
    routers = (RouterReport(1.25, 0.5), RouterReport(1.75, 0.25))
    desk.hear(0, structs.replace(step(0), routers=routers))
    [metrics] = await desk.metrics()
    assert (metrics["loss/router"], metrics["router/load_cv"]) == (1.5, 0.5)
    [noted] = [event for event in desk.ledger.noted if isinstance(event, StepReported)]
    assert (noted.router_losses, noted.router_load_cvs) == ((1.25, 1.75), (0.5, 0.25))
    desk.clock.now += STEPS_TOGETHER_S
    desk.hear(0, step(0, 1))
    [metrics] = await desk.metrics()
    assert metrics.keys().isdisjoint({"loss/router", "router/load_cv"})


async def test_what_a_family_reports_beside_the_loss_is_noted_and_told_by_name(desk: Desk) -> None:
    reports = (RouterReport(1.25, 0.5), RouterReport(0.75, 0.0, "accuracy/discriminator"), RouterReport(9.0, 0.0, "lr"))
    desk.hear(0, structs.replace(step(0), routers=reports))
    [metrics] = await desk.metrics()
    assert (metrics["accuracy/discriminator"], metrics["loss/router"]) == (0.75, 1.25)
    assert metrics["lr"] == step(0).lr, "none takes the name of another number"
    [noted] = [event for event in desk.ledger.noted if isinstance(event, StepReported)]
    assert noted.figures == {"accuracy/discriminator": 0.75, "lr": 9.0}
    assert noted.router_losses == (1.25,)


async def test_what_is_reported_again_counts_once_and_is_noted_once(desk: Desk) -> None:
    said = [step(0), step(0, 1), EvalReport(0, 0, 20.0, 10, 10), done(0)]
    for message in said * 2:
        assert desk.hear(0, message)
    progress = desk.reports.progress
    assert (progress.steps, progress.samples, progress.sent_bytes) == (2, 8, {"control": 1})
    assert progress.eval_losses == {0: 2.0}
    noted = [type(event) for event in desk.ledger.noted]
    # How often a trainer says that it is done makes no difference.
    assert noted == [StepReported] * 2 + [ShareEvaluated, EvaluationDone] + [TrainerFinished] * 2


async def test_a_client_that_was_started_again_knows_who_is_done_and_what_each_pipeline_has_trained(desk: Desk) -> None:
    for message in (step(0), step(0, 1), done(0)):
        desk.hear(0, message)
    shared = desk.reports.shares.of_round()
    desk.ledger.earlier = [event for event in desk.ledger.noted if isinstance(event, StepReported | TrainerFinished)]
    desk.reports.resume(1, PIPELINES)
    assert desk.reports.shares.of_round() == shared
    assert desk.slots.is_done(0)
    assert not desk.slots.is_done(1)
    desk.hear(0, step(0, 1))
    assert desk.reports.progress.steps == 2
    desk.hear(1, step(1, 4))
    assert desk.reports.progress.steps == 3
    desk.reports.resume(2, PIPELINES)
    assert not desk.slots.is_done(0), "that was the round before"


async def test_counters_reach_the_monitor_with_the_round_that_is_trained(desk: Desk) -> None:
    desk.begin_round(4)
    desk.client.metrics.counter("refused").add(1)
    others: Any = SimpleNamespace(view=SwarmView(), reported=lambda *_: None)
    totals = CounterTotals(
        desk.client, _OneTick(), desk.ledger, reports=desk.reports, membership=others, troubles=others, host="desk"
    )
    with pytest.raises(_Enough):
        await totals.run()
    assert [(message.round, message.values) for message in await desk.messages()] == [(4, {"counters/refused": 1.0})]


async def test_the_monitor_hears_who_is_there_while_no_step_is_committed(desk: Desk) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.reports.run)
        await anyio.wait_all_tasks_blocked()
        assert await desk.metrics() == [NUMBERS]
        desk.swarm.has_changed.notify()
        await anyio.wait_all_tasks_blocked()
        assert await desk.metrics() == [NUMBERS]
        tasks.cancel_scope.cancel()


async def test_a_monitor_that_was_lost_is_told_again_who_is_there(desk: Desk) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.reports.run)
        await anyio.wait_all_tasks_blocked()
        await desk.metrics()
        desk.reports.peer_lost(desk.monitor.peer_id)
        await anyio.wait_all_tasks_blocked()
        assert await desk.metrics() == []
        desk.clock.pass_s(5.0)
        await anyio.wait_all_tasks_blocked()
        assert await desk.metrics() == [NUMBERS]
        tasks.cancel_scope.cancel()


async def test_a_server_that_invents_numbers_of_a_step_is_told_of_in_as_many_as_the_monitor_takes(desk: Desk) -> None:
    invented = tuple(RouterReport(1.0, 0.0, f"figure/{number}") for number in range(5000))
    desk.hear(0, structs.replace(step(0), routers=invented))
    [metrics] = await desk.metrics()
    assert sum(name.startswith("figure/") for name in metrics) == MAX_FIGURES
    [noted] = [event for event in desk.ledger.noted if isinstance(event, StepReported)]
    assert len(noted.figures) == MAX_FIGURES
