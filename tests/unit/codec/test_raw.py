"""Raw codec: same bits, same memory, no gradient."""

from __future__ import annotations

import pytest
import torch

from shoal.codec.raw import from_wire, to_wire
from shoal.errors import LocalProtocolError
from shoal.wire.tensors import ITEM_BYTES, WireTensor


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 1, 4), (0, 3)])
def test_a_tensor_of_every_type_and_shape_keeps_its_bits(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(getattr(torch, dtype))
    wire = to_wire(tensor)
    assert (wire.dtype, wire.shape) == (dtype, shape)
    back = from_wire(wire)
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)


def test_a_contiguous_tensor_is_not_copied_either_way() -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    wire = to_wire(tensor)
    tensor[1, 2] = 40.0
    back = from_wire(wire)
    assert back[1, 2] == 40.0
    back[0, 0] = -2.0
    assert tensor[0, 0] == -2.0


def test_a_strided_tensor_is_sent_in_its_logical_order() -> None:
    tensor = torch.arange(6, dtype=torch.int64).reshape(2, 3).t()
    assert torch.equal(from_wire(to_wire(tensor)), tensor)


def test_autograd_history_is_left_behind() -> None:
    tensor = torch.ones(3, requires_grad=True) * 2
    back = from_wire(to_wire(tensor))
    assert not back.requires_grad
    assert back.is_leaf


def test_read_only_memory_is_copied_so_that_the_result_may_be_written_to() -> None:
    source = bytes(8)
    back = from_wire(WireTensor("float32", (2,), memoryview(source)))
    back += 1
    assert source == bytes(8)


def test_a_type_that_cannot_travel_is_named() -> None:
    with pytest.raises(LocalProtocolError, match="complex64"):
        to_wire(torch.zeros(2, dtype=torch.complex64))
