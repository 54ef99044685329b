"""Averages of pseudo-gradients that are encoded as a whole: each member's bytes are gathered, and all decode all.

    pseudo-gradient + residual --encode--> bytes --Join--> digest and size in the quorum
                                             '--gather--> decode, weigh, add up in ring order --> the average

A member encodes once in a round, without its weight: whoever is lost meanwhile, the others' bytes stay, and the record
names them. Everybody, the sender too, forms the same sum of the same bytes: for each member in ring order one rounded
product by its share, one by its scale if there is one, and one rounded addition, in float32. So the bits are equal on
all hardware, and a program that has never heard of gathering comes to them.

Over `all`, a coordinate that a member has not sent counts as zero. Over `senders` (SparseLoCo, arXiv 2508.15706) the
sum is divided by the shares of those that have sent the coordinate, added up in the same order.

Shapes: N elements of the parameters that the round averages, P bytes of a payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.codec.base import Codec
from shoal.errors import MemberFault, RemoteProtocolError
from shoal.ids import PeerId
from shoal.optim.flat import tensor_sha256
from shoal.wire.messages.round import Payload


class Gathered(NamedTuple):
    """What a member that counts has brought to an average.

    Attributes:
        share: Its weight over the sum of all weights.
        scale: The factor on its pseudo-gradient; 1: no operation.
    """

    member: PeerId
    payload_P: Tensor
    share: float
    scale: float


def payload_of(payload_P: Tensor) -> Payload:
    """What is said of a payload before it travels."""
    return Payload(tensor_sha256(payload_P), payload_P.numel())


def gathered_weights(
    weights: Sequence[int], payloads: Sequence[Payload | None], codec: Codec, num_elements: int
) -> list[int]:
    """What each member of a quorum counts: its weight, or 0 if it has announced no payload that could be one.

    All come to the same, so who has trained and joins without one stops nobody.
    """
    limit = codec.max_size_bytes(num_elements)
    announced = [*payloads, *[None] * (len(weights) - len(payloads))]
    return [
        weight if payload is not None and payload.num_bytes <= limit else 0
        for weight, payload in zip(weights, announced, strict=True)
    ]


def brought_by(
    members: Sequence[PeerId], weights: Sequence[int], scales: Sequence[float], parts: Sequence[Tensor]
) -> list[Gathered]:
    """What the members of a quorum that count have brought, in its order.

    Args:
        weights: As `gathered_weights` has them.
        scales: Empty if nobody's pseudo-gradient is changed.
        parts: Their payloads; empty ones of who has no weight.
    """
    total = sum(weights)
    each = zip(members, weights, scales or [1.0] * len(members), parts, strict=True)
    return [Gathered(member, part_P, weight / total, scale) for member, weight, scale, part_P in each if weight]


def gathered_average(codec: Codec, brought: Sequence[Gathered], num_elements: int, *, over_senders: bool) -> Tensor:
    """Return the average (N, float32) of what members have brought, in ring order.

    Raises:
        MemberFault: A payload is not what any values of that size become.
    """
    sum_N, values_N = torch.zeros(num_elements), torch.empty(num_elements)
    senders_N = torch.zeros(num_elements) if over_senders else None
    for member, payload_P, share, scale in brought:
        try:
            codec.decode((payload_P,), values_N)
            is_sent_N = None if senders_N is None else codec.sent((payload_P,), num_elements)
        except RemoteProtocolError as error:
            raise MemberFault(f"its pseudo-gradient: {error}", member) from error
        values_N.mul_(share)
        if scale != 1.0:
            values_N.mul_(scale)
        sum_N.add_(values_N)
        if senders_N is not None:
            senders_N.add_(share if is_sent_N is None else is_sent_N.to(torch.float32).mul_(share))
    if senders_N is not None:
        # Where nobody has sent, the sum is zero, and stays it.
        sum_N.div_(senders_N.masked_fill_(senders_N == 0, 1.0))
    return sum_N
