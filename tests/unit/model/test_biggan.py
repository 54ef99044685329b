"""BigGAN: each player's gradient is its own loss's alone, draws follow the seed, evaluation is always the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.config import Config
from shoal.config.diloco import InnerOptimConfig
from shoal.errors import ConfigError
from shoal.ids import StepKey
from shoal.model.biggan import BigganFamily, BigganUnit, Scores, SpectralConv, SpectralLinear
from shoal.model.meta import build_without_values
from shoal.model.registry import load_family
from shoal.model.seeding import seeded
from shoal.model.stage import StageModule, build_stage
from shoal.optim.inner import InnerOptimizer
from shoal.pipeline.stage_compute import StageCompute
from shoal.swarm.step_operations import Schedule

SMALL = {"generator_channels": 4, "discriminator_channels": 4, "latent_size": 8}
WITH_ATTENTION = {**SMALL, "generator_attention": [8], "discriminator_attention": [4]}


def family(extra: dict[str, Any] = SMALL, img_size: int = 8, channels: int = 1, classes: int = 3) -> BigganFamily:
    config = Config.model_validate(
        {
            "data": {"task_type": "image_gen", "num_channels": channels, "img_size": img_size},
            "model": {"family": "biggan", "num_classes": classes, "extra": extra},
        }
    )
    found = load_family(config.model, config.data)
    assert isinstance(found, BigganFamily)
    return found


def unit_of(stage: StageModule) -> BigganUnit:
    [unit] = stage.units.values()
    assert isinstance(unit, BigganUnit)
    return unit


def images(num: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    real = torch.rand(num, 1, 8, 8, generator=generator) * 2 - 1
    return real, torch.randint(3, (num,), generator=generator)


def grads(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None and p.grad.any()}


@pytest.mark.parametrize("extra", [SMALL, WITH_ATTENTION, {**SMALL, "hierarchical": False, "wide": False}])
def test_the_gradient_of_each_player_is_that_of_its_own_loss_alone(extra: dict[str, Any]) -> None:
    stage = build_stage(family(extra), 0, 1, seed=1, dtype=torch.float64)
    real, labels = images(5)
    of_both, of_discriminator, of_generator = (copy.deepcopy(stage) for _ in range(3))
    for module, which in ((of_both, 0), (of_discriminator, 1), (of_generator, 2)):
        with seeded(7):
            output = module(real)
        scores = Scores.of(output, labels)
        losses = (module.loss(output, labels), scores.loss_of_discriminator, scores.loss_of_generator)
        losses[which].backward()
    alone = (grads(of_discriminator), grads(of_generator))
    assert all(".discriminator." in name for name in alone[0])
    assert all(".generator." in name for name in alone[1])
    both = grads(of_both)
    assert both.keys() == alone[0].keys() | alone[1].keys()
    for name, gradient in {**alone[0], **alone[1]}.items():
        torch.testing.assert_close(both[name], gradient, rtol=1e-12, atol=1e-14)


def test_scores_are_those_of_a_projection_discriminator_and_losses_are_hinges() -> None:
    unit = unit_of(build_stage(family(), 0, 1, seed=1, dtype=torch.float64)).eval()
    real, labels = images(5)
    discriminator = unit.discriminator
    with torch.no_grad():
        features = F.relu(discriminator.blocks(real.double())).sum(dim=(2, 3))
        weight = discriminator.classes.spectral(discriminator.classes.weight)
        expected = discriminator.linear(features)[:, 0] + (weight[labels] * features).sum(1)
        scores = Scores.of(unit(real.double()), labels)
    torch.testing.assert_close(scores.real, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(scores.made, scores.for_generator)
    by_hand = Scores(torch.tensor([2.0, 0.5, -1.0]), torch.tensor([-3.0, 0.0, 1.0]), torch.tensor([1.0, 2.0, 6.0]))
    assert by_hand.loss_of_discriminator.item() == pytest.approx((0 + 0.5 + 2) / 3 + (0 + 1 + 2) / 3)
    assert by_hand.loss_of_generator.item() == -3.0
    assert by_hand.accuracy.item() == pytest.approx(4 / 6)


def test_training_draws_from_the_seed_and_evaluation_for_each_real_image_the_same_however_they_are_batched() -> None:
    stage = build_stage(family(), 0, 1, seed=1)
    real, _ = images(6)
    outputs: list[Tensor] = []
    for seed in (3, 3, 4):
        with seeded(seed), torch.no_grad():
            outputs.append(copy.deepcopy(stage)(real))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0][:, -2:], outputs[2][:, -2:])
    stage.eval()
    before = [buffer.clone() for buffer in stage.buffers()]
    with torch.no_grad():
        whole = stage(real)
        parts = torch.cat([stage(real[:1]), stage(real[1:4]), stage(real[4:])])
    torch.testing.assert_close(whole, parts, rtol=1e-5, atol=1e-5)
    assert len({float(score) for score in whole[:, -1]}) == len(real), "each has a noise of its own"
    assert all(torch.equal(a, b) for a, b in zip(before, stage.buffers(), strict=True))


def test_a_spectral_norm_comes_to_a_weight_whose_largest_singular_value_is_one() -> None:
    # Of an orthogonal weight all singular values are equal, and any estimate is right.
    normal = {"generator_init": "normal", "discriminator_init": "normal"}
    stage = build_stage(family({**SMALL, **normal}), 0, 1, seed=1)
    real, _ = images(4)
    with torch.no_grad():
        for _ in range(100):
            stage(real)
        modules = [module for module in stage.modules() if isinstance(module, SpectralConv | SpectralLinear)]
        sizes = [torch.linalg.matrix_norm(m.spectral(m.weight).flatten(1), 2).item() for m in modules]
    assert len(sizes) > 10
    assert sizes == pytest.approx([1.0] * len(sizes), abs=0.02)


def test_the_classes_and_each_part_of_the_noise_decide_an_image() -> None:
    unit = unit_of(build_stage(family(), 0, 1, seed=1)).eval()
    latent, _ = unit.drawn(1, 0, torch.zeros(1))
    with torch.no_grad():
        first = unit.generator(latent, torch.tensor([0]))
        assert first.shape == (1, 1, 8, 8)
        assert first.abs().max() <= 1
        assert not torch.equal(first, unit.generator(latent, torch.tensor([1])))
        for place in range(latent.shape[1]):
            other = latent.clone()
            other[0, place] += 1
            assert not torch.equal(first, unit.generator(other, torch.tensor([0])))


def trained(**how: Any) -> tuple[StageCompute, list[tuple[tuple[str, float], ...]]]:
    module = build_stage(family(WITH_ATTENTION), 0, 1, seed=1)
    groups = [{"name_patterns": ["gan.generator.*"], "every_steps": 2, "adam_lr": 1e-3}]
    optim = InnerOptimConfig.model_validate({"adam_betas1": 0.0, "adam_lr": 2e-3, "groups": groups})
    compute = StageCompute(module, InnerOptimizer(module.named_parameters(), optim), run_seed=3, stage=0, **how)
    reported: list[tuple[tuple[str, float], ...]] = []
    for number in range(3):
        key = StepKey(0, 1, number, 0)
        for microbatch, num in enumerate((6, 2)):
            real, labels = images(num, seed=10 * number + microbatch)
            compute.loss(key, microbatch, real, labels, num / 8)
            compute.weights(key, microbatch)
        totals = compute.totals(key)
        assert totals.finite
        figures = tuple((report.figure, report.loss) for report in totals.routers)
        assert totals.loss == pytest.approx(dict(figures)["loss/discriminator"] + dict(figures)["loss/generator"])
        reported.append(figures)
        compute.commit(key, 1.0, 2e-3, False)
    return compute, reported


@pytest.mark.parametrize("how", [{"schedule": Schedule.ZERO_BUBBLE}, {"activation_checkpointing": True}])
def test_a_stage_that_computes_otherwise_trains_the_same_bits(how: dict[str, Any]) -> None:
    (plain, figures), (other, others) = trained(), trained(**how)
    assert torch.equal(plain.snapshot(), other.snapshot())
    assert figures == others


def test_figures_of_a_step_are_means_over_its_samples() -> None:
    module = build_stage(family(), 0, 1, seed=1)
    optimizer = InnerOptimizer(module.named_parameters(), InnerOptimConfig())
    compute = StageCompute(module, optimizer, run_seed=3, stage=0)
    said: list[float] = []
    original = module.figures

    def noted(output: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = dict(original(output, labels))
        said.append(found["accuracy/discriminator"].item())
        return found

    module.figures = noted
    key = StepKey(0, 1, 0, 0)
    for microbatch, num in enumerate((6, 2)):
        real, labels = images(num, seed=microbatch)
        compute.loss(key, microbatch, real, labels, num / 8)
    found = {report.figure: report.loss for report in compute.totals(key).routers}
    assert found["accuracy/discriminator"] == pytest.approx(0.75 * said[0] + 0.25 * said[1])


def test_the_model_for_imagenet_has_the_published_sizes() -> None:
    extra = {
        "generator_channels": 96,
        "discriminator_channels": 96,
        "latent_size": 120,
        "shared_size": 128,
        "generator_attention": [64],
        "discriminator_attention": [64],
    }
    unit = build_without_values(family(extra, 128, 3, 1000), 0, 0)
    assert isinstance(unit, BigganUnit)
    assert next(unit.parameters()).is_meta
    sizes = [sum(p.numel() for p in player.parameters()) for player in (unit.generator, unit.discriminator)]
    assert sizes == [70_433_988, 87_982_370]


@pytest.mark.parametrize("img_size", [8, 16, 32, 64])
def test_images_of_every_size_are_made_and_judged(img_size: int) -> None:
    stage = build_stage(
        family({**SMALL, "generator_channels": 1, "discriminator_channels": 1}, img_size, 3), 0, 1, seed=1
    )
    assert stage(torch.zeros(2, 3, img_size, img_size)).shape == (2, 5)
    latent, classes = unit_of(stage).drawn(2, 0, torch.zeros(1))
    assert unit_of(stage).generator(latent, classes).shape == (2, 3, img_size, img_size)


@pytest.mark.parametrize(
    ("extra", "img_size", "message"),
    [
        ({"G_ch": 64}, 8, r"model\.extra\.G_ch: Extra inputs.*\n.*has generator_channels, "),
        ({"latent_size": 0}, 8, r"model\.extra\.latent_size: .*greater than or equal to 1"),
        ({"latent_size": 1}, 8, r"model\.extra\.latent_size = 1 is less than 2"),
        ({}, 28, r"data\.img_size = 28: .* 8, 16, 32"),
    ],
)
def test_sizes_that_make_no_model_are_refused(extra: dict[str, Any], img_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        family(extra, img_size)
