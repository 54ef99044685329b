"""The role's entry: joins the swarm, has its data server and trainers started, runs the rounds, sums the run up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from shoal import log
from shoal.averaging.audit import audit
from shoal.averaging.coordinator import RoundCoordinator
from shoal.averaging.journal import write_genesis
from shoal.client.failovers import Failovers
from shoal.client.reports import Reports
from shoal.client.rounds import RoundLoop
from shoal.client.spec import ClientSpec
from shoal.client.summary import build_summary
from shoal.client.trainers import TrainerPool
from shoal.clock import Clock, SystemClock
from shoal.config.shared import shared_configuration
from shoal.control.join import join_swarm
from shoal.control.membership import Membership
from shoal.control.records import ClientRecord, RunRecord
from shoal.control.registry import Registry
from shoal.data.feed import Feed
from shoal.errors import ControlError, ShoalError
from shoal.identity import Identity
from shoal.ids import PeerId, RunId
from shoal.runtime.control_pipe import RoleControl
from shoal.runtime.process_info import process_age_s
from shoal.swarm.records import genesis_hash
from shoal.swarm.round_settings import RoundSettings
from shoal.transport.base import Endpoint, Received
from shoal.transport.dispatch import dispatch
from shoal.transport.unix import open_unix_endpoint
from shoal.wire.messages.control import StepReport

logger = logging.getLogger(__name__)

INCARNATION = 1
TRAINER_START_TIMEOUT_S = 20.0


async def main(payload: bytes, control: RoleControl) -> None:
    """Run a client.

    Args:
        payload: `ClientSpec` in msgpack.
        control: asked for a data server and trainers; told `ready()`, and at the end `summary(summary=...)`, also when
            the run is interrupted or fails.

    Raises:
        ShoalError: the run failed.
    """
    spec = msgspec.msgpack.decode(payload, type=ClientSpec)
    log.configure(spec.log_path.stem, Path(spec.log_dir))
    identity, clock = Identity(spec.identity_key), SystemClock()
    async with open_unix_endpoint(
        peer_id=identity.peer_id, run_id=RunId(spec.run_id), role=spec.role, path=Path(spec.socket_path)
    ) as endpoint:
        reply = await control.request("start_data_server")
        if "error" in reply:
            raise ControlError(f"the data server could not be started: {reply['error']}")
        async with join_swarm(spec, identity, control, clock) as registry:
            await _Client(spec, identity, endpoint, registry, control, clock).run()


class _Watch:
    """Corrects the view by what the data plane sees, and notes when steps are committed and what broke in between."""

    def __init__(
        self,
        membership: Membership,
        trainers: TrainerPool,
        launcher_pid: int,
        slots_of_replica: Callable[[PeerId], frozenset[int]],
    ) -> None:
        self.seconds_to_first_step: float | None = None
        self.failovers = Failovers()
        self._membership = membership
        self._trainers = trainers
        self._launcher_pid = launcher_pid
        self._slots_of_replica = slots_of_replica

    def receive(self, event: Received) -> bool:
        if isinstance(event.message, StepReport):
            now_s = process_age_s(self._launcher_pid)
            if self.seconds_to_first_step is None:
                self.seconds_to_first_step = now_s
            self.failovers.step_committed(event.message.slot, now_s)
        return False

    def peer_lost(self, peer: PeerId) -> None:
        now_s = process_age_s(self._launcher_pid)
        if (slot := self._trainers.slot_of(peer)) is not None:
            self.failovers.lost("trainer", {slot}, now_s)
        elif self._membership.view.replica(peer) is not None:
            self.failovers.lost("server", self._slots_of_replica(peer), now_s)
        self._membership.lost(peer)


class _Client:
    """The parts of a client, put together."""

    def __init__(
        self,
        spec: ClientSpec,
        identity: Identity,
        endpoint: Endpoint,
        registry: Registry,
        control: RoleControl,
        clock: Clock,
    ) -> None:
        config = spec.config()
        self._spec, self._config, self._endpoint, self._control = spec, config, endpoint, control
        self._membership = registry.membership
        self._log_dir = Path(spec.log_dir)
        self._feed = Feed(endpoint=endpoint, data_server=spec.data_server, trainer=-1, incarnation=INCARNATION)
        self._num_train = 0
        self._trainers = TrainerPool(endpoint=endpoint, control=control, start_timeout_s=TRAINER_START_TIMEOUT_S)
        self._watch = _Watch(
            registry.membership, self._trainers, spec.launcher_pid, lambda peer: self._rounds.slots_of(peer)
        )
        shared = shared_configuration(config)
        self._coordinator = RoundCoordinator(
            endpoint=endpoint,
            identity=identity,
            incarnation=INCARNATION,
            settings=RoundSettings(
                run_id=spec.run_id,
                num_stages=config.num_stages,
                genesis=genesis_hash(spec.run_id, config.run.seed, shared),
                stage_timeout_s=config.diloco.averaging_timeout_s,
            ),
            clock=clock,
        )
        self._reports = Reports(
            endpoint=endpoint,
            monitor=spec.monitor,
            trainers=self._trainers,
            clock=clock,
            swarm_numbers=self._swarm_numbers,
            on_stuck=lambda _: self._rounds.update_trainers(),
        )
        self._rounds = RoundLoop(
            config=config,
            log_dir=self._log_dir,
            endpoint=endpoint,
            coordinator=self._coordinator,
            membership=registry.membership,
            trainers=self._trainers,
            reports=self._reports,
            data_server=spec.data_server,
            clock=clock,
            expected_servers=spec.expected_servers,
        )
        joined_unix_s = clock.unix_s()
        registry.advertise(ClientRecord(endpoint.addresses, joined_unix_s))
        registry.advertise(RunRecord(spec.run_id, config.num_stages, joined_unix_s))
        write_genesis(
            self._log_dir,
            seed=config.run.seed,
            configuration=shared,
            num_threads=config.servers.threads,
            versions={name: version(name) for name in ("shoal", "torch", "numpy")},
        )

    async def run(self) -> None:
        """Run the rounds until they are done, fail, or the launcher says stop; then say what was reached."""
        exit_reason = "interrupted"
        try:
            async with anyio.create_task_group() as tasks:
                handlers = (self._watch, self._trainers, self._reports, self._coordinator, self._feed)
                tasks.start_soon(dispatch, self._endpoint, handlers, self._membership.found)
                tasks.start_soon(self._coordinator.run)
                tasks.start_soon(self._stop_when_told, tasks)
                self._control.ready()
                sizes = await self._feed.hello()
                self._num_train, self._reports.num_holdout = sizes.num_train, sizes.num_holdout
                await self._rounds.run()
                exit_reason = "done"
                tasks.cancel_scope.cancel()
        except* ShoalError:
            exit_reason = "failed"
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await self._sum_up(exit_reason)

    async def _stop_when_told(self, tasks: anyio.abc.TaskGroup) -> None:
        await self._control.stopping.wait()
        tasks.cancel_scope.cancel()

    async def _sum_up(self, exit_reason: str) -> None:
        found = await anyio.to_thread.run_sync(audit, self._log_dir, self._num_train)
        self._control.event(
            "summary",
            summary=build_summary(
                config=self._config,
                run_id=self._spec.run_id,
                progress=self._reports.progress,
                audit=found,
                replicas=self._rounds.num_replicas,
                outer_rounds=self._rounds.rounds,
                hashes=self._rounds.hashes,
                seconds_to_first_step=self._watch.seconds_to_first_step,
                failovers=self._watch.failovers.as_json(),
                exit_reason=exit_reason,
            ),
        )

    def _swarm_numbers(self) -> Mapping[str, float]:
        view = self._membership.view
        return {
            "pipelines": float(self._rounds.num_pipelines),
            # The data server and the trainers announce themselves to nobody but this client.
            "alive_peers": float(view.num_peers + len(self._trainers.present) + 1),
            "missing_stages": float(len(view.missing_stages(self._config.num_stages))),
        }

