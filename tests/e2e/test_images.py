"""A run on a folder of images, one of them damaged: augmented, evaluated on a folder of its own, and computed again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from tests.e2e.launched import completed, run_shoal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_SIDE = 12


def _write_photos(folder: Path, number: int, seed: int) -> None:
    """Pictures of horizontal and of vertical stripes, which stay what they are when they are moved or mirrored."""
    random = np.random.default_rng(seed)
    for name, axis in (("rows", 1), ("columns", 0)):
        (folder / name).mkdir(parents=True)
        for index in range(number):
            stripes = random.integers(0, 2, _SIDE) * 160 + random.integers(0, 60, _SIDE)
            pixels = np.repeat(np.expand_dims(stripes, axis), _SIDE, axis).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")


def _flags(tmp_path: Path) -> str:
    values = {
        "wandb": False,
        "run": {"deterministic": True},
        "data": {
            "dataset_name": str(tmp_path / "photos"),
            "eval_split": str(tmp_path / "held_out"),
            "task_type": "cv",
            "num_channels": 1,
            "img_size": _SIDE,
            "num_workers": 2,
            "augment": {"crop_padding": 2, "horizontal_flip": True},
        },
        "model": {"family": "mlp", "num_layers": 2, "hidden_size": 32, "num_classes": 2},
        "model_pipeline": {"stages": 2, "microbatches": 2},
        "diloco": {"inner_steps": 12, "outer_steps": 2, "batch_size_per_step": 8},
        "servers": {"replicas": 1},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    return f"--config-path={tmp_path / 'run.yaml'}"


def test_a_run_on_a_folder_of_images_is_augmented_and_computed_again_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    _write_photos(tmp_path / "photos", 60, seed=0)
    _write_photos(tmp_path / "held_out", 20, seed=1)
    (tmp_path / "photos" / "rows" / "33.png").write_bytes(b"no image")
    # 24 steps of 8: more than a pass over the 120 images.
    run = completed(tmp_path, _flags(tmp_path))
    summary = run.summary()
    assert (summary["duplicates"], summary["missing"]) == (0, 0)
    (opened,) = run.events("data_server_0", "dataset.opened")
    assert (opened["num_train"], opened["num_holdout"]) == (120, 40)
    (skipped,) = run.events("data_server_0", "sample.skipped")
    assert skipped["which"].endswith("rows/33.png)")
    assert "1 of 160 samples" in run.output
    assert run.log_dir is not None
    run_shoal("replay", str(run.log_dir))
    evaluated = json.loads(run_shoal("evaluate", str(run.log_dir), "--json"))
    # What it sees in an image has the name of the image's folder.
    photos = [str(tmp_path / "held_out" / name / "3.png") for name in ("rows", "columns")]
    seen = json.loads(run_shoal("classify", str(run.log_dir), *photos, "--json"))["images"]
    assert [set(each["classes"]) for each in seen] == 2 * [{"rows", "columns"}]
    # The run has evaluated the same images, as they are.
    assert evaluated["eval_loss"] == pytest.approx(summary["eval_loss_last"], abs=1e-5)
