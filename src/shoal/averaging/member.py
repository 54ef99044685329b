"""A replica's end of the outer round: connects the machine to the network, the steps and the device.

    endpoint -> receive -> RoundMemberMachine -> jobs: close steps, ring, swap -> RoundMemberMachine -> post

One job at a time changes the state; a ring runs beside it and ends when a newer view or a record replaces it. A replica
that was left behind fetches the newest state (`state_sync`), and gives its own to those that ask (`state_donor`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, TypeVarTuple

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream

from shoal.averaging.replica_state import Contribution, ReplicaState
from shoal.averaging.signing import unsealer
from shoal.averaging.state_donor import StateDonor
from shoal.averaging.state_sync import StateSync
from shoal.collective.inbox import RingInbox, RingTag
from shoal.collective.plan import SEGMENT_BYTES
from shoal.collective.ring import Reduction, Ring, RingVector
from shoal.errors import RemoteProtocolError, RoundAborted, StateMismatch
from shoal.ids import PeerId, StepKey
from shoal.swarm.records import Tip
from shoal.swarm.round_effects import (
    CloseSteps,
    Fetch,
    Introduce,
    MemberEffect,
    Pin,
    ReplicaOut,
    ResolveStep,
    RunRing,
    Send,
    Swap,
)
from shoal.swarm.round_member import Order, RoundMemberMachine, StepsClosed
from shoal.swarm.view import NOTHING_HELD
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.round import Propose, Record, StageHashes
from shoal.wire.messages.step import StepEntry

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Args = TypeVarTuple("_Args")


class ClosedSteps(Protocol):
    """What a replica brings to its join."""

    @property
    def num_samples(self) -> int: ...

    @property
    def in_doubt(self) -> tuple[StepKey, ...]: ...

    @property
    def log(self) -> tuple[StepEntry, ...]: ...


class StepService(Protocol):
    """The steps of the replica, as the round needs them; `pipeline.StageWorker` is one."""

    def start_round(self, round: int) -> None:
        """The replica holds D_{round-1}: steps of `round` may begin. What is open is dropped; with 0 none may begin."""
        ...

    async def close(self, round: int) -> ClosedSteps:
        """Refuse new steps and return when nothing is open but doubt; again after `resolve`.

        Raises:
            RoundAborted: The replica is in another round.
        """
        ...

    def resolve(self, key: StepKey, commit: bool, scale: float, lr: float, skipped: bool) -> None:
        """Settle a step in doubt."""
        ...


class Device(Protocol):
    """The thread that computes; `runtime.DeviceThread` is one."""

    async def run(self, function: Callable[[*_Args], _Result], *args: *_Args) -> _Result:
        """Call a function on it."""
        ...


@dataclass(frozen=True, slots=True)
class RoundSwapped:
    """The replica now holds `record`, and its stage's bytes have these hashes."""

    record: Record
    hashes: StageHashes


RoundEvent = RoundSwapped | ReplicaOut
"""What a member tells the role that runs it."""

_Job = CloseSteps | RunRing | Swap | Fetch


class RoundMember:
    """The outer rounds of one replica.

    Args:
        endpoint: Of the server.
        run_id: Of the run.
        genesis: Hash that stands for D_0, whose state the replica holds.
        stage: Its stage.
        steps: Serves the steps of the replica.
        state: What is averaged.
        device: Where it is computed.
        events: Told of each swap, and if the replica is left out; must never be full.
        sync: Fetches the newest state when the replica does not hold it; without it, it is out until it is restarted.
        donor: Gives the replica's state to others.
        is_behind: The replica has reason to believe that the run is further than D_0.
        segment_bytes: Size of the parts of a ring; the same on all replicas.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        run_id: str,
        genesis: str,
        stage: int,
        steps: StepService,
        state: ReplicaState,
        device: Device,
        events: MemoryObjectSendStream[RoundEvent] | None = None,
        sync: StateSync | None = None,
        donor: StateDonor | None = None,
        is_behind: bool = False,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._endpoint = endpoint
        self._stage = stage
        self._steps = steps
        self._state = state
        self._device = device
        self._events = events
        self._segment_bytes = segment_bytes
        self._machine = RoundMemberMachine(endpoint.hop, stage, Tip(0, genesis, None), unsealer(run_id), is_behind)
        self._sync = sync
        self._donor = donor or StateDonor(endpoint, stage)
        self._inbox = RingInbox(stage, state.ring_bytes)
        self._jobs: deque[_Job] = deque()
        self._has_jobs = anyio.Event()
        self._ring_scope = anyio.CancelScope()
        self._fetch_scope = anyio.CancelScope()
        self._sent_before = self._sent_bytes()

    @property
    def held_round(self) -> int:
        """The round whose record the replica holds."""
        return self._machine.tip.round

    @property
    def offered_round(self) -> int:
        """The same, or `NOTHING_HELD` while the replica is believed to be behind: what others may be told."""
        return NOTHING_HELD if self._machine.is_behind else self._machine.tip.round

    @property
    def hashes(self) -> StageHashes:
        """Of the state that the replica holds."""
        return self._state.hashes

    # -- events

    def receive(self, event: Received) -> bool:
        """Take a round message for a replica; see `transport.dispatch.Handler`."""
        if self._inbox.receive(event) or self._donor.receive(event):
            return True
        if self._sync is not None and self._sync.receive(event):
            return True
        if not isinstance(event.message, Order):
            return False
        self._do(self._machine.receive(event.peer, event.message))
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """See `transport.dispatch.Handler`."""
        self._donor.peer_lost(peer)
        if self._sync is not None:
            self._sync.peer_lost(peer)
        self._do(self._machine.lost(peer))

    async def run(self) -> None:
        """Work until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._donor.run)
            while True:
                while self._jobs:
                    match self._jobs.popleft():
                        case CloseSteps(round):
                            tasks.start_soon(self._close, round)
                        case RunRing(view):
                            self._start_ring(tasks, view)
                        case Swap(record, hashes):
                            await self._swap(record, hashes)
                        case Fetch() as order:
                            self._fetch_scope.cancel()
                            self._fetch_scope = anyio.CancelScope()
                            tasks.start_soon(self._fetch, order, self._fetch_scope)
                self._has_jobs = anyio.Event()
                await self._has_jobs.wait()

    def _do(self, effects: Sequence[MemberEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self._endpoint.post(peer, message)
                case Introduce(hop):
                    self._endpoint.introduce(hop)
                case ResolveStep(fate):
                    self._steps.resolve(fate.key, fate.commit, fate.scale, fate.lr, fate.skipped)
                    self._put(CloseSteps(fate.round))
                case Pin(hashes):
                    self._state.pin(hashes)
                case ReplicaOut(_, reason):
                    logger.warning("replica.out", extra={"round": self._machine.round, "reason": reason})
                    self._tell(effect)
                case CloseSteps() | RunRing() | Swap() | Fetch():
                    self._put(effect)

    def _put(self, job: _Job) -> None:
        self._jobs.append(job)
        self._has_jobs.set()

    def _tell(self, event: RoundEvent) -> None:
        if self._events is not None:
            self._events.send_nowait(event)

    # -- jobs

    async def _close(self, round: int) -> None:
        try:
            closed = await self._steps.close(round)
        except RoundAborted:
            logger.info("round.close_superseded", extra={"round": round})
            return
        if round != self._machine.round:
            return
        self._do(self._machine.steps_closed(StepsClosed(closed.num_samples, closed.in_doubt, closed.log)))

    def _sent_bytes(self) -> dict[str, int]:
        return {traffic.value: count for traffic, count in self._endpoint.sent_bytes.items()}

    def _start_ring(self, tasks: TaskGroup, view: Propose) -> None:
        self._ring_scope.cancel()
        self._ring_scope = anyio.CancelScope()
        tasks.start_soon(self._average, view, self._ring_scope)

    async def _average(self, view: Propose, scope: anyio.CancelScope) -> None:
        """Average with the view's members and stage the outer step."""
        with scope:
            peers = [hop.peer for hop in view.members]
            me = peers.index(self._endpoint.peer_id)
            logger.info("ring.started", extra={"round": view.round, "epoch": view.epoch, "members": peers})
            try:
                hashes = await self._reduce(view, peers, view.weights[me])
            except StateMismatch as error:
                self._donor.release()
                self._do(self._machine.state_broken(str(error)))
                return
            except RemoteProtocolError as error:
                # Only the previous member sends to this one; without it the view cannot end, and a new one begins.
                self._endpoint.disconnect(peers[me - 1], str(error))
                return
            self._do(self._machine.ring_done(view, hashes))

    async def _reduce(self, view: Propose, peers: Sequence[PeerId], weight: int) -> StageHashes:
        tag = RingTag(view.round, view.ballot, view.epoch)
        parts = self._inbox.open(tag)
        if view.epoch > 0:
            await self._device.run(self._state.check)
        total = sum(view.weights)
        if total == 0:
            return await self._device.run(self._state.stage, None)
        share = await self._device.run(self._state.contribution, weight, total)
        ring = Ring(self._endpoint, tag, self._stage, peers, _vectors(share), self._device.run, self._segment_bytes)
        await ring.run(parts)
        return await self._device.run(self._state.stage, share)

    async def _fetch(self, order: Fetch, scope: anyio.CancelScope) -> None:
        """Get the state of a record from its holders and stage it."""
        if self._sync is None:
            return
        with scope:
            state = await self._sync.fetch(order, self._state.held)
            await self._device.run(self._state.stage_fetched, state, order.hashes)
            self._do(self._machine.fetched(order.record_hash, order.hashes))

    async def _swap(self, record: Record, hashes: StageHashes) -> None:
        self._ring_scope.cancel()
        self._fetch_scope.cancel()
        self._inbox.close()
        if self._machine.joined is None:
            self._steps.start_round(0)  # it was left out of the round: what it still trains is lost
        try:
            await self._device.run(self._state.swap, hashes)
        except StateMismatch as error:
            self._do(self._machine.state_broken(str(error)))
            return
        before, self._sent_before = self._sent_before, self._sent_bytes()
        sent = {traffic: count - before[traffic] for traffic, count in self._sent_before.items()}
        self._steps.start_round(record.round + 1)
        self._do(self._machine.swapped(hashes, sent))
        self._donor.hold(record.round, self._machine.tip.hash, self._state.held)
        logger.info("round.swapped", extra={"round": record.round, "parameters": hashes.parameters})
        self._tell(RoundSwapped(record, hashes))


def _vectors(share: Contribution) -> tuple[RingVector, ...]:
    """The three vectors of a ring, numbered as `RingPart.buffer` counts them."""
    return (
        RingVector(0, share.parameters_N, Reduction.SUM),
        RingVector(1, share.floats_F, Reduction.SUM),
        RingVector(2, share.integers_I, Reduction.MAX),
    )
