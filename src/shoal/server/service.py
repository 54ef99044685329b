"""The role's entry: joins the swarm, finds its stage, builds the replica and serves it until it is told to stop."""

from __future__ import annotations

import hmac
import logging
import os
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

import anyio
import torch

from shoal.checkpoint.start_weights import fill_start
from shoal.clock import SystemClock
from shoal.config.schema import Config
from shoal.config.shared import shared_configuration
from shoal.control.assignment import StageChooser, require_fit
from shoal.control.counter_report import client_hop, counters_reported
from shoal.control.dial_back import dial_back_heard
from shoal.control.join import join_swarm
from shoal.control.records import MAX_INDEX, StageRecord
from shoal.control.registry import Registry
from shoal.control.role_start import ServerSpec, open_role_endpoint
from shoal.control.run_end import RunEndListener
from shoal.control.run_question import RunTeller
from shoal.control.view_builder import server_of
from shoal.errors import ConfigError
from shoal.events.base import emit
from shoal.events.servers import ServerIsReady, ServerTakesLess, ServerUsesDisk
from shoal.identity import swarm_authority
from shoal.ids import PeerId, RunId
from shoal.model.registry import load_exact_family
from shoal.pipeline.configured_stage import Fill
from shoal.pipeline.role_hooks import role_hooks
from shoal.pipeline.torch_device import device_initialiser
from shoal.runtime.control_pipe import RoleControl
from shoal.runtime.device_thread import DeviceThread
from shoal.runtime.file_memory import file_room
from shoal.runtime.launcher_messages import DialledBack, RunConcluded, ServerReady
from shoal.server.announcer import Announcer
from shoal.server.leaving import Leaving
from shoal.server.memory import server_memory, snapshot_room, stage_needs
from shoal.server.reassignment_monitor import ReassignmentMonitor
from shoal.server.replica import LocalReplica, build_replica
from shoal.server.weights import ServerWeights
from shoal.server.work_report import WorkReport
from shoal.swarm.assignment import StageNeed
from shoal.swarm.microbatch_cut import MAX_MICROBATCHES, cut
from shoal.swarm.records import genesis_hash
from shoal.swarm.view import SwarmView
from shoal.transport.base import Endpoint
from shoal.transport.dispatch import dispatch
from shoal.wire.messages.round import Record

logger = logging.getLogger(__name__)


async def main(payload: bytes, control: RoleControl) -> None:
    """Run a server.

    Args:
        control: is told `ServerReady` once the replica can be used, and `RunConcluded` when the client says so; between
            them what `WorkReport` says.

    Raises:
        BootstrapError: no initial peer answered.
        ConfigError: no stage fits, or the device does not exist.
    """
    await control.until_stopped(_serve, ServerSpec.begun(payload), control)


async def _serve(spec: ServerSpec, control: RoleControl) -> None:
    config = spec.config()
    _require_few_parts(config)
    clock = SystemClock()
    hooks = role_hooks(spec)
    initialiser = device_initialiser(spec.device, spec.threads)
    async with (
        DeviceThread(initialiser, name="device") as device,
        open_role_endpoint(spec) as endpoint,
        join_swarm(spec, control, clock, endpoint) as registry,
        counters_reported(endpoint, spec.label, lambda: client_hop(registry.membership.view), clock),
        dial_back_heard(registry.membership, endpoint.peer_id, lambda reason: control.tell(DialledBack(reason))),
    ):
        memory = await device.run(
            server_memory, spec.device, spec.memory_bytes, spec.device_sharers, config.servers.max_memory_bytes
        )
        disk_bytes, no_files = _file_room(spec, config)
        record = StageRecord(
            addresses=endpoint.addresses,
            join_unix_s=clock.unix_s(),
            stage=spec.stage,
            pinned=spec.stage is not None,
            free_memory_bytes=memory.host_bytes,
            device_memory_bytes=memory.device_bytes,
            max_microbatch_samples=config.servers.max_microbatch_samples,
            free_disk_bytes=disk_bytes,
            host=config.network.shown_host_name,
            index=min(spec.index, MAX_INDEX),
        )
        await device.run(load_exact_family, config.model, config.data)
        needs = await device.run(stage_needs, config)
        server = server_of(endpoint.peer_id, record)
        stage = await _stage(spec, registry, endpoint, record, needs, no_files)
        authority = swarm_authority(spec.swarm_key).peer_id
        weights: ServerWeights | None = None
        if config.begins_from_weights:
            weights = ServerWeights(
                config,
                genesis_hash(RunId(spec.run_id), config.run.seed, shared_configuration(config), authority),
                endpoint=endpoint,
                device=device,
                clock=clock,
                view=lambda: registry.membership.view,
                notice=control.notice,
            )

        async def build(stage: int) -> LocalReplica:
            require_fit(server, needs, (stage,), no_files)
            cap = needs[stage].cap_of(server)
            steps = needs[stage].steps_of(server, cap)
            files = needs[stage].files_of(server)
            if files:
                emit(logger, ServerUsesDisk(stage, files.name.lower(), needs[stage].disk_bytes, asdict(memory)))
            if cap != server.max_microbatch_samples or steps < needs[stage].max_steps:
                emit(logger, ServerTakesLess(stage, cap, steps, no_files, asdict(memory)))
            if weights is None:
                return await build_from(stage, cap, steps, fill_start)
            return await weights.built(stage, partial(build_from, stage, cap, steps))

        async def build_from(stage: int, cap: int | None, steps: int, fill: Fill | None) -> LocalReplica:
            further, files = needs[stage].further_of(server, cap, steps), needs[stage].files_of(server)
            return await build_replica(
                config=config,
                run_id=RunId(spec.run_id),
                authority=authority,
                stage=stage,
                device=device,
                device_name=spec.device,
                endpoint=endpoint,
                view=lambda: registry.membership.view,
                log_dir=Path(spec.log_dir),
                max_microbatch_samples=cap,
                max_open_steps=steps,
                further_microbatches=further,
                clock=clock,
                hooks=hooks,
                snapshot_key=hmac.digest(spec.identity_key, b"shoal snapshot", "sha256"),
                snapshot_room_bytes=snapshot_room(memory, needs[stage].of(server, cap, steps, further, files)[0]),
                fill=fill,
                files=files,
            )

        def recorded(record: Record) -> None:
            hooks.reached("swapped", record.round)
            work.recorded(record)
            if weights is not None:
                weights.starts.withdraw()

        connected: Collection[PeerId] = ()
        async with AsyncExitStack() as early:
            if weights is not None:
                connected = await early.enter_async_context(weights.heard(endpoint))
            replica = await build(stage)
        monitor = ReassignmentMonitor(
            endpoint=endpoint,
            announcer=Announcer(registry, record),
            replica=replica,
            rebuild=build,
            view=lambda: registry.membership.view,
            num_stages=config.num_stages,
            on_record=recorded,
        )
        work = WorkReport(
            peer=endpoint.peer_id,
            replica=lambda: monitor.replica,
            view=lambda: registry.membership.view,
            metrics=endpoint.metrics,
            clock=clock,
            tell=control.tell,
        )

        def is_complete(view: SwarmView) -> bool:
            return not view.missing_stages(config.num_stages)

        def peer_up(peer: PeerId) -> None:
            monitor.peer_up(peer)
            work.found(peer)

        listener = RunEndListener(
            spec.run_id,
            view=lambda: registry.membership.view,
            on_over=lambda reason, ended_well: control.tell(RunConcluded(reason, ended_well)),
            coordinator=lambda: monitor.replica.member.coordinator,
        )
        teller = RunTeller(endpoint, shared_configuration(config), lambda: monitor.client)
        leaving = Leaving(
            endpoint,
            replica=lambda: monitor.replica,
            view=lambda: registry.membership.view,
            clock=clock,
            tell=control.tell,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(monitor.run)
            starts = () if weights is None else (weights.starts,)
            handlers = hooks.handlers((*starts, leaving, monitor, listener, teller))
            for peer in connected:
                peer_up(peer)
            for handler in starts:
                tasks.start_soon(handler.run)
            tasks.start_soon(dispatch, endpoint, handlers, peer_up, work.lost)
            threads = await device.run(torch.get_num_threads)
            emit(logger, ServerIsReady(stage, spec.device, threads, os.nice(0), endpoint.peer_id))
            control.tell(ServerReady(stage))
            tasks.start_soon(work.run)
            # Those who come at the same time are not in what was read first, and may keep this replica's snapshots.
            tasks.start_soon(registry.membership.wait_for, is_complete)
            await leaving.run(control.orders)
            if leaving.has_left:
                tasks.cancel_scope.cancel()


def _require_few_parts(config: Config) -> None:
    """Check that this server's cap leaves a step with a number of microbatches that replicas take.

    Raises:
        ConfigError: it does not.
    """
    cap, diloco = config.servers.max_microbatch_samples, config.diloco
    whole = -(-diloco.batch_size_per_step // config.model_pipeline.microbatches)
    sizes = [whole] * config.model_pipeline.microbatches * diloco.gradient_accumulation_steps
    if cap is not None and (num_parts := len(cut(sizes, cap))) > MAX_MICROBATCHES:
        raise ConfigError(
            f"servers.max_microbatch_samples = {cap} (or diloco.batch_size_per_step of this host) would cut a step of "
            f"{diloco.samples_per_step} samples into {num_parts} microbatches; at most {MAX_MICROBATCHES} are taken, "
            "so take more samples at a time"
        )


def _file_room(spec: ServerSpec, config: Config) -> tuple[int, str]:
    """Return how many bytes may lie in files in place of this server's memory, and if none, why."""
    if spec.device == "mps":
        return 0, "a GPU of a Mac computes with the host's memory, and not with files"
    return file_room(Path(spec.log_dir), config.num_servers, config.servers.max_disk_bytes)


async def _stage(
    spec: ServerSpec,
    registry: Registry,
    endpoint: Endpoint,
    record: StageRecord,
    needs: Sequence[StageNeed],
    no_files: str,
) -> int:
    """The given stage, or the one that needs a server most.

    Raises:
        ConfigError: none fits into this server's memory.
    """
    if spec.stage is not None:
        return spec.stage
    require_fit(server_of(endpoint.peer_id, record), needs, range(len(needs)), no_files)
    chooser = StageChooser(registry, endpoint.peer_id, record, needs, num_servers=spec.expected_servers or None)
    return await chooser.choose()
