"""A replica's end of the outer round: connects the machine to the network, the steps and the device.

    endpoint -> receive -> RoundMemberMachine -> jobs: close steps, ring, swap -> RoundMemberMachine -> post

One job at a time changes the state; a ring runs beside it and ends when a newer quorum or a record replaces it. A
replica that was left behind gets the newest state from its `StateSource`, and what it holds goes there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar, TypeVarTuple

import anyio
import msgspec
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream
from torch import Tensor

from shoal.averaging.payloads_ahead import PayloadsAhead
from shoal.averaging.replica_state import Contribution, OuterState, ReplicaState
from shoal.averaging.round_average import DEFAULT_RING, Device, RingSettings, RoundAverage
from shoal.averaging.state_source import StateSource
from shoal.errors import RoundAborted, StateMismatch
from shoal.events.base import emit
from shoal.events.rounds import (
    ReplicaChainLeft,
    ReplicaNotResumed,
    ReplicaPutOut,
    ReplicaRestored,
    ReplicaResumed,
    RingStarted,
    RoundCloseSuperseded,
    RoundHasSwapped,
)
from shoal.ids import PeerId, StepKey
from shoal.optim.fragments import Fragment
from shoal.runtime.waking import Mailbox
from shoal.swarm.records import Tip, names, outcome_of, payload_in, record_hash
from shoal.swarm.round_effects import (
    CloseSteps,
    Fetch,
    Introduce,
    MemberEffect,
    Pin,
    Relocate,
    ReplicaOut,
    ResolveStep,
    RunRing,
    Send,
    Swap,
)
from shoal.swarm.round_member import RoundMemberMachine
from shoal.swarm.round_orders import Order, StepsClosed
from shoal.swarm.snapshots import Base
from shoal.swarm.view import NO_BASE
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.round import (
    MAX_LINK_REPORTS,
    LinkReport,
    OrderPassed,
    Propose,
    Record,
    SignedRecord,
    StageHashes,
)
from shoal.wire.messages.step import StepEntry, StepsTrained

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Args = TypeVarTuple("_Args")


class StepService(Protocol):
    """The steps of the replica, as the round needs them; `pipeline.StageWorker` is one."""

    def start_round(self, round: int, base: str = "", anew: bool = False, keeps_rest: bool = False) -> None:
        """The replica holds D_{round-1}, whose hash is `base`: steps on top of it may begin. What is open is dropped;
        with round 0 none may begin. `anew`: the inner optimizer has done no step. `keeps_rest`: see `Swap`."""
        ...

    async def close(self, round: int) -> StepsClosed:
        """Refuse new steps and return when nothing is open but doubt; again after `resolve`.

        Raises:
            RoundAborted: The replica is in another round.
        """
        ...

    def resolve(self, key: StepKey, commit: bool, scale: float, lr: float, skipped: bool) -> None:
        """Settle a step in doubt."""
        ...

    def resume(
        self, log: tuple[StepEntry, ...], content: Tensor, generation: int, earlier: tuple[StepsTrained, ...] = ()
    ) -> bool:
        """Right after `start_round`: go on from a snapshot; False if that would contradict what was said since."""
        ...


@dataclass(frozen=True, slots=True)
class RoundSwapped:
    """The replica now holds `record`, and its stage's bytes have these hashes."""

    record: Record
    hashes: StageHashes


RoundEvent = RoundSwapped | ReplicaOut | Relocate
"""What a member tells the role that runs it."""


@dataclass(frozen=True, slots=True)
class _EncodeCut:
    """The replica was cut in this round, to which it brings so many targets."""

    round: int
    num_targets: int


_Job = CloseSteps | RunRing | Swap | Fetch | _EncodeCut


@dataclass(kw_only=True, eq=False, repr=False)
class RoundMember:
    """The outer rounds of one replica.

    Attributes:
        unseal: Checks and decodes a record of the run (`signing.unsealer`).
        genesis: The hash that stands for D_0, whose state the replica holds.
        events: Is told of each swap, and when the replica is left out; must never be full.
        source: Has the newest state when the replica does not hold it, and is told of what it holds.
        ring: The same on all replicas.
        links: What is known of the links to others of the stage; the coordinator orders the ring by it.
        ahead: Where replicas are cut before a round is closed, they get each other's payloads by it.
    """

    endpoint: Endpoint
    unseal: Callable[[SignedRecord], Record]
    genesis: str
    stage: int
    steps: StepService
    state: ReplicaState
    device: Device
    source: StateSource
    events: MemoryObjectSendStream[RoundEvent] | None = None
    ring: RingSettings = DEFAULT_RING
    links: Callable[[], Sequence[LinkReport]] = tuple
    ahead: PayloadsAhead | None = None

    def __post_init__(self) -> None:
        self._averages = RoundAverage(
            self.endpoint, self.stage, self.state, self.device, self.ring, self.peer_lost, self.ahead
        )
        self._machine = RoundMemberMachine(
            self.endpoint.hop,
            self.stage,
            Tip(0, self.genesis, None),
            self.state.hashes,
            self.unseal,
            self.source.is_behind,
        )
        self._jobs = Mailbox[_Job]()
        self._ring_scope = anyio.CancelScope()
        self._fetch_scope = anyio.CancelScope()
        self._sent_before = self._sent_bytes()
        self._last_members: Sequence[PeerId] = ()

    @property
    def base_round(self) -> int:
        """The round whose record the replica holds."""
        return self._machine.tip.round

    @property
    def offered_round(self) -> int:
        """The same, or `NO_BASE` while the replica is believed to be behind: what others may be told."""
        return NO_BASE if self._machine.is_behind else self._machine.tip.round

    @property
    def coordinator(self) -> PeerId | None:
        """The client that the replica follows; None before it has heard of any."""
        return self._machine.promised.peer or None

    @property
    def hashes(self) -> StageHashes:
        """Of the state that the replica holds."""
        return self.state.hashes

    @property
    def base(self) -> Base:
        """The state that the replica's round is trained from."""
        return Base(self._machine.tip.round, self._machine.tip.hash, self.state.hashes)

    @property
    def is_closing(self) -> bool:
        """Whether the end of the round has begun for this replica."""
        return self._machine.closing

    def cut(self, round: int, num_targets: int) -> None:
        """The replica was cut, and goes on training: encode its pseudo-gradient meanwhile.

        Args:
            num_targets: What it brings to the round.
        """
        self._jobs.put(_EncodeCut(round, num_targets))

    def stay(self, reason: str) -> None:
        """Answer an order to move (`Relocate`): the server cannot."""
        self._do(self._machine.stay(reason))

    def succeed(self, other: RoundMember) -> None:
        """Take the place of this peer's replica of another stage, whose promises stay."""
        has_begun = other.offered_round != 0
        self._machine.succeed(other._machine.promised, has_begun)

    async def resume(self) -> None:
        """Go on after the server had left this stage in vain: from the state of the record that the replica holds."""
        self._ring_scope.cancel()
        self._fetch_scope.cancel()
        self._jobs.clear()
        if self.ahead is not None:
            self.ahead.end()
        await self.device.run(self.state.restore)
        self.steps.start_round(self._machine.round, self._machine.tip.hash)

    # -- events

    def receive(self, event: Received) -> bool:
        """Take a round message for a replica; see `transport.dispatch.Handler`."""
        if self._averages.receive(event) or (self.ahead is not None and self.ahead.receive(event)):
            return True
        if not isinstance(event.message, Order | OrderPassed):
            return False
        self._do(self._machine.receive(event.peer, event.message))
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """See `transport.dispatch.Handler`."""
        self._do(self._machine.lost(peer))

    async def run(self) -> None:
        """Work until cancelled."""
        with contextlib.closing(self._averages):
            await self._run()

    async def _run(self) -> None:
        async with anyio.create_task_group() as tasks:
            if self.ahead is not None:
                tasks.start_soon(self.ahead.run)
            if self._averages.foresight is not None:
                tasks.start_soon(self._averages.foresight.run, lambda: self._last_members)
            if self.source.may_resume and not self._machine.is_behind:
                await self.source.settled(self.base)
                self.steps.start_round(self._machine.round, self._machine.tip.hash)
                self._resume()
            async for job in self._jobs:
                match job:
                    case CloseSteps(round):
                        tasks.start_soon(self._close, round)
                    case _EncodeCut(round, num_targets):
                        tasks.start_soon(self._encode, round, num_targets)
                    case RunRing(quorum):
                        self._start_ring(tasks, quorum)
                    case Swap():
                        await self._swap(job)
                    case Fetch():
                        self._start_fetch(tasks, job)

    def _do(self, effects: Sequence[MemberEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self.endpoint.post(peer, message)
                case Introduce(hop):
                    self.endpoint.introduce(hop)
                case ResolveStep(fate):
                    self.steps.resolve(fate.key, fate.commit, fate.scale, fate.lr, fate.skipped)
                    self._jobs.put(CloseSteps(fate.round))
                case Pin(hashes):
                    self.state.pin(hashes)
                case ReplicaOut(_, reason):
                    # Who coordinates the round has put it out, and warns of it.
                    emit(logger, ReplicaPutOut(reason, round=self._machine.round), level=logging.INFO)
                    self._tell(effect)
                case Relocate():
                    self._tell(effect)
                case CloseSteps() | RunRing() | Swap() | Fetch():
                    self._jobs.put(effect)

    def _tell(self, event: RoundEvent) -> None:
        if self.events is not None:
            self.events.send_nowait(event)

    # -- jobs

    async def _close(self, round: int) -> None:
        try:
            closed = await self.steps.close(round)
        except RoundAborted:
            emit(logger, RoundCloseSuperseded(round))
            return
        norm, payload = 0.0, None
        if closed.log or any(each.num_steps for each in closed.earlier):
            norm, payload = await self.device.run(self.state.brought, self.state.fragment(round))
        if round != self._machine.round:
            return
        self._give(round)
        links = tuple(self.links())[:MAX_LINK_REPORTS]
        brought = replace(closed, links=links, gradient_norm=norm, payload=payload)
        self._do(self._machine.steps_closed(brought))

    async def _encode(self, round: int, num_targets: int) -> None:
        """In pieces: steps go on in between."""
        while round == self._machine.round:
            if await self.device.run(self.state.encode_some, self.state.fragment(round)):
                self._give(round, num_targets)
                return

    def _give(self, round: int, num_targets: int = 0) -> None:
        """Let others of the stage have what this replica has encoded, if it has."""
        brought = self.state.brought_payload
        if self.ahead is not None and brought is not None and round == self._machine.round:
            self.ahead.give(brought.payload_P, brought.announced, num_targets)

    def _sent_bytes(self) -> dict[str, int]:
        return {traffic.value: count for traffic, count in self.endpoint.sent_bytes.items()}

    def _start_ring(self, tasks: TaskGroup, quorum: Propose) -> None:
        self._ring_scope.cancel()
        self._ring_scope = anyio.CancelScope()
        tasks.start_soon(self._average, quorum, self._ring_scope)

    async def _average(self, quorum: Propose, scope: anyio.CancelScope) -> None:
        """Average with the quorum's members and stage the outer step."""
        with scope:
            peers = [hop.peer for hop in quorum.members]
            emit(logger, RingStarted(quorum.round, quorum.epoch, peers))
            try:
                average, foreseen = await self._averages.run(quorum)
                is_kept, fragment = self.source.donor.is_followed, self.state.fragment(quorum.round)
                hashes = await self.device.run(self.state.stage, average, is_kept, fragment, foreseen)
            except StateMismatch as error:
                self.source.donor.release()
                self._do(self._machine.state_broken(str(error)))
                return
            self._do(self._machine.ring_done(quorum, hashes))

    def _start_fetch(self, tasks: TaskGroup, order: Fetch) -> None:
        """Go on to a newer record from the one that is being fetched, or begin with it."""
        if self.source.sync.follow(order):
            return
        self._fetch_scope.cancel()
        self._fetch_scope = anyio.CancelScope()
        tasks.start_soon(self._fetch, order, self._fetch_scope)

    async def _fetch(self, order: Fetch, scope: anyio.CancelScope) -> None:
        """Get the state of the newest record from its holders and stage it."""
        with scope:
            base: tuple[OuterState, StageHashes] | None = None
            if order.follows_base:
                with contextlib.suppress(StateMismatch):  # then the whole state is fetched
                    await self.device.run(self.state.check)
                    base = (self.state.base, self.state.hashes)
            take = self._stage_fetched
            newest = await self.source.sync.fetch(order, self.state.base, base, self._successor, take)
            await self.source.settled(Base(newest.record.round, newest.record_hash, newest.hashes))
            self._do(self._machine.fetched(newest.record_hash, newest.hashes))

    async def _successor(self, state: OuterState, average: Contribution, fragment: Fragment) -> OuterState:
        return await self.device.run(self.state.successor, state, average, fragment)

    async def _stage_fetched(self, state: OuterState, hashes: StageHashes) -> None:
        await self.device.run(self.state.stage_fetched, state, hashes)

    async def _swap(self, swap: Swap) -> None:
        record, hashes, leaves_chain, keeps_rest = swap.record, swap.hashes, swap.leaves_chain, swap.keeps_rest
        self._ring_scope.cancel()
        self._fetch_scope.cancel()
        self._averages.end()
        if self._machine.joined is None:
            self.steps.start_round(0)  # it was left out of the round: what it still trains is lost
        try:
            is_whole = names(record, self.stage, hashes)
            counted = payload_in(record, self.stage, self.endpoint.peer_id) if is_whole else None
            how = leaves_chain, counted, self.state.fragment(record.round), keeps_rest, record.codec
            average = await self.device.run(self.state.swap, hashes, *how)
        except StateMismatch as error:
            self._do(self._machine.state_broken(str(error)))
            return
        outcome = outcome_of(record, self.stage)
        self._last_members = () if outcome is None else outcome.members
        await self._keep_inner(record)
        before, self._sent_before = self._sent_before, self._sent_bytes()
        sent = {traffic: count - before[traffic] for traffic, count in self._sent_before.items()}
        self._do(self._machine.swapped(hashes, sent))
        if self.ahead is not None:
            self.ahead.end()
        self.steps.start_round(record.round + 1, self._machine.tip.hash, leaves_chain, keeps_rest)
        state = None if self._machine.is_restored else self.state.base
        self.source.hold(record.round, self._machine.tip.hash, state, average)
        self._resume()
        if self._machine.is_restored:
            emit(logger, ReplicaRestored(record.round, self._machine.basis.round))
        if leaves_chain:
            emit(logger, ReplicaChainLeft(record.round, self.stage))
        held = msgspec.structs.asdict(hashes)
        emit(logger, RoundHasSwapped(record.round, self.stage, **held, record=self._machine.tip.hash))
        self._tell(RoundSwapped(record, hashes))

    async def _keep_inner(self, record: Record) -> None:
        """What is copied here is what the inner optimizer knew at the record: no step can begin before the swap is
        said."""
        signed = self._machine.swapping
        if self.endpoint.peer_id in self._last_members and signed is not None:
            await self.source.keep_inner(record.round, record_hash(signed), is_wanted=record.keep)

    def _resume(self) -> None:
        """A round has begun: go on from a snapshot of it, if there is one."""
        found = self.source.resumable(self.base)
        if found is None:
            return
        snapshot, content = found
        is_taken = self.steps.resume(snapshot.log, content, snapshot.generation, snapshot.earlier)
        resumed = ReplicaResumed if is_taken else ReplicaNotResumed
        emit(logger, resumed(self._machine.round, self.stage, len(snapshot.log), is_taken))
