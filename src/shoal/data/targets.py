"""Targets: the labels that a loss counts. Losses and all weights of training count them, not samples.

A sample of a conversation may have three targets and its neighbour sixty: with weights by samples, three tokens would
move the model as far as sixty.
"""

from __future__ import annotations

import math

import numpy as np

from shoal.wire.tensors import WireTensor

IGNORED = -100
"""A label that counts for nothing, as torch's cross-entropy has it."""

_MAY_IGNORE = ("int32", "int64")
"""Only types that can hold `IGNORED` and are used for labels."""


def targets_of(labels: WireTensor) -> tuple[int, ...]:
    """Return how many targets each sample has, from labels (n, ...)."""
    num_samples = labels.shape[0]
    if labels.dtype not in _MAY_IGNORE:
        return (_per_sample(labels),) * num_samples
    values = np.frombuffer(labels.data, dtype=labels.dtype).reshape(num_samples, _per_sample(labels))
    counts: list[int] = (values != IGNORED).sum(axis=1).tolist()
    return tuple(counts)


def _per_sample(labels: WireTensor) -> int:
    return math.prod(labels.shape[1:])
