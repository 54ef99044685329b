"""Targets: the labels that a loss counts. Losses and all weights of training count them, not samples.

A sample of a conversation may have three targets and its neighbour sixty: with weights by samples, three tokens would
move the model as far as sixty.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import BadSamples
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


def require_labels(labels: NDArray[np.integer[Any]], num_classes: int, name_of: Callable[[int], str]) -> None:
    """Refuse samples with a label that the model has no class or token for.

    Args:
        labels: Of shape (n, ...). Only samples of several labels may have `IGNORED`.
        name_of: Says which sample the one at a place of `labels` is.

    Raises:
        BadSamples: A sample has such a label.
    """
    wrong: NDArray[np.bool_] = np.asarray((labels < 0) | (labels >= num_classes))
    if labels.ndim > 1:
        wrong &= labels != IGNORED
    if wrong.any():
        place = int(np.argwhere(wrong)[0, 0])
        raise BadSamples(
            f"{name_of(place)} has the label {labels[place][wrong[place]].flat[0]}, and labels are 0 to "
            f"{num_classes - 1}: mend the data, or give the model more of them (model.num_classes, of text "
            "model.vocab_size)"
        )


def _per_sample(labels: WireTensor) -> int:
    return math.prod(labels.shape[1:])
