"""Data sets: what a sample is, what is held out, and what a wrong choice says."""

from __future__ import annotations

import io
import json
import sys
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.fake_hub import FakeBuilder, use_in_place_of_datasets
from tests.unit.data.corpora import make_tokens_here

from shoal.config import Config
from shoal.data import huggingface, image_reader
from shoal.data.builtin import resize_nearest
from shoal.data.catalog import open_source
from shoal.data.fields import Fields
from shoal.data.source import Array, ArraySpec, Indices, Source, split
from shoal.data.text import ByteText, text_dataset
from shoal.errors import ConfigError
from shoal.events.base import Event
from shoal.events.data import DatasetWanted

DIGITS = {"dataset_name": "digits", "task_type": "cv", "img_size": 20, "num_channels": 3}
RESNET = {"family": "resnet18"}


def config(data: dict[str, Any], model: dict[str, Any] | None = None) -> Config:
    return Config.model_validate({"data": data, "model": model or {}, "model_pipeline": {"stages": 1}})


def text_of_pydoc() -> bytes:
    from pydoc_data.topics import topics

    return "".join(topics[name] for name in sorted(topics)).encode()


def test_a_text_sample_is_a_window_and_its_labels_are_the_window_one_byte_on() -> None:
    dataset = open_source(config({"seq_len": 32}))
    text = text_of_pydoc()
    inputs, labels, _ = dataset.train.read(np.array([7, 0]))
    assert inputs.dtype == labels.dtype == np.uint8
    assert inputs[0].tolist() == list(text[7 * 32 : 8 * 32])
    assert labels[0].tolist() == list(text[7 * 32 + 1 : 8 * 32 + 1])
    assert inputs[1].tolist() == list(text[:32])
    assert dataset.num_classes == 256


def test_the_end_of_a_text_is_held_out_and_shares_no_byte_with_the_rest() -> None:
    text = bytes(range(201))
    dataset = text_dataset("numbers", text, seq_len=10, holdout_fraction=0.25)
    seen = [set(), set()]
    for part, source in enumerate((dataset.train, dataset.holdout)):
        inputs, labels, _ = source.read(np.arange(source.num_samples))
        seen[part] = {*inputs.ravel().tolist(), *labels.ravel().tolist()}
        assert np.array_equal(inputs.ravel() + 1, labels.ravel())
    assert not seen[0] & seen[1]
    assert dataset.holdout.num_samples == 5
    assert max(seen[1]) == 200
    assert dataset.train.num_samples == 14


@pytest.mark.parametrize("seq_len", [1, 7, 64])
def test_the_last_window_of_a_text_still_has_all_its_labels(seq_len: int) -> None:
    source = ByteText(np.arange(65, dtype=np.uint8), seq_len)
    _, labels, _ = source.sample(source.num_samples - 1)
    assert labels.shape == (seq_len,)
    assert labels[-1] == source.num_samples * seq_len


def test_a_text_shorter_than_three_windows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.seq_len = 100"):
        text_dataset("short", bytes(300), 100, 0.05)


def test_digits_are_scaled_images_with_their_classes() -> None:
    dataset = open_source(config(DIGITS, RESNET))
    assert dataset.train.num_samples + dataset.holdout.num_samples == 1797
    assert dataset.holdout.num_samples == 90
    inputs, labels, _ = dataset.train.read(np.arange(dataset.train.num_samples))
    assert inputs.shape == (1707, 3, 20, 20)
    assert inputs.dtype == np.float32
    assert np.array_equal(inputs[:, 0], inputs[:, 2])
    assert sorted(set(labels.tolist())) == list(range(10))
    # 8x8 pixels become 16x16 in the middle of 20x20: the border is background, the darkest value.
    assert (inputs[:, :, 0] == inputs.min()).all()
    core = inputs[:, 0, 2:18, 2:18]
    assert abs(core.mean()) < 0.01
    assert abs(core.std() - 1) < 0.01


def test_held_out_digits_are_not_among_those_trained_on() -> None:
    dataset = open_source(config(DIGITS, RESNET))
    both = [
        {image.tobytes() for image in source.read(np.arange(source.num_samples))[0]}
        for source in (dataset.train, dataset.holdout)
    ]
    assert len(both[0] | both[1]) >= 1795
    assert len(both[0] & both[1]) <= 2


class Numbers(Source):
    """Samples that are their own labels."""

    def __init__(self, count: int) -> None:
        self._count = count

    @property
    def inputs(self) -> ArraySpec:
        return ArraySpec("int64", ())

    @property
    def labels(self) -> ArraySpec:
        return ArraySpec("int64", ())

    @property
    def num_samples(self) -> int:
        return self._count

    def read_into(self, indices: Indices, batch: Fields[Array]) -> None:
        batch.inputs[...] = indices
        batch.labels[...] = indices


@pytest.mark.parametrize(("count", "fraction", "folds"), [(100, 0.1, 10), (1797, 0.2, 5), (7, 0.3, 3), (3, 0.05, 1)])
def test_the_folds_of_a_split_have_no_sample_in_common_and_what_is_left_is_trained_on(
    count: int, fraction: float, folds: int
) -> None:
    source = Numbers(count)
    held_out: list[int] = []
    for fold in range(folds):
        parts = split(source, fraction, fold)
        train, holdout = (set(part.read(np.arange(part.num_samples))[1].tolist()) for part in parts)
        assert train | holdout == set(range(count))
        assert not train & holdout
        held_out += holdout
    assert len(held_out) == len(set(held_out))
    # Tenths make the whole; of three shares of 0.3 something is left, which is always trained on.
    assert (len(held_out) == count) == (round(folds * fraction, 6) == 1)


def test_a_fold_of_which_there_is_no_sample_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.holdout_fold = 3: 5 samples have no such share"):
        split(Numbers(5), 0.05, 3)


def test_the_configuration_says_which_images_are_held_out() -> None:
    fifths = {**DIGITS, "holdout_fraction": 0.2}
    held_out = [open_source(config({**fifths, "holdout_fold": fold}, RESNET)).holdout for fold in (0, 4)]
    assert [source.num_samples for source in held_out] == [359, 359]
    images = [{image.tobytes() for image in source.read(np.arange(359))[0]} for source in held_out]
    assert len(images[0] & images[1]) <= 2
    with pytest.raises(ValueError, match=r"holdout_fold = 5: with holdout_fraction = 0\.2 the last one is 4"):
        config({**fifths, "holdout_fold": 5}, RESNET)
    with pytest.raises(ValueError, match="holdout_fold = 1: only images are held out in folds"):
        Config.model_validate({"data": {"holdout_fold": 1}})


def test_a_split_is_the_same_every_time_and_takes_from_everywhere() -> None:
    source = ByteText(np.arange(101, dtype=np.uint8), 1)
    parts = [split(source, 0.2) for _ in range(2)]
    first, second = ([part.read(np.arange(part.num_samples))[0].ravel().tolist() for part in pair] for pair in parts)
    assert first == second
    assert sorted(first[0] + first[1]) == list(range(100))
    assert len(first[1]) == 20
    assert first[1][-1] - first[1][0] > 60


@pytest.mark.parametrize(("size", "expected"), [(4, "2p"), (2, "p"), (1, "c"), (3, "e")])
def test_small_images_grow_by_whole_pixels_and_large_ones_lose_some(size: int, expected: str) -> None:
    image = np.array([[[1, 2], [3, 4]]], dtype=np.uint8)
    results = {
        "2p": [[1, 1, 2, 2], [1, 1, 2, 2], [3, 3, 4, 4], [3, 3, 4, 4]],
        "p": [[1, 2], [3, 4]],
        "c": [[1]],
        "e": [[1, 2, 0], [3, 4, 0], [0, 0, 0]],
    }
    assert resize_nearest(image, size)[0].tolist() == results[expected]


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        ({**DIGITS}, {"family": "resnet18", "num_classes": 4}, r"model\.num_classes = 4 .* at least 10"),
        ({}, {"vocab_size": 100}, r"model\.vocab_size = 100 .* at least 256"),
        ({"dataset_name": "digits", "task_type": "llm"}, {}, r"data\.task_type = cv or image_gen, not llm"),
        ({"dataset_name": "pydoc-topics", "task_type": "cv"}, RESNET, r"data\.task_type = llm, not cv"),
        ({"seq_len": 400_000}, {}, r"data\.seq_len = 400000"),
    ],
)
def test_a_data_set_that_does_not_fit_says_what_to_change(
    data: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_source(config(data, model))


class FakeHub:
    """Stands in for the package `datasets`."""

    config = SimpleNamespace(
        DOWNLOADED_DATASETS_PATH="/downloads",
        EXTRACTED_DATASETS_PATH="/downloads/extracted",
        HF_ENDPOINT="https://huggingface.co",
    )

    def __init__(self, table: Any) -> None:
        self.table = table
        self.asked: tuple[Any, ...] = ()

    def load_dataset_builder(self, name: str, subset: str | None, *, token: str | None) -> FakeBuilder:
        def as_dataset(split: str) -> Any:
            self.asked = (name, subset, split, token)
            if isinstance(self.table, Exception):
                raise self.table
            return self.table

        return FakeBuilder(download_and_prepare=lambda: None, as_dataset=as_dataset)


class FakeTable(dict[str, list[Any]]):
    """Columns; rows by a list of indices, as `datasets.Dataset` gives them."""

    features: Any = None

    @property
    def column_names(self) -> list[str]:
        return list(self.keys())

    def __len__(self) -> int:
        return len(next(iter(self.values())))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, list):
            return {name: [column[index] for index in key] for name, column in self.items()}
        return super().__getitem__(key)

    def cast_column(self, column: str, feature: Any) -> FakeTable:
        assert not feature.decode
        return self

    def select_columns(self, column_names: Sequence[str]) -> FakeTable:
        return FakeTable({name: self[name] for name in column_names})


def use_hub(monkeypatch: pytest.MonkeyPatch, table: Any) -> FakeHub:
    hub = FakeHub(table)
    use_in_place_of_datasets(monkeypatch, hub)
    return hub


def test_text_of_the_hub_is_joined_byte_by_byte(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_tokens_here(monkeypatch)
    hub = use_hub(monkeypatch, FakeTable(text=["déjà", "vu " * 20]))
    data = {"dataset_name": "wikitext", "dataset_config": "small", "seq_len": 4, "hf_token": "secret"}
    dataset = open_source(config({**data, "cache_dir": str(tmp_path)}))
    assert hub.asked == ("wikitext", "small", "train", "secret")
    assert bytes(dataset.train.sample(0)[0].astype(np.uint8)) == "déjà".encode()[:4]
    assert bytes(dataset.train.sample(1)[0].astype(np.uint8)) == "déjà".encode()[4:] + b"\nv"


@pytest.mark.parametrize(
    ("name", "near"), [("pydoc", "; if you mean pydoc-topics, which needs no network, say so"), ("wikitext", "")]
)
def test_before_the_hub_is_asked_it_is_said(
    name: str, near: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_tokens_here(monkeypatch)
    use_hub(monkeypatch, FakeTable(text=["vu " * 20]))
    said: list[Event] = []
    open_source(config({"dataset_name": name, "seq_len": 4, "cache_dir": str(tmp_path)}), said.append)
    assert said[0].say() == f"nothing here is called {name}: asking the Hugging Face hub for it{near}"


def test_of_what_is_here_nobody_says_that_the_hub_is_asked(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be " * 50)
    said: list[Event] = []
    for name in (str(tmp_path), "pydoc-topics", f"{tmp_path}/*.txt"):
        open_source(config({"dataset_name": name, "seq_len": 4, "cache_dir": str(tmp_path / "c")}), said.append)
    assert not any(isinstance(event, DatasetWanted) for event in said)


@pytest.mark.parametrize("task", ["llm", "cv"])
def test_a_folder_that_is_not_there_is_not_asked_for_on_the_hub(
    task: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_tokens_here(monkeypatch)
    hub = use_hub(monkeypatch, FakeTable(text=["vu " * 20]))
    data = {"dataset_name": "./nowhere", "task_type": task, "cache_dir": str(tmp_path)}
    said: list[Event] = []
    with pytest.raises(ConfigError, match=r"\./nowhere: there is no such folder or file here \(/"):
        open_source(config(data, RESNET if task == "cv" else {}), said.append)
    assert hub.asked == ()
    assert not any(isinstance(event, DatasetWanted) for event in said)


cropped: list[tuple[int, int, int, int]] = []
"""What has been cut out of images since a test has emptied it."""


class FakeImage:
    """Stands in for a `PIL.Image.Image` of one colour; converted and resized it is an array."""

    def __init__(self, value: int, mode: str = "P", size: tuple[int, int] = (4, 4)) -> None:
        self.value, self.mode, self.size = value, mode, size

    def convert(self, mode: str) -> FakeImage:
        return FakeImage(self.value, mode, self.size)

    def crop(self, box: tuple[int, int, int, int]) -> FakeImage:
        cropped.append(box)
        return FakeImage(self.value, self.mode, (box[2] - box[0], box[3] - box[1]))

    def resize(self, size: tuple[int, int]) -> FakeImage:
        return FakeImage(self.value, self.mode, size)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        shape = self.size if self.mode == "L" else (*self.size, {"RGB": 3, "P": 1}[self.mode])
        return np.full(shape, self.value, dtype=dtype)


class FakeFeature:
    """Stands in for `datasets.Image`; what is decoded is the image itself, and the one before has to be gone."""

    def __init__(self, decode: bool = True) -> None:
        self.decode = decode
        self.before: weakref.ref[FakeImage] | None = None

    def decode_example(self, found: dict[str, Any]) -> FakeImage:
        assert self.before is None or self.before() is None, "images of a batch are not all in memory together"
        image = FakeImage(*json.loads(found["bytes"]))
        self.before = weakref.ref(image)
        return image


class FakeClasses:
    """Stands in for `datasets.ClassLabel`."""

    names = tuple("0123456789")


def images(*said: tuple[Any, ...]) -> FakeTable:
    """A table of images of these values, modes and sizes."""
    rows = [{"bytes": json.dumps(each).encode(), "path": None} for each in said]
    table = FakeTable(img=rows, label=list(range(len(said))))
    table.features = {"img": FakeFeature(), "label": FakeClasses()}
    return table


def use_pillow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand in for the library that decodes images."""
    pillow = SimpleNamespace(
        init=lambda: None,
        ID=["PNG", "EPS"],
        open=lambda _: nullcontext(SimpleNamespace(size=(4, 4), format="PNG")),
        UnidentifiedImageError=OSError,
    )
    monkeypatch.setitem(sys.modules, "PIL.Image", pillow)  # type: ignore[arg-type]
    return pillow


@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_the_hub_are_resized_and_scaled(monkeypatch: pytest.MonkeyPatch, channels: int) -> None:
    use_hub(monkeypatch, images((255,), *[(0,)] * 9))
    pillow = use_pillow(monkeypatch)
    data = {"dataset_name": "cifar10", "task_type": "cv", "img_size": 6, "num_channels": channels}
    dataset = open_source(config(data, RESNET))
    assert dataset.num_classes == 10
    assert pillow.ID == ["PNG"], "an EPS is a program"
    everything = [source.read(np.arange(source.num_samples)) for source in (dataset.train, dataset.holdout)]
    values = {
        int(label): pixels for inputs, labels, _ in everything for pixels, label in zip(inputs, labels, strict=True)
    }
    assert sorted(values) == list(range(10))
    assert values[0].shape == (channels, 6, 6)
    assert (values[0] == 1.0).all()
    assert (values[1] == -1.0).all()


@pytest.mark.parametrize(("task", "family"), [("image_gen", "biggan"), ("cv", "resnet18")])
def test_of_images_that_are_to_be_made_the_middle_is_taken(
    monkeypatch: pytest.MonkeyPatch, task: str, family: str
) -> None:
    sizes = [(10, 6), (5, 9)]
    use_hub(monkeypatch, images(*[(1, "P", sizes[i % 2]) for i in range(10)]))
    use_pillow(monkeypatch)
    dataset = open_source(config({"dataset_name": "cifar10", "task_type": task, "img_size": 8}, {"family": family}))
    cropped.clear()
    dataset.train.read(np.arange(dataset.train.num_samples))
    assert set(cropped) == ({(2, 0, 8, 6), (0, 2, 5, 7)} if task == "image_gen" else set())


@pytest.mark.parametrize(
    "place",
    [
        "/etc/x.png",
        "x.png",
        "http://127.0.0.1:9/x.png",
        "zip://x.png::/etc/x.zip",
        "file:///etc/x.png",
        "hf://datasets/cifar100@main/x.png",
        "hf://datasets/cifar10@main/../../private/x.png",
        "https://huggingface.co/datasets/cifar100/resolve/main/x.png",
    ],
)
def test_an_image_that_a_row_only_names_is_a_file_of_its_data_set(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    table = images(*[(0,)] * 10)
    table["img"] = [{"bytes": None, "path": place}] * 10
    use_hub(monkeypatch, table)
    use_pillow(monkeypatch)
    data = {"dataset_name": "cifar10", "task_type": "cv", "img_size": 6, "num_channels": 1}
    train = open_source(config(data, RESNET)).train
    with pytest.raises(ConfigError, match=r"is outside of its data set, (.*datasets--)?cifar10, and is not read"):
        train.read(np.arange(train.num_samples))


@pytest.mark.parametrize("inside", ["file:///etc/x.png", "http://127.0.0.1:9/x.png", "zip://a::zip://b", "/etc/x.png"])
def test_a_place_in_front_of_one_of_the_data_set_leads_into_a_zip_there_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    table = images(*[(0,)] * 10)
    table["img"] = [{"bytes": None, "path": f"{inside}::hf://datasets/cifar10@main/x.zip"}] * 10
    use_hub(monkeypatch, table)
    use_pillow(monkeypatch)
    data = {"dataset_name": "cifar10", "task_type": "cv", "img_size": 6, "num_channels": 1}
    train = open_source(config(data, RESNET)).train
    with pytest.raises(ConfigError, match="a file in an archive that is not read"):
        train.read(np.arange(train.num_samples))


@pytest.mark.parametrize("place", ["hf://datasets/cifar10@main/x.png", "zip://x.png::hf://datasets/cifar10@main/x.zip"])
def test_an_image_that_the_hub_has_is_looked_at_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    fetched: list[tuple[str, str | None]] = []

    def xopen(path: str, mode: str, *, download_config: str | None) -> io.BytesIO:
        fetched.append((path, download_config))
        return io.BytesIO(b"x" * 100)

    table = images(*[(0,)] * 10)
    table["img"] = [{"bytes": None, "path": place}] * 10
    hub = use_hub(monkeypatch, table)
    monkeypatch.setattr(hub, "DownloadConfig", lambda token: token, raising=False)
    monkeypatch.setitem(sys.modules, "datasets.utils.file_utils", SimpleNamespace(xopen=xopen))  # type: ignore[arg-type]
    use_pillow(monkeypatch)
    monkeypatch.setattr(image_reader, "_MOST_BYTES", 99)
    data = {"dataset_name": "cifar10", "task_type": "cv", "img_size": 6, "num_channels": 1, "hf_token": "secret"}
    reader = image_reader.ImageReader(FakeFeature(), config(data, RESNET).data)
    with pytest.raises(ValueError, match="more than 99 bytes"):
        reader.read(table["img"][0])
    assert fetched == [(place, "secret")]


def test_digits_that_are_to_be_made_have_values_from_minus_one_to_one() -> None:
    data = {"dataset_name": "digits", "task_type": "image_gen", "img_size": 8, "num_channels": 1}
    train = open_source(config(data, {"family": "biggan"})).train
    pixels = train.read(np.arange(train.num_samples)).inputs
    assert (pixels.min(), pixels.max()) == (-1.0, 1.0)
    other = open_source(config({**data, "task_type": "cv"}, RESNET)).train
    assert other.read(np.arange(other.num_samples)).inputs.std() == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (ConnectionError("no route to host"), r"nosuch .*needs a network.*no route.*pydoc-topics.*digits"),
        (ValueError("Unknown split"), r"dataset_split train.*Unknown split"),
        (FakeTable(words=["a"]), r'needs a column "text".*words'),
    ],
)
def test_a_hub_data_set_that_cannot_be_used_says_why(monkeypatch: pytest.MonkeyPatch, table: Any, message: str) -> None:
    use_hub(monkeypatch, table)
    make_tokens_here(monkeypatch)
    with pytest.raises(ConfigError, match=message):
        open_source(config({"dataset_name": "nosuch"}))


def test_a_package_that_runs_what_a_data_set_brings_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = use_hub(monkeypatch, FakeTable(text=["a"]))
    monkeypatch.setattr(huggingface, "version", {"datasets": "3.6.0"}.__getitem__)
    make_tokens_here(monkeypatch)
    with pytest.raises(ConfigError, match=r"datasets 3\.6\.0 .* runs a script .*; 4\.0 .*pip install 'shoal\[hf\]'"):
        open_source(config({"dataset_name": "wikitext"}))
    assert hub.asked == ()


def test_without_the_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # type: ignore[arg-type]
    make_tokens_here(monkeypatch)
    with pytest.raises(ConfigError, match=r"not built in.*pip install 'shoal\[hf\]'"):
        open_source(config({"dataset_name": "wikitext"}))
