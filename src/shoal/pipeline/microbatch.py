"""What a trainer feeds into a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.swarm.microbatch_cut import MicrobatchPart
from shoal.wire.tensors import WireTensor


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Inputs (num_samples, ...) for the first stage and labels (num_samples, ...) for the last one.

    The memory behind both must stay as it is until the step has ended.
    """

    inputs: WireTensor
    labels: WireTensor
    num_samples: int


def take(microbatches: Sequence[Microbatch], part: MicrobatchPart) -> Microbatch:
    """Return a part of uncut microbatches, as views."""
    whole = microbatches[part.whole]
    if part.num_samples == whole.num_samples:
        return whole
    inputs, labels = (tensor.rows(part.start, part.stop) for tensor in (whole.inputs, whole.labels))
    return Microbatch(inputs, labels, part.num_samples)
