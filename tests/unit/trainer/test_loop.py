"""One trainer's decisions, with a feed and a driver that do what the test says."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.abc import TaskGroup
from tests.alongside import alongside, until

from shoal.clock import SystemClock
from shoal.config import Config
from shoal.data.feed import LeasedBatch
from shoal.data.fields import Fields
from shoal.errors import NoPipeline, RemoteProtocolError, RoundAborted, RoundClosed
from shoal.ids import PeerId, StepKey
from shoal.swarm.step_trainer import Finished
from shoal.trainer.loop import TrainerLoop
from shoal.transport.base import Received
from shoal.transport.dispatch import dispatch
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork
from shoal.wire.messages import Message
from shoal.wire.messages.base import Hop, ReplicaRef, SampleRange, StepRange
from shoal.wire.messages.control import (
    EvalReport,
    Evaluation,
    Metrics,
    StartRound,
    StepReport,
    TrainerDone,
    TrainerHello,
    TrainerStuck,
    UpdateReplicas,
)

CLIENT = PeerId("client")
SLOT = 1
CONFIG = Config.model_validate(
    {"model_pipeline": {"stages": 2, "microbatches": 2}, "diloco": {"inner_steps": 3, "batch_size_per_step": 4}}
)


def hop(name: str) -> Hop:
    return Hop(PeerId(name), (f"memory:{name}",))


def ref(name: str, cap: int | None = None) -> ReplicaRef:
    return ReplicaRef(hop(name), cap)


HOME = (hop("a0"), hop("b0"))
REPLICAS = ((ref("a0"), ref("a1", cap=2)), (ref("b0", cap=3), ref("b1")))
HOME_REFS = (ref("a0"), ref("b0", cap=3))
RESULT = Finished(StepKey(SLOT, 1, 0, 0), (PeerId("a0"), PeerId("b0")), 2.0, 1.0, False, True, 1, 4, 4)


@dataclass
class Feed:
    """Gives batches as long as there are some; keeps what became of them."""

    num_batches: int = 100
    ended: list[str] = field(default_factory=list)
    leased: list[tuple[int, int]] = field(default_factory=list)

    async def hello(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def lease(self, round: int, step: int) -> LeasedBatch | None:
        await anyio.lowlevel.checkpoint()
        if len(self.leased) == self.num_batches:
            return None
        self.leased.append((round, step))
        return self._batch(len(self.leased))

    async def holdout(self, start: int, stop: int) -> AsyncGenerator[LeasedBatch]:
        for ticket in range(start, stop, 2):
            try:
                yield self._batch(ticket)
            finally:
                self.ended.append(f"read {ticket}")

    def note(self, key: StepKey, batch: LeasedBatch) -> None:
        self.ended.append(f"noted {batch.ticket}")

    def acknowledge(self, key: StepKey, batch: LeasedBatch, *, committed: bool) -> None:
        self.ended.append(f"{'done' if committed else 'left'} {batch.ticket}")

    def give_back(self, batch: LeasedBatch) -> None:
        self.ended.append(f"back {batch.ticket}")

    def _batch(self, ticket: int) -> LeasedBatch:
        array = np.zeros((4, 2), dtype=np.int64)
        return LeasedBatch(Fields(array, array), (SampleRange(0, 4 * ticket, 4 * ticket + 4),), 4, ticket)


@dataclass
class Driver:
    """Does in turn what is listed: a result to return, an error to raise, or something to call before the next."""

    steps: list[Finished | Exception | Callable[[], None]] = field(default_factory=list)
    evaluations: list[Callable[[], None]] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    paths: list[tuple[ReplicaRef, ...]] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)

    def round_begun(self, round: int) -> None:
        self.begun.append(round)

    async def train(self, **plan: Any) -> Finished:
        self.asked.append(plan)
        await anyio.lowlevel.checkpoint()
        while self.steps:
            what = self.steps.pop(0)
            if isinstance(what, Exception):
                raise what
            if isinstance(what, Finished):
                return what
            what()
        return RESULT

    async def evaluate(self, *, path: tuple[ReplicaRef, ...], refuses: Any, **_: Any) -> tuple[float, int]:
        self.paths.append(path)
        self.refuses = refuses
        await anyio.lowlevel.checkpoint()
        if self.evaluations:
            self.evaluations.pop(0)()
            raise RoundAborted("refused, or lost")
        return 8.0, 4


class Host:
    """A loop, and its client's end of the connection."""

    def __init__(self, tasks: TaskGroup, feed: Feed, driver: Driver) -> None:
        self.network = MemoryNetwork(seed=0)
        self.client: MemoryEndpoint = self.network.endpoint(CLIENT)
        endpoint = self.endpoint = self.network.endpoint(PeerId("T1"))
        self.loop = TrainerLoop(
            endpoint=endpoint,
            feed=feed,
            driver=driver,
            config=CONFIG,
            client=self.client.hop,
            slot=SLOT,
            generation=1,
            clock=SystemClock(),
        )
        tasks.start_soon(self.loop.run)
        tasks.start_soon(dispatch, endpoint, (self.loop,))

    def restart_client(self) -> MemoryEndpoint:
        """Kill the client and start it again."""
        self.network.kill(CLIENT)
        return self.network.endpoint(CLIENT)

    def tell(self, message: Message, sender: PeerId = CLIENT) -> bool:
        return self.loop.receive(Received(sender, message))

    async def settle(self) -> None:
        await anyio.wait_all_tasks_blocked()

    async def heard(self) -> list[Message]:
        """What the client has been told since the hello; ends the client."""
        await self.settle()
        self.client.post(CLIENT, Metrics("end", CLIENT, 0, {}))
        found: list[Message] = []
        async for event in self.client.events():
            if isinstance(event, Received):
                if isinstance(event.message, Metrics):
                    break
                found.append(event.message)
        assert isinstance(found[0], TrainerHello)
        return found[1:]


Work = Callable[[Host], Any]


async def run(feed: Feed, driver: Driver, work: Work) -> list[Message]:
    async with alongside() as tasks:
        host = Host(tasks, feed, driver)
        await host.settle()
        await work(host)
        heard = await host.heard()
    return heard


def start(round: int = 1, **fields: Any) -> StartRound:
    plan = StartRound(round, SLOT, 2, StepRange(3 * round - 3, 3 * round), HOME, REPLICAS, None)
    values = {name: getattr(plan, name) for name in plan.__struct_fields__}
    return StartRound(**{**values, **fields})


async def begin(host: Host) -> None:
    host.tell(start())


async def test_how_long_a_trainer_waits_for_its_batches_is_measured() -> None:
    waits: list[dict[str, dict[int, int]]] = []

    async def round_of_three(host: Host) -> None:
        host.tell(start())
        await host.settle()
        waits.append(host.endpoint.metrics.histograms())

    await run(Feed(), Driver(), round_of_three)
    assert sum(waits[0]["data.wait_seconds"].values()) == 3


async def test_a_round_is_trained_step_by_step_and_then_reported() -> None:
    feed, driver = Feed(), Driver()
    *reports, end = await run(feed, driver, begin)
    assert feed.leased == [(1, 0), (1, 1), (1, 2)]
    assert feed.ended == ["done 1", "done 2", "done 3"]
    assert [plan["number"] for plan in driver.asked] == [0, 1, 2]
    assert driver.asked[0]["path"] == HOME
    assert driver.asked[0]["replicas"] == REPLICAS
    assert [len(plan["microbatches"]) for plan in driver.asked] == [2, 2, 2]
    assert all(isinstance(report, StepReport) and report.slot == SLOT for report in reports)
    assert len(reports) == 3
    assert isinstance(end, TrainerDone)
    assert (end.slot, end.round, end.steps, end.num_samples) == (SLOT, 1, 3, 12)


async def test_step_numbers_count_on_over_the_rounds() -> None:
    driver = Driver()

    async def two_rounds(host: Host) -> None:
        await begin(host)
        await host.settle()
        host.tell(start(round=2))

    await run(Feed(), driver, two_rounds)
    assert [plan["number"] for plan in driver.asked] == [0, 1, 2, 3, 4, 5]
    assert {plan["round"] for plan in driver.asked} == {1, 2}
    assert driver.begun == [1, 2], "a step that waits for a second word of the end of a round is over"


async def test_a_trainer_that_takes_a_lost_ones_place_trains_the_steps_that_it_is_told_and_no_others() -> None:
    feed, driver = Feed(), Driver()

    async def rest(host: Host) -> None:
        # Numbers that no arithmetic over the configuration gives: only the client knows how long rounds are.
        host.tell(start(round=2, steps=StepRange(40, 42)))

    *_, end = await run(feed, driver, rest)
    assert feed.leased == [(2, 40), (2, 41)]
    assert [plan["number"] for plan in driver.asked] == [40, 41]
    assert isinstance(end, TrainerDone)
    assert end.steps == 2


async def test_a_step_whose_fate_is_open_is_left_to_the_record_and_not_reported() -> None:
    feed, driver = Feed(), Driver(steps=[replace(RESULT, committed=False)])
    heard = await run(feed, driver, begin)
    assert feed.ended == ["left 1", "done 2", "done 3"]
    assert sum(isinstance(message, StepReport) for message in heard) == 2


async def test_a_closed_round_gives_the_batch_back_and_ends_the_steps() -> None:
    feed, driver = Feed(), Driver(steps=[RESULT, RoundClosed("closed")])
    heard = await run(feed, driver, begin)
    assert feed.ended == ["done 1", "back 2"]
    assert isinstance(heard[-1], TrainerDone)
    assert heard[-1].steps == 1


async def test_no_batch_ends_the_steps() -> None:
    heard = await run(Feed(num_batches=1), Driver(), begin)
    assert isinstance(heard[-1], TrainerDone)
    assert (heard[-1].steps, heard[-1].num_samples) == (1, 4)


async def test_a_stuck_trainer_says_so_and_trains_the_same_batch_when_the_replicas_change() -> None:
    feed, driver = Feed(), Driver(steps=[NoPipeline("stage 1")])
    others = (REPLICAS[0], (ref("b1"),))

    async def get_stuck(host: Host) -> None:
        host.tell(start(replicas=(REPLICAS[0], ())))
        await host.settle()
        assert len(driver.asked) == 1, "it waits"
        host.tell(UpdateReplicas(others))

    heard = await run(feed, driver, get_stuck)
    assert heard[0] == TrainerStuck(SLOT, 1, (1,))
    assert [plan["number"] for plan in driver.asked] == [0, 0, 1, 2]
    assert driver.asked[1]["replicas"] == others
    assert feed.ended == ["done 1", "done 2", "done 3"]


async def test_a_step_that_all_refuse_is_tried_again_over_others_and_not_over_the_same() -> None:
    feed, driver = Feed(), Driver(steps=[NoPipeline("every replica of stage 1 refuses", "ValueError: odd")])
    others = (REPLICAS[0], (ref("b1"),))

    async def get_refused(host: Host) -> None:
        await begin(host)
        await host.settle()
        host.tell(UpdateReplicas(REPLICAS))
        await host.settle()
        assert len(driver.asked) == 1, "it waits"
        host.tell(UpdateReplicas(others))

    heard = await run(feed, driver, get_refused)
    assert heard[0] == TrainerStuck(SLOT, 1, (), "ValueError: odd")
    assert [plan["number"] for plan in driver.asked] == [0, 0, 1, 2]


async def test_a_step_that_all_refuse_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.trainer.loop._REFUSED_S", 0.0)
    driver = Driver(steps=[NoPipeline("every replica of stage 1 refuses", "ValueError: odd")])
    await run(Feed(), driver, begin)
    assert [plan["number"] for plan in driver.asked] == [0, 0, 1, 2]


async def test_a_step_at_which_the_model_fails_everywhere_is_told_as_that_and_tried_again_after_growing_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float] = []

    @contextmanager
    def no_time(longest_s: float) -> Iterator[None]:
        waited.append(longest_s)
        with anyio.move_on_after(0.0):
            yield

    monkeypatch.setattr("shoal.trainer.loop.anyio", SimpleNamespace(**{**vars(anyio), "move_on_after": no_time}))
    fails = NoPipeline("every replica of stage 1 refuses", "ValueError: odd", is_model=True)
    driver = Driver(steps=[fails] * 8)
    heard = await run(Feed(), driver, begin)
    assert heard[:8] == [TrainerStuck(SLOT, 1, (), "ValueError: odd", is_model=True)] * 8
    assert waited == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


async def test_a_stuck_trainer_gives_up_when_the_next_round_begins() -> None:
    feed, driver = Feed(), Driver(steps=[NoPipeline("stage 1")])

    async def go_on_without(host: Host) -> None:
        await begin(host)
        await host.settle()
        host.tell(start(round=2))

    heard = await run(feed, driver, go_on_without)
    assert feed.ended[0] == "back 1"
    assert [plan["number"] for plan in driver.asked] == [0, 3, 4, 5]
    assert [message.round for message in heard if isinstance(message, TrainerDone)] == [2]


async def test_a_slow_trainer_leaves_a_round_that_is_over() -> None:
    driver = Driver()

    async def close_meanwhile(host: Host) -> None:
        driver.steps = [lambda: (host.tell(start(round=2)), None)[1], RESULT]
        await begin(host)

    heard = await run(Feed(), driver, close_meanwhile)
    assert [plan["number"] for plan in driver.asked] == [0, 3, 4, 5]
    assert [message.round for message in heard if isinstance(message, TrainerDone)] == [2]


async def evaluate(host: Host) -> None:
    host.tell(start(steps=StepRange(0, 0), evaluation=Evaluation(0, 0, 4)))


async def test_the_share_of_the_held_out_set_is_evaluated_and_reported() -> None:
    feed, driver = Feed(), Driver()
    report, end = await run(feed, driver, evaluate)
    assert report == EvalReport(SLOT, 0, 16.0, 4, 8)
    assert driver.paths == [HOME_REFS, HOME_REFS]
    assert feed.ended == ["read 0", "read 2"]
    assert isinstance(end, TrainerDone)


async def test_an_empty_share_is_not_reported() -> None:
    async def evaluate_nothing(host: Host) -> None:
        host.tell(start(steps=StepRange(0, 0), evaluation=Evaluation(0, 4, 4)))

    [end] = await run(Feed(), Driver(), evaluate_nothing)
    assert isinstance(end, TrainerDone)


@pytest.mark.parametrize("is_lost", [True, False])
async def test_an_evaluation_goes_on_over_other_replicas_when_one_is_lost_or_refuses(is_lost: bool) -> None:
    driver = Driver()

    async def lose_one(host: Host) -> None:
        driver.evaluations = [lambda: (host.loop.peer_lost if is_lost else driver.refuses)(PeerId("b0"))]
        await evaluate(host)

    report, _ = await run(Feed(), driver, lose_one)
    assert report == EvalReport(SLOT, 0, 16.0, 4, 8)
    assert driver.paths == [HOME_REFS, (ref("a0"), ref("b1")), (ref("a0"), ref("b1"))]


async def test_an_evaluation_that_all_refuse_is_given_up() -> None:
    driver = Driver()
    driver.evaluations = [lambda name=name: driver.refuses(PeerId(name)) for name in ("a0", "a1", "b0", "b1", "a0")]
    assert [type(report) for report in await run(Feed(), driver, evaluate)] == [TrainerDone]


async def test_an_evaluation_without_another_path_is_given_up_and_its_batch_returned() -> None:
    feed, driver = Feed(), Driver(evaluations=[lambda: None])
    [end] = await run(feed, driver, evaluate)
    assert isinstance(end, TrainerDone)
    assert len(driver.paths) == 1
    assert feed.ended == ["read 0"]


@pytest.mark.parametrize(
    ("message", "sender"),
    [
        (start(), PeerId("stranger")),
        (UpdateReplicas(REPLICAS), PeerId("a0")),
        (start(slot=0), CLIENT),
        (start(path=HOME[:1]), CLIENT),
        (start(replicas=REPLICAS[:1]), CLIENT),
        (UpdateReplicas(()), CLIENT),
    ],
)
async def test_orders_that_are_not_the_clients_or_not_for_this_trainer_break_the_protocol(
    message: Message, sender: PeerId
) -> None:
    driver = Driver()

    async def order(host: Host) -> None:
        with pytest.raises(RemoteProtocolError):
            host.tell(message, sender)

    assert await run(Feed(), driver, order) == []
    assert not driver.asked


async def test_other_messages_are_not_taken() -> None:
    async def order(host: Host) -> None:
        assert not host.tell(TrainerStuck(SLOT, 1, ()))

    await run(Feed(), Driver(), order)


async def test_a_client_that_is_lost_is_dialled_again_and_told_all_of_the_round_again() -> None:
    async with alongside() as tasks:
        host = Host(tasks, Feed(), Driver())
        await host.settle()
        host.tell(start(1))
        first = await host.heard()
        assert [type(report) for report in first] == [StepReport] * 3 + [TrainerDone]
        client = host.restart_client()
        events = client.events()
        again = []
        async for event in events:
            if isinstance(event, Received):
                again.append(event.message)
                if isinstance(event.message, TrainerDone):
                    break
        assert again == [TrainerHello(SLOT, 1, hop("T1"), round=1), *first]


async def test_a_client_is_dialled_until_it_is_there() -> None:
    async with alongside() as tasks:
        host = Host(tasks, Feed(), Driver())
        await host.settle()
        host.network.kill(CLIENT)
        # Each hello to nobody is another lost connection.
        await until(lambda: host.loop._backoff._attempts >= 2)
        client = host.restart_client()
        async for event in client.events():
            if isinstance(event, Received):
                assert event.message == TrainerHello(SLOT, 1, hop("T1"), round=0)
                break
