"""A stage's computation: what commits do, and that everything else leaves no trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.families import tied_gpt
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.config.diloco import InnerOptimConfig
from shoal.errors import LocalProtocolError, StateMismatch
from shoal.ids import StepKey
from shoal.model.resnet import ResNetFamily, ResNetShape
from shoal.model.stage import build_stage
from shoal.optim.inner import InnerOptimizer
from shoal.pipeline.stage_compute import StageCompute
from shoal.pipeline.step_buffers import LiveBuffers

KEY, OTHER = StepKey(0, 1, 0, 0), StepKey(1, 1, 0, 0)


class TinyNet(ResNetFamily):
    depths = (1, 0, 0, 0)
    bottleneck = False


def compute(
    stage: int, autocast: torch.dtype | None = None, family_class: type[ResNetFamily] = TinyNet
) -> StageCompute:
    shape = ResNetShape((1, 0, 0, 0), bottleneck=False, stem="cifar", num_channels=1, img_size=4, num_classes=4)
    module = build_stage(family_class(shape), stage, 2, seed=5, autocast=autocast)
    optimizer = InnerOptimizer(module.named_parameters(), InnerOptimConfig())
    return StageCompute(module, optimizer, run_seed=5, stage=stage)


def grouped(config: InnerOptimConfig) -> StageCompute:
    shape = ResNetShape((1, 0, 0, 0), bottleneck=False, stem="cifar", num_channels=1, img_size=4, num_classes=4)
    module = build_stage(TinyNet(shape), 0, 2, seed=5)
    return StageCompute(module, InnerOptimizer(module.named_parameters(), config), run_seed=5, stage=0)


def image(seed: int, n: int = 3) -> Tensor:
    return torch.randn(n, 1, 4, 4, generator=torch.Generator().manual_seed(seed))


def state(stage: StageCompute) -> list[Tensor]:
    moments = stage.optimizer.state_tensors
    return [t.detach().clone() for t in [*stage.module.parameters(), *stage.module.buffers(), *moments]]


def is_same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def run(stage: StageCompute, key: StepKey, seed: int = 0) -> None:
    """Two microbatches of the first stage, with all forwards before the backwards."""
    for microbatch in range(2):
        output = stage.forward(key, microbatch, image(seed + microbatch))
        assert not output.requires_grad
    for microbatch in range(2):
        stage.backward(key, microbatch, torch.ones(3, 64, 4, 4) / (1 + microbatch + seed))


def test_until_its_commit_a_step_changes_nothing_and_a_drop_leaves_no_trace() -> None:
    stage = compute(0)
    run(stage, OTHER)
    stage.commit(OTHER, 0.5, 0.01, False)
    before = state(stage)
    run(stage, KEY)
    stage.totals(KEY)
    assert is_same(before, state(stage))
    stage.drop(KEY)
    assert is_same(before, state(stage))
    assert all(p.grad is None for p in stage.module.parameters())
    run(stage, KEY)
    stage.commit(KEY, 1.0, 0.01, False)
    undisturbed = compute(0)
    run(undisturbed, OTHER)
    undisturbed.commit(OTHER, 0.5, 0.01, False)
    run(undisturbed, KEY)
    undisturbed.commit(KEY, 1.0, 0.01, False)
    assert is_same(state(stage), state(undisturbed))
    assert stage.version == 2


def test_interleaved_steps_do_not_mix() -> None:
    mixed, alone = compute(0), compute(0)
    mixed.forward(KEY, 0, image(0))
    mixed.forward(OTHER, 0, image(8))
    mixed.forward(KEY, 1, image(1))
    mixed.backward(OTHER, 0, torch.ones(3, 64, 4, 4))
    for microbatch in range(2):
        mixed.backward(KEY, microbatch, torch.ones(3, 64, 4, 4) / (1 + microbatch))
    run(alone, KEY)
    assert mixed.totals(KEY) == alone.totals(KEY)
    mixed.commit(KEY, 1.0, 0.01, False)
    alone.commit(KEY, 1.0, 0.01, False)
    assert is_same(state(mixed), state(alone))


def test_buffers_are_the_same_whether_steps_come_one_after_the_other_or_at_once() -> None:
    """Batch norm's counts, and its moving averages: of steps at once, each has kept a part of the same one before."""
    at_once, in_turn = compute(0), compute(0)
    keys = [StepKey(trainer, 1, 0, 0) for trainer in range(6)]
    for number, key in enumerate(keys):
        run(at_once, key, seed=20 * number)
    for number, key in enumerate(keys):
        at_once.commit(key, 1.0, 0.0, False)
        # With a rate of 0, what a later step computes is the same.
        run(in_turn, key, seed=20 * number)
        in_turn.commit(key, 1.0, 0.0, False)
    for (name, one), other in zip(at_once.module.named_buffers(), in_turn.module.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)


def test_a_variance_stays_above_zero_however_many_steps_share_a_replica() -> None:
    """With the differences of four steps at once, each of ten microbatches, it swung up to 1,100 and down to -1,800."""
    norm = torch.nn.BatchNorm1d(1)
    buffers = LiveBuffers(norm)
    batch = torch.tensor([[-0.2], [0.2]])
    open_steps: list[tuple[list[Tensor], list[Tensor], int]] = []
    for _ in range(100):
        base = last = buffers.copy()
        for _ in range(10):
            with buffers.bound_to(last) as left:
                norm(batch)
            last = left
        open_steps.append((base, last, buffers.changes))
        if len(open_steps) == 4:
            buffers.apply(*open_steps.pop(0))
        assert norm.running_var is not None
        assert 0.079 < norm.running_var.item() <= 1
    torch.testing.assert_close(norm.running_var, torch.tensor([0.08]))


def test_other_buffers_of_a_step_that_was_overtaken_are_added_as_a_difference() -> None:
    module = torch.nn.Module()
    module.register_buffer("total", torch.tensor(1.0))
    buffers = LiveBuffers(module)
    steps = [(buffers.copy(), [torch.tensor(1.0 + more)], buffers.changes) for more in (2.0, 4.0)]
    for step in steps:
        buffers.apply(*step)
    assert module.get_buffer("total") == 7.0


def test_a_skipped_step_changes_nothing_but_the_version() -> None:
    stage = compute(0)
    before = state(stage)
    run(stage, KEY)
    stage.commit(KEY, 0.0, 0.1, True)
    assert is_same(before, state(stage))
    assert stage.version == 1


def test_the_last_stage_weighs_microbatches_by_samples_and_sums_the_loss() -> None:
    whole, cut = compute(1), compute(1)
    hidden = torch.randn(4, 64, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 3])
    for stage in (whole, cut):
        for module in stage.module.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()  # otherwise the cut itself changes the statistics
    one = whole.loss(KEY, 0, hidden, labels, 1.0)
    two = [
        cut.loss(KEY, m, hidden[s], labels[s], w) for m, (s, w) in enumerate([(slice(0, 3), 0.75), (slice(3, 4), 0.25)])
    ]
    torch.testing.assert_close(one, torch.cat(two))
    assert cut.totals(KEY).loss == pytest.approx(whole.totals(KEY).loss)
    assert cut.totals(KEY).squared_norm == pytest.approx(whole.totals(KEY).squared_norm, rel=1e-5)


def test_gradients_that_are_not_finite_are_reported() -> None:
    stage = compute(1)
    hidden = torch.full((2, 64, 4, 4), float("nan"))
    stage.loss(KEY, 0, hidden, torch.tensor([0, 1]), 1.0)
    assert not stage.totals(KEY).finite


def test_a_step_that_was_not_run_to_its_end_cannot_be_committed() -> None:
    stage = compute(0)
    stage.forward(KEY, 0, image(0))
    with pytest.raises(LocalProtocolError):
        stage.commit(KEY, 1.0, 0.1, False)
    with pytest.raises(LocalProtocolError):
        stage.commit(OTHER, 1.0, 0.1, False)


def test_evaluation_uses_the_round_s_parameters_and_buffers_and_changes_nothing() -> None:
    stage = compute(0)
    stage.start_round()
    held = stage.averaged.parameters.flat()
    expected = stage.evaluate(image(0))
    run(stage, KEY)
    stage.commit(KEY, 1.0, 0.1, False)
    with pytest.raises(LocalProtocolError):
        stage.evaluate(image(0))
    stage.base_parameters = lambda: held
    before = state(stage)
    assert torch.equal(stage.evaluate(image(0)), expected)
    assert is_same(before, state(stage))
    assert stage.module.training
    stage.start_round()
    assert not torch.equal(stage.evaluate(image(0)), expected)


def test_a_round_that_begins_with_other_parameters_and_buffers_evaluates_those_of_the_record() -> None:
    stage, fresh = compute(0), compute(0)
    base = [part.flat() for part in stage.averaged]
    stage.base_parameters, stage.base_buffers = lambda: base[0], lambda: (base[1], base[2])
    run(stage, KEY)
    stage.commit(KEY, 1.0, 0.1, False)
    stage.start_round()
    assert not torch.equal(stage.averaged.floats.flat(), base[1])
    assert torch.equal(stage.evaluate(image(0)), fresh.evaluate(image(0)))
    stage.inherit(stage.parts.inner_state())
    assert all(torch.equal(part.flat(), held) for part, held in zip(stage.averaged, base, strict=True))


def test_evaluation_between_a_forward_and_its_backward_does_not_disturb_them() -> None:
    disturbed, alone = compute(0), compute(0)
    for stage in (disturbed, alone):
        base = stage.averaged.parameters.flat()
        stage.base_parameters = lambda base=base: base
        run(stage, OTHER)
        stage.commit(OTHER, 1.0, 0.1, False)
        stage.forward(KEY, 0, image(4))
    disturbed.evaluate(image(9))
    for stage in (disturbed, alone):
        stage.backward(KEY, 0, torch.ones(3, 64, 4, 4))
    assert disturbed.totals(KEY) == alone.totals(KEY)


def test_flat_state_goes_out_and_in() -> None:
    source, target = compute(0), compute(0)
    run(source, KEY)
    source.commit(KEY, 1.0, 0.1, False)
    target.averaged.parameters.load(source.averaged.parameters.flat())
    target.averaged.floats.load(source.averaged.floats.flat())
    target.averaged.integers.load(source.averaged.integers.flat())
    count = len(list(source.module.parameters())) + len(list(source.module.buffers()))
    assert is_same(state(source)[:count], state(target))


def trained(stage: StageCompute, numbers: range) -> StageCompute:
    for number in numbers:
        run(stage, StepKey(0, 1, number, 0), seed=number)
        stage.commit(StepKey(0, 1, number, 0), 0.5, 0.01, number == 1)
    return stage


@pytest.mark.parametrize("commits", [0, 1, 3])
def test_what_goes_on_from_a_snapshot_is_what_never_stopped_bit_for_bit(commits: int) -> None:
    undisturbed = compute(0)
    trained(undisturbed, range(commits))
    content = undisturbed.snapshot()
    trained(undisturbed, range(commits, 6))
    resumed = compute(0)
    resumed.start_round(content, commits)
    assert resumed.version == commits
    assert is_same(state(trained(resumed, range(commits, 6))), state(undisturbed))
    assert not is_same(state(trained(compute(0), range(commits, 6))), state(undisturbed)) or commits == 0


def test_groups_are_stepped_by_the_number_of_the_step_also_from_a_snapshot_between() -> None:
    groups = [{"name_patterns": ["*conv*"], "every_steps": 2, "adam_betas1": 0.5}]
    config = InnerOptimConfig.model_validate({"groups": groups})
    undisturbed, resumed = grouped(config), grouped(config)
    before = state(undisturbed)
    trained(undisturbed, range(3, 4))
    names = [name for name, _ in undisturbed.module.named_parameters()]
    stayed = [name for name, a, b in zip(names, state(undisturbed), before, strict=False) if torch.equal(a, b)]
    assert stayed == [name for name in names if "conv" in name]
    content = undisturbed.snapshot()
    trained(undisturbed, range(4, 7))
    resumed.start_round(content, 1)
    trained(resumed, range(4, 7))
    assert is_same(state(undisturbed), state(resumed))


def test_a_snapshot_is_a_copy() -> None:
    stage = trained(compute(0), range(2))
    content = stage.snapshot()
    before = content.clone()
    trained(stage, range(2, 4))
    assert torch.equal(content, before)


def test_a_snapshot_has_all_that_memory_is_counted_for() -> None:
    stage = trained(compute(0), range(1))
    marks = len(list(stage.module.parameters()))
    assert stage.snapshot().numel() == marks + stage.parts.num_bytes
    local = [*stage.module.parameters(), *stage.module.buffers(), *stage.optimizer.state_tensors]
    assert stage.parts.num_bytes == sum(tensor.nbytes for tensor in local)


def test_after_a_snapshot_evaluation_is_of_what_the_round_began_from() -> None:
    fresh, resumed = compute(0), compute(0)
    held = resumed.averaged.parameters.flat()
    resumed.base_parameters = lambda: held
    resumed.start_round(trained(compute(0), range(3)).snapshot(), 3)
    assert torch.equal(resumed.evaluate(image(3)), fresh.evaluate(image(3)))


def test_a_snapshot_of_something_else_is_refused_and_changes_nothing() -> None:
    stage = compute(0)
    before = [t.detach().clone() for t in [*stage.module.parameters(), *stage.module.buffers()]]
    with pytest.raises(StateMismatch, match="bytes were expected"):
        stage.start_round(trained(compute(1), range(0)).snapshot(), 0)
    assert is_same(before, [*stage.module.parameters(), *stage.module.buffers()])


def wrapped() -> StageCompute:
    """The first of two stages, which has the head as well."""
    module = build_stage(tied_gpt(), 0, 2, seed=5)
    return StageCompute(module, InnerOptimizer(module.named_parameters(), InnerOptimConfig()), run_seed=5, stage=0)


def train_wrapped(stage: StageCompute, order: str, key: StepKey = KEY) -> list[Tensor]:
    """One step of two microbatches: `f0`, `l0` and `b0` are the forward, the loss and the backward of the first one."""
    for step in order.split():
        microbatch = int(step[1])
        generator = torch.Generator().manual_seed(microbatch)
        tokens = torch.randint(32, (2, 8), generator=generator)
        hidden = torch.randn(2, 8, 16, generator=generator)
        if step[0] == "f":
            stage.forward(key, microbatch, tokens)
        elif step[0] == "l":
            stage.loss(key, microbatch, hidden, tokens, 0.5)
        else:
            stage.backward(key, microbatch, hidden)
    totals = stage.totals(key)
    assert totals.loss is not None
    stage.commit(key, 1.0, 0.1, False)
    return [*state(stage), torch.tensor([totals.squared_norm, totals.loss], dtype=torch.float64)]


@pytest.mark.parametrize("order", ["f0 l0 b0 f1 l1 b1", "f0 f1 l0 b0 l1 b1", "f0 f1 b0 b1 l0 l1", "l0 l1 f0 b0 f1 b1"])
def test_in_which_order_both_parts_of_a_wrapped_stage_compute_decides_no_bit(order: str) -> None:
    assert is_same(train_wrapped(wrapped(), order), train_wrapped(wrapped(), "f0 f1 l0 l1 b0 b1"))


def test_a_wrapped_stage_that_drops_a_step_or_evaluates_changes_nothing() -> None:
    stage = wrapped()
    begun_with = stage.averaged.parameters.flat()
    stage.base_parameters = lambda: begun_with
    train_wrapped(stage, "f0 l0 b0")
    before = state(stage)
    hidden, labels = torch.ones(2, 8, 16), torch.ones(2, 8, dtype=torch.int64)
    stage.loss(OTHER, 0, hidden, labels, 1.0)
    stage.drop(OTHER)
    own, of_head = stage.evaluate(labels), stage.evaluate(hidden, labels)
    fresh = wrapped()
    assert torch.equal(own, fresh.evaluate(labels))
    assert torch.equal(of_head, fresh.evaluate(hidden, labels))
    assert is_same(state(stage), before)
    assert all(parameter.grad is None for parameter in stage.module.parameters())


def test_a_stage_without_a_head_is_asked_for_none() -> None:
    with pytest.raises(LocalProtocolError, match="stage 0 of 2 hosts no head"):
        compute(0).forward(KEY, 0, image(0), is_head=True)


class CountedCasts(TorchDispatchMode):
    """Counts how often each of a module's weights is cast."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.counts: Counter[int] = Counter()
        self._numbers = {weight.data_ptr(): number for number, weight in enumerate(weights)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self._numbers:
            self.counts[self._numbers[args[0].data_ptr()]] += 1
        return func(*args, **(kwargs or {}))


def in_bfloat16(stage: StageCompute, key: StepKey, seed: int = 0) -> None:
    """As `run`, of a stage that sends bfloat16."""
    for microbatch in range(2):
        stage.forward(key, microbatch, image(seed + microbatch))
    for microbatch in range(2):
        stage.backward(key, microbatch, (torch.ones(3, 64, 4, 4) / (1 + microbatch + seed)).bfloat16())


def test_each_weight_is_cast_once_for_all_microbatches_and_steps_of_a_version() -> None:
    stage = compute(0, torch.bfloat16)
    with CountedCasts(list(stage.module.parameters())) as casts:
        in_bfloat16(stage, OTHER)
        in_bfloat16(stage, KEY, seed=1)
        assert set(casts.counts.values()) == {1}
        stage.commit(OTHER, 1.0, 0.01, False)
        stage.commit(KEY, 1.0, 0.01, False)
        in_bfloat16(stage, KEY)
    assert set(casts.counts.values()) == {2}


def test_an_evaluation_leaves_the_casts_of_open_steps_where_they_are() -> None:
    stage = compute(0, torch.bfloat16)
    with CountedCasts(list(stage.module.parameters())) as casts:
        stage.forward(KEY, 0, image(0))
        stage.evaluate(image(9))
        before = dict(casts.counts)
        stage.forward(KEY, 1, image(1))
    assert casts.counts == before


@pytest.mark.parametrize("end", ["dropped", "skipped"])
def test_a_stage_without_open_steps_keeps_no_casts(end: str) -> None:
    stage = compute(0, torch.bfloat16)
    with CountedCasts(list(stage.module.parameters())) as casts:
        in_bfloat16(stage, KEY)
        if end == "dropped":
            stage.drop(KEY)
        else:
            stage.commit(KEY, 1.0, 0.01, True)
        in_bfloat16(stage, OTHER)
    assert set(casts.counts.values()) == {2}


class CastsByItself(nn.Module):
    """Casts a unit's weights itself, in a stage that is computed in float32."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.unit = unit

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.unit(x).float()


def test_what_a_family_casts_by_itself_is_never_of_weights_that_were_trained_since() -> None:
    class Own(TinyNet):
        def build_unit(self, index: int) -> nn.Module:
            unit = super().build_unit(index)
            return CastsByItself(unit) if index == 0 else unit

    stage = compute(0, family_class=Own)
    before = stage.forward(KEY, 0, image(0)).clone()
    stage.backward(KEY, 0, torch.ones_like(before))
    stage.commit(KEY, 1.0, 0.5, False)
    trained = stage.forward(OTHER, 0, image(0))
    torch.clear_autocast_cache()
    assert torch.equal(trained, stage.forward(OTHER, 1, image(0)))


def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have autocast cast anew in each forward, as it does by itself."""
    monkeypatch.setattr(torch, "autocast_increment_nesting", lambda: 0)
    monkeypatch.setattr(torch, "autocast_decrement_nesting", lambda: 0)


def test_casts_that_are_kept_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained_in_bfloat16() -> list[Tensor]:
        stage = compute(0, torch.bfloat16)
        held = stage.averaged.parameters.flat()
        stage.base_parameters = lambda: held
        evaluated: list[Tensor] = []
        for step in range(3):
            in_bfloat16(stage, KEY, seed=step)
            evaluated.append(stage.evaluate(image(9)))
            stage.commit(KEY, 1.0, 0.01, False)
            # Between rounds, weights are replaced in place.
            if step == 1:
                with torch.no_grad():
                    for parameter in stage.module.parameters():
                        parameter.mul_(0.5)
                stage.start_round()
        return [*state(stage), *evaluated]

    kept = trained_in_bfloat16()
    forgetful(monkeypatch)
    assert is_same(kept, trained_in_bfloat16())


def test_an_evaluation_never_takes_casts_of_weights_that_were_replaced_since() -> None:
    stage, fresh = compute(0, torch.bfloat16), compute(0, torch.bfloat16)
    in_bfloat16(stage, KEY)
    for each in (stage, fresh):
        with torch.no_grad():
            for parameter in each.module.parameters():
                parameter.add_(0.5)
    assert torch.equal(stage.evaluate(image(3)), fresh.evaluate(image(3)))
