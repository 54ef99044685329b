"""One replica of a stage, put together: the module on its device, the step's end, the round's end.

endpoint events --> StageWorker (steps) ----+--> StageCompute, ReplicaState on the device thread
                --> RoundMember (rounds) ---+--> RoundSwapped / ReplicaOut to the server
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import torch
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from shoal.averaging.contents import Contents
from shoal.averaging.inner_exchange import InnerExchange
from shoal.averaging.link_reports import link_reports
from shoal.averaging.member import RoundEvent, RoundMember
from shoal.averaging.payloads_ahead import PayloadsAhead
from shoal.averaging.replica_state import ReplicaState, outer_optimizer
from shoal.averaging.round_average import RingSettings, averaging_codec
from shoal.averaging.signing import employment, unsealer
from shoal.averaging.snapshot_exchange import SnapshotExchange
from shoal.averaging.snapshot_owner import SnapshotOwner, SnapshotSettings
from shoal.averaging.starts import run_has_begun
from shoal.averaging.state_donor import StateDonor
from shoal.averaging.state_source import StateSource
from shoal.averaging.state_sync import StateSync
from shoal.checkpoint.start_weights import fill_start
from shoal.clock import Clock
from shoal.config.schema import Config
from shoal.config.shared import shared_configuration
from shoal.ids import PeerId, RunId
from shoal.model.device_calls import name_of
from shoal.model.registry import load_family
from shoal.model.stage import StageModule
from shoal.optim.flat import trained_parameters
from shoal.optim.inner import InnerOptimizer, transposed_matrices
from shoal.optim.merge import Merge
from shoal.optim.vector_memory import IN_MEMORY, FileVectorMemory, VectorMemory
from shoal.pipeline.configured_stage import Fill, configured_stage, tell_if_in_vain
from shoal.pipeline.host_memory import page_locked
from shoal.pipeline.replica_log import Place, ReplicaLog, Started, place_of
from shoal.pipeline.role_hooks import RoleHooks
from shoal.pipeline.stage_compute import StageCompute
from shoal.pipeline.stage_worker import CapLowered, RoundCuts, StageWorker, StepLimits, StepRights
from shoal.runtime.device_thread import DeviceThread
from shoal.server.memory import MAX_OPEN_STEPS, UNKNOWN_ROOM_BYTES
from shoal.swarm.assignment import Files
from shoal.swarm.content_transfer import TransferSettings
from shoal.swarm.cut_rule import CutRule
from shoal.swarm.records import genesis_hash
from shoal.swarm.step_operations import Schedule
from shoal.swarm.view import SwarmView
from shoal.transport.base import Endpoint
from shoal.transport.dispatch import Handler
from shoal.wire.messages.step import Open

ReplicaEvent = RoundEvent | CapLowered
"""What a replica tells its server."""


@dataclass(frozen=True)
class LocalReplica:
    """A replica that can serve.

    Attributes:
        compute: only its device thread may use it.
        contents: what it gives to others and gets from them.
        inner: what its inner optimizer knows, for checkpoints and from them.
        snapshots: its own on other servers, and theirs here; None: the run makes none.
    """

    stage: int
    compute: StageCompute
    state: ReplicaState
    worker: StageWorker
    member: RoundMember
    contents: Contents
    inner: InnerExchange
    events: MemoryObjectReceiveStream[ReplicaEvent]
    snapshots: SnapshotExchange | None
    _sender: MemoryObjectSendStream[ReplicaEvent]
    _log: ReplicaLog

    @property
    def handlers(self) -> tuple[Handler, ...]:
        """Who takes the endpoint's events."""
        parts = (self.worker, self.member, self.contents, self.inner)
        return parts if self.snapshots is None else (*parts, self.snapshots)

    def close(self) -> None:
        """Give back what a replica that does not run any more, or never did, has opened."""
        self._sender.close()
        self.events.close()
        self._log.close()

    async def run(self) -> None:
        """Work until cancelled."""
        async with self._sender, anyio.create_task_group() as tasks:
            tasks.start_soon(self.worker.run)
            tasks.start_soon(self.member.run)
            tasks.start_soon(self.contents.run)
            tasks.start_soon(self.inner.run)
            if self.snapshots is not None:
                tasks.start_soon(self.snapshots.run)


async def build_replica(
    *,
    config: Config,
    run_id: RunId,
    authority: PeerId,
    stage: int,
    device: DeviceThread,
    device_name: str,
    endpoint: Endpoint,
    view: Callable[[], SwarmView],
    log_dir: Path,
    max_microbatch_samples: int | None,
    max_open_steps: int = MAX_OPEN_STEPS,
    further_microbatches: int,
    clock: Clock,
    transfer: TransferSettings | None = None,
    hooks: RoleHooks,
    snapshot_key: bytes = b"",
    snapshot_room_bytes: int = UNKNOWN_ROOM_BYTES,
    fill: Fill | None = fill_start,
    files: Files = Files.NOTHING,
) -> LocalReplica:
    """Build the stage with the state of D_0, on the device thread, and connect it.

    If the run holds a record already, the coordinator names it, and the replica fetches its state from others of its
    stage; until then the replica is not used.

    Args:
        authority: of the swarm; warrants the signers of the run's records.
        device_name: as torch names it.
        view: returns the swarm as it is now.
        log_dir: holds the replica's own log, without which a run cannot be replayed.
        max_microbatch_samples: the most that it takes at a time; None: any number.
        max_open_steps: for which it has memory.
        further_microbatches: of each of these, in flight beside those of the window, for which it has memory.
        transfer: as configured if None.
        snapshot_key: seals this peer's snapshots; the same in all its generations, and secret.
        snapshot_room_bytes: the most that is kept of other replicas' snapshots.
        fill: gives the stage what the run begins from; None: a record stands, and D_0 is of no use.
        files: what of the replica lies in files, on the disk of `log_dir`.

    Raises:
        ConfigError: the model does not fit the configuration, or there is no such device.
        WeightsMissing: the run begins from weights that are not on this host.
    """
    memory = FileVectorMemory(log_dir) if files else IN_MEMORY
    of_inner = memory if files is Files.MOMENTS else IN_MEMORY
    build = partial(build_state, fill=fill or _unfilled, memory=memory, of_inner=of_inner)
    compute, state = await device.run(build, config, stage, device_name)
    tell_if_in_vain(config, stage, max_microbatch_samples)
    if device_name != "cpu":
        endpoint.receive_into(page_locked)
    started = Started(run_id, endpoint.peer_id, stage, await device.run(_place, device_name))
    log = ReplicaLog(log_dir, started, lambda: state.hashes, endpoint.metrics)
    transfer = transfer or TransferSettings(timeout_s=config.diloco.load_state_timeout_s)
    contents, cuts = Contents(endpoint, clock, transfer.chunk_bytes, memory), CutRule.of(config.diloco)
    owner, snapshots = None, None
    if config.diloco.snapshot_every_steps:
        every_steps = config.diloco.snapshot_every_steps
        settings = SnapshotSettings(every_steps, snapshot_room_bytes, snapshot_key, cuts)
        owner = SnapshotOwner(
            contents,
            stage,
            generation=log.generation,
            settings=settings,
            view=view,
            device=device,
            capture=compute.snapshot,
            base=lambda: member.base,
        )
        snapshots = SnapshotExchange(
            contents,
            stage,
            owner=owner,
            settings=settings,
            generation=log.generation,
            follows=log.follows,
            view=view,
        )
    sender, receiver = anyio.create_memory_object_stream[ReplicaEvent](math.inf)

    def is_client(peer: PeerId) -> bool:
        """Whether the replica follows this peer."""
        return peer == member.coordinator

    is_employed = employment(run_id)

    def may_open(peer: PeerId, step: Open) -> bool:
        """Whether the client that the replica follows has given this peer the slot of the step."""
        client = member.coordinator
        return client is not None and is_employed(client, peer, step)

    worker = StageWorker(
        endpoint=endpoint,
        compute=compute,
        device=device,
        num_stages=config.num_stages,
        limits=StepLimits(
            max_open_steps, max_microbatch_samples, config.model_pipeline.microbatches_in_flight, further_microbatches
        ),
        events=sender,
        replica_log=log,
        hooks=hooks,
        boundary=None if owner is None else owner.boundary,
        cuts=RoundCuts(cuts, lambda round, num_targets: member.cut(round, num_targets)),
        rights=StepRights(is_client, may_open),
    )
    genesis = genesis_hash(run_id, config.run.seed, shared_configuration(config), authority)
    ahead: PayloadsAhead | None = None
    if config.diloco.overlap_steps:
        codec = averaging_codec(config.diloco)
        ahead = PayloadsAhead(
            contents,
            stage,
            view=view,
            base=lambda: member.base,
            limit_bytes=lambda round: codec.max_size_bytes(state.gradient_size(state.fragment(round))),
        )
    sync = StateSync(contents, stage, view=view, settings=transfer, num_fragments=config.diloco.fragments)
    inner = InnerExchange(
        contents,
        stage,
        generation=log.generation,
        device=device,
        num_parameters=compute.averaged.parameters.layout.numel,
        capture=compute.parts.inner_state,
        inherit=worker.inherit,
        base=lambda: member.base,
        has_mirrors=lambda: bool(view().mirrors),
        is_client=is_client,
    )
    donor = StateDonor(contents, stage, config.diloco.fragments)
    source = StateSource(sync, donor, snapshots, inner, is_behind=fill is None or run_has_begun(view()))
    member = RoundMember(
        endpoint=endpoint,
        unseal=unsealer(run_id, authority),
        genesis=genesis,
        stage=stage,
        steps=worker,
        state=state,
        device=device,
        source=source,
        events=sender,
        # Measurements differ from run to run, and the order of the ring decides the last bits.
        links=tuple if config.run.deterministic else lambda: link_reports(endpoint),
        ring=RingSettings(codec=averaging_codec(config.diloco), over_senders=config.diloco.averages_senders),
        ahead=ahead,
    )
    if not source.may_resume or source.is_behind:
        worker.start_round(1, genesis)
    return LocalReplica(stage, compute, state, worker, member, contents, inner, receiver, snapshots, sender, log)


def _unfilled(config: Config, module: StageModule) -> None:
    """Leave what the seed says: it will be replaced."""


def _place(device_name: str) -> Place:
    """Runs on the device thread, whose number of threads is its own."""
    gpu = name_of(torch.device(device_name))
    return place_of(device_name, torch.get_num_threads(), torch.backends.cpu.get_cpu_capability(), gpu)


def build_state(
    config: Config,
    stage: int,
    device_name: str,
    fill: Fill = fill_start,
    *,
    memory: VectorMemory = IN_MEMORY,
    of_inner: VectorMemory = IN_MEMORY,
) -> tuple[StageCompute, ReplicaState]:
    """Build what a replica of a stage computes with, in the state of D_0; runs on the device thread.

    Args:
        device_name: as torch names it.
        memory: where the states of records lie.
        of_inner: where what the inner optimizer knows lies.

    Raises:
        ConfigError: the model does not fit the configuration, or there is no such device.
        WeightsMissing: the run begins from weights that are not on this host.
    """
    module = configured_stage(config, load_family(config.model, config.data), stage, device_name, fill)
    inner_optim = config.diloco.inner_optim
    optimizer = InnerOptimizer(trained_parameters(module), inner_optim, transposed_matrices(module), of_inner)
    compute = StageCompute(
        module,
        optimizer,
        run_seed=config.run.seed,
        stage=stage,
        schedule=Schedule(config.model_pipeline.schedule),
        activation_checkpointing=config.model_pipeline.activation_checkpointing,
    )
    outer = outer_optimizer(config.diloco.outer_optim, compute.averaged.parameters.layout)
    state = ReplicaState(
        compute,
        outer,
        averaging_codec(config.diloco),
        resets_inner=config.diloco.inner_state == "reset",
        num_fragments=config.diloco.fragments,
        merge=Merge(config.diloco.overlap_merge) if config.diloco.overlap_steps else None,
        memory=memory,
    )
    return compute, state
