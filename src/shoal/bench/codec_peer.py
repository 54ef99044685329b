"""The process of the benchmark `codec`: our codecs and hivemind's compressions over one and the same tensor."""

# hivemind ships no type information, and protobuf makes its enumerations when it is imported.
# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.proto import runtime_pb2

from shoal.bench.measure import seconds_per_call
from shoal.bench.peer import Calls, Seat
from shoal.clock import SystemClock
from shoal.codec import raw
from shoal.codec.cast import FP16
from shoal.errors import InvariantViolation

_AT_LEAST_S = 0.2


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return raw.from_wire(raw.to_wire(tensor))


def _fp16(tensor: torch.Tensor) -> torch.Tensor:
    [encoded] = FP16.encode(tensor).tensors
    return FP16.decode((_raw(encoded),))


_OURS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"raw": _raw, "fp16": _fp16}


@contextmanager
def main(seat: Seat) -> Generator[Calls, None, None]:
    """Offer both sides; each returns the seconds that it takes to encode a float32 tensor and decode it again."""

    def ours(codec: str, size_bytes: int) -> float:
        return _seconds(_OURS[codec], size_bytes)

    def reference(compression: str, size_bytes: int) -> float:
        kind = runtime_pb2.CompressionType.Value(compression.upper())
        return _seconds(lambda tensor: deserialize_torch_tensor(serialize_torch_tensor(tensor, kind)), size_bytes)

    yield {"ours": ours, "reference": reference}


def _seconds(there_and_back: Callable[[torch.Tensor], torch.Tensor], size_bytes: int) -> float:
    tensor = torch.linspace(-1, 1, size_bytes // 4)
    if not torch.allclose(there_and_back(tensor), tensor, atol=1e-2):
        raise InvariantViolation("what was decoded is not what was encoded: the measurement would mean nothing")
    return seconds_per_call(lambda: there_and_back(tensor), SystemClock(), _AT_LEAST_S)
