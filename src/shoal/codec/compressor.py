"""A tensor into few bytes and back, for programs that are no swarm: any codec by name, with error feedback inside.

    sender = Compressor("sparse", density=1 / 64, feedback=0.95)
    receiver = Compressor("sparse", density=1 / 64)

    data = sender.compress(gradient)                         # some 200 times smaller than float32
    approximately = receiver.decompress(data, gradient.shape)

What a call of `compress` leaves out is kept, and comes with the next ones: have one compressor for each tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.codec.base import NO_STATE
from shoal.codec.raw import to_wire
from shoal.codec.registry import CodecSettings, codec_of
from shoal.errors import LocalProtocolError, RemoteProtocolError


class Compressor:
    """Compresses one tensor again and again, and decompresses what another one of the same settings has made.

    It may be used by one thread at a time.

    Args:
        codec: A name in `shoal.codec.registry.CODEC_NAMES`: `none`, `bf16`, `fp16`, `int8`, `int4`, `int4_e3m0`,
            `2bit`, `sparse`.
        feedback: What has been left out is multiplied with this, from 0 to 1, and added to the next tensor. Only the
            sender needs it; `none`, `bf16` and `fp16` have none.
        density: The share of values that `sparse` sends; the same at both ends.

    Raises:
        ConfigError: There is no such codec, or a setting is out of its range.
    """

    def __init__(self, codec: str, *, feedback: float = 0.0, density: float = 0.0625) -> None:
        self._codec = codec_of(CodecSettings(codec, feedback, density))
        self._state = NO_STATE

    @property
    def residual(self) -> Tensor | None:
        """What has been left out so far, flat, to be saved and set again; None: nothing yet, or there is no feedback.

        Setting it to None forgets it. A later call of `compress` does not change a tensor that was read here.
        """
        return self._state[0] if self._state else None

    @residual.setter
    def residual(self, residual_N: Tensor | None) -> None:
        self._state = NO_STATE if residual_N is None else (residual_N.detach().float().cpu().reshape(-1).clone(),)

    def compress(self, tensor: Tensor) -> bytes:
        """Return the bytes of a tensor of any shape, device and floating dtype; its values count as float32.

        Raises:
            LocalProtocolError: A value is NaN, infinite or huge, and the codec has no form for it; or the tensor has
                another number of elements than the one before. The residual is as it was.
        """
        if not tensor.is_floating_point():
            raise LocalProtocolError(f"a tensor of {tensor.dtype} has no values that a codec could round")
        values_N = tensor.detach().to("cpu", torch.float32).reshape(-1)
        encoded = self._codec.encode(values_N, self._state)
        self._state = encoded.state
        return b"".join(bytes(to_wire(part).data) for part in encoded.tensors)

    def decompress(self, data: bytes | bytearray | memoryview, shape: Sequence[int]) -> Tensor:
        """Return the float32 tensor of this shape whose bytes these are.

        Raises:
            RemoteProtocolError: They are not what a tensor of this shape becomes with this codec.
        """
        out_N = torch.empty(math.prod(shape))
        [dtype] = self._codec.wire_dtypes(torch.float32)
        expected = out_N.numel() * dtype.itemsize
        if self._codec.is_elementwise and len(data) != expected:
            raise RemoteProtocolError(f"{len(data)} bytes of {self._codec.name} for a tensor of {expected}")
        received = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return self._codec.decode((received,), out_N).reshape(tuple(shape))
