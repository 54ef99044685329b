"""A swarm of stage workers and step drivers on one event loop, over the in-memory network."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pytest
import torch
from anyio.abc import TaskGroup
from tests.threads import one_thread as one_thread
from torch import Tensor

from shoal.clock import SystemClock
from shoal.codec.raw import to_wire
from shoal.config.diloco import InnerOptimConfig
from shoal.config.model import ModelPipelineConfig
from shoal.data.fields import Fields
from shoal.data.microbatch import Microbatch
from shoal.ids import PeerId, StepKey
from shoal.model.stage import Family, StageModule, build_stage
from shoal.optim.inner import InnerOptimizer
from shoal.pipeline.driver import StepDriver
from shoal.pipeline.stage_compute import StageCompute
from shoal.pipeline.stage_worker import StageWorker, StepLimits
from shoal.runtime.device_thread import DeviceThread
from shoal.swarm.step_operations import Schedule
from shoal.swarm.step_trainer import Finished
from shoal.transport.dispatch import dispatch
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork
from shoal.wire.messages import Hop, SampleRange
from shoal.wire.messages.base import ReplicaRef

_LONGEST_CHAIN = 20
"""Of computations one of which leads to the next: forward and backward of a few microbatches over three stages."""

Batch = Sequence[tuple[Tensor, ...]]
"""Inputs, labels, and perhaps positions, of each microbatch."""


def microbatch(inputs: Tensor, labels: Tensor, *positions: Tensor) -> Microbatch:
    """As a data server would give it."""
    context = dict(zip(("positions",), map(to_wire, positions), strict=False))
    return Microbatch(Fields(to_wire(inputs), to_wire(labels), context), len(labels))


@dataclass
class Replica:
    """One server: its endpoint, its worker, its computation."""

    endpoint: MemoryEndpoint
    worker: StageWorker
    compute: StageCompute


@dataclass
class Swarm:
    """`replicas[stage][i]`, and one driver per trainer."""

    network: MemoryNetwork
    tasks: TaskGroup
    device: DeviceThread
    replicas: list[list[Replica]] = field(default_factory=list)
    drivers: list[StepDriver] = field(default_factory=list)
    caps: dict[PeerId, int] = field(default_factory=dict)
    notes: list[tuple[StepKey, tuple[PeerId, ...]]] = field(default_factory=list)

    def path(self, index: int = 0) -> tuple[Hop, ...]:
        return tuple(stage[min(index, len(stage) - 1)].endpoint.hop for stage in self.replicas)

    def ref(self, replica: Replica) -> ReplicaRef:
        return ReplicaRef(replica.endpoint.hop, self.caps.get(replica.endpoint.peer_id))

    def refs(self) -> tuple[ReplicaRef, ...]:
        """The path of home 0, with its caps."""
        return tuple(self.ref(stage[0]) for stage in self.replicas)

    async def train(
        self,
        batch: Batch,
        number: int,
        lr: float,
        *,
        trainer: int = 0,
        home: int = 0,
        round: int = 1,
        loss_scale: float = 1.0,
    ) -> Finished:
        """Train a step, until all replicas have applied it that can: its trainer goes on when one has."""
        result = await self.drivers[trainer].train(
            round=round,
            number=number,
            microbatches=[microbatch(*tensors) for tensors in batch],
            samples=(SampleRange(0, number * 100, number * 100 + sum(len(tensors[0]) for tensors in batch)),),
            lr=lr,
            path=self.path(home),
            replicas=tuple(tuple(map(self.ref, stage)) for stage in self.replicas),
            note=lambda key, path: self.notes.append((key, path)),
            loss_scale=loss_scale,
        )
        await self.settle()
        return result

    async def settle(self) -> None:
        """Lets everything that is under way arrive and be computed, and what follows from it as well."""
        for _ in range(_LONGEST_CHAIN):
            for _ in range(100):
                await anyio.lowlevel.checkpoint()
            # The device works in order: what was handed over until now has been computed then.
            await self.device.run(int)


MakeSwarm = Callable[..., AbstractAsyncContextManager[Swarm]]


@pytest.fixture
def make_swarm() -> MakeSwarm:
    @asynccontextmanager
    async def make(
        family: Family,
        num_stages: int,
        *,
        seed: int = 7,
        num_replicas: int = 1,
        num_trainers: int = 1,
        dtype: torch.dtype = torch.float32,
        autocast: torch.dtype | None = None,
        optim: InnerOptimConfig | None = None,
        max_grad_norm: float | None = 1.0,
        window: int | None = None,
        further: int = 0,
        max_open_steps: int = 4,
        step_timeout_s: float = 30.0,
        caps: Mapping[PeerId, int] | None = None,
        schedule: Schedule = Schedule.ONE_F_ONE_B,
        activation_checkpointing: bool = False,
        prepare: Callable[[StageModule], None] = lambda _: None,
    ) -> AsyncIterator[Swarm]:
        flow = ModelPipelineConfig(stages=num_stages, schedule=schedule.value, window=window)
        network = MemoryNetwork(seed=0)
        # The random generators belong to the process, so all replicas of the test share one device thread.
        async with DeviceThread(lambda: torch.set_num_threads(1)) as device, anyio.create_task_group() as tasks:
            swarm = Swarm(network, tasks, device, caps=dict(caps or {}))
            for stage in range(num_stages):
                swarm.replicas.append([])
                for i in range(num_replicas):
                    module = build_stage(family, stage, num_stages, seed=seed, dtype=dtype, autocast=autocast)
                    await device.run(prepare, module)
                    optimizer = InnerOptimizer(module.named_parameters(), optim or InnerOptimConfig())
                    compute = StageCompute(
                        module,
                        optimizer,
                        run_seed=seed,
                        stage=stage,
                        schedule=schedule,
                        activation_checkpointing=activation_checkpointing,
                    )
                    endpoint = network.endpoint(PeerId(f"R{stage}.{i}"))
                    worker = StageWorker(
                        endpoint=endpoint,
                        compute=compute,
                        device=device,
                        num_stages=num_stages,
                        limits=StepLimits(
                            max_open_steps, swarm.caps.get(endpoint.peer_id), flow.microbatches_in_flight, further
                        ),
                        clock=SystemClock(),
                    )
                    worker.start_round(1)
                    tasks.start_soon(worker.run)
                    tasks.start_soon(dispatch, endpoint, [worker])
                    swarm.replicas[-1].append(Replica(endpoint, worker, compute))
            for trainer in range(num_trainers):
                endpoint = network.endpoint(PeerId(f"T{trainer}"))
                driver = StepDriver(
                    endpoint=endpoint,
                    trainer=trainer,
                    generation=1,
                    window=flow.microbatches_in_flight,
                    max_grad_norm=max_grad_norm,
                    clock=SystemClock(),
                    step_timeout_s=step_timeout_s,
                    is_wrapped=family.is_tied and num_stages > 1,
                )
                tasks.start_soon(dispatch, endpoint, [driver])
                swarm.drivers.append(driver)
            yield swarm
            tasks.cancel_scope.cancel()

    return make
