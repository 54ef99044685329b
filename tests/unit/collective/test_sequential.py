"""An all-reduce in one process has the bits of the agreed order, as the one over a network has."""

from __future__ import annotations

import pytest
import torch
from tests.reference.diloco import central_sum, ring_sum, tree_sum

from shoal.codec.base import Codec
from shoal.codec.cast import BF16
from shoal.codec.plain import PLAIN
from shoal.collective.plan import Collective
from shoal.collective.sequential import reduce_in_turn
from shoal.collective.vectors import Reduction, RingVector

SUMS = {Collective.RING: ring_sum, Collective.TREE: tree_sum, Collective.CENTRAL: central_sum}


@pytest.mark.parametrize(("codec", "wire"), [(PLAIN, None), (BF16, torch.bfloat16)])
@pytest.mark.parametrize("collective", list(Collective))
@pytest.mark.parametrize(("num_members", "num_elements"), [(1, 5), (2, 7), (4, 101), (5, 3), (7, 300), (3, 0)])
def test_the_sum_is_formed_in_the_agreed_order(
    num_members: int, num_elements: int, collective: Collective, codec: Codec, wire: torch.dtype | None
) -> None:
    generator = torch.Generator().manual_seed(num_members)
    values = [torch.randn(num_elements, generator=generator) for _ in range(num_members)]
    expected = SUMS[collective](values, wire)
    members = [RingVector(0, value.clone(), Reduction.SUM, codec) for value in values]
    assert torch.equal(reduce_in_turn(members, lambda _bytes, _members: collective).values_N, expected)


def test_of_integers_the_maximum_is_taken() -> None:
    members = [RingVector(2, torch.tensor(value), Reduction.MAX) for value in ([1, 9], [5, 2], [3, 3])]
    assert reduce_in_turn(members).values_N.tolist() == [5, 9]
