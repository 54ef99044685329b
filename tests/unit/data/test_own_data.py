"""Data of a user's own: which classes are taken, what is found of their samples, and what wrong ones are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from shoal.config import Config
from shoal.data.catalog import open_configured, open_source, opening_of
from shoal.data.fields import Fields
from shoal.data.preparation import Content, prepare
from shoal.data.source import Array, DataSet, Source
from shoal.errors import BadSamples, ConfigError, SampleError
from shoal.events.base import Event
from shoal.events.data import SamplesSkipped
from shoal.wire.messages.base import SampleRange

SETS = "tests.unit.data.own_sets"


def config(name: str, data: dict[str, Any] | None = None, model: dict[str, Any] | None = None) -> Config:
    values = {"dataset_name": f"{SETS}:{name}", "task_type": "cv", "num_channels": 1, "img_size": 4, **(data or {})}
    return Config.model_validate({"data": values, "model": {"family": "mlp", "num_classes": 4, **(model or {})}})


def pictured(source: Source) -> list[int]:
    """The number that each sample is a picture of."""
    inputs, labels, _ = source.read(np.arange(source.num_samples))
    assert (inputs == inputs[:, :1, :1, :1]).all()
    assert (labels == inputs[:, 0, 0, 0].astype(int) % 4).all()
    return inputs[:, 0, 0, 0].astype(int).tolist()


@pytest.mark.parametrize(
    "name", ["Pictures", "WithoutSplit", "Named", "Numbers", "with_its_own_held_out", "numpy_only"]
)
def test_each_kind_of_data_set_is_taken_and_all_of_its_samples_are_there(name: str) -> None:
    dataset = open_source(config(name, {"arguments": {"count": 30}, "holdout_fraction": 0.1}))
    assert dataset.train.inputs.dtype == "float32"
    assert sorted(pictured(dataset.train) + pictured(dataset.holdout)) == list(range(30))
    assert dataset.holdout.num_samples == (2 if name == "with_its_own_held_out" else 3)
    assert dataset.num_classes == 4


def test_a_class_that_takes_a_split_gives_what_is_evaluated_on() -> None:
    dataset = open_source(config("Pictures", {"eval_split": "test"}))
    assert pictured(dataset.train) == list(range(20))
    assert pictured(dataset.holdout) == list(range(1000, 1020))
    swapped = open_source(config("Pictures", {"dataset_split": "test", "arguments": {"count": 5}}))
    assert min(pictured(swapped.train) + pictured(swapped.holdout)) == 1000


def test_texts_are_tokens_and_what_no_loss_counts_is_a_label() -> None:
    values = {"dataset_name": f"{SETS}:Texts", "seq_len": 8}
    dataset = open_source(Config.model_validate({"data": values, "model": {"vocab_size": 32}}))
    inputs, labels, _ = dataset.train.sample(0)
    assert inputs.tolist()[1:] == [each + 1 for each in inputs.tolist()[:-1]]
    assert labels.tolist() == [-100, *(each + 2 for each in inputs.tolist()[:-1])]


def test_a_worker_opens_the_same() -> None:
    own = config("Pictures", {"arguments": {"count": 7}})
    there = opening_of(own)
    assert there.entry == "shoal.data.catalog:open_configured"
    assert pictured(open_configured(there.payload).train) == pictured(open_source(own).train)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("Nowhere", {}, "data.dataset_name: the module .* has no Nowhere"),
        ("Pic tures", {}, "not of the form package.module:Class"),
        ("NOT_A_CLASS", {}, "own_sets:NOT_A_CLASS is no class but a builtins.int"),
        (
            "Dataset",
            {},
            "not defined there: name it as torch.utils.data.dataset:Dataset, or derive a class of your own",
        ),
        ("split", {}, "own_sets:split is not defined there: name it as shoal.data.source:split"),
        ("np", {}, "own_sets:np is no class but a builtins.module"),
        ("", {"dataset_name": "subprocess:getoutput", "arguments": {"cmd": "true"}}, "a module that comes with Python"),
        (
            "Raising",
            {"arguments": {"path": "x.h5"}},
            r"raises FileNotFoundError: there is no x.h5 \(\S+/own_sets\.py line \d+\) when .* path='x.h5'",
        ),
        ("WithoutSplit", {"arguments": {"number": 3}}, "raises TypeError: .* number=3"),
        ("WithoutSplit", {"eval_split": "test"}, "takes no argument 'split'.* data.eval_split = test"),
        ("Pictures", {"arguments": {"split": "test"}}, "data.arguments has 'split'"),
        ("Pictures", {"dataset_split": "tset"}, "raises KeyError: .* split='tset'"),
        ("with_its_own_held_out", {"arguments": {"count": 9}, "eval_split": "test"}, "takes no argument 'split'"),
        ("WithoutSplit", {"arguments": {"count": 0}}, "has no samples: its length is 0"),
        ("WithoutSplit", {"arguments": {"count": 1}}, "has 1 sample"),
        ("Unmeasured", {}, r"its length raises AttributeError: no .*cuont. \(\S+/own_sets\.py line \d+\)"),
        (
            "WithoutSplit",
            {"arguments": {"bad": list(range(20))}},
            r"none of .* can be read; .* OSError: broken file 19.png \(\S+/own_sets\.py line \d+\)",
        ),
        ("Stream", {}, "stream of samples without a length.* or set data.streaming = true"),
        ("test_of_nothing", {}, "has no test_of_nothing"),
        ("Nameless", {}, r"Nameless\[0\] has image, label, weight: a mapping has one of"),
        ("Triples", {}, r"Triples\[0\] has 3 parts"),
        ("OfWords", {}, r"OfWords\[0\]: its labels are a builtins.str"),
        ("Drawn", {}, r"Drawn\[0\] gives another sample when it is read again"),
        ("Pictures", {"img_size": 5}, r"inputs float32\[1, 4, 4\] .* mlp takes inputs float32\[1, 5, 5\]"),
        ("Pictures", {"task_type": "llm", "seq_len": 8}, r"gpt takes inputs int64\[8\]"),
    ],
)
def test_what_is_no_data_set_is_refused_with_what_to_do(name: str, data: dict[str, Any], message: str) -> None:
    family = {"family": "gpt"} if data.get("task_type") == "llm" else {}
    with pytest.raises(ConfigError, match=message):
        open_source(config(name, data, family))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Growing", r"Growing\[7\]: its inputs are float32\[1, 5, 4\], and those of other samples float32\[1, 4, 4\]"),
        ("ManyClasses", r"sample .*ManyClasses\[7\] of .* has the label 4, and labels are 0 to 3: mend .*num_classes"),
    ],
)
def test_a_sample_that_is_not_like_the_others_ends_the_run_by_name(name: str, message: str) -> None:
    dataset = open_source(config(name, {"max_bad_fraction": 1}))
    with pytest.raises(BadSamples, match=message):
        read_all(dataset)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"dataset_name": "digits", "arguments": {"a": 1}}, "data.arguments: data.dataset_name = digits takes none"),
        ({"max_documents": 3, "task_type": "llm"}, "data.max_documents = 3: .* gives samples and no documents"),
        ({"tokenizer": "train:300", "task_type": "llm"}, "data.tokenizer = train:300: .* gives samples"),
        ({"holdout_fold": 1, "eval_split": "test"}, "holdout_fold = 1 and eval_split = test"),
    ],
)
def test_keys_that_mean_nothing_to_it_are_refused(data: dict[str, Any], message: str) -> None:
    family = {"family": "gpt"} if data.get("task_type") == "llm" else {}
    with pytest.raises(ValidationError, match=message):
        config("Pictures", data, family)


def read_all(dataset: DataSet) -> None:
    """As batches are prepared."""
    for source in (dataset.train, dataset.holdout):
        content = Content((SampleRange(0, 0, source.num_samples),), is_holdout=source is dataset.holdout)
        prepare(dataset, content, np.arange(source.num_samples), memory_for(source))


def memory_for(source: Source) -> Fields[Array]:
    return source.fields.each(lambda spec: spec.empty(source.num_samples))


def reading(data: dict[str, Any], said: list[Event] | None = None) -> DataSet:
    return open_source(config("WithoutSplit", data), [].append if said is None else said.append)


def test_in_place_of_a_sample_that_raises_stands_the_next_one_of_its_split_whatever_was_read_before() -> None:
    bad = {"arguments": {"count": 40, "bad": [0, 7, 8, 9, 39]}, "max_bad_fraction": 0.2, "holdout_fraction": 0.2}
    good = reading(bad | {"arguments": {"count": 40}})
    for part in ("train", "holdout"):
        numbers = pictured(getattr(good, part))
        left = [number for number in numbers if number not in (0, 7, 8, 9, 39)]
        wanted = [min((each for each in left if each >= number), default=left[0]) for number in numbers]
        assert len(set(wanted)) < len(wanted), "some of this part are bad"
        at_once = getattr(reading(bad), part)
        assert pictured(at_once) == wanted
        # As a worker reads it that met others before, and a batch that begins elsewhere.
        source = getattr(reading(bad), part)
        for index in reversed(range(source.num_samples)):
            assert int(source.sample(index).inputs[0, 0, 0]) == wanted[index]
        assert pictured(source) == wanted


def test_samples_that_raise_are_counted_once_and_named() -> None:
    said: list[Event] = []
    dataset = reading({"arguments": {"count": 40, "bad": [3, 7, 8, 30]}, "max_bad_fraction": 0.1}, said)
    for _ in range(2):
        read_all(dataset)
    assert dataset.skipped is not None
    found = dataset.skipped.take_new()
    assert sorted(each.which.partition("sample ")[2] for each in found) == [
        f"{SETS}:WithoutSplit[{index}]" for index in (30, 3, 7, 8)
    ]
    assert all(each.reason.startswith("OSError: broken file") for each in found)
    assert [event.skipped for event in said if isinstance(event, SamplesSkipped)] == [1, 2, 4]
    assert not dataset.skipped.take_new()


def test_more_of_them_than_allowed_end_the_run() -> None:
    dataset = reading({"arguments": {"count": 40, "bad": [3, 7, 8, 30]}, "max_bad_fraction": 0.09})
    with pytest.raises(BadSamples, match=r"4 of 40 samples .* more than data.max_bad_fraction = 0.09; .*broken file"):
        read_all(dataset)


def test_held_out_samples_of_which_none_can_be_read_are_named() -> None:
    dataset = reading({"arguments": {"count": 40}, "max_bad_fraction": 1, "holdout_fraction": 0.05})
    held_out = pictured(dataset.holdout)
    dataset = reading({"arguments": {"count": 40, "bad": held_out}, "max_bad_fraction": 1, "holdout_fraction": 0.05})
    with pytest.raises(SampleError, match=r"no held-out sample of .* can be read; .* OSError: broken file"):
        dataset.holdout.sample(0)


def test_a_module_that_raises_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dividing_by_zero.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = config("Pictures", {"dataset_name": "dividing_by_zero:Own"})
    with pytest.raises(
        ConfigError,
        match=r"data\.dataset_name: dividing_by_zero, when it is imported, raises ZeroDivisionError.* line 1",
    ):
        open_source(own)
