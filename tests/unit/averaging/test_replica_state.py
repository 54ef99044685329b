"""Outer state of a replica: contributions, staging, swapping."""

from __future__ import annotations

import math

import pytest
import torch
from tests.unit.averaging.conftest import FakeStage

from shoal.averaging.replica_state import Contribution, OuterState, ReplicaState, outer_optimizer, outer_step
from shoal.config.diloco import OuterOptimConfig
from shoal.config.quant import QuantConfig
from shoal.errors import StateMismatch
from shoal.optim.flat import FlatLayout, tensor_sha256
from shoal.optim.fragments import Fragment
from shoal.optim.outer import OuterSgd, pseudo_gradient
from shoal.optim.parts import AveragedParts
from shoal.quant.apply import apply_quant


class Stage:
    def __init__(self) -> None:
        self.base_parameters = self.base_buffers = self.cut = None
        self.parameters = torch.tensor([1.0, 2.0, 3.0])
        self.floats = torch.tensor([0.5])
        self.integers = torch.tensor([4])
        self.forgotten = 0
        buffers = [("floats", self.floats), ("integers", self.integers)]
        self.averaged = AveragedParts.of([("parameters", self.parameters)], buffers)

    def forget_moments(self) -> None:
        self.forgotten += 1


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture
def state(stage: Stage) -> ReplicaState:
    return ReplicaState(stage, OuterSgd(lr=1.0, momentum=0.5))


def average(gradient: float, buffers: float = 9.0, count: int = 7) -> Contribution:
    return Contribution(torch.full((3,), gradient), torch.tensor([buffers]), torch.tensor([count]))


def test_a_contribution_is_the_weighted_share_and_changes_nothing(stage: Stage, state: ReplicaState) -> None:
    stage.parameters -= 4.0
    share = state.contribution(1, 4)
    assert share.parameters_M.tolist() == [1.0, 1.0, 1.0]
    assert share.floats_F.tolist() == [0.125]
    assert share.integers_I.tolist() == [4]
    share.parameters_M.add_(100)
    assert state.contribution(1, 4).parameters_M.tolist() == [1.0, 1.0, 1.0]
    assert stage.parameters.tolist() == [-3.0, -2.0, -1.0]


def test_without_weight_a_contribution_is_zeros(stage: Stage, state: ReplicaState) -> None:
    stage.parameters[0] = float("nan")
    share = state.contribution(0, 4)
    assert share.parameters_M.tolist() == [0.0, 0.0, 0.0]
    assert share.floats_F.tolist() == [0.0]
    assert share.integers_I.tolist() == [4]


def test_staging_changes_nothing_until_the_swap(stage: Stage, state: ReplicaState) -> None:
    before = state.hashes
    hashes = state.stage(average(1.0))
    assert state.hashes == before
    assert stage.parameters.tolist() == [1.0, 2.0, 3.0]
    state.swap(hashes)
    assert state.hashes == hashes
    assert stage.parameters.tolist() == [0.0, 1.0, 2.0]
    assert stage.floats.tolist() == [9.0]
    assert stage.integers.tolist() == [7]
    assert hashes.parameters == tensor_sha256(torch.tensor([0.0, 1.0, 2.0]))
    assert hashes.momentum == tensor_sha256(torch.ones(3))


def test_momentum_is_carried_into_the_next_round(stage: Stage, state: ReplicaState) -> None:
    state.swap(state.stage(average(1.0)))
    state.swap(state.stage(average(0.0)))
    assert stage.parameters.tolist() == [-0.5, 0.5, 1.5]


def test_without_any_training_the_state_stays(stage: Stage, state: ReplicaState) -> None:
    stage.floats += 1
    before = state.hashes
    assert state.stage(None) == before
    state.swap(before)
    assert stage.floats.tolist() == [0.5]


def test_only_staged_bytes_can_be_swapped(stage: Stage, state: ReplicaState) -> None:
    first = state.stage(average(1.0))
    state.stage(average(2.0))
    with pytest.raises(StateMismatch):
        state.swap(first)
    assert stage.parameters.tolist() == [1.0, 2.0, 3.0]


def test_pinned_bytes_outlive_what_is_staged_after_them(stage: Stage, state: ReplicaState) -> None:
    first = state.stage(average(1.0))
    state.pin(first)
    state.stage(average(2.0))
    state.stage(average(3.0))
    state.swap(first)
    assert stage.parameters.tolist() == [0.0, 1.0, 2.0]


def test_each_part_of_the_state_has_a_hash_of_its_own(state: ReplicaState) -> None:
    base = state.stage(average(1.0))
    assert state.stage(average(1.0, buffers=8.0)).buffers != base.buffers
    assert state.stage(average(1.0, count=8)).buffers != base.buffers
    assert state.stage(average(1.0, count=8)).parameters == base.parameters
    assert state.stage(average(2.0)).momentum != base.momentum


def test_base_parameters_are_those_of_the_record_while_training_goes_on(stage: Stage, state: ReplicaState) -> None:
    state.swap(state.stage(average(1.0)))
    stage.parameters += 5
    assert stage.base_parameters is not None
    assert stage.base_parameters().tolist() == [0.0, 1.0, 2.0]


def test_a_state_that_has_changed_by_itself_is_noticed(state: ReplicaState) -> None:
    state.check()
    state.base_parameters()[1] += 1
    with pytest.raises(StateMismatch, match="hashes to"):
        state.check()


def test_a_contribution_has_the_size_that_is_announced(state: ReplicaState) -> None:
    assert state.ring_bytes == 3 * 4 + 4 + 8


def test_the_held_bytes_can_be_swapped_in_again_and_what_was_trained_on_them_is_gone(
    stage: Stage, state: ReplicaState
) -> None:
    before = state.hashes
    stage.parameters -= 4.0
    state.swap(before)
    assert stage.parameters.tolist() == [1.0, 2.0, 3.0]
    assert state.hashes == before


def test_the_length_of_a_pseudo_gradient_is_that_of_its_difference(stage: Stage, state: ReplicaState) -> None:
    stage.parameters -= torch.tensor([3.0, 0.0, 4.0])
    assert state.brought()[0] == 5.0
    assert stage.parameters.tolist() == [-2.0, 2.0, -1.0]


@pytest.mark.parametrize("where", ["parameters", "floats"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_has_no_length_and_the_swap_forgets_its_moments(
    stage: Stage, state: ReplicaState, where: str, value: float
) -> None:
    getattr(stage, where)[0] = value
    assert not math.isfinite(state.brought()[0])
    assert stage.forgotten == 0
    state.swap(state.stage(average(1.0)))
    assert stage.forgotten == 1
    assert stage.parameters.tolist() == [0.0, 1.0, 2.0]
    state.swap(state.stage(average(1.0)))
    assert stage.forgotten == 1


@pytest.mark.parametrize("resets_inner", [False, True])
def test_moments_stay_local_over_rounds_unless_each_round_is_to_begin_without(stage: Stage, resets_inner: bool) -> None:
    state = ReplicaState(stage, OuterSgd(lr=1.0), resets_inner=resets_inner)
    for round in (1, 2):
        state.swap(state.stage(average(0.5)))
        assert stage.forgotten == (round if resets_inner else 0)


def test_a_state_of_another_chain_is_taken_without_the_moments_of_the_own_one(
    stage: Stage, state: ReplicaState
) -> None:
    state.swap(state.stage(average(1.0)), True)
    assert stage.forgotten == 1
    state.swap(state.stage(average(1.0)))
    assert stage.forgotten == 1


def test_a_scale_multiplies_the_share_of_the_pseudo_gradient_alone(stage: Stage, state: ReplicaState) -> None:
    stage.parameters -= 4.0
    share = state.contribution(1, 4, scale=0.5)
    assert share.parameters_M.tolist() == [0.5, 0.5, 0.5]
    assert share.floats_F.tolist() == [0.125]


def test_a_member_keeps_what_it_has_learnt_of_other_fragments_and_one_that_fetches_does_not() -> None:
    wide = FakeStage(2 * 4096)
    state = ReplicaState(wide, OuterSgd(lr=1.0), num_fragments=2)
    begun = wide.parameters.clone()
    wide.parameters -= 3.0
    wide.floats += 1.0
    second = state.fragment(1)
    for keeps_rest in (True, False):
        average = state.base.averages_like(second)
        average.parameters_M.fill_(2.0)
        average.floats_F.fill_(9.0)
        average.integers_I.fill_(7)
        state.swap(state.stage(average, False, second), fragment=second, keeps_rest=keeps_rest)
        num_rounds = 1 if keeps_rest else 2
        assert torch.equal(wide.parameters[:4096], begun[:4096] - (3.0 if keeps_rest else 0.0))
        assert torch.equal(wide.parameters[4096:], begun[4096:] - 2.0 * num_rounds)
        assert wide.floats.tolist() == [9.0] * 3
    # Buffers are averaged with the last fragment alone.
    wide.floats += 1.0
    first = state.fragment(2)
    average = state.base.averages_like(first)
    average.parameters_M.fill_(1.0)
    assert average.floats_F.numel() == average.integers_I.numel() == 0
    state.swap(state.stage(average, False, first), fragment=first, keeps_rest=True)
    assert wide.floats.tolist() == [10.0] * 3
    assert state.base.floats_F.tolist() == [9.0] * 3


def test_parameters_that_are_not_finite_are_kept_in_no_fragment() -> None:
    wide = FakeStage(2 * 4096)
    state = ReplicaState(wide, OuterSgd(lr=1.0), num_fragments=2)
    wide.parameters[3] = float("nan")
    second = state.fragment(1)
    assert not math.isfinite(state.brought(second)[0])
    average = state.base.averages_like(second)
    for vector in average:
        vector.fill_(0)
    state.swap(state.stage(average, False, second), fragment=second, keeps_rest=True)
    assert wide.parameters.isfinite().all()
    assert wide.forgotten == 1


def test_step_sizes_are_only_averaged_in_whichever_fragment_they_are() -> None:
    averaged = (slice(4090, 4100), slice(3 * 4096 + 1, 3 * 4096 + 3))
    optimizer = OuterSgd(lr=0.5, momentum=0.5, averaged=averaged)
    state = OuterState(torch.ones(4 * 4096), torch.ones(4 * 4096), torch.empty(0), torch.empty(0, dtype=torch.int64))
    whole = outer_step(optimizer, state, Contribution(torch.full((4 * 4096,), 0.25), state.floats_F, state.integers_I))
    for number in range(3):
        fragment = Fragment(number, 3)
        average = state.averages_like(fragment)
        average.parameters_M.fill_(0.25)
        found = outer_step(optimizer, state, average, fragment)
        is_own = torch.arange(4 * 4096) // 4096 % 3 == number
        for name in ("parameters_N", "momentum_N"):
            before, after = getattr(state, name), getattr(whole, name)
            assert torch.equal(getattr(found, name), torch.where(is_own, after, before))


def test_no_outer_momentum_takes_a_step_size_below_zero() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    apply_quant(model, QuantConfig.model_validate({"base": {"weight_quant": {"per_channel": True}}}))
    layout = FlatLayout.of_parameters(model)
    is_step = torch.zeros(layout.numel, dtype=torch.bool)
    for entry in layout.entries:
        is_step[entry.offset : entry.offset + entry.numel] = entry.name.endswith("step")
    assert is_step.sum() == 3 + 1 + 2 + 1
    start = layout.flatten(list(model.parameters()))
    for optimizer, stays_positive in (
        (outer_optimizer(OuterOptimConfig(), layout), True),
        (OuterSgd(0.7, 0.9, True), False),
    ):
        outer, momentum = start, torch.zeros_like(start)
        for _ in range(3):
            # Round after round both replicas make all that they train a fifth and two fifths smaller.
            locals_ = [outer * 0.8, outer * 0.6]
            average = sum((pseudo_gradient(outer, local) / 2 for local in locals_), torch.zeros_like(outer))
            expected = outer * 0.7
            outer, momentum = optimizer.stage(outer, momentum, average)
            if stays_positive:
                torch.testing.assert_close(outer[is_step], expected[is_step])
                assert (outer[~is_step] != expected[~is_step]).all()
        assert bool((outer[is_step] > 0).all()) == stays_positive


def test_the_outer_optimizer_of_a_stage_without_step_sizes_is_the_configured_one() -> None:
    layout = FlatLayout.of_parameters(torch.nn.Linear(4, 3))
    outer = OuterOptimConfig(sgd_lr=0.5, sgd_momentum=0.25, sgd_nesterov=False)
    assert outer_optimizer(outer, layout) == OuterSgd(0.5, 0.25, False)
