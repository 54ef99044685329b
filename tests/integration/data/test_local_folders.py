"""Folders of the user's own as data: text files, and images in a folder for each class, without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

_OPEN = """
import sys
from shoal.config import Config
from shoal.data.catalog import open_source
from shoal.errors import ConfigError
name, task = sys.argv[1:]
try:
    data = {"dataset_name": name, "task_type": task, "seq_len": 16, "img_size": 8, "holdout_fraction": 0.2}
    family = {"llm": "gpt", "cv": "resnet18"}[task]
    found = open_source(Config.model_validate({"data": data, "model": {"family": family}}))
    print(found.num_classes, found.train.num_samples, found.holdout.num_samples)
except ConfigError as error:
    print(error)
"""


def _opened(folder: Path, name: str, task: str) -> str:
    """What a process of its own says of a data set: the library keeps threads and caches."""
    places = {"HF_HOME": str(folder / "cache"), "XDG_CACHE_HOME": str(folder / "cache")}
    environment = os.environ | places | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", _OPEN, name, task]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=True, cwd=folder)
    return done.stdout.strip()


def test_a_folder_of_text_files_is_a_data_set(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "one.txt").write_text("to be or not to be\n" * 40)
    (tmp_path / "corpus" / "two.txt").write_text("that is the question\n" * 40)
    num_bytes = 40 * (len("to be or not to be\n") + len("that is the question\n"))
    classes, num_train, num_holdout = map(int, _opened(tmp_path, "./corpus", "llm").split())
    assert classes == 256
    assert num_bytes - 3 * 16 <= 16 * (num_train + num_holdout) <= num_bytes


def test_a_folder_of_images_has_a_class_for_each_folder_in_it(tmp_path: Path) -> None:
    for name in ("cats", "dogs"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for grey in range(10):
            image = Image.fromarray(np.full((8, 8, 3), 20 * grey, dtype=np.uint8))
            image.save(tmp_path / "photos" / name / f"{grey}.png")
    assert _opened(tmp_path, "./photos", "cv") == "2 16 4"


def test_a_folder_that_cannot_be_read_as_data_is_named_and_one_that_is_not_there_too(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    said = _opened(tmp_path, "./empty", "llm")
    assert "data.dataset_name = ./empty" in said
    assert "loaded from this folder" in said
    said = _opened(tmp_path, "./nowhere", "llm")
    assert "data.dataset_name = ./nowhere" in said
    assert "no folder here is called so" in said
