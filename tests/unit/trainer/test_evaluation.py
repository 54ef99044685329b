"""How held-out samples are cut."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.data.feed import LeasedBatch
from shoal.data.fields import Fields
from shoal.swarm.microbatch_cut import EVAL_SAMPLES
from shoal.trainer.evaluation import eval_parts


@pytest.mark.parametrize("num_samples", [1, EVAL_SAMPLES, EVAL_SAMPLES + 1, 3 * EVAL_SAMPLES + 5])
def test_parts_are_in_order_complete_and_no_larger_than_what_travels_together(num_samples: int) -> None:
    inputs = np.arange(num_samples, dtype=np.int64)[:, None]
    batch = LeasedBatch(Fields(inputs, -inputs), (), num_samples, ticket=0)
    parts = eval_parts(batch)
    assert len(parts) == -(-num_samples // EVAL_SAMPLES)
    assert max(part.num_samples for part in parts) <= EVAL_SAMPLES
    read = [np.frombuffer(part.fields.inputs.data, dtype=np.int64) for part in parts]
    assert np.array_equal(np.concatenate(read), inputs[:, 0])
