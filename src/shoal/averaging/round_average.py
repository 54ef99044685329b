"""From a quorum to the average: a replica's contribution, put together with those of the quorum's other members.

An element-wise codec travels in a ring that forms sums on the way: the pseudo-gradient, weighed, is computed anew from
the kept inputs for every quorum, and lies in memory that the other members of this host may read
(`collective.shared_memory`), the same in every round. Of any other one each member sends its bytes, the same in every
quorum, straight to each other one (`averaging.gathered`), or has given them before and all is computed by now
(`averaging.foresight`). Buffers are reduced either way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar, TypeVarTuple

import anyio
import torch
from torch import Tensor

from shoal.averaging.foresight import Foresight, MemberShare
from shoal.averaging.gathered import Gathered, brought_by, gathered_average, gathered_weights, payload_of
from shoal.averaging.payloads_ahead import Fetching, PayloadsAhead
from shoal.averaging.replica_state import Contribution, Foreseen, ReplicaState
from shoal.codec.base import Codec
from shoal.codec.plain import PLAIN
from shoal.codec.registry import CodecSettings, auto_codec, codec_of
from shoal.collective.group import Group
from shoal.collective.inbox import GroupInbox
from shoal.collective.plan import SEGMENT_BYTES, SMALL_BYTES, Collective, choose_collective
from shoal.collective.shared_memory import SharedMemory
from shoal.collective.vectors import Reduction, RingVector
from shoal.config.diloco import DilocoConfig
from shoal.errors import MemberFault, RemoteProtocolError
from shoal.events.base import emit
from shoal.events.rounds import RingRefused
from shoal.ids import PeerId
from shoal.optim.fragments import Fragment
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
        over_senders: Where they are gathered, each coordinate is averaged over those that have sent it.
    """

    segment_bytes: int = SEGMENT_BYTES
    choose: Callable[[int, int], Collective] = choose_collective
    codec: Codec = PLAIN
    over_senders: bool = False


DEFAULT_RING: Final = RingSettings()


def averaging_codec(diloco: DilocoConfig) -> Codec:
    """How pseudo-gradients travel, as section `diloco` says."""
    if diloco.compression_choices:
        return auto_codec(diloco.compression_choices, diloco.feedback)
    return codec_of(CodecSettings(diloco.averaging_compression, diloco.feedback, diloco.averaging_density))


def ring_vectors(share: Contribution, codec: Codec) -> tuple[RingVector, ...]:
    """Return what is reduced of a contribution, in place; `codec` as in `RingSettings`."""
    return (
        RingVector(0, share.parameters_M, Reduction.SUM, codec),
        *buffer_vectors(share.floats_F, share.integers_I),
    )


def buffer_vectors(floats_F: Tensor, integers_I: Tensor) -> tuple[RingVector, ...]:
    """Return what is reduced of a replica's buffers, in place."""
    return (RingVector(1, floats_F, Reduction.SUM), RingVector(2, integers_I, Reduction.MAX))


@dataclass(eq=False, repr=False)
class RoundAverage:
    """The averages of one replica, one after the other.

    Attributes:
        blame: Is told of a member that breaks the protocol, which is disconnected when the quorum is another one.
        ahead: With it payloads are not gathered: what was not fetched before the quorum is fetched in it.
        foresight: Of the next average; None without payloads that come before it.
    """

    endpoint: Endpoint
    stage: int
    state: ReplicaState
    device: Device
    settings: RingSettings
    blame: Callable[[PeerId], None]
    ahead: PayloadsAhead | None = None

    def __post_init__(self) -> None:
        self.foresight = None if self.ahead is None else Foresight(self.ahead, self._foreseen)
        self._memory = SharedMemory()
        # Without its contribution a ring comes no further than that.
        self._limit_bytes = self.state.ring_bytes + _SMALL_SUMS * SMALL_BYTES
        self._inbox = GroupInbox(self._age_of, self._limit_bytes)

    def _age_of(self, tag: bytes) -> QuorumTag:
        """Which quorum a tag is of; a part of another stage is a mistake of its sender."""
        quorum = QuorumTag.decoded(tag)
        if quorum.stage != self.stage:
            raise RemoteProtocolError(f"a part of stage {quorum.stage} came to stage {self.stage}")
        return quorum

    def receive(self, event: Received) -> bool:
        """Take a part of a ring; see `transport.dispatch.Handler`."""
        return self._inbox.receive(event)

    def end(self) -> None:
        """The round is over: what still arrives for the last quorum is of no use."""
        self._inbox.close()
        if self.state.memory.is_short:
            self._memory.rest()

    def close(self) -> None:
        """Give the shared memory back."""
        self._memory.close()

    async def run(self, quorum: Propose) -> tuple[Contribution | None, Foreseen | None]:
        """Reduce the contributions of a quorum's members.

        A quorum with a member that breaks the protocol cannot end. This call disconnects that member, and the newer
        quorum that follows cancels this call.

        Returns:
            The averages, valid until the next call; None: no member has trained. What follows from them, if it was
            foreseen.

        Raises:
            StateMismatch: This replica's own state is not what the record says, or its pseudo-gradient not what it has
                joined with.
        """
        peers = [hop.peer for hop in quorum.members]
        group = Group(
            self.endpoint,
            peers,
            QuorumTag.of(quorum).encoded(),
            self._inbox,
            self.device.run,
            memory=self._memory,
            segment_bytes=self.settings.segment_bytes,
            choose=self.settings.choose,
        )
        if quorum.epoch > 0:
            await self.device.run(self.state.check)
        total = sum(quorum.weights)
        if total == 0:
            return None, None
        self._memory.forget_others(peers)
        try:
            if self.settings.codec.is_elementwise:
                return await self._reduced(group, quorum, peers, total), None
            return await self._gathered(group, quorum, peers)
        except MemberFault as error:
            peer = PeerId(error.peer)
            self.endpoint.metrics.counter("ring.refused").add()
            emit(logger, RingRefused(peer, str(error)))
            self.blame(peer)
            try:
                # While it is of the quorum it would complain of its lost connection, and an honest member would go.
                await anyio.Event().wait()
            finally:
                self.endpoint.disconnect(peer, str(error))
            raise

    async def _reduced(self, group: Group, quorum: Propose, peers: Sequence[PeerId], total: int) -> Contribution:
        """The averages whose sums are formed on their way."""
        # Only this lies in shared memory: averaged buffers become part of the base state, and are small.
        [gradient_N] = self._memory.vectors([self.state.gradient_kind])
        place, fragment = peers.index(self.endpoint.peer_id), self.state.fragment(quorum.round)
        gradient_M = gradient_N[: self.state.gradient_size(fragment)]
        weight, scale = quorum.weights[place], quorum.scales[place] if quorum.scales else 1.0
        share = await self.device.run(self.state.contribution, weight, total, gradient_M, scale, fragment)
        await group.all_reduce(ring_vectors(share, self.settings.codec))
        return share

    async def _gathered(
        self, group: Group, quorum: Propose, peers: Sequence[PeerId]
    ) -> tuple[Contribution | None, Foreseen | None]:
        """The averages of what each member has encoded, None if no member counts; and what was foreseen of them."""
        place, codec = peers.index(self.endpoint.peer_id), self.settings.codec
        fragment = self.state.fragment(quorum.round)
        num_elements = self.state.gradient_size(fragment)
        weights = gathered_weights(quorum.weights, quorum.payloads, codec, num_elements)
        for peer, counts, said in zip(peers, weights, quorum.weights, strict=True):
            if counts != said:
                emit(
                    logger,
                    RingRefused(peer, "it has trained, and has joined without a pseudo-gradient that could be one"),
                )
        total = sum(weights)
        if total == 0:
            return None, None
        lengths = [
            payload.num_bytes if weight and payload is not None else 0
            for weight, payload in zip(weights, quorum.payloads, strict=True)
        ]
        # Others may be ahead by all that they send.
        self._inbox.limit_bytes = self._limit_bytes + (sum(lengths) if self.ahead is None else 0)
        floats_F, integers_I = await self.device.run(self.state.buffers, weights[place], total, fragment)
        buffers = buffer_vectors(floats_F, integers_I)
        if self.ahead is None:
            # When this returns, everybody knows how much is to come.
            await group.all_reduce([*buffers, RingVector(0, torch.zeros(1))])
            parts = await self._all_gathered(group, quorum, place, lengths)
        else:
            if floats_F.numel() or integers_I.numel():
                await group.all_reduce(buffers)
            foreseen = await self._foreseen_of(quorum, peers, weights)
            if foreseen is not None:
                self.endpoint.metrics.counter("round.foreseen").add()
                return Contribution(foreseen.average_M, floats_F, integers_I), foreseen
            parts = await self._fetched(self.ahead, quorum, peers, weights)
        average_M = await self.device.run(self._averaged, quorum, peers, weights, parts)
        return Contribution(average_M, floats_F, integers_I), None

    async def _all_gathered(
        self, group: Group, quorum: Propose, place: int, lengths: Sequence[int]
    ) -> Sequence[Tensor]:
        """The payloads of all members, which each sends to each."""
        payloads_P = torch.empty(sum(lengths), dtype=torch.uint8)
        if lengths[place]:
            own_P = payloads_P[sum(lengths[:place]) :][: lengths[place]]
            await self.device.run(self.state.put_encoded, own_P, quorum.payloads[place])
        [parts] = await group.all_gather([RingVector(0, payloads_P)], [lengths], Collective.CENTRAL)
        return parts

    async def _fetched(
        self, ahead: PayloadsAhead, quorum: Propose, peers: Sequence[PeerId], weights: Sequence[int]
    ) -> Sequence[Tensor]:
        """The payloads of all members, which each gets from each, mostly before."""
        parts, others = [torch.empty(0, dtype=torch.uint8) for _ in peers], dict[int, Fetching]()
        for place, (peer, weight, payload) in enumerate(zip(peers, weights, quorum.payloads, strict=True)):
            if not weight or payload is None:
                continue
            if peer != self.endpoint.peer_id:
                others[place] = ahead.ask(peer, payload)
                continue
            parts[place] = torch.empty(payload.num_bytes, dtype=torch.uint8)
            await self.device.run(self.state.put_encoded, parts[place], payload)
        for place, get in others.items():
            parts[place] = await get()
        return parts

    async def _foreseen_of(self, quorum: Propose, peers: Sequence[PeerId], weights: Sequence[int]) -> Foreseen | None:
        """What was foreseen of a quorum. A later one is computed anew: there may be one because members differed."""
        if self.foresight is None or quorum.epoch > 0:
            return None
        scales, total = quorum.scales or [1.0] * len(peers), sum(weights)
        members = zip(peers, quorum.payloads, weights, scales, strict=True)
        return await self.foresight.of(
            [
                MemberShare(peer, payload, weight / total, scale)
                for peer, payload, weight, scale in members
                if weight and payload is not None
            ]
        )

    def _foreseen(self, round: int, brought: Sequence[Gathered]) -> Foreseen:
        """What the state becomes in a round by what its members have brought; any thread may call this."""
        fragment = self.state.fragment(round)
        return self.state.foresee(self._average_of(brought, fragment), fragment)

    def _averaged(
        self, quorum: Propose, peers: Sequence[PeerId], weights: Sequence[int], parts: Sequence[Tensor]
    ) -> Tensor:
        """Check and average what was gathered, on the device thread."""
        for peer, weight, part_P, announced in zip(peers, weights, parts, quorum.payloads, strict=True):
            if weight and payload_of(part_P) != announced:
                raise MemberFault(f"it sent {payload_of(part_P)} and has joined with {announced}", peer)
        brought = brought_by(peers, weights, quorum.scales, parts)
        return self._average_of(brought, self.state.fragment(quorum.round))

    def _average_of(self, brought: Sequence[Gathered], fragment: Fragment) -> Tensor:
        num_elements, over_senders = self.state.gradient_size(fragment), self.settings.over_senders
        return gathered_average(self.settings.codec, brought, num_elements, over_senders=over_senders)
