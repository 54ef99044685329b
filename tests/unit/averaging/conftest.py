"""A run without a model: replicas whose parameters are set by hand, real members and a real coordinator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
import torch
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream
from tests.leading import lead
from torch import Tensor

from shoal.averaging.contents import Contents
from shoal.averaging.coordinator import RoundCoordinator
from shoal.averaging.member import RoundMember
from shoal.averaging.payloads_ahead import PayloadsAhead
from shoal.averaging.replica_state import ReplicaState
from shoal.averaging.round_average import RingSettings
from shoal.averaging.signing import Signer, unsealer
from shoal.averaging.state_donor import StateDonor
from shoal.averaging.state_source import StateSource
from shoal.averaging.state_sync import StateSync
from shoal.clock import SystemClock
from shoal.codec.base import CodecState
from shoal.collective.plan import Collective
from shoal.identity import Identity
from shoal.ids import PeerId, StepKey
from shoal.optim.merge import Merge
from shoal.optim.outer import OuterSgd
from shoal.optim.parts import AveragedParts
from shoal.swarm.content_transfer import TransferSettings
from shoal.swarm.cut_rule import EVERY_STEP, CutRule
from shoal.swarm.passed_orders import IN_LARGE_RINGS, PassingRule
from shoal.swarm.records import Logs
from shoal.swarm.round_orders import StepsClosed
from shoal.swarm.round_settings import RoundSettings
from shoal.swarm.view import Replica as SeenReplica
from shoal.swarm.view import SwarmView
from shoal.transport.dispatch import dispatch
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork
from shoal.wire.messages import Hop, SampleRange
from shoal.wire.messages.step import StepEntry, StepsTrained

AUTHORITY = Identity.generate()
SMALL_RING = RingSettings(8, lambda _bytes, _members: Collective.RING)


class FakeStage:
    """Three flat vectors where a module would be."""

    def __init__(self, num_elements: int) -> None:
        self.base_parameters: Callable[[], Tensor] | None = None
        self.base_buffers: Callable[[], tuple[Tensor, Tensor]] | None = None
        self.parameters = torch.arange(num_elements, dtype=torch.float32)
        self.floats = torch.zeros(3)
        self.integers = torch.zeros(2, dtype=torch.int64)
        self.forgotten = 0
        self.cut: Tensor | None = None
        self.residual: CodecState = ()
        buffers = [("floats", self.floats), ("integers", self.integers)]
        self.averaged = AveragedParts.of([("parameters", self.parameters)], buffers)

    def forget_moments(self) -> None:
        self.forgotten += 1


@dataclass
class FakeSteps:
    """A log where a stage worker would be."""

    round: int = 1
    cuts: CutRule = EVERY_STEP
    earlier: tuple[StepsTrained, ...] = ()
    log: tuple[StepEntry, ...] = ()
    in_doubt: tuple[StepKey, ...] = ()
    fates: dict[StepKey, tuple[bool, float, float, bool]] = field(default_factory=dict)
    path: Sequence[PeerId] = ()
    """Of the steps in doubt."""

    @property
    def num_samples(self) -> int:
        return sum(entry.num_samples for entry in self.log)

    def start_round(self, round: int, base: str = "", anew: bool = False, keeps_rest: bool = False) -> None:
        self.earlier = self.cuts.still_earlier(self.round, self.earlier, self.log) if keeps_rest else ()
        self.round, self.log, self.in_doubt = round, (), ()

    async def close(self, round: int) -> StepsClosed:
        await anyio.lowlevel.checkpoint()
        return StepsClosed(self.num_samples, self.in_doubt, self.log, earlier=self.earlier)

    def resolve(self, key: StepKey, commit: bool, scale: float, lr: float, skipped: bool) -> None:
        self.fates[key] = (commit, scale, lr, skipped)
        self.in_doubt = tuple(other for other in self.in_doubt if other != key)
        if commit:
            self.log = (*self.log, entry_of(key, self.path))


class InlineDevice:
    """Computes where it is called."""

    async def run(self, function: Callable[..., object], *arguments: object) -> object:
        await anyio.lowlevel.checkpoint()
        return function(*arguments)


class FaultyState(ReplicaState):
    """Memory that flips a bit while staging, `faults` times."""

    faults = 0

    def stage(self, average: object, *arguments: Any) -> object:
        if self.faults:
            self.faults -= 1
            average.parameters_M[0] += 1
        return super().stage(average, *arguments)


def entry_of(key: StepKey, path: Sequence[PeerId], num_samples: int = 4) -> StepEntry:
    start = key.number * 10
    samples = (SampleRange(key.trainer, start, start + num_samples),)
    return StepEntry(key, tuple(path), 0, samples, num_samples, num_samples, 0.5, 0.25, False)


@dataclass
class Replica:
    peer: PeerId
    stage: FakeStage
    steps: FakeSteps
    state: FaultyState
    member: RoundMember
    contents: Contents
    source: StateSource
    events: MemoryObjectReceiveStream[object]


@dataclass
class Run:
    """`replicas[stage][slot]`."""

    network: MemoryNetwork
    tasks: TaskGroup
    identity: Identity
    num_stages: int
    streams: list[object]
    ring: RingSettings = SMALL_RING
    num_elements: int = 10
    num_fragments: int = 1
    cut_after: int | None = None
    merge: Merge = Merge.CARRY
    chunk_bytes: int = 8
    passing: PassingRule = IN_LARGE_RINGS
    replicas: list[list[Replica]] = field(default_factory=list)
    generation: int = 0
    journal: dict[str, Logs] = field(default_factory=dict)

    async def write(self, _round: int, digest: str, logs: Logs) -> None:
        self.journal[digest] = logs

    @property
    def hops(self) -> Mapping[PeerId, object]:
        found = (self.network.find(PeerId("?"), f"memory:{r.peer}") for stage in self.replicas for r in stage)
        return {endpoint.peer_id: endpoint.hop for endpoint in found if endpoint is not None}

    @property
    def view(self) -> SwarmView:
        """All replicas that are on the network."""
        found = [
            SeenReplica(Hop(r.peer, (f"memory:{r.peer}",)), 0.0, stage=stage)
            for stage, replicas in enumerate(self.replicas)
            for r in replicas
        ]
        return SwarmView(replicas=tuple(found))

    @property
    def slots(self) -> dict[PeerId, int]:
        return {r.peer: slot for stage in self.replicas for slot, r in enumerate(stage)}

    @property
    def cuts(self) -> CutRule:
        return CutRule(self.num_fragments, self.cut_after)

    def commit(self, slot: int, number: int, stages: Sequence[int] | None = None) -> StepKey:
        """Commit a step of slot's trainer on its pipeline (or on some stages): parameters move by slot + 1."""
        key = StepKey(slot, 1, number, 0)
        path = [stage[slot].peer for stage in self.replicas]
        for stage in range(self.num_stages) if stages is None else stages:
            replica = self.replicas[stage][slot]
            replica.steps.log = (*replica.steps.log, entry_of(key, path))
            replica.stage.parameters -= slot + 1
            replica.stage.floats += slot + 1
            replica.stage.integers += slot + 1
        return key

    def start_client(self, identity: Identity | None = None) -> RoundCoordinator:
        """Start the client, or start it again."""
        self.generation += 1
        identity = identity or self.identity
        endpoint = self.network.endpoint(identity.peer_id)
        coordinator = RoundCoordinator(
            endpoint=endpoint,
            signer=Signer(identity, AUTHORITY, "run"),
            generation=self.generation,
            settings=RoundSettings(
                "run",
                self.num_stages,
                "D0",
                retry_s=0.02,
                drop_after_s=10.0,
                cuts=self.cuts,
                passing=self.passing,
            ),
            clock=SystemClock(),
            journal=self.write,
        )
        self.tasks.start_soon(dispatch, endpoint, [coordinator])
        self.tasks.start_soon(coordinator.run)
        coordinator.replicas(self.hops)
        return coordinator

    async def lead(self) -> RoundCoordinator:
        """Start the client, and have it lead."""
        coordinator = self.start_client()
        await lead(coordinator)
        return coordinator

    def add_replica(self, stage: int) -> Replica:
        peer = PeerId(f"R{stage}.{len(self.replicas[stage])}")
        endpoint: MemoryEndpoint = self.network.endpoint(peer)
        fake, steps = FakeStage(self.num_elements), FakeSteps(cuts=self.cuts)
        optimizer = OuterSgd(lr=0.5, momentum=0.9, nesterov=True)
        merge = None if self.cut_after is None else self.merge
        state = FaultyState(fake, optimizer, self.ring.codec, num_fragments=self.num_fragments, merge=merge)
        send, receive = anyio.create_memory_object_stream[object](100)
        self.streams += [send, receive]
        contents = Contents(endpoint, SystemClock(), chunk_bytes=self.chunk_bytes)
        patience = TransferSettings(retry_s=0.02, slow_s=0.1, timeout_s=1.0)
        sync = StateSync(contents, stage, view=lambda: self.view, settings=patience, num_fragments=self.num_fragments)
        source = StateSource(sync, StateDonor(contents, stage))
        ahead = PayloadsAhead(
            contents,
            stage,
            view=lambda: self.view,
            base=lambda: member.base,
            limit_bytes=lambda round: self.ring.codec.max_size_bytes(state.gradient_size(state.fragment(round))),
        )
        member = RoundMember(
            endpoint=endpoint,
            unseal=unsealer("run", AUTHORITY.peer_id),
            genesis="D0",
            stage=stage,
            steps=steps,
            state=state,
            device=InlineDevice(),
            source=source,
            events=send,
            ring=self.ring,
            ahead=None if self.cut_after is None else ahead,
        )
        self.tasks.start_soon(dispatch, endpoint, [contents, member])
        self.tasks.start_soon(contents.run)
        self.tasks.start_soon(member.run)
        replica = Replica(peer, fake, steps, state, member, contents, source, receive)
        self.replicas[stage].append(replica)
        return replica


def brought_to(run: Run, replica: Replica) -> int:
    """The targets that a replica brings to the round that is under way, by what it has done so far."""
    steps = replica.steps
    return run.cuts.brought(steps.round, steps.log, steps.earlier).num_targets


MakeRun = Callable[..., AbstractAsyncContextManager[Run]]


@pytest.fixture
def make_run() -> MakeRun:
    @asynccontextmanager
    async def make(num_stages: int, num_slots: int, **options: Any) -> AsyncIterator[Run]:
        streams: list[object] = []
        try:
            async with anyio.create_task_group() as tasks:
                run = Run(MemoryNetwork(seed=0), tasks, Identity.generate(), num_stages, streams, **options)
                run.replicas = [[] for _ in range(num_stages)]
                for stage in range(num_stages):
                    for _ in range(num_slots):
                        run.add_replica(stage)
                yield run
                tasks.cancel_scope.cancel()
        finally:
            for stream in streams:
                stream.close()

    return make
