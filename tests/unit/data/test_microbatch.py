"""Cutting a step's batch: the sizes of torch.chunk, and views of the same memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.data.feed import LeasedBatch
from shoal.data.fields import Fields
from shoal.data.microbatch import cut, microbatches, usual_sizes
from shoal.swarm.microbatch_cut import EVAL_SAMPLES


def arrays(num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.arange(num_samples * 3, dtype=np.float32).reshape(num_samples, 3)
    return inputs, np.arange(num_samples, dtype=np.int64)


@pytest.mark.parametrize("max_parts", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_samples", [1, 2, 5, 8, 9])
def test_parts_are_those_of_torch_chunk(num_samples: int, max_parts: int) -> None:
    inputs, labels = arrays(num_samples)
    parts = cut(Fields(inputs, labels), max_parts)
    expected = torch.arange(num_samples).chunk(max_parts)
    assert [part.num_samples for part in parts] == [len(chunk) for chunk in expected]
    for part, chunk in zip(parts, expected, strict=True):
        assert part.fields.inputs.shape == (len(chunk), 3)
        assert np.frombuffer(part.fields.inputs.data, np.float32).tolist() == inputs[chunk.numpy()].ravel().tolist()
        assert np.frombuffer(part.fields.labels.data, np.int64).tolist() == chunk.tolist()


def test_each_accumulated_batch_is_cut_by_itself() -> None:
    inputs, labels = arrays(11)
    sizes = [
        p.num_samples
        for p in microbatches(Fields(inputs, labels), batch_samples=4, samples_per_step=12, num_microbatches=2)
    ]
    assert sizes == [2, 2, 2, 2, 2, 1]
    sizes = [
        p.num_samples
        for p in microbatches(Fields(inputs, labels), batch_samples=5, samples_per_step=15, num_microbatches=2)
    ]
    assert sizes == [3, 2, 3, 2, 1]


@pytest.mark.parametrize(
    ("num_samples", "sizes"),
    [(16, [4] * 4), (17, [4, 4, 4, 4, 1]), (18, [4, 4, 4, 4, 2]), (31, [4] * 7 + [3]), (22, [4] * 5 + [2])],
)
def test_a_batch_above_the_usual_size_has_more_microbatches_and_no_larger_ones(
    num_samples: int, sizes: list[int]
) -> None:
    inputs, labels = arrays(num_samples)
    parts = microbatches(Fields(inputs, labels), batch_samples=15, samples_per_step=15, num_microbatches=4)
    assert [part.num_samples for part in parts] == sizes


def test_a_batch_below_the_usual_size_has_smaller_microbatches_and_not_fewer() -> None:
    inputs, labels = arrays(7)
    parts = microbatches(Fields(inputs, labels), batch_samples=64, samples_per_step=64, num_microbatches=4)
    assert [part.num_samples for part in parts] == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("num_samples", "sizes"), [(4, [4]), (7, [4, 3]), (15, [4, 4, 4, 3]), (17, [4] * 4 + [1]), (31, [4] * 7 + [3])]
)
def test_microbatches_that_keep_their_size_are_fewer_or_more_and_only_the_last_one_is_smaller(
    num_samples: int, sizes: list[int]
) -> None:
    inputs, labels = arrays(num_samples)
    parts = microbatches(
        Fields(inputs, labels), batch_samples=15, samples_per_step=15, num_microbatches=4, keeps_size=True
    )
    assert [part.num_samples for part in parts] == sizes


@pytest.mark.parametrize(("batch", "parts"), [(15, 4), (16, 4), (5, 2), (3, 1), (4, 4), (9, 4)])
def test_the_usual_sizes_are_those_of_a_usual_batch(batch: int, parts: int) -> None:
    usual = microbatches(
        Fields(*arrays(2 * batch)), batch_samples=batch, samples_per_step=2 * batch, num_microbatches=parts
    )
    assert {part.num_samples for part in usual} == usual_sizes(batch, parts)


def test_parts_are_views_and_not_copies() -> None:
    inputs, labels = arrays(4)
    parts = cut(Fields(inputs, labels), 2)
    inputs[3, 0] = 99.0
    labels[0] = 42
    assert np.frombuffer(parts[1].fields.inputs.data, np.float32)[3] == 99.0
    assert np.frombuffer(parts[0].fields.labels.data, np.int64)[0] == 42


@pytest.mark.parametrize("num_samples", [1, EVAL_SAMPLES, EVAL_SAMPLES + 1, 3 * EVAL_SAMPLES + 5])
def test_parts_are_in_order_complete_and_no_larger_than_what_travels_together(num_samples: int) -> None:
    inputs = np.arange(num_samples, dtype=np.int64)[:, None]
    batch = LeasedBatch(Fields(inputs, -inputs), (), num_samples, ticket=0)
    parts = batch.eval_parts()
    assert len(parts) == -(-num_samples // EVAL_SAMPLES)
    assert max(part.num_samples for part in parts) <= EVAL_SAMPLES
    read = [np.frombuffer(part.fields.inputs.data, dtype=np.int64) for part in parts]
    assert np.array_equal(np.concatenate(read), inputs[:, 0])
