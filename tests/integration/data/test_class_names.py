"""What classes of images are called: found where a run begins, asked of the data after, said by `shoal classify`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.integration.data.test_local_folders import opened, write_photos
from tests.unit.checkpoint.folders import make_config, write_model

from shoal.checkpoint.loading import load_model
from shoal.config import Config
from shoal.config.training import DataConfig
from shoal.data import huggingface
from shoal.data.catalog import log_event
from shoal.data.class_names import with_classes
from shoal.errors import ConfigError
from shoal.events.base import Event

MODEL = {"family": "mlp", "num_classes": 3, "num_layers": 2, "hidden_size": 8}
SIDE = 8


def of_images(name: object, num_classes: int = 3, **data: Any) -> Config:
    """A configuration for images."""
    said = {"dataset_name": str(name), "task_type": "cv", "img_size": SIDE, **data}
    return make_config(data=said, model={**MODEL, "num_classes": num_classes})


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def silent(event: Event) -> None:
    raise AssertionError(f"nothing is to be said: {event}")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_begins_with_the_names_of_its_classes(streaming: bool, tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", classes=("dogs", "cats"))
    data = {"streaming": streaming, "shuffle_window": 64 if streaming else None}
    said: list[str] = []
    config = with_classes(of_images(tmp_path / "photos", **data), lambda event: said.append(event.say()))
    assert said == [f"looking at the images of {tmp_path}/photos for their classes, which takes some seconds at least"]
    assert config.data.classes == ("cats", "dogs")
    # They are asked for once.
    shutil.rmtree(tmp_path / "photos")
    assert with_classes(config, silent) is config


def test_a_model_that_knows_too_few_classes_is_refused_before_anything_starts(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos")
    with pytest.raises(ConfigError, match=r"it has 2 classes; set model.num_classes to at least 2"):
        with_classes(of_images(tmp_path / "photos", num_classes=1), log_event)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="could not be loaded from this folder"):
        with_classes(of_images(tmp_path / "empty"), log_event)


@pytest.mark.parametrize("name", ["digits", "tests.unit.data.own_sets:Pictures"])
def test_data_that_name_no_classes_are_not_asked(name: str) -> None:
    config = of_images(name, num_classes=10)
    assert with_classes(config, silent) is config


def test_classes_mean_nothing_to_text_and_each_is_named_once() -> None:
    with pytest.raises(ValueError, match=r"data.classes: means nothing to data.task_type = llm"):
        Config.model_validate({"data": {"classes": ["a"]}})
    with pytest.raises(ValueError, match="one is there twice"):
        of_images("digits", classes=["a", "a"])


def test_images_of_other_classes_than_the_run_began_with_are_refused(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", classes=("cats", "dogs"))
    assert opened(tmp_path, "./photos", "cv", classes=["cats", "dogs"]).startswith("2 16 4")
    # Without the first folder what was class 1 would be class 0.
    (tmp_path / "photos" / "cats").rename(tmp_path / "photos" / "zebras")
    for more in ({}, {"streaming": True, "shuffle_window": 64}):
        said = opened(tmp_path, "./photos", "cv", classes=["cats", "dogs"], **more)
        assert "has the classes dogs, zebras, and data.classes, which the run has from where it began, are cats" in said


def classified(*argv: str) -> tuple[int, str, str]:
    """The command in a process of its own: the library keeps threads."""
    command = [sys.executable, "-m", "shoal", "classify", *argv]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout, " ".join(done.stderr.split())


def test_images_in_files_are_classified_as_samples_are_and_the_classes_named(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos")
    config = of_images(tmp_path / "photos", classes=["cats", "dogs"])
    folder = write_model(tmp_path / "model", config)
    # One is as large as a sample, one is to be resized and has no colours, and one is no image.
    small, large, none = tmp_path / "photos" / "dogs" / "7.png", tmp_path / "large.png", tmp_path / "none.png"
    pixels = np.random.default_rng(0).integers(0, 256, (24, 16), dtype=np.uint8)
    Image.fromarray(pixels).save(large)
    none.write_bytes(b"no image")
    code, out, err = classified(str(folder), str(small), str(none), str(tmp_path / "nowhere.png"), str(large), "--json")
    assert code == 1
    assert f"{none}: it is no image of a kind that Pillow reads" in err
    assert f"{tmp_path / 'nowhere.png'}: No such file or directory" in err
    first, second = json.loads(out)["images"]
    assert [first["file"], second["file"]] == [str(small), str(large)]
    grey = np.full((3, SIDE, SIDE), 2 * 7 + 1, dtype=np.float32)
    resized = np.asarray(Image.fromarray(pixels).convert("RGB").resize((SIDE, SIDE)), dtype=np.float32)
    samples = np.stack([grey, resized.transpose(2, 0, 1)]) / 255 * 2 - 1
    with torch.no_grad():
        expected = load_model(folder)(torch.from_numpy(samples)).softmax(-1)
    for found, probabilities in zip((first, second), expected, strict=True):
        # The model knows a class more than the data have.
        named = dict(zip(("cats", "dogs", "2"), probabilities.tolist(), strict=True))
        assert found["classes"] == pytest.approx(named, abs=1e-5)
        assert [*found["classes"]] == sorted(named, key=lambda name: -named[name])
    code, out, err = classified(str(folder), str(small), "--top", "1")
    likeliest, share = next(iter(first["classes"].items()))
    assert (code, out, err) == (0, f"{small}: {likeliest} {100 * share:.1f} %\n", "")


def test_what_cannot_be_classified_is_told_what_to_do(tmp_path: Path) -> None:
    of_digits = str(write_model(tmp_path / "digits", of_images("digits", num_classes=10)))
    of_text = str(write_model(tmp_path / "text", make_config()))
    for argv, says in (
        ((of_digits, "a.png"), "whose samples are made of no files; `shoal evaluate` measures it"),
        ((of_text, "a.png"), "was trained with data.task_type = llm, and names no classes of images"),
        ((of_text,), f"say which images, as in `shoal classify {of_text} photo.png`"),
        ((of_text, "--top", "0"), "--top 0: give a number of classes, at least 1"),
    ):
        code, out, err = classified(*argv)
        assert (code, out) == (2, "")
        assert says in err


def test_what_a_library_says_ends_with_one_full_stop() -> None:
    error = huggingface._not_loaded(DataConfig(dataset_name="no/such"), "train", ValueError("please install 'it'."))
    assert "please install 'it'. Check the name" in str(error)
