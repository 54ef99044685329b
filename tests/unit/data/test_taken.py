"""Samples that somebody's own family does not take are refused before a run begins."""

from __future__ import annotations

import pytest

from shoal.config import Config
from shoal.data.catalog import open_source
from shoal.data_server.service import require_taken
from shoal.errors import ConfigError
from shoal.model.mlp import MlpFamily
from shoal.model.stage import TensorSpec


class Fitting(MlpFamily):
    """Takes images of 4 x 4 pixels, and their classes in any type of whole numbers."""


class Other(MlpFamily):
    def input_spec(self) -> TensorSpec:
        return TensorSpec("float32", (16,))

    def label_spec(self) -> TensorSpec:
        return TensorSpec("float32", ())


class Raising(MlpFamily):
    def input_spec(self) -> TensorSpec:
        raise KeyError("no such sizes")


def _require_taken(family: str) -> None:
    data = {
        "dataset_name": "tests.unit.data.own_sets:WithoutSplit",
        "task_type": "cv",
        "num_channels": 1,
        "img_size": 4,
    }
    config = Config.model_validate({"data": data, "model": {"family": f"{__name__}:{family}", "num_classes": 4}})
    require_taken(config, open_source(config))


def test_samples_that_the_family_takes_pass() -> None:
    _require_taken("Fitting")


def test_inputs_and_labels_that_it_does_not_take_are_both_named() -> None:
    with pytest.raises(ConfigError) as refused:
        _require_taken("Other")
    inputs, labels = str(refused.value).splitlines()
    assert "own_sets:WithoutSplit has inputs float32[1, 4, 4], and input_spec() of " in inputs
    assert inputs.endswith("test_taken:Other says float32[16]; make them agree")
    assert "has labels int64[], and label_spec() of " in labels
    assert labels.endswith("test_taken:Other says float32[]; make them agree")


def test_what_is_wrong_with_the_family_itself_is_left_to_those_who_build_it() -> None:
    _require_taken("Raising")
