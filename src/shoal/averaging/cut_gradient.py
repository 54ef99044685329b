"""The pseudo-gradient of a replica that goes on training: encoded in pieces, between which its device does steps.

Shapes: N elements of the parameters, M of the fragment that the round averages, P bytes of the payload.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.codec.base import CodecState
from shoal.codec.gathered import GatheredCodec
from shoal.codec.raw import to_wire
from shoal.errors import LocalProtocolError
from shoal.optim.fragments import Fragment
from shoal.optim.norm import all_finite, squared_norm
from shoal.optim.outer import pseudo_gradient
from shoal.wire.messages.round import Payload

PIECE_BYTES = 1 << 22
"""What is computed at once takes a few milliseconds."""


class Brought(NamedTuple):
    """What the pseudo-gradient of a round is encoded as, what is said of that, and what it has left out of the fragment
    (M each)."""

    payload_P: Tensor
    announced: Payload
    residual: CodecState


Bringing = Generator[None, None, tuple[float, Brought | None]]
"""Ends with the length of the pseudo-gradient, and None if that is not finite."""


def bring_in_pieces(
    codec: GatheredCodec, fragment: Fragment, base_N: Tensor, cut_N: Tensor, residual: CodecState
) -> Bringing:
    """Encode what a replica has learnt up to its cut; none of the vectors changes, nor may it meanwhile.

    Args:
        base_N: The outer parameters that the round began from.
        cut_N: The replica's own at its cut. Where any of them is not finite, so is the length.
        residual: What the codec has left out so far (N each).
    """
    is_finite = True
    for part in _parts(cut_N):
        is_finite = is_finite and all_finite([cut_N[part]])
        yield
    base_M, cut_M = fragment.take(base_N), fragment.take(cut_N)
    yield
    left = tuple(fragment.take(each_N) for each_N in residual)
    yield
    gradient_M, total = torch.empty_like(cut_M), 0.0
    for part in _parts(cut_M):
        total += squared_norm(pseudo_gradient(base_M[part], cut_M[part], out=gradient_M[part])).item()
        yield
    del base_M, cut_M
    norm = math.sqrt(total) if is_finite else math.nan
    if not math.isfinite(norm):
        return norm, None
    try:
        encoded = yield from codec.pieces(gradient_M, left)
    except LocalProtocolError:  # values that are finite, and whose squares or sums are not
        return math.inf, None
    [payload_P] = encoded.tensors
    digest = hashlib.sha256()
    for part in _parts(payload_P):
        digest.update(to_wire(payload_P[part]).data)
        yield
    return norm, Brought(payload_P, Payload(digest.hexdigest(), payload_P.numel()), encoded.state)


def _parts(vector: Tensor) -> Iterator[slice]:
    step = PIECE_BYTES // vector.itemsize
    return (slice(start, start + step) for start in range(0, vector.numel(), step))
