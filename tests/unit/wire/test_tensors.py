"""Wire form of a tensor: sizes are checked where it is made."""

from __future__ import annotations

import pytest

from shoal.errors import LocalProtocolError
from shoal.wire.tensors import ITEM_BYTES, WireTensor, empty_bytes, tensor_bytes


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_a_tensor_has_as_many_bytes_as_its_type_and_shape_say(dtype: str) -> None:
    assert tensor_bytes(dtype, (2, 3)) == 6 * ITEM_BYTES[dtype]
    assert WireTensor(dtype, (2, 3), empty_bytes(6 * ITEM_BYTES[dtype])).num_bytes == 6 * ITEM_BYTES[dtype]
    assert tensor_bytes(dtype, ()) == ITEM_BYTES[dtype]
    assert tensor_bytes(dtype, (5, 0)) == 0


@pytest.mark.parametrize(
    ("dtype", "shape", "num_bytes"),
    [("float32", (3,), 11), ("complex64", (1,), 8), ("uint8", (-1, -4), 4), ("uint8", (1,) * 9, 1)],
)
def test_a_tensor_whose_parts_do_not_fit_is_refused(dtype: str, shape: tuple[int, ...], num_bytes: int) -> None:
    with pytest.raises(LocalProtocolError):
        WireTensor(dtype, shape, empty_bytes(num_bytes))


def test_data_has_to_be_a_flat_contiguous_view_of_bytes() -> None:
    with pytest.raises(LocalProtocolError, match="flat"):
        WireTensor("float32", (2,), memoryview(bytearray(8)).cast("f"))
    with pytest.raises(LocalProtocolError, match="flat"):
        WireTensor("uint8", (4,), memoryview(bytearray(8))[::2])


def test_a_copy_has_memory_of_its_own() -> None:
    source = bytearray(b"abcd")
    copy = WireTensor("uint8", (4,), memoryview(source)).copy()
    source[:] = b"xxxx"
    assert bytes(copy.data) == b"abcd"
    assert not copy.data.readonly
