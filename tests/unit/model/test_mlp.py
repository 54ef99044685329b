"""The mlp: its layers, beside the same network written down plainly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.config import Config
from shoal.model.costs import static_costs
from shoal.model.mlp import MlpFamily
from shoal.model.registry import load_family
from shoal.model.stage import build_stage

SMALL = {"model": {"family": "mlp", "num_layers": 1, "hidden_size": 6, "num_classes": 3}}
IMAGES = {"data": {"task_type": "cv", "num_channels": 2, "img_size": 4}}


def _family(**sections: object) -> MlpFamily:
    config = Config.model_validate({**SMALL, **IMAGES, **sections})
    family = load_family(config.model, config.data)
    assert isinstance(family, MlpFamily)
    return family


def test_it_is_linear_layers_with_relu_between_them() -> None:
    model = build_stage(_family(), 0, 1, seed=4)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(32, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    values = list(model.state_dict().values())
    plain.load_state_dict(dict(zip(plain.state_dict(), values, strict=True)))
    images = torch.randn(5, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 2, 1, 1, 0])
    found = model.loss(model(images), labels)
    expected = nn.functional.cross_entropy(plain(images), labels)
    assert torch.equal(found, expected)
    found.backward()
    expected.backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


def test_its_sizes_are_those_of_the_configuration_and_of_mnist_those_of_distqat() -> None:
    family = _family(model={"family": "mlp", "num_layers": 1, "hidden_size": 200}, data={"task_type": "cv"})
    assert [family.unit_name(index) for index in range(family.num_units)] == ["stem", "block_0", "head"]
    assert family.input_spec().shape == (3, 32, 32)
    data = {"task_type": "cv", "num_channels": 1, "img_size": 28}
    mnist = build_stage(_family(model={"family": "mlp", "num_layers": 1, "hidden_size": 200}, data=data), 0, 1, seed=0)
    assert sum(p.numel() for p in mnist.parameters()) == 784 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10


@pytest.mark.parametrize(("img_size", "first"), [(4, 3), (64, 1)])
def test_the_launcher_cuts_it_by_the_costs_of_its_units(img_size: int, first: int) -> None:
    sections = {
        "model": {"family": "mlp", "num_layers": 4, "hidden_size": 64},
        "data": {"task_type": "cv", "num_channels": 3, "img_size": img_size},
    }
    config = Config.model_validate(sections)
    family = load_family(config.model, config.data)
    assert static_costs(config.model, config.data) == family.unit_costs()
    stage = build_stage(family, 0, 2, seed=0)
    assert len(stage.units) == first
