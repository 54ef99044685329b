"""What the client tells the data server of its host: the plan of a round, what a record holds, who is dead.

A data server that was started again knows nothing. It is told all records' samples and the round as it stands; its
trainers say what they have leased (`data.feed`), so that nothing is trained twice and nothing is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio

from shoal.client.ledger import Ledger
from shoal.clock import Backoff, Clock
from shoal.errors import RemoteProtocolError
from shoal.events.data import DataAwaited, SamplesUnknown
from shoal.events.losses import DataServerBack
from shoal.events.trainers import DataServerFrozen
from shoal.ids import PeerId
from shoal.runtime.launcher_messages import Launcher, ReplaceDataServer
from shoal.runtime.waking import Signal
from shoal.swarm.sample_ranges import Ranges, count, lowest, within
from shoal.swarm.takeover import Settled
from shoal.swarm.trainer_slots import TrainerSlots
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.base import Hop, SampleRange, StepRange
from shoal.wire.messages.feed import (
    BatchesAwaited,
    DataHello,
    HoldoutInfo,
    PauseLeases,
    PlanRound,
    RecordSamples,
    Released,
    ReleaseTrainer,
    ResumeRound,
    WindowsRead,
)

_CLIENT = -1
"""Who the client is in a `DataHello`: none of the slots."""
_FROZEN_S = 1.0
"""A data server that is dialled and neither answers nor refuses for so long is frozen, or its host is so busy that the
next one would not answer either: that one has twice as long."""
_MOST_FROZEN_S = 30.0
_SAY_EVERY_S = 30.0
"""While nothing is trained for want of samples."""


@dataclass(kw_only=True, eq=False, repr=False)
class DataLink:
    """The client's orders to its data server. A `transport.dispatch.Handler` that leaves `HoldoutInfo` to others.

    Attributes:
        data_server: of the same host as the client.
        trainers: those that are there now may lease.
        launcher: starts a data server again that hangs but is not dead.
        recorded: the samples of all records.
        chain: what the data server tells the present chain of records from earlier ones by.
        is_late: whether it is, and nobody can train since it has no batch for those who ask.
        marks: of the windows of a stream that it has read; empty: of none, as far as it has said.
        changed: it is lost or back, or has answered.
    """

    endpoint: Endpoint
    data_server: Hop
    clock: Clock
    ledger: Ledger
    trainers: TrainerSlots
    launcher: Launcher
    _plan: PlanRound | None = None
    recorded: Ranges = field(default=(), init=False)
    _base_round: int = 0
    chain: str = field(default="", init=False)
    _marks: bytes = b""
    _has_dead: bool = False
    _is_paused: bool = False
    _has_said_unknown: bool = False
    _released: dict[int, Released] = field(default_factory=dict[int, Released])
    is_up: bool = field(default=True, init=False)
    is_late: bool = field(default=False, init=False)
    marks: bytes = field(default=b"", init=False)
    _is_told: bool = False
    _sent: tuple[PlanRound | None, int, str, bool] = (None, 0, "", False)
    _lost: Signal = field(default_factory=Signal)
    changed: Signal = field(default_factory=Signal, init=False)
    _backoff: Backoff = field(default_factory=lambda: Backoff(first_s=0.1, max_s=1.0))

    def __post_init__(self) -> None:
        self._patience_s = _FROZEN_S
        self.endpoint.introduce(self.data_server)

    def receive(self, event: Received) -> bool:
        """Take the answer to a release, or the data server's word whether samples come, and which it has read.

        Raises:
            RemoteProtocolError: it came from another peer.
        """
        message = event.message
        if isinstance(message, HoldoutInfo) and event.peer == self.data_server.peer:
            self._up()
        if not isinstance(message, Released | BatchesAwaited | WindowsRead):
            return False
        if event.peer != self.data_server.peer:
            raise RemoteProtocolError(f"{type(message).__name__} from {event.peer}, which is not the data server")
        match message:
            case BatchesAwaited(awaited):
                self.is_late = awaited
            case WindowsRead(marks):
                self.marks = marks
            case Released(trainer):
                self._released[trainer] = message
        self.changed.notify()
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """If it was the data server, it is dialled again; see `run`."""
        if peer != self.data_server.peer:
            return
        self.is_up = self.is_late = self._is_told = False
        self._lost.notify()
        self.changed.notify()

    @property
    def feeds(self) -> bool:
        """Whether whoever can train gets samples."""
        return self.is_up and not self.is_late

    async def run(self) -> None:
        """Dial a lost data server again, tell it what it has to know, and say that it is awaited, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep)
            tasks.start_soon(self._say_that_it_is_awaited)

    async def _say_that_it_is_awaited(self) -> None:
        while True:
            while self.feeds:
                await self.changed.wait()
            since_s = self.clock.now_s()
            while not self.feeds:
                with anyio.move_on_after(_SAY_EVERY_S) as timer:
                    while not self.feeds:
                        await self.changed.wait()
                if timer.cancelled_caught:
                    self.ledger.note(DataAwaited(round(self.clock.now_s() - since_s)))

    async def _keep(self) -> None:
        while True:
            await self._lost.take()
            await self._backoff.wait(self.clock)
            self._tell()
            if not await self._is_heard():
                self.ledger.note(DataServerFrozen(self._patience_s))
                self._patience_s = min(2 * self._patience_s, _MOST_FROZEN_S)
                await self.launcher.request(ReplaceDataServer())

    async def _is_heard(self) -> bool:
        """Wait for an answer, or for the end of the connection: a dead one cannot be dialled, a frozen one can."""
        with anyio.move_on_after(self._patience_s):
            while not self.is_up and not self._lost.is_kept:
                await self.changed.wait()
            return True
        return False

    @property
    def recorded_marks(self) -> bytes:
        """Of the windows of a stream that the records have samples of."""
        return self._marks

    def know(self, base_round: int, recorded: Ranges, chain: str, marks: bytes = b"") -> None:
        """Take over what others, or an earlier start of this client, knew of the records, and tell the data server.

        Args:
            base_round: of the newest record.
            chain: if it differs from the one before, the data server forgets the old chain and begins anew.
            marks: of the newest record.
        """
        if chain != self.chain:
            self._plan = None
        self._base_round, self.recorded, self.chain, self._marks = base_round, recorded, chain, marks
        self._post_record()

    def pause(self, *, paused: bool) -> None:
        """Have nothing leased from now on, or let trainers have batches again."""
        self._is_paused = paused
        if self.is_up:
            self._post(PauseLeases(paused))

    def resume(
        self, round: int, num_slots: int, steps: StepRange, speeds: tuple[float, ...], *, has_dead: bool
    ) -> None:
        """Go on in a round that an earlier start of this client has planned.

        A data server that was not restarted knows all this and changes nothing.

        Args:
            has_dead: trainers have died in the round.
        """
        self._plan, self._has_dead = PlanRound(round, num_slots, steps, speeds), has_dead
        self._tell()

    def _tell(self) -> None:
        """Tell the data server all that it would need if it had just started."""
        # First, so that nothing is leased in a pause.
        self._post(PauseLeases(self._is_paused))
        self._post_record()
        plan = self._plan
        if plan is not None and plan.round > self._base_round:
            generations, present = self.trainers.generations, self.trainers.present
            trainers = {slot: generations[slot] for slot in present if slot < plan.num_slots}
            complete = not self._has_dead and len(trainers) == plan.num_slots
            self._post(
                ResumeRound(plan.round, plan.num_slots, plan.steps, trainers, complete, plan.speeds),
            )
        self._sent, self._is_told = (plan, self._base_round, self.chain, self._is_paused), True
        self._post(DataHello(_CLIENT))

    def plan(self, round: int, num_slots: int, steps: StepRange, speeds: tuple[float, ...]) -> None:
        """Open a round: its batches may be leased."""
        self._plan, self._has_dead = PlanRound(round, num_slots, steps, speeds), False
        if self.is_up:
            self._post_plan()

    def record(self, round: int, samples: tuple[SampleRange, ...], marks: bytes = b"") -> None:
        """A record is committed and holds these samples, those of skipped steps included, and these marks."""
        self.recorded = lowest((*self.recorded, *samples))
        self._base_round, self._marks = round, marks
        if self.is_up:
            self._post(RecordSamples(round, self._of_the_data(samples), self.chain))

    async def release(self, trainer: int, generation: int, settled: Settled) -> Released:
        """Free what this generation has leased and surely not trained; return what the data server says to it."""
        self._has_dead = True
        self._released.pop(trainer, None)
        order = ReleaseTrainer(
            trainer=trainer,
            generation=generation,
            round=settled.round,
            committed=tuple(sorted(key for key in settled.committed if key.generation == generation)),
            in_doubt=tuple(sorted(key for key in settled.in_doubt if key.generation == generation)),
            witnesses=dict(settled.witnesses),
            complete=settled.complete,
        )
        while True:
            changed = self.changed.coming
            if self.is_up:
                self._post(order)
            await changed.wait()
            answer = self._released.get(trainer)
            if answer is not None and answer.generation >= generation:
                return answer

    def _up(self) -> None:
        """It has answered: what has changed since it was told comes now."""
        if not self.is_up and not self._is_told:
            return
        # Also one that was replaced while there was no client, so that none of this one's connections has ended.
        if self.ledger.totals.incidents.is_away("data_server", ""):
            self.ledger.note(DataServerBack(self._base_round + 1, self.ledger.now_s()))
        if self.is_up:
            return
        self._backoff.reset()
        self._patience_s = _FROZEN_S
        self.is_up = True
        plan, base_round, chain, is_paused = self._sent
        if is_paused != self._is_paused:
            self._post(PauseLeases(self._is_paused))
        if (base_round, chain) != (self._base_round, self.chain):
            self._post_record()
        if plan != self._plan:
            self._post_plan()
        self.changed.notify()

    def _post_record(self) -> None:
        if self.recorded or self.chain:
            recorded = self._of_the_data(self.recorded)
            self._post(RecordSamples(self._base_round, recorded, self.chain, self._marks))

    def _of_the_data(self, samples: Ranges) -> Ranges:
        """Return what of this the data have: the data server would not take the rest, however often it is told."""
        num_train = self.ledger.totals.num_train
        if not num_train:
            return samples
        known = within(samples, num_train)
        if not self._has_said_unknown and (unknown := count(samples) - count(known)):
            self._has_said_unknown = True
            self.ledger.note(SamplesUnknown(unknown, num_train))
        return known

    def _post_plan(self) -> None:
        if self._plan is not None:
            self._post(self._plan)

    def _post(
        self, message: PlanRound | ResumeRound | PauseLeases | RecordSamples | ReleaseTrainer | DataHello
    ) -> None:
        self.endpoint.post(self.data_server.peer, message)
