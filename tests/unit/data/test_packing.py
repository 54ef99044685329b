"""Texts that share a sample: each is in one of them, and little room is left."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.data.packed_texts import best_fit
from shoal.data.source import Indices


def log_normal(num_texts: int, most: int, seed: int) -> Indices:
    """Lengths of conversations, median 300."""
    lengths = np.random.default_rng(seed).lognormal(np.log(300), 0.9, num_texts)
    return np.clip(lengths, 1, most).astype(np.int64)


@pytest.mark.parametrize("seed", range(3))
def test_samples_are_filled_to_97_percent_by_texts_of_log_normal_lengths(seed: int) -> None:
    lengths = log_normal(20_000, 2048, seed)
    packing = best_fit(lengths, 2048)
    assert lengths.sum() / (packing.num_samples * 2048) >= 0.97


@pytest.mark.parametrize("lengths", [[1], [5] * 7, [3, 1, 2, 5, 5, 4, 1], [2, 2, 2], []])
def test_every_text_is_in_one_sample_which_holds_no_more_than_it_can(lengths: list[int]) -> None:
    given = np.array(lengths, dtype=np.int64)
    packing = best_fit(given, 5)
    assert sorted(packing.texts.tolist()) == list(range(len(lengths)))
    samples = [packing.of(sample) for sample in range(packing.num_samples)]
    assert [text for texts in samples for text in texts] == packing.texts.tolist()
    assert all(0 < given[texts].sum() <= 5 for texts in samples)


def test_a_text_goes_where_the_least_room_is_left() -> None:
    # 3 would fit behind 6 as well.
    packing = best_fit(np.array([6, 7, 3, 2, 2], dtype=np.int64), 10)
    assert [sorted(packing.of(sample).tolist()) for sample in range(packing.num_samples)] == [[1, 2], [0, 3, 4]]


def test_a_plan_is_a_function_of_the_lengths_alone() -> None:
    lengths = log_normal(2_000, 512, 7)
    one, other = best_fit(lengths, 512), best_fit(lengths.copy(), 512)
    assert np.array_equal(one.texts, other.texts)
    assert np.array_equal(one.starts, other.starts)
