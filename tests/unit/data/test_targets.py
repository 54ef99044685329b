"""Which labels count."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.data.microbatch import wire_view
from shoal.data.targets import IGNORED, targets_of


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_ignored_labels_are_no_targets(dtype: str) -> None:
    labels = np.array([[1, IGNORED, 3], [IGNORED, IGNORED, IGNORED], [0, 0, 0]], dtype=dtype)
    assert targets_of(wire_view(labels)) == (2, 0, 3)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "bool"])
def test_types_that_hold_no_ignored_label_count_all(dtype: str) -> None:
    # As a byte -100 would be 156.
    labels = np.full((2, 3), 156).astype(dtype)
    assert targets_of(wire_view(labels)) == (3, 3)


def test_a_class_for_each_image_is_a_target_each() -> None:
    assert targets_of(wire_view(np.array([4, IGNORED, 0]))) == (1, 0, 1)
