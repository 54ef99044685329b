"""ResNets: sizes, stems, BatchNorm's buffers."""

from __future__ import annotations

import pytest
import torch

from shoal.model.resnet import ResNetFamily
from shoal.model.resnet_shape import BOTTLENECKS, DEPTHS, ResNetShape
from shoal.model.stage import build_stage


@pytest.mark.parametrize(
    ("name", "millions"), [("resnet18", 11.689512), ("resnet50", 25.557032), ("resnet101", 44.549160)]
)
def test_imagenet_models_have_the_published_number_of_parameters(name: str, millions: float) -> None:
    family = ResNetFamily(ResNetShape(DEPTHS[name], name in BOTTLENECKS, "imagenet", 3, 224, 1000))
    with torch.device("meta"):
        model = torch.nn.ModuleList(family.build_unit(i) for i in range(family.num_units))
    assert sum(p.numel() for p in model.parameters()) == round(millions * 1e6)


def _small() -> ResNetFamily:
    return ResNetFamily(ResNetShape((2, 2, 2, 2), False, "cifar", num_channels=1, img_size=8, num_classes=10))


def test_a_training_forward_moves_the_running_statistics_and_eval_does_not() -> None:
    stage = build_stage(_small(), 0, 2, seed=1)
    before = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    stage.eval()
    stage(images)
    assert all(torch.equal(buffer, before[name]) for name, buffer in stage.named_buffers())
    stage.train()
    stage(images)
    assert not any(torch.equal(buffer, before[name]) for name, buffer in stage.named_buffers())
    assert {b.item() for name, b in stage.named_buffers() if name.endswith("num_batches_tracked")} == {1}


def test_a_single_sample_with_one_pixel_left_trains_with_the_running_statistics() -> None:
    model = build_stage(_small(), 0, 1, seed=1)
    norm = model.get_submodule("units.block_7.norm2")
    before = norm.get_buffer("running_mean").clone()
    loss = model.loss(model(torch.ones(1, 1, 8, 8)), torch.tensor([3]))
    loss.backward()
    assert loss.isfinite()
    assert torch.equal(norm.get_buffer("running_mean"), before)
    assert norm.get_parameter("weight").grad is not None


def test_buffers_written_in_a_functional_call_leave_the_module_alone() -> None:
    stage = build_stage(_small(), 0, 2, seed=1)
    copies = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    before = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.func.functional_call(stage, copies, (images,))
    assert all(torch.equal(buffer, before[name]) for name, buffer in stage.named_buffers())
    assert not any(torch.equal(copies[name], before[name]) for name in before)
