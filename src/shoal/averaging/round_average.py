"""From a quorum to the average: a replica's contribution, reduced with those of the quorum's other members.

The pseudo-gradient lies in memory that the other members of this host may read (`collective.shared_memory`), the same
in every round. It is computed anew from the kept inputs for every quorum.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar, TypeVarTuple

import anyio

from shoal.averaging.replica_state import Contribution, ReplicaState
from shoal.codec.base import Codec
from shoal.codec.plain import PLAIN
from shoal.collective.group import Group
from shoal.collective.inbox import GroupInbox
from shoal.collective.plan import SEGMENT_BYTES, SMALL_BYTES, Collective, choose_collective
from shoal.collective.shared_memory import SharedMemory
from shoal.collective.vectors import Reduction, RingVector
from shoal.errors import MemberFault, RemoteProtocolError
from shoal.events.base import emit
from shoal.events.rounds import RingRefused
from shoal.ids import PeerId
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.round import Propose, QuorumTag

logger = logging.getLogger(__name__)

_SMALL_SUMS = 64
"""Sums of small vectors that may wait for a ring: the root of a tree has several children."""

_Result = TypeVar("_Result")
_Args = TypeVarTuple("_Args")


class Device(Protocol):
    """The thread that computes; `runtime.DeviceThread` is one."""

    async def run(self, function: Callable[[*_Args], _Result], *args: *_Args) -> _Result:
        """Call a function on it."""
        ...


@dataclass(frozen=True, slots=True)
class RingSettings:
    """How vectors are reduced; the same on all replicas of a stage.

    Attributes:
        segment_bytes: Size of the parts of a ring.
        choose: The collective for a vector of so many bytes and members.
        codec: How pseudo-gradients travel.
    """

    segment_bytes: int = SEGMENT_BYTES
    choose: Callable[[int, int], Collective] = choose_collective
    codec: Codec = PLAIN


DEFAULT_RING: Final = RingSettings()


def ring_vectors(share: Contribution, codec: Codec) -> tuple[RingVector, ...]:
    """Return what is reduced of a contribution, in place; `codec` as in `RingSettings`."""
    return (
        RingVector(0, share.parameters_N, Reduction.SUM, codec),
        RingVector(1, share.floats_F, Reduction.SUM),
        RingVector(2, share.integers_I, Reduction.MAX),
    )


class RoundAverage:
    """The averages of one replica, one after the other."""

    def __init__(
        self, endpoint: Endpoint, stage: int, state: ReplicaState, device: Device, settings: RingSettings
    ) -> None:
        self._endpoint = endpoint
        self._stage = stage
        self._state = state
        self._device = device
        self._settings = settings
        self._memory = SharedMemory()
        # Without its contribution a ring comes no further than that.
        self._inbox = GroupInbox(self._age_of, state.ring_bytes + _SMALL_SUMS * SMALL_BYTES)

    def _age_of(self, tag: bytes) -> QuorumTag:
        """Which quorum a tag is of; a part of another stage is a mistake of its sender."""
        quorum = QuorumTag.decoded(tag)
        if quorum.stage != self._stage:
            raise RemoteProtocolError(f"a part of stage {quorum.stage} came to stage {self._stage}")
        return quorum

    def receive(self, event: Received) -> bool:
        """Take a part of a ring; see `transport.dispatch.Handler`."""
        return self._inbox.receive(event)

    def end(self) -> None:
        """What still arrives for the last quorum is of no use."""
        self._inbox.close()

    def close(self) -> None:
        """Give the shared memory back."""
        self._memory.close()

    async def run(self, quorum: Propose) -> Contribution | None:
        """Reduce the contributions of a quorum's members.

        A quorum with a member that breaks the protocol cannot end. This call disconnects that member, and the newer
        quorum that follows cancels this call.

        Returns:
            The averages, valid until the next call; None: no member has trained.

        Raises:
            StateMismatch: This replica's own state is not what the record says.
        """
        peers = [hop.peer for hop in quorum.members]
        group = Group(
            self._endpoint,
            peers,
            QuorumTag.of(quorum).encoded(),
            self._inbox,
            self._device.run,
            memory=self._memory,
            segment_bytes=self._settings.segment_bytes,
            choose=self._settings.choose,
        )
        if quorum.epoch > 0:
            await self._device.run(self._state.check)
        total = sum(quorum.weights)
        if total == 0:
            return None
        self._memory.forget_others(peers)
        # Only this lies in shared memory: averaged buffers become part of the base state, and are small.
        [gradient_N] = self._memory.vectors([self._state.gradient_kind])
        place = peers.index(self._endpoint.peer_id)
        weight, scale = quorum.weights[place], quorum.scales[place] if quorum.scales else 1.0
        share = await self._device.run(self._state.contribution, weight, total, gradient_N, scale)
        try:
            await group.all_reduce(ring_vectors(share, self._settings.codec))
        except MemberFault as error:
            self._endpoint.metrics.counter("ring.refused").add()
            emit(logger, RingRefused(PeerId(error.peer), str(error)))
            self._endpoint.disconnect(PeerId(error.peer), str(error))
            await anyio.Event().wait()
        return share
