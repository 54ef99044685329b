"""The samples of the benchmark `data`, the same for both sides, and what is done with each batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InvariantViolation

BATCHES = {"4 MB": 1000, "64 KB": 16}
"""Samples of a batch, by its size in the name of the case."""

SAMPLE_BYTES = 4000
"""1,000 float32, as a grey picture of 32 x 32 has; its label comes on top of that."""

MEASURED_S = 0.5
"""How long one repetition takes at least."""

_NUM_SAMPLES = 64_000
_PAGE_BYTES = 4096


def make_samples() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return samples (n, 1000) float32, 256 MB, and labels (n,) int64: sample i begins with i, so is its label."""
    samples = np.random.default_rng(0).random((_NUM_SAMPLES, SAMPLE_BYTES // 4), dtype=np.float32)
    samples[:, 0] = np.arange(_NUM_SAMPLES)
    return samples, np.arange(_NUM_SAMPLES)


def use(inputs: NDArray[np.float32], labels: NDArray[np.int64]) -> None:
    """Read a byte of each page of a batch (n, 1000), and the beginning of each sample and its label (n,).

    Raises:
        InvariantViolation: they do not belong together.
    """
    inputs.reshape(-1).view(np.uint8)[::_PAGE_BYTES].sum()
    if not (inputs[:, 0] == labels).all():
        raise InvariantViolation("a batch does not hold its samples: the measurement would mean nothing")


def gigabytes_per_s(num_batches: int, batch_samples: int, duration_s: float) -> float:
    """Return the rate of inputs; labels are not counted."""
    return num_batches * batch_samples * SAMPLE_BYTES / 1e9 / duration_s
