"""The process of the benchmark `codec`: our codecs and hivemind's compressions over one and the same tensor."""

# hivemind ships no type information, and protobuf makes its enumerations when it is imported.
# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.proto import runtime_pb2

from shoal.clock import SystemClock, thread_cpu_s
from shoal.codec import raw
from shoal.codec.cast import FP16
from shoal.codec.registry import CodecSettings, codec_of
from shoal.errors import InvariantViolation
from shoal_lab.bench.measure import seconds_per_call
from shoal_lab.bench.peer import Calls, Seat

_AT_LEAST_S = 0.2


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return raw.from_wire(raw.to_wire(tensor))


def _fp16(tensor: torch.Tensor) -> torch.Tensor:
    [encoded] = FP16.encode(tensor).tensors
    return FP16.decode((_raw(encoded),))


_OURS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"raw": _raw, "fp16": _fp16}


@contextmanager
def main(seat: Seat) -> Generator[Calls, None, None]:
    """Offer all sides; each returns the seconds that one call takes.

    `ours` and `reference` encode a float32 tensor and decode it again. `encode`, beside it `reference_encode`, and
    `decode` do half of it, with a codec for whole vectors; `memcpy` copies a vector. These count the seconds for which
    their one thread computes.
    """

    def ours(codec: str, size_bytes: int) -> float:
        return _seconds(_OURS[codec], size_bytes)

    def reference(compression: str, size_bytes: int) -> float:
        kind = runtime_pb2.CompressionType.Value(compression.upper())
        return _seconds(lambda tensor: deserialize_torch_tensor(serialize_torch_tensor(tensor, kind)), size_bytes)

    def reference_encode(compression: str, size_bytes: int) -> float:
        kind, values_N = runtime_pb2.CompressionType.Value(compression.upper()), _vector(size_bytes)
        return _thread_seconds(lambda: serialize_torch_tensor(values_N, kind))

    def encode(name: str, feedback: float, density: float, size_bytes: int) -> float:
        codec, values_N = codec_of(CodecSettings(name, feedback, density)), _vector(size_bytes)
        state = codec.encode(values_N).state
        return _thread_seconds(lambda: codec.encode(values_N, state))

    def decode(name: str, feedback: float, density: float, size_bytes: int) -> float:
        codec, values_N = codec_of(CodecSettings(name, feedback, density)), _vector(size_bytes)
        tensors = codec.encode(values_N).tensors
        out_N = torch.empty_like(values_N)
        return _thread_seconds(lambda: codec.decode(tensors, out_N))

    def memcpy(size_bytes: int) -> float:
        values, out = _vector(size_bytes).numpy(), np.zeros(size_bytes // 4, np.float32)
        return _thread_seconds(lambda: np.copyto(out, values))

    yield {
        "ours": ours,
        "reference": reference,
        "reference_encode": reference_encode,
        "encode": encode,
        "decode": decode,
        "memcpy": memcpy,
    }


@cache
def _vector(size_bytes: int) -> torch.Tensor:
    return torch.randn(size_bytes // 4, generator=torch.Generator().manual_seed(1))


def _seconds(there_and_back: Callable[[torch.Tensor], torch.Tensor], size_bytes: int) -> float:
    tensor = torch.linspace(-1, 1, size_bytes // 4)
    if not torch.allclose(there_and_back(tensor), tensor, atol=1e-2):
        raise InvariantViolation("what was decoded is not what was encoded: the measurement would mean nothing")
    return seconds_per_call(lambda: there_and_back(tensor), SystemClock().now_s, _AT_LEAST_S)


def _thread_seconds(call: Callable[[], object]) -> float:
    call()
    return seconds_per_call(call, thread_cpu_s, _AT_LEAST_S)
