"""The host of a cluster's client: its client, its data server, and the trainers that the client starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

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
from shoal.runtime import launcher_messages as messages
from shoal.trainer.loop import Trainer
from shoal.transport.dispatch import dispatch
from shoal.transport.memory import MemoryNetwork
from shoal.wire.messages.base import Hop
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


class ClusterLauncher:
    """Keeps the newest trainer of each slot.

    Attributes:
        trainers: by slot.
        losses: losses from the time without a client, for the client that is started again.
    """

    def __init__(self, start: Callable[[int, int], Process]) -> None:
        """Start nothing yet.

        Args:
            start: starts the trainer of a slot (first argument) with a generation (second).
        """
        self.trainers: dict[int, Process] = {}
        self.losses: list[messages.LostProcess] = []
        self._start = start
        self._generations: dict[int, int] = {}

    async def request(self, asked: messages.LauncherRequest[messages.Reply]) -> messages.Reply:
        """Start a trainer, or say which ones there are, as the launcher of a host does when its client asks."""
        reply: messages.AnyReply = messages.LauncherAnswer()
        match cast(messages.AnyRequest, asked):
            case messages.StartTrainer(slot, generation):
                if slot in self.trainers:
                    self.trainers[slot].kill()
                self.trainers[slot], self._generations[slot] = self._start(slot, generation), generation
            case messages.Adopt():
                running = [slot for slot, trainer in self.trainers.items() if trainer.running]
                reply = messages.Adoption(self._generations, running, self.losses)
            case other:
                reply = messages.LauncherAnswer(f"a cluster does not do this: {other}")
        return cast(messages.Reply, reply)


@dataclass(kw_only=True, eq=False, repr=False)
class ClientHost:
    """One client's host; its processes can be killed one by one, or all at once with the host.

    Making one starts its data server and builds its client; `run_client` runs that.

    Attributes:
        number: of the host; the first host begins the run, later ones continue it.
        log_dir: the client's.
        expected_servers: returns how many the first round waits for.
        age_s: returns the seconds since the cluster was built.
        checkpoint: from which the run was resumed; `log_dir` is prepared for it.
        identity: of the client, in all of its starts.
        data_service: the newest data server.
        is_lost: the whole host is gone.
    """

    number: int
    config: Config
    log_dir: Path
    dataset: DataSet
    network: MemoryNetwork
    registry: LocalRegistry
    monitor: Hop
    clock: Clock
    tasks: TaskGroup
    expected_servers: Callable[[], int]
    age_s: Callable[[], float]
    checkpoint: StoredCheckpoint | None = None

    def __post_init__(self) -> None:
        self.identity = Identity.generate()
        self.is_lost = False
        self._client_away_s = 0.0
        self._client_back: anyio.Event | None = None
        self.launcher = ClusterLauncher(self._start_trainer)
        self._run_id = run_id_of(self.checkpoint)
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

    def kill_client(self, away_s: float = 0.02, until: anyio.Event | None = None) -> None:
        """End the client as SIGKILL would; `run_client` starts it again after so long and then, unless the host is
        lost."""
        self._client_away_s, self._client_back = away_s, until
        self.diary.close()
        self.launcher.losses.append(messages.LostProcess("client", self.clock.now_s()))
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
            await self.clock.sleep_s(self._client_away_s)
            if self._client_back is not None:
                await self._client_back.wait()
            self.start_client()
        return True

    async def result(self, exit_reason: str) -> ClusterResult:
        """Return what the run has come to, as this host knows it.

        Raises:
            InvariantViolation: what has happened is not told as it was.
        """
        found = await collect(self.client, self.log_dir, self.dataset.train.num_samples, exit_reason)
        if self.checkpoint is None:
            require_told(self.log_dir, found.summary)
        return found

    def start_client(self) -> None:
        """Build the client, from what its diary says."""
        process = self.client_process = Process(self.network, self.identity.peer_id)
        self.diary = Diary(self.log_dir, self._run_id)
        registry, record = self.registry.of(process.peer), ClientRecord(process.endpoint.addresses, self.age_s())

        async def announce(turn: anyio.Event) -> None:
            await turn.wait()
            registry.advertise(RunRecord(self._run_id, self.config.num_stages, self.age_s()))
            registry.advertise(record)

        is_first = self.number == 0
        run = ClientRun(
            config=self.config,
            run_id=self._run_id,
            log_dir=self.log_dir,
            data_server=self.data_server,
            monitor=self.monitor,
            diary=self.diary,
            beginning=Beginning(self.expected_servers() if is_first else 0, succeeds=not is_first),
            checkpoint=None if self.diary.saved.resumed is None else self.checkpoint,
        )
        self.client = Client(
            run,
            signer=Signer(self.identity, AUTHORITY, self._run_id),
            endpoint=process.endpoint,
            membership=self.registry.watch(process.peer),
            launcher=self.launcher,
            ledger=Ledger(self.clock, self.diary, age_s=self.age_s, log_dir=self.log_dir),
            clock=self.clock,
        )
        if not self.client.has_turn:
            registry.advertise(msgspec.structs.replace(record, waits=True))
        self.tasks.start_soon(announce, self.client.turn_taken.event)

    def serve_data(self) -> None:
        """Start the data server, with nothing of what an earlier one knew."""
        config = self.config
        process = self.data_process = Process(self.network, self._named("data_server"))
        self.data_server = process.endpoint.hop
        service = self.data_service = DataService(
            endpoint=process.endpoint,
            dataset=self.dataset,
            samples_per_step=config.diloco.samples_per_step,
            seed=config.run.seed,
            deterministic=config.run.deterministic,
            num_workers=config.data.num_workers,
            opening=opening_of(config, self.dataset.windows),
            client=self.identity.peer_id,
            clock=self.clock,
        )

        async def serve() -> None:
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(service.run)
                    tasks.start_soon(dispatch, process.endpoint, (service,))
            finally:
                service.close()

        self.tasks.start_soon(process.run, serve)

    def trainer_peer(self, slot: int) -> PeerId:
        """Return who a slot's trainer is, in all of its generations."""
        return self._named(f"trainer{slot}")

    def _named(self, name: str) -> PeerId:
        return PeerId(f"{name}@{self.number}" if self.number else name)

    def _start_trainer(self, slot: int, generation: int) -> Process:
        process = Process(self.network, self.trainer_peer(slot))
        trainer = Trainer(
            config=self.config,
            endpoint=process.endpoint,
            slot=slot,
            generation=generation,
            client=self.client_process.endpoint.hop,
            data_server=self.data_server,
            clock=self.clock,
        )
        self.tasks.start_soon(process.run, trainer.run)
        return process
