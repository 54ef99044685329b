"""What a trainer feeds into a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.wire.tensors import WireTensor


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Inputs (num_samples, ...) for the first stage and labels (num_samples, ...) for the last one.

    The memory behind both must stay as it is until the step has ended.
    """

    inputs: WireTensor
    labels: WireTensor
    num_samples: int
