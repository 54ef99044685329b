"""One process of a pipeline: peer 0 is its trainer, peer 1 + s the replica of stage s, over Unix sockets.

What steps them is what servers and trainers run; there is no registry, no data server and no round.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path

import anyio
import msgspec
import torch
from anyio.from_thread import start_blocking_portal

from shoal.clock import SystemClock
from shoal.codec.raw import to_wire
from shoal.config.diloco import InnerOptimConfig
from shoal.config.model import ModelPipelineConfig
from shoal.data.fields import Fields
from shoal.data.microbatch import Microbatch
from shoal.errors import InvariantViolation
from shoal.ids import PeerId, RunId
from shoal.model.gpt import GptFamily, GptShape
from shoal.model.stage import build_stage
from shoal.optim.inner import build_inner_optimizer
from shoal.pipeline.driver import StepDriver
from shoal.pipeline.stage_compute import StageCompute
from shoal.pipeline.stage_worker import StageWorker, StepLimits
from shoal.runtime.device_thread import DeviceThread
from shoal.swarm.step_operations import Schedule
from shoal.transport.dispatch import Handler, dispatch
from shoal.transport.unix import open_unix_endpoint
from shoal.wire.messages import Hop, SampleRange
from shoal.wire.messages.base import ReplicaRef
from shoal_lab.bench.peer import Calls, Seat
from shoal_lab.bench.serving import serving
from shoal_lab.emulation.device_pace import DevicePace
from shoal_lab.emulation.hooks import EmulatedRole

_SEED = 1


class PipelineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Start parameters of all processes.

    Attributes:
        folder: for their sockets.
        schedule: see `model_pipeline.schedule`.
        microbatches: of each step.
        samples: of each microbatch.
        seq_len: tokens of a sample.
        blocks: of the model: one stage has at least one.
        pace: of the emulated devices; None: as fast as the machine can.
        activation_checkpointing: see `model_pipeline.activation_checkpointing`.
    """

    folder: str
    schedule: str = "1f1b"
    microbatches: int = 8
    samples: int = 2
    seq_len: int = 16
    width: int = 32
    blocks: int = 4
    pace: DevicePace | None = None
    activation_checkpointing: bool = False


class _StagePeer:
    """One process; all its methods run on the event loop."""

    def __init__(self, seat: Seat, spec: PipelineSpec) -> None:
        self._stage = seat.index - 1
        self._num_stages = seat.num_peers - 1
        self._spec = spec
        self._flow = ModelPipelineConfig(
            stages=self._num_stages,
            schedule=Schedule(spec.schedule).value,
            activation_checkpointing=spec.activation_checkpointing,
        )
        self._path = tuple(_hop(spec, index) for index in range(1, seat.num_peers))
        self._me = _hop(spec, seat.index)
        self._family = GptFamily(
            GptShape(seq_len=spec.seq_len, width=spec.width, num_layers=spec.blocks, num_heads=2, dropout=0.1)
        )
        self._clock = SystemClock()
        self._number = 0

    async def serve(self, ready: anyio.Event, end: anyio.Event) -> None:
        """Be there for the others until the end."""
        async with AsyncExitStack() as stack:
            self._endpoint = await stack.enter_async_context(
                open_unix_endpoint(
                    peer_id=self._me.peer,
                    run_id=RunId("bench"),
                    role="member",
                    path=Path(self._spec.folder) / self._me.peer,
                )
            )
            device = await stack.enter_async_context(DeviceThread(lambda: torch.set_num_threads(1)))
            tasks = await stack.enter_async_context(anyio.create_task_group())
            handler: Handler
            if self._stage < 0:
                handler = self._driver = self._build_driver()
            else:
                handler = worker = await device.run(self._build_worker, device)
                worker.start_round(1)
                tasks.start_soon(worker.run)
            tasks.start_soon(dispatch, self._endpoint, [handler])
            ready.set()
            await end.wait()
            tasks.cancel_scope.cancel()

    async def train(self, num_steps: int) -> float:
        """The trainer trains some steps; return the seconds from the first one's start to the last one's commit."""
        if self._stage >= 0:
            return 0.0
        spec, generator = self._spec, torch.Generator().manual_seed(_SEED)
        begun_s = self._clock.now_s()
        for _ in range(num_steps):
            shape = (spec.samples, spec.seq_len)
            tokens = [torch.randint(256, shape, generator=generator) for _ in range(spec.microbatches + 1)]
            result = await self._driver.train(
                round=1,
                number=self._number,
                microbatches=[Microbatch(Fields(to_wire(x), to_wire(x)), spec.samples) for x in tokens[1:]],
                samples=(SampleRange(0, self._number, self._number + 1),),
                lr=1e-3,
                path=self._path,
                replicas=tuple((ReplicaRef(hop),) for hop in self._path),
                note=lambda _key, _path: None,
            )
            if result.attempts != 1 or not result.committed:
                raise InvariantViolation(f"step {self._number} was replayed: the measurement would mean nothing")
            self._number += 1
        return self._clock.now_s() - begun_s

    async def counts(self) -> dict[str, int]:
        """Return this process's counters."""
        return self._endpoint.metrics.counts()

    def _build_driver(self) -> StepDriver:
        return StepDriver(
            endpoint=self._endpoint,
            trainer=0,
            generation=1,
            window=self._flow.microbatches_in_flight,
            max_grad_norm=1.0,
            clock=self._clock,
            step_timeout_s=60.0,
        )

    def _build_worker(self, device: DeviceThread) -> StageWorker:
        module = build_stage(self._family, self._stage, self._num_stages, seed=_SEED)
        compute = StageCompute(
            module,
            build_inner_optimizer(module.named_parameters(), InnerOptimConfig()),
            run_seed=_SEED,
            stage=self._stage,
            schedule=Schedule(self._spec.schedule),
            activation_checkpointing=self._spec.activation_checkpointing,
        )
        return StageWorker(
            endpoint=self._endpoint,
            compute=compute,
            device=device,
            num_stages=self._num_stages,
            limits=StepLimits(open_steps=2, kept=self._flow.microbatches_in_flight),
            hooks=EmulatedRole(SystemClock(), pace=self._spec.pace),
        )


def _hop(spec: PipelineSpec, index: int) -> Hop:
    peer = PeerId(f"P{index}")
    return Hop(peer, (f"unix:{Path(spec.folder) / peer}",))


@contextmanager
def main(seat: Seat) -> Generator[Calls, None, None]:
    """Offer `train`, the seconds of some steps at the trainer, and `counts`."""
    torch.set_num_threads(1)
    member = _StagePeer(seat, msgspec.convert(seat.arguments, PipelineSpec))
    with start_blocking_portal(backend_options={"use_uvloop": True}) as portal, serving(portal, member.serve):
        yield {"train": partial(portal.call, member.train), "counts": partial(portal.call, member.counts)}
