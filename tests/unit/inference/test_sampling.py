"""Tokens are drawn as transformers' processors leave them, and from the seed and the position alone."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from shoal.errors import ConfigError
from shoal.inference.sampling import Sampling, distribution, next_token

LOGITS = 3 * torch.randn(500, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(
    "limits",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 7},
        {"temperature": 0.9, "top_p": 0.6},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 2.0, "min_p": 0.2},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 1.0, "top_k": 5000, "top_p": 1.0, "min_p": 0.0},
    ],
)
def test_the_distribution_is_that_of_the_processors_of_transformers(
    limits: dict[str, Any], transformers: ModuleType
) -> None:
    processors = transformers.LogitsProcessorList([transformers.TemperatureLogitsWarper(limits["temperature"])])
    warpers = {
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
        "min_p": transformers.MinPLogitsWarper,
    }
    for name, warper in warpers.items():
        if name in limits:
            processors.append(warper(limits[name]))
    expected = processors(torch.zeros(1, 1, dtype=torch.int64), LOGITS[None].clone())[0].softmax(0)
    found = distribution(LOGITS, Sampling(**limits))
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_draws_are_as_frequent_as_the_distribution_says_and_the_same_for_the_same_seed() -> None:
    sampling = Sampling(temperature=1.0, top_k=6, seed=3)
    probabilities = distribution(LOGITS, sampling)
    drawn = [next_token(LOGITS, sampling, position) for position in range(4000)]
    counts = torch.bincount(torch.tensor(drawn), minlength=500).double()
    kept = probabilities > 0
    assert counts[~kept].sum() == 0
    chi_square = ((counts - 4000 * probabilities)[kept] ** 2 / (4000 * probabilities)[kept]).sum()
    assert chi_square < 20.5, "one seed in a thousand has more with five degrees of freedom"
    assert drawn == [next_token(LOGITS, sampling, position) for position in range(4000)]
    other = Sampling(temperature=1.0, top_k=6, seed=4)
    assert drawn != [next_token(LOGITS, other, position) for position in range(4000)]


def test_without_a_temperature_it_is_the_likeliest_token() -> None:
    assert next_token(LOGITS, Sampling(), 0) == LOGITS.argmax()
    assert next_token(LOGITS, Sampling(temperature=5.0, top_k=1), 9) == LOGITS.argmax()


def test_values_that_make_no_sense_are_named_together() -> None:
    with pytest.raises(ConfigError) as refused:
        Sampling(temperature=float("nan"), top_k=0, top_p=1.5, min_p=-1, seed=-2)
    for name in ("temperature nan", "top-k 0", "top-p 1.5", "min-p -1", "seed -2"):
        assert name in str(refused.value)
    with pytest.raises(ConfigError, match="top-k and min-p: with temperature 0"):
        Sampling(top_k=3, min_p=0.1)
