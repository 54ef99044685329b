"""Seeds and seeded sections."""

from __future__ import annotations

import itertools

import pytest
import torch

from shoal.model.seeding import operation_seed, seeded, unit_seed


def test_operation_seeds_are_the_same_on_every_machine() -> None:
    assert operation_seed(17, 0, 0, 0, 0) == OPERATION_SEED_17
    assert unit_seed(17, 3) == UNIT_SEED_17_3


def test_operations_that_differ_in_one_number_draw_from_different_seeds() -> None:
    seeds = [operation_seed(*numbers) for numbers in itertools.product(range(3), repeat=5)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seeded_section_repeats_and_leaves_no_trace() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    draws: list[torch.Tensor] = []
    for _ in range(2):
        with seeded(99):
            draws.append(torch.rand(4))
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(torch.rand(3), expected)


def test_a_seeded_section_restores_the_generator_when_its_body_fails() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)

    def draw_and_fail() -> None:
        with seeded(1):
            torch.rand(1)
            raise ValueError("body")

    with pytest.raises(ValueError, match="body"):
        draw_and_fail()
    assert torch.equal(torch.rand(3), expected)


OPERATION_SEED_17 = 621677968855950213
UNIT_SEED_17_3 = 8261996480367094870
