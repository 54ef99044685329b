"""The parts of a client, put together: what the role's process runs, and a cluster in one process as well.

endpoint -> Watch, TrainerPool, Reports, RoundCoordinator, Feed
membership -> RoundLoop -> RoundCoordinator, trainers, data server
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from shoal.averaging.audit import audit
from shoal.averaging.coordinator import RoundCoordinator
from shoal.averaging.journal import write_genesis
from shoal.client.data_link import DataLink
from shoal.client.fencing import Fencing
from shoal.client.reports import Reports
from shoal.client.rounds import RoundLoop
from shoal.client.summary import build_summary
from shoal.client.takeover import Takeover
from shoal.client.trainers import Launcher, TrainerPool
from shoal.client.watch import Watch
from shoal.clock import Clock
from shoal.config.schema import Config
from shoal.config.shared import shared_configuration
from shoal.control.membership import Membership
from shoal.data.feed import Feed
from shoal.identity import Identity
from shoal.ids import PeerId
from shoal.swarm.records import genesis_hash
from shoal.swarm.round_settings import RoundSettings
from shoal.transport.base import Endpoint
from shoal.transport.dispatch import dispatch
from shoal.wire.messages.base import Hop

INCARNATION = 1
TRAINER_START_TIMEOUT_S = 20.0


class Client:
    """Trains a run from its first round to its last, with the servers of a membership.

    Attributes:
        reports: what the trainers have reported, with the running totals.
        rounds: the round loop.
        watch: what broke, and when the first step was committed.
        trainers: the trainer of each slot.
    """

    def __init__(
        self,
        *,
        config: Config,
        run_id: str,
        log_dir: Path,
        identity: Identity,
        endpoint: Endpoint,
        membership: Membership,
        launcher: Launcher,
        data_server: Hop,
        monitor: Hop,
        clock: Clock,
        age_s: Callable[[], float],
        expected_servers: int,
        patient: bool = False,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Connect the parts and write the run's record 0.

        Args:
            config: of the run.
            run_id: the training job.
            log_dir: where records and step logs are written.
            identity: signs the records; of the same peer as `endpoint`.
            endpoint: its events are taken by `run`.
            membership: who serves.
            launcher: starts trainers.
            data_server: of this host; runs already.
            monitor: gets numbers.
            clock: for deadlines and rates.
            age_s: seconds since the run was launched.
            expected_servers: servers that the first round waits for, for a while.
            notice: tells the user something that stays on the screen.
            patient: wait for them, or for the first complete pipeline, however long it takes.

        Raises:
            OSError: `log_dir` cannot be written.
        """
        self._config, self._run_id, self._log_dir = config, run_id, log_dir
        self._endpoint = endpoint
        self._membership = membership
        self._num_train = 0
        self._feed = Feed(endpoint=endpoint, data_server=data_server, trainer=-1, incarnation=INCARNATION, clock=clock)
        self.trainers = TrainerPool(endpoint=endpoint, launcher=launcher, start_timeout_s=TRAINER_START_TIMEOUT_S)
        self.watch = Watch(
            membership=membership,
            trainers=self.trainers,
            slots_of_replica=self._slots_of,
            age_s=age_s,
        )
        shared = shared_configuration(config)
        self._coordinator = RoundCoordinator(
            endpoint=endpoint,
            identity=identity,
            incarnation=INCARNATION,
            settings=RoundSettings(
                run_id=run_id,
                num_stages=config.num_stages,
                genesis=genesis_hash(run_id, config.run.seed, shared),
                stage_timeout_s=config.diloco.averaging_timeout_s,
            ),
            clock=clock,
        )
        self.reports = Reports(
            endpoint=endpoint,
            monitor=monitor,
            trainers=self.trainers,
            clock=clock,
            swarm_numbers=self._swarm_numbers,
            on_stuck=lambda _: self.rounds.update_trainers(),
        )
        self._fencing = Fencing(
            endpoint=endpoint,
            clock=clock,
            replicas=lambda: [replica.peer for replica in membership.view.replicas],
        )
        self._data = DataLink(
            endpoint=endpoint,
            data_server=data_server,
            clock=clock,
            trainers=lambda: {slot: self.trainers.incarnations[slot] for slot in self.trainers.present},
            on_lost=lambda: self.watch.failovers.lost("data_server", self.trainers.present, age_s()),
        )
        self.rounds = RoundLoop(
            config=config,
            log_dir=log_dir,
            endpoint=endpoint,
            coordinator=self._coordinator,
            membership=membership,
            trainers=self.trainers,
            reports=self.reports,
            takeover=Takeover(trainers=self.trainers, reports=self.reports, fencing=self._fencing, data=self._data),
            data=self._data,
            clock=clock,
            expected_servers=expected_servers,
            patient=patient,
            notice=notice,
        )
        write_genesis(
            log_dir,
            seed=config.run.seed,
            configuration=shared,
            num_threads=config.servers.threads,
            versions={name: version(name) for name in ("shoal", "torch", "numpy")},
        )

    async def run(self) -> None:
        """Train all rounds.

        Raises:
            ShoalError: the run failed.
        """
        async with anyio.create_task_group() as tasks:
            handlers = (
                self.watch,
                self.trainers,
                self.reports,
                self._coordinator,
                self._fencing,
                self._data,
                self._feed,
            )
            tasks.start_soon(dispatch, self._endpoint, handlers, self._membership.found)
            tasks.start_soon(self._coordinator.run)
            tasks.start_soon(self._data.run)
            tasks.start_soon(self._feed.run)
            sizes = await self._feed.hello()
            self._num_train, self.reports.num_holdout = sizes.num_train, sizes.num_holdout
            await self.rounds.run()
            tasks.cancel_scope.cancel()

    async def summary(self, exit_reason: str) -> dict[str, Any]:
        """Return what was reached so far, as `summary.json` has it.

        Args:
            exit_reason: "done", "failed" or "interrupted".

        Raises:
            RecordRejected: a step log in `log_dir` is damaged.
            OSError: it cannot be read.
        """
        return build_summary(
            config=self._config,
            run_id=self._run_id,
            progress=self.reports.progress,
            audit=await anyio.to_thread.run_sync(audit, self._log_dir, self._num_train),
            replicas=self.rounds.num_replicas,
            outer_rounds=self.rounds.rounds,
            hashes=self.rounds.hashes,
            seconds_to_first_step=self.watch.seconds_to_first_step,
            failovers=self.watch.failovers.as_json(),
            exit_reason=exit_reason,
        )

    def _slots_of(self, peer: PeerId) -> frozenset[int]:
        return self.rounds.slots_of(peer)

    def _swarm_numbers(self) -> Mapping[str, float]:
        view = self._membership.view
        return {
            "pipelines": float(self.rounds.num_pipelines),
            # The data server and the trainers announce themselves to nobody but this client.
            "alive_peers": float(view.num_peers + len(self.trainers.present) + 1),
            "missing_stages": float(len(view.missing_stages(self._config.num_stages))),
        }
