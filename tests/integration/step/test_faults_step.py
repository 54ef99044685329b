"""A step under faults: applied everywhere or nowhere, replayed with the same result, never trained twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor

from shoal.codec.raw import to_wire
from shoal.config.diloco import InnerOptimConfig
from shoal.data.fields import Fields
from shoal.data.microbatch import Microbatch
from shoal.errors import NoPipeline, RoundClosed
from shoal.ids import PeerId
from shoal.model.resnet import ResNetFamily, ResNetShape
from shoal.model.stage import build_stage
from shoal.optim.inner import InnerOptimizer
from shoal.pipeline.stage_compute import StageCompute
from shoal.swarm.step_operations import Schedule
from shoal.trainer.baseline import PlainLoop
from shoal.wire.messages import Hop, Message
from shoal.wire.messages.step import Backward, Commit, Forward, Labels, MicrobatchDone, Open, Prepared

SEED = 7
SIZES = (3, 2, 3)
MakeSwarm = Callable[..., Any]


class TinyNet(ResNetFamily):
    """A residual network with batch norm that computes in no time."""

    depths = (1, 0, 0, 0)
    bottleneck = False


def family() -> TinyNet:
    return TinyNet(
        ResNetShape(depths=(1, 0, 0, 0), bottleneck=False, stem="cifar", num_channels=1, img_size=4, num_classes=4)
    )


def batch(number: int, sizes: Sequence[int] = SIZES) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(number)
    return [(torch.randn(n, 1, 4, 4, generator=generator), torch.randint(4, (n,), generator=generator)) for n in sizes]


def plain(num_stages: int, trainer: int = 0) -> PlainLoop:
    stages = [build_stage(family(), s, num_stages, seed=SEED) for s in range(num_stages)]
    return PlainLoop(stages, InnerOptimConfig(), 1.0, SEED, trainer)


def snapshot(compute: StageCompute) -> list[Tensor]:
    moments = [tensor.clone() for tensor in compute.optimizer.state_tensors]
    return [*(t.detach().clone() for t in [*compute.module.parameters(), *compute.module.buffers()]), *moments]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def is_equal(compute: StageCompute, stage: torch.nn.Module) -> bool:
    return same([*compute.module.parameters(), *compute.module.buffers()], [*stage.parameters(), *stage.buffers()])


class Once:
    """Calls `act` before the first delivery that `matches`."""

    def __init__(self, matches: Callable[[PeerId, PeerId, Message], bool], act: Callable[[], None]) -> None:
        self.matches, self.act, self.fired = matches, act, False

    def __call__(self, sender: PeerId, receiver: PeerId, message: Message) -> None:
        if not self.fired and self.matches(sender, receiver, message):
            self.fired = True
            self.act()


POINTS = {
    "open": lambda a, b, m: isinstance(m, Open) and b == "R1.0",
    "first input": lambda a, b, m: isinstance(m, Forward) and b == "R1.0",
    "last labels": lambda a, b, m: isinstance(m, Labels) and m.microbatch == 2,
    "second backward": lambda a, b, m: isinstance(m, Backward) and m.microbatch == 1,
    "last backward": lambda a, b, m: isinstance(m, Backward) and m.microbatch == 2,
    "prepared": lambda a, b, m: isinstance(m, Prepared) and a == "R1.0",
    "microbatch done": lambda a, b, m: isinstance(m, MicrobatchDone) and m.microbatch == 0,
}


async def test_a_home_replica_that_was_started_again_in_the_round_is_reached_where_it_is_now(
    make_swarm: MakeSwarm,
) -> None:
    async with make_swarm(family(), 2) as swarm:
        # On another host it listens on another port; the round was begun before.
        before = tuple(Hop(hop.peer, ("memory:before",)) for hop in swarm.path())
        swarm.path = lambda _home: before
        result = await swarm.train(batch(0), 0, 0.1)
        assert (result.committed, result.key.attempt) == (True, 0)


@pytest.mark.usual(
    "zero_bubble-kill-open",
    "zero_bubble-kill-first input",
    "zero_bubble-kill-second backward",
    "zero_bubble-kill-prepared",
    "zero_bubble-kill-microbatch done",
    "1f1b-kill-last labels",
    "1f1b-cut from the trainer-prepared",
    "1f1b-cut from its neighbour-last backward",
)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("fault", ["kill", "cut from the trainer", "cut from its neighbour"])
@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE])
async def test_a_step_that_loses_a_replica_gives_the_same_result_over_another(
    make_swarm: MakeSwarm, point: str, fault: str, schedule: Schedule
) -> None:
    async with make_swarm(family(), 2, num_replicas=2, schedule=schedule) as swarm:
        acts = {
            "kill": lambda: swarm.network.kill(PeerId("R1.0")),
            "cut from the trainer": lambda: swarm.network.cut(PeerId("T0"), PeerId("R1.0")),
            "cut from its neighbour": lambda: swarm.network.cut(PeerId("R0.0"), PeerId("R1.0")),
        }
        once = Once(POINTS[point], acts[fault])
        swarm.network.before_delivery = once
        before = {r.endpoint.peer_id: snapshot(r.compute) for stage in swarm.replicas for r in stage}
        result = await swarm.train(batch(0), 0, 1e-2)
        await swarm.settle()
        assert once.fired
        assert result.committed
        reference = plain(2)
        assert (result.loss, result.grad_norm) == reference.step(batch(0), 0, 1e-2)
        if result.attempts == 1:
            # Once prepared, a replica needs its neighbour no more.
            assert (point, fault) == ("prepared", "cut from its neighbour")
        for replica in (replica for stage in swarm.replicas for replica in stage):
            if replica.endpoint.peer_id in result.path:
                stage = result.path.index(replica.endpoint.peer_id)
                assert is_equal(replica.compute, reference.stages[stage])
                assert [entry.key.attempt for entry in replica.worker.log] == [result.attempts - 1]
            else:
                assert replica.worker.log == ()
                assert same(before[replica.endpoint.peer_id], snapshot(replica.compute))


async def test_from_its_first_commit_on_a_step_stands_without_the_replica_that_died(make_swarm: MakeSwarm) -> None:
    async with make_swarm(family(), 2, num_replicas=2) as swarm:
        swarm.network.before_delivery = Once(
            lambda a, b, m: isinstance(m, Commit) and b == "R1.0", lambda: swarm.network.kill(PeerId("R1.0"))
        )
        result = await swarm.train(batch(0), 0, 1e-2)
        assert (result.committed, result.attempts, result.path) == (True, 1, ("R0.0", "R1.0"))
        assert [len(replica.worker.log) for replica in swarm.replicas[0]] == [1, 0]
        result = await swarm.train(batch(1), 1, 1e-2)
        assert (result.committed, result.path) == (True, ("R0.0", "R1.1"))


async def test_a_prepared_step_whose_trainer_dies_is_committed_if_one_replica_heard_of_the_commit(
    make_swarm: MakeSwarm,
) -> None:
    async with make_swarm(family(), 3) as swarm, anyio.create_task_group() as tasks:
        swarm.network.before_delivery = Once(
            lambda a, b, m: isinstance(m, Commit) and b == "R1.0", lambda: swarm.network.kill(PeerId("T0"))
        )
        tasks.start_soon(swarm.train, batch(0), 0, 1e-2)
        while not all(len(stage[0].worker.log) == 1 for stage in swarm.replicas):
            await swarm.settle()
        reference = plain(3)
        reference.step(batch(0), 0, 1e-2)
        assert all(
            is_equal(stage[0].compute, module) for stage, module in zip(swarm.replicas, reference.stages, strict=True)
        )
        tasks.cancel_scope.cancel()


async def test_a_prepared_step_whose_trainer_dies_before_any_commit_is_aborted_everywhere(
    make_swarm: MakeSwarm,
) -> None:
    async with make_swarm(family(), 3) as swarm, anyio.create_task_group() as tasks:
        before = [snapshot(stage[0].compute) for stage in swarm.replicas]
        swarm.network.before_delivery = Once(
            lambda a, b, m: isinstance(m, Commit), lambda: swarm.network.kill(PeerId("T0"))
        )
        tasks.start_soon(swarm.train, batch(0), 0, 1e-2)
        while not swarm.network.before_delivery.fired:
            await swarm.settle()
        while any(stage[0].worker.num_open for stage in swarm.replicas):
            await swarm.settle()
        assert [len(stage[0].worker.log) for stage in swarm.replicas] == [0, 0, 0]
        assert all(same(old, snapshot(stage[0].compute)) for old, stage in zip(before, swarm.replicas, strict=True))
        tasks.cancel_scope.cancel()


async def test_steps_of_two_trainers_that_share_replicas_do_not_mix(make_swarm: MakeSwarm) -> None:
    async with make_swarm(family(), 2, num_trainers=2) as swarm, anyio.create_task_group() as tasks:
        for trainer in range(2):

            async def train(trainer: int = trainer) -> None:
                for number in range(4):
                    result = await swarm.train(batch(10 * trainer + number), number, 1e-2, trainer=trainer)
                    assert result.committed

            tasks.start_soon(train)
        while any(len(stage[0].worker.log) < 8 for stage in swarm.replicas):
            await swarm.settle()
    logs = [stage[0].worker.log for stage in swarm.replicas]
    assert any(entry.version < place for place, entry in enumerate(logs[0]))  # they did overlap
    for stage, computed in enumerate(replayed(logs)):
        assert is_equal(swarm.replicas[stage][0].compute, computed.module)


def replayed(logs: Sequence[Any]) -> list[StageCompute]:
    """Computes every step alone, on the versions that the logs name, and applies them in the logs' order."""
    live, states = [fresh(s) for s in range(2)], [[state_of(fresh(s))] for s in range(2)]
    steps = {entry.key: [log_entry(log, entry.key) for log in logs] for entry in logs[0]}
    waiting, done = dict(steps), {}
    while waiting:
        key = next(k for k, es in waiting.items() if all(e.version < len(states[s]) for s, e in enumerate(es)))
        entries = waiting.pop(key)
        workers = [fresh(s) for s in range(2)]
        for worker, states_of_stage, entry in zip(workers, states, entries, strict=True):
            load(worker, states_of_stage[entry.version])
        for m, (x, y) in enumerate(batch(10 * key.trainer + key.number)):
            hidden = workers[0].forward(key, m, x)
            workers[0].backward(key, m, workers[1].loss(key, m, hidden, y, len(y) / sum(SIZES)))
        done[key] = workers
        for stage, log in enumerate(logs):
            while len(states[stage]) <= len(log) and log[len(states[stage]) - 1].key in done:
                entry = log[len(states[stage]) - 1]
                source = done[entry.key][stage]._steps[entry.key]
                target = live[stage]._step(entry.key, 1.0)
                target.gradients, target.buffers, target.base = source.gradients, source.buffers, source.base
                target.changes = -1 if entry.version < len(states[stage]) - 1 else target.changes
                live[stage].commit(entry.key, entry.scale, entry.lr, entry.skipped)
                states[stage].append(state_of(live[stage]))
    return live


def fresh(stage: int) -> StageCompute:
    module = build_stage(family(), stage, 2, seed=SEED)
    return StageCompute(
        module, InnerOptimizer(module.named_parameters(), InnerOptimConfig()), run_seed=SEED, stage=stage
    )


def state_of(compute: StageCompute) -> list[Tensor]:
    return [t.detach().clone() for t in [*compute.module.parameters(), *compute.module.buffers()]]


@torch.no_grad()
def load(compute: StageCompute, state: list[Tensor]) -> None:
    for live, new in zip([*compute.module.parameters(), *compute.module.buffers()], state, strict=True):
        live.copy_(new)


def log_entry(log: Any, key: Any) -> Any:
    return next(entry for entry in log if entry.key == key)


async def test_a_step_that_is_not_finite_is_skipped_everywhere_and_counted(make_swarm: MakeSwarm) -> None:
    async with make_swarm(family(), 2) as swarm:
        before = [snapshot(stage[0].compute) for stage in swarm.replicas]
        bad = batch(0)
        bad[1][0][0, 0, 0, 0] = float("inf")
        result = await swarm.train(bad, 0, 1e-2)
        assert (result.committed, result.skipped) == (True, True)
        for old, [replica] in zip(before, swarm.replicas, strict=True):
            assert same(old, snapshot(replica.compute))
            assert [entry.skipped for entry in replica.worker.log] == [True]
            assert replica.worker.num_samples == 0
        result = await swarm.train(batch(1), 1, 1e-2)
        assert (result.committed, result.skipped) == (True, False)


async def test_tensors_that_do_not_fit_are_refused_and_nothing_crashes(make_swarm: MakeSwarm) -> None:
    async with make_swarm(family(), 2) as swarm:
        x, y = batch(0)[0]
        with pytest.raises(NoPipeline, match="stage 1"):
            await swarm.train([(x, y.float())], 0, 1e-2)
        assert (await swarm.train(batch(0), 1, 1e-2)).committed
        # The network itself would take an image of any size.
        with pytest.raises(NoPipeline, match="stage 0"):
            await swarm.train([(x[..., :3, :3].contiguous(), y)], 2, 1e-2)
        # A label that is no class only fails in the loss.
        with pytest.raises(NoPipeline, match="stage 1"):
            await swarm.train([(x, y + 100)], 2, 1e-2)
        assert (await swarm.train(batch(1), 3, 1e-2)).committed
        assert [entry.key.number for entry in swarm.replicas[0][0].worker.log] == [1, 3]


async def test_a_stage_without_replicas_is_named(make_swarm: MakeSwarm) -> None:
    async with make_swarm(family(), 3) as swarm:
        swarm.network.kill(PeerId("R2.0"))
        with pytest.raises(NoPipeline, match="stage 2:"):
            await swarm.train(batch(0), 0, 1e-2)
        assert all(replica.worker.num_open == 0 for stage in swarm.replicas[:2] for replica in stage)


async def test_closing_a_round_finishes_what_has_begun_and_tells_the_trainer(make_swarm: MakeSwarm) -> None:
    async with make_swarm(family(), 2) as swarm:
        await swarm.train(batch(0), 0, 1e-2)
        closed: list[Any] = []

        async def close(worker: Any) -> None:
            closed.append(await worker.close(1))

        async with anyio.create_task_group() as tasks:
            once = Once(
                lambda a, b, m: isinstance(m, Backward) and m.microbatch == 0,
                lambda: [tasks.start_soon(close, stage[0].worker) for stage in swarm.replicas],
            )
            swarm.network.before_delivery = once
            result = await swarm.train(batch(1), 1, 1e-2)
        assert result.committed
        assert [(c.num_samples, len(c.log), c.in_doubt) for c in closed] == [(16, 2, ())] * 2
        with pytest.raises(RoundClosed):
            await swarm.train(batch(2), 2, 1e-2)
        for [replica] in swarm.replicas:
            replica.worker.start_round(2)
            assert replica.worker.log == ()
        with pytest.raises(RoundClosed):
            await swarm.train(batch(2), 2, 1e-2, round=1)
        assert (await swarm.train(batch(2), 2, 1e-2, round=2)).committed


async def test_one_replica_that_says_that_the_round_is_closed_stops_no_trainer(make_swarm: MakeSwarm) -> None:
    async with make_swarm(family(), 2, num_replicas=2) as swarm:
        liar, honest = swarm.replicas[0]
        await liar.worker.close(1)
        for number in range(2):
            assert (await swarm.train(batch(number), number, 1e-2)).committed
        assert [entry.key.attempt for entry in honest.worker.log] == [1, 0], "it is asked once"
        await swarm.replicas[1][0].worker.close(1)
        with pytest.raises(RoundClosed):
            await swarm.train(batch(2), 2, 1e-2)
        assert [key.attempt for key, _ in swarm.notes] == [0, 1, 0, 0], "the second one that says so is believed"


async def test_a_replica_is_closed_when_its_step_in_doubt_has_been_resolved_and_applied(make_swarm: MakeSwarm) -> None:
    async with make_swarm(family(), 2) as swarm, anyio.create_task_group() as tasks:
        [[replica], _] = swarm.replicas
        gone = (PeerId("T0"), PeerId("R1.0"))
        swarm.network.before_delivery = Once(
            lambda a, b, m: isinstance(m, Commit), lambda: [swarm.network.kill(peer) for peer in gone]
        )
        tasks.start_soon(swarm.train, batch(0), 0, 1e-2)
        while not replica.worker.in_doubt:
            await swarm.settle()
        [key] = (await replica.worker.close(1)).in_doubt
        # Nobody asks for an answer, so nothing is sent when it is applied.
        replica.worker.resolve(key, True, 1.0, 1e-2, False)
        closed = await replica.worker.close(1)
        assert [entry.key for entry in closed.log] == [key]
        tasks.cancel_scope.cancel()


async def test_a_busy_replica_is_tried_again(make_swarm: MakeSwarm) -> None:
    async with make_swarm(family(), 2, num_trainers=3, max_open_steps=1) as swarm:
        async with anyio.create_task_group() as tasks:
            for trainer in range(3):

                async def train(trainer: int = trainer) -> None:
                    for number in range(2):
                        assert (await swarm.train(batch(number), number, 1e-2, trainer=trainer)).committed

                tasks.start_soon(train)
        assert [len(stage[0].worker.log) for stage in swarm.replicas] == [6, 6]


async def test_a_hung_replica_is_left_after_the_step_timeout(make_swarm: MakeSwarm) -> None:
    async with make_swarm(family(), 2, num_replicas=2, step_timeout_s=1.0) as swarm:
        hung = swarm.replicas[1][0]
        hung.worker._work = lambda: anyio.sleep_forever()
        hung.worker._notify()
        result = await swarm.train(batch(0), 0, 1e-2)
        assert (result.committed, result.path[1]) == (True, "R1.1")


async def test_a_step_that_is_cancelled_is_aborted(make_swarm: MakeSwarm) -> None:
    async with make_swarm(family(), 2) as swarm:
        with anyio.CancelScope() as scope:
            swarm.network.before_delivery = Once(lambda a, b, m: isinstance(m, Backward), scope.cancel)
            await swarm.train(batch(0), 0, 1e-2)
        await swarm.settle()
        assert all(stage[0].worker.num_open == 0 for stage in swarm.replicas)
        assert (await swarm.train(batch(0), 0, 1e-2)).committed


async def test_evaluation_over_a_replica_that_is_behind_is_refused(make_swarm: MakeSwarm) -> None:
    from shoal.errors import RoundAborted

    async with make_swarm(family(), 2) as swarm:
        microbatches = [Microbatch(Fields(to_wire(x), to_wire(y)), len(y)) for x, y in batch(0)]
        with pytest.raises(RoundAborted, match="record of round 0, not 1"):
            await swarm.drivers[0].evaluate(evaluation=1, base_round=1, microbatches=microbatches, path=swarm.refs())
