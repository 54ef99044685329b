"""From a view to the average: a replica's contribution, reduced with those of the view's other members.

The pseudo-gradient lies in memory that the other members of this host may read (`collective.shared_memory`), the same
in every round. It is computed anew from the kept inputs for every view.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar, TypeVarTuple

import anyio
import torch

from shoal.averaging.replica_state import Contribution, ReplicaState
from shoal.collective.inbox import RingInbox, RingTag
from shoal.collective.plan import SEGMENT_BYTES, SMALL_BYTES, Collective, choose_collective
from shoal.collective.ring import Ring
from shoal.collective.shared_memory import SharedMemory
from shoal.collective.vectors import Reduction, RingVector
from shoal.errors import RemoteProtocolError
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.round import Propose

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
        choose: Returns the collective for a vector of this size (bytes) and number of members.
        wire: The dtype in which pseudo-gradients travel (`codec.cast`); None: their own.
    """

    segment_bytes: int = SEGMENT_BYTES
    choose: Callable[[int, int], Collective] = choose_collective
    wire: torch.dtype | None = None


DEFAULT_RING: Final = RingSettings()


def ring_vectors(share: Contribution, wire: torch.dtype | None) -> tuple[RingVector, ...]:
    """Return what is reduced of a contribution, in place; `wire` as in `RingSettings`."""
    return (
        RingVector(0, share.parameters_N, Reduction.SUM, wire),
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
        self._inbox = RingInbox(stage, state.ring_bytes + _SMALL_SUMS * SMALL_BYTES)

    def receive(self, event: Received) -> bool:
        """Take a part of a ring; see `transport.dispatch.Handler`."""
        return self._inbox.receive(event)

    def end(self) -> None:
        """What still arrives for the last view is of no use."""
        self._inbox.close()

    def close(self) -> None:
        """Give the shared memory back."""
        self._memory.close()

    async def run(self, view: Propose) -> Contribution | None:
        """Reduce the contributions of a view's members.

        A view with a member that breaks the protocol cannot end. This call disconnects that member, and the newer view
        that follows cancels this call.

        Returns:
            The averages, valid until the next call; None: no member has trained.

        Raises:
            StateMismatch: This replica's own state is not what the record says.
        """
        tag = RingTag(view.round, view.ballot, view.epoch)
        parts = self._inbox.open(tag)
        if view.epoch > 0:
            await self._device.run(self._state.check)
        total = sum(view.weights)
        if total == 0:
            return None
        peers = [hop.peer for hop in view.members]
        self._memory.forget_others(peers)
        # Only this lies in shared memory: averaged buffers become part of the held state, and are small.
        [gradient_N] = self._memory.vectors([self._state.gradient_kind])
        place = peers.index(self._endpoint.peer_id)
        weight, scale = view.weights[place], view.scales[place] if view.scales else 1.0
        share = await self._device.run(self._state.contribution, weight, total, gradient_N, scale)
        vectors = ring_vectors(share, self._settings.wire)
        ring = Ring(
            self._endpoint,
            tag,
            self._stage,
            peers,
            vectors,
            self._device.run,
            memory=self._memory,
            segment_bytes=self._settings.segment_bytes,
            choose=self._settings.choose,
        )
        try:
            await ring.run(parts)
        except RemoteProtocolError as error:
            self._endpoint.metrics.counter("ring.refused").add()
            logger.warning("ring.refused", extra={"peer": ring.offender, "error": str(error)})
            if ring.offender is not None:
                self._endpoint.disconnect(ring.offender, str(error))
            await anyio.Event().wait()
        return share
