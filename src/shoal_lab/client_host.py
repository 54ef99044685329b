"""The host of a cluster's client: its client, its data server, and the trainers that the client starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
from anyio.abc import TaskGroup

from shoal.averaging.signing import Signer
from shoal.checkpoint.stored import StoredCheckpoint
from shoal.client.client import Beginning, Client, ClientRun
from shoal.client.diary import Diary
from shoal.client.ledger import Ledger
from shoal.clock import Clock
from shoal.config.schema import Config
from shoal.control.records import ClientRecord, RunRecord
from shoal.data.catalog import opening_of
from shoal.data.server import DataService
from shoal.data.source import DataSet
from shoal.identity import Identity, swarm_authority
from shoal.ids import PeerId, RunId
from shoal.runtime.launcher_messages import LostProcess
from shoal.trainer.trainer import Trainer
from shoal.transport.dispatch import dispatch
from shoal.transport.memory import MemoryNetwork
from shoal.wire.messages.base import Hop
from shoal_lab.launcher import ClusterLauncher
from shoal_lab.process import Process
from shoal_lab.registry import LocalRegistry
from shoal_lab.results import ClusterResult, collect
from shoal_lab.told import require_told

AUTHORITY = swarm_authority(bytes(32))
"""Of the swarm that all processes of a cluster are members of."""


RUN_ID = RunId("cluster")


def run_id_of(checkpoint: StoredCheckpoint | None) -> RunId:
    """Return what a cluster's run is called, which keeps its name when it is resumed."""
    return RUN_ID if checkpoint is None else RunId(checkpoint.manifest.run_id)


class ClientHost:
    """One client's host; its processes can be killed one by one, or all at once with the host.

    Attributes:
        log_dir: the client's.
        identity: of the client, in all of its starts.
        data_service: the newest data server.
        is_lost: the whole host is gone.
    """

    def __init__(
        self,
        *,
        number: int,
        config: Config,
        log_dir: Path,
        dataset: DataSet,
        network: MemoryNetwork,
        registry: LocalRegistry,
        monitor: Hop,
        clock: Clock,
        tasks: TaskGroup,
        expected_servers: Callable[[], int],
        age_s: Callable[[], float],
        checkpoint: StoredCheckpoint | None = None,
    ) -> None:
        """Start the data server and build the client; `run_client` runs it.

        Args:
            number: of the host; the first host begins the run, later ones continue it.
            expected_servers: returns how many the first round waits for.
            age_s: returns the seconds since the cluster was built.
            checkpoint: from which the run was resumed; `log_dir` is prepared for it.
        """
        self.log_dir = log_dir
        self.identity = Identity.generate()
        self.launcher = ClusterLauncher(self._start_trainer)
        self.is_lost = False
        self._number = number
        self._config = config
        self._run_id = run_id_of(checkpoint)
        self._dataset = dataset
        self._network = network
        self._registry = registry
        self._monitor = monitor
        self._clock = clock
        self._tasks = tasks
        self._expected_servers = expected_servers
        self._age_s = age_s
        self._checkpoint = checkpoint
        self._client_away_s = 0.0
        self.serve_data()
        self.start_client()

    # -- faults

    def kill(self) -> None:
        """End everything on the host at once."""
        self.is_lost = True
        self.kill_client()
        for trainer in self.launcher.trainers.values():
            trainer.kill()
        self.kill_data_server()

    def kill_client(self, away_s: float = 0.02) -> None:
        """End the client as SIGKILL would; `run_client` starts it again after so long, unless the host is lost."""
        self._client_away_s = away_s
        self.diary.close()
        self.launcher.losses.append(LostProcess("client", self._clock.now_s()))
        self.client_process.kill()

    def kill_data_server(self) -> None:
        """End the data server as SIGKILL would."""
        self.data_process.kill()

    # -- processes

    async def run_client(self) -> bool:
        """Run the client to the end of the run; one that is killed is started again. Returns False with a lost host.

        Raises:
            ShoalError: the run failed.
        """
        while not await self.client_process.run_here(self.client.run):
            if self.is_lost:
                return False
            await self._clock.sleep_s(self._client_away_s)
            self.start_client()
        return True

    async def result(self, exit_reason: str) -> ClusterResult:
        """Return what the run has come to, as this host knows it.

        Raises:
            InvariantViolation: what has happened is not told as it was.
        """
        found = await collect(self.client, self.log_dir, self._dataset.train.num_samples, exit_reason)
        if self._checkpoint is None:
            require_told(self.log_dir, found.summary)
        return found

    def start_client(self) -> None:
        """Build the client, from what its diary says."""
        process = self.client_process = Process(self._network, self.identity.peer_id)
        self.diary = Diary(self.log_dir, self._run_id)
        registry, record = self._registry.of(process.peer), ClientRecord(process.endpoint.addresses, self._age_s())

        async def announce(turn: anyio.Event) -> None:
            await turn.wait()
            registry.advertise(RunRecord(self._run_id, self._config.num_stages, self._age_s()))
            registry.advertise(record)

        is_first = self._number == 0
        run = ClientRun(
            config=self._config,
            run_id=self._run_id,
            log_dir=self.log_dir,
            data_server=self.data_server,
            monitor=self._monitor,
            diary=self.diary,
            beginning=Beginning(self._expected_servers() if is_first else 0, succeeds=not is_first),
            checkpoint=None if self.diary.saved.resumed is None else self._checkpoint,
        )
        self.client = Client(
            run,
            signer=Signer(self.identity, AUTHORITY, self._run_id),
            endpoint=process.endpoint,
            membership=self._registry.watch(process.peer),
            launcher=self.launcher,
            ledger=Ledger(self._clock, self.diary, age_s=self._age_s, log_dir=self.log_dir),
            clock=self._clock,
        )
        if not self.client.has_turn:
            registry.advertise(msgspec.structs.replace(record, waits=True))
        self._tasks.start_soon(announce, self.client.turn_taken.event)

    def serve_data(self) -> None:
        """Start the data server, with nothing of what an earlier one knew."""
        config = self._config
        process = self.data_process = Process(self._network, self._named("data_server"))
        self.data_server = process.endpoint.hop
        service = self.data_service = DataService(
            endpoint=process.endpoint,
            dataset=self._dataset,
            samples_per_step=config.diloco.samples_per_step,
            seed=config.run.seed,
            deterministic=config.run.deterministic,
            num_workers=config.data.num_workers,
            opening=opening_of(config, self._dataset.windows),
            client=self.identity.peer_id,
            clock=self._clock,
        )

        async def serve() -> None:
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(service.run)
                    tasks.start_soon(dispatch, process.endpoint, (service,))
            finally:
                service.close()

        self._tasks.start_soon(process.run, serve)

    def trainer_peer(self, slot: int) -> PeerId:
        """Return who a slot's trainer is, in all of its generations."""
        return self._named(f"trainer{slot}")

    def _named(self, name: str) -> PeerId:
        return PeerId(f"{name}@{self._number}" if self._number else name)

    def _start_trainer(self, slot: int, generation: int) -> Process:
        process = Process(self._network, self.trainer_peer(slot))
        trainer = Trainer(
            config=self._config,
            endpoint=process.endpoint,
            slot=slot,
            generation=generation,
            client=self.client_process.endpoint.hop,
            data_server=self.data_server,
            clock=self._clock,
        )
        self._tasks.start_soon(process.run, trainer.run)
        return process
