"""The client's end of the outer round: connects the coordinator's machine to network, clock and the client's waits."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import anyio

from shoal.averaging.signing import Signer
from shoal.clock import Clock
from shoal.errors import LocalProtocolError
from shoal.events.base import emit
from shoal.events.rounds import (
    ReplicaCameIn,
    ReplicaIsSuspect,
    ReplicaPutOut,
    RoundDeposed,
    RoundIsReady,
    RoundOvertaken,
    SamplesTrainedTwice,
)
from shoal.ids import Ballot, PeerId
from shoal.runtime.waking import Mailbox, Signal
from shoal.swarm.contribution_guard import suspects
from shoal.swarm.records import Logs, Tip, record_hash
from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_effects import (
    ChainLeft,
    CoordinatorEffect,
    Deposed,
    Introduce,
    Journal,
    Overtaken,
    RecordCommitted,
    ReplicaIn,
    ReplicaOut,
    Restored,
    RoundReady,
    Send,
    Stuck,
    TrainedTwice,
)
from shoal.swarm.round_settings import CloseRequest, RoundPhase, RoundSettings
from shoal.swarm.sample_ranges import Ranges
from shoal.transport.base import Endpoint, Received
from shoal.transport.drive import drive
from shoal.wire.messages import Hop
from shoal.wire.messages.mirror import Mirrored
from shoal.wire.messages.round import (
    Join,
    MemberLost,
    Record,
    RecordPrepared,
    RoundState,
    SignedRecord,
    Staged,
    StaleBallot,
    Swapped,
)

logger = logging.getLogger(__name__)

CoordinatorEvent = ReplicaIn | ReplicaOut | Restored | Stuck | ChainLeft | Overtaken | Deposed
"""What the client may want to act on, or to say."""

Answer = RoundState | StaleBallot | Join | Staged | MemberLost | RecordPrepared | Swapped | Mirrored
"""What only replicas and mirrors send."""


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """A committed round; `signed` is its record, encoded and signed.

    Attributes:
        sent_bytes: What the holders sent in the round, by kind of traffic.
        holders: The replicas that hold the record now, with their stages.
    """

    record: Record
    signed: SignedRecord
    sent_bytes: Mapping[str, int]
    holders: Mapping[PeerId, int]


class RoundCoordinator:
    """The outer rounds of a run, for the client that coordinates them.

    Args:
        signer: Signs the records, as the endpoint's peer.
        generation: Unique to this start of the client.
        journal: Writes step logs down before their record is prepared (see `journal.keep_steps`).
        recorded: Samples in the records known from before a restart.
        ballot_number: Of the last ballot before a restart. This client gives way to a higher one.
        known: A record that is known to be committed, though no replica may hold it: of a checkpoint.
        on_event: Is told which replicas are in and out, which stages lack one and which are restored.

    Attributes:
        stuck: Stages for whose replicas the coordinator waits now.
        stages: Of each replica that has said it on the connection that it has now.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        signer: Signer,
        generation: int,
        settings: RoundSettings,
        clock: Clock,
        journal: Callable[[int, str, Logs], Awaitable[None]],
        recorded: Ranges = (),
        ballot_number: int = 0,
        known: SignedRecord | None = None,
        on_event: Callable[[CoordinatorEvent], None] = lambda _: None,
    ) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._journal = journal
        self._to_journal = Mailbox[Journal]()
        self._tell = on_event
        self._unseal = signer.unseal
        tip = known and Tip(signer.unseal(known).round, record_hash(known), known)
        self._machine = RoundCoordinatorMachine(
            endpoint.peer_id, generation, settings, signer.seal, signer.unseal, recorded, ballot_number, tip
        )
        self.keep = self._machine.keep  # the client says whose bytes it gives, since all servers of the stage have left
        self._committed: RecordCommitted | None = None
        self._ready: RoundReady | None = None
        self._is_retired = False
        self.stuck: tuple[int, ...] = ()
        self.stages: dict[PeerId, int] = {}
        self._changed = Signal()

    # -- commands

    def replicas(self, hops: Mapping[PeerId, Hop]) -> None:
        """Name all replicas of the run; to be called whenever they change."""
        self._do(self._machine.replicas(hops, self._clock.now_s()))

    def mirrors(self, hops: Mapping[PeerId, Hop]) -> None:
        """Name all mirrors that are announced; to be called whenever they change, and before `replicas` is."""
        self._do(self._machine.mirrors(hops, self._clock.now_s()))

    def stand(self) -> None:
        """Take a ballot and ask all replicas what they hold; `ready` is what comes of it."""
        self._ready = None
        self._do(self._machine.lead(self._clock.now_s()))

    def retire(self) -> None:
        """Decide nothing any more: `standing` stays what it is, whatever replicas still answer."""
        self._is_retired = True

    async def swapped(self) -> None:
        """Wait until some replica has swapped to the record that everybody was told to swap to."""
        while not self._machine.is_said:
            await self._changed.wait()

    def close_round(
        self,
        round: int,
        slots: Mapping[PeerId, int],
        generations: Mapping[int, int] | None = None,
        join_within_s: float | None = None,
        *,
        keep: bool = False,
        trained_s: float | None = None,
        num_samples: int | None = None,
        marks: bytes = b"",
    ) -> None:
        """Begin the end of the round.

        Args:
            slots: Home slot of each home replica, which orders the rings. Spares come last.
            generations: The lowest generation of each trainer that may still act.
            join_within_s: How long to wait for reachable replicas that do not join; None: until they do.
            keep: A checkpoint of its record is wanted.
            trained_s: How long it was trained; None: not known.
            num_samples: Of a pass over the data; None: not known.
            marks: Of the windows of a stream that were read here; empty: of none.

        Raises:
            LocalProtocolError: The run is not in this round.
        """
        if round != self._machine.tip.round + 1:
            raise LocalProtocolError(f"round {round} cannot be closed, the run is in round {self.round}")
        known = dict(slots), dict(generations or {}), join_within_s, keep, trained_s, num_samples, marks
        self._do(self._machine.close(CloseRequest(round, *known), self._clock.now_s()))

    @property
    def ready(self) -> RoundReady | None:
        """Where every reachable replica that could has swapped to one record, so that it can be trained on; None until
        then, and while a round is being averaged."""
        return self._ready

    @property
    def committed_round(self) -> int:
        """Of the record that this client has committed last; 0: none."""
        return 0 if self._committed is None else self._committed.record.round

    def outcome(self, ready: RoundReady) -> RoundOutcome:
        """Return how the round has ended whose record is ready.

        Raises:
            LocalProtocolError: it is D_0, which no round has made.
        """
        signed = ready.tip.signed
        if signed is None:
            raise LocalProtocolError("no round has made D_0")
        return RoundOutcome(self._unseal(signed), signed, ready.sent_bytes, ready.holders)

    @property
    def holders(self) -> Mapping[PeerId, int] | None:
        """The replicas that hold the record that stands now, with their stages; None while that is not known.

        Those that have caught up since the round began are among them: they may be used at once.
        """
        return self._machine.holders

    @property
    def ballot(self) -> Ballot:
        """Of this client."""
        return self._machine.ballot

    @property
    def leads(self) -> bool:
        """Whether this client coordinates, as far as it knows."""
        return self._machine.phase is not RoundPhase.WAITING

    @property
    def round(self) -> int:
        """The round after the record that stands."""
        return self._machine.tip.round + 1

    @property
    def standing(self) -> RoundOutcome | None:
        """The record that stands, or that everybody was told to swap to; None for D_0."""
        signed = self._machine.tip.signed
        return None if signed is None else RoundOutcome(self._unseal(signed), signed, {}, self._machine.holders or {})

    @property
    def unmirrored(self) -> frozenset[tuple[PeerId, int]]:
        """Mirrors that can be reached, each with every stage that it does not yet have of the record that stands."""
        return self._machine.unmirrored

    @property
    def record_hash(self) -> str:
        """Of the record that stands."""
        return self._machine.tip.hash

    async def changed(self) -> None:
        """Wait until a replica has said something, or something was committed."""
        await self._changed.wait()

    # -- events

    def receive(self, event: Received) -> bool:
        """Take a replica's round message; see `transport.dispatch.Handler`."""
        if not isinstance(event.message, Answer):
            return False
        if self._is_retired and (self._machine.is_said or not isinstance(event.message, Swapped)):
            return True
        if isinstance(event.message, RoundState):
            self.stages[event.peer] = event.message.stage
        self._do(self._machine.receive(event.peer, event.message, self._clock.now_s()))
        return True

    def peer_lost(self, peer: PeerId) -> None:
        self.stages.pop(peer, None)
        if self._is_retired:
            return
        self._do(self._machine.lost(peer, self._clock.now_s()))

    async def run(self) -> None:
        """Journal step logs, and repeat what is not answered, until cancelled.

        Raises:
            StorageError: Step logs cannot be written.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._write_journal)
            await drive(self._machine, self._clock, self._changed, self._do, until=lambda: self._is_retired)

    async def _write_journal(self) -> None:
        async for each in self._to_journal:
            await self._journal(each.record.round, each.digest, each.logs)
            self._do(self._machine.journaled(each.digest))

    # -- effects

    def _do(self, effects: Sequence[CoordinatorEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self._endpoint.post(peer, message)
                case Introduce(hop):
                    self._endpoint.introduce(hop)
                case Journal():
                    self._to_journal.put(effect)
                case RecordCommitted(record):
                    self._name_suspects(record)
                    self._committed = effect
                    self._ready = None
                case RoundReady(tip):
                    emit(logger, RoundIsReady(tip.round, len(effect.holders)))
                    self._ready = effect
                case ReplicaOut(peer, reason):
                    emit(logger, ReplicaPutOut(reason, peer))
                    self._tell(effect)
                case TrainedTwice(first, second, out):
                    emit(logger, SamplesTrainedTwice([str(first), str(second)], out))
                case ReplicaIn(peer):
                    emit(logger, ReplicaCameIn(peer, self._machine.tip.round + 1))
                    self._tell(effect)
                case Stuck(stages):
                    self.stuck = stages
                    self._tell(effect)
                case Restored():
                    self._tell(effect)
                case ChainLeft():
                    self._endpoint.metrics.counter("round.chains_left").add()
                    self._tell(effect)
                case Overtaken(tip):
                    emit(logger, RoundOvertaken(tip.round, tip.hash))
                    self._ready = None
                    self._tell(effect)
                case Deposed(highest):
                    emit(logger, RoundDeposed(str(highest)))
                    self._tell(effect)
        self._changed.notify()

    def _name_suspects(self, record: Record) -> None:
        for suspect in suspects(record):
            self._endpoint.metrics.counter("round.suspects", suspicion=suspect.suspicion.value).add()
            emit(logger, ReplicaIsSuspect(record.round, **suspect._asdict()))
