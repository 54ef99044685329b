"""`shoal classify`: what a model sees in images of files, in this one process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.checkpoint.model_source import ModelSource
from shoal.cli.exporting import opened
from shoal.cli.output import on_one_line
from shoal.cli.trained import whole
from shoal.config.training import DataConfig
from shoal.data.builtin import BUILTINS
from shoal.data.image_reader import image_in
from shoal.errors import ConfigError, SampleError
from shoal.inference.evaluation import class_probabilities
from shoal.swarm.microbatch_cut import EVAL_SAMPLES


def classify(
    model: Path, files: Sequence[Path], *, top: int, family: str | None, device: str, as_json: bool = False
) -> None:
    """Print the likeliest classes of each image; as JSON, of all together.

    Args:
        top: so many classes of each.

    Raises:
        ConfigError: this is no folder of a model that classifies images, or what is wanted makes no sense.
        SampleError: files are no images; the others have been classified.
        ShoalError: the model cannot be read.
    """
    problems: list[str] = []
    if not files:
        problems.append(f"say which images, as in `shoal classify {model} photo.png`")
    if top < 1:
        problems.append(f"--top {top}: give a number of classes, at least 1")
    if problems:
        raise ConfigError("\n".join(problems))
    with opened(model, family) as source:
        _require_images(model, source)
        data = source.config.data
        module = whole(source, device)
    report: list[Mapping[str, object]] = []
    for start in range(0, len(files), EVAL_SAMPLES):
        images: dict[Path, NDArray[np.float32]] = {}
        for file in files[start : start + EVAL_SAMPLES]:
            try:
                images[file] = image_in(file.read_bytes(), data)
            except (OSError, SampleError) as error:
                problems.append(f"{file}: {getattr(error, 'strerror', None) or error}")
        found = class_probabilities(module, np.stack([*images.values()])) if images else ()
        for file, probabilities_K in zip(images, found, strict=True):
            likeliest = dict(_likeliest(probabilities_K, data, top))
            report.append({"file": str(file), "classes": likeliest})
            if not as_json:
                shown = ", ".join(f"{on_one_line(name)} {100 * share:.1f} %" for name, share in likeliest.items())
                print(f"{on_one_line(str(file))}: {shown}", flush=True)
    if as_json:
        print(json.dumps({"images": report}), flush=True)
    if problems:
        raise SampleError("\n".join(problems))


def _require_images(model: Path, source: ModelSource) -> None:
    """Check that an image in a file can become a sample of this model.

    Raises:
        ConfigError: it cannot, or nobody knows how.
    """
    data = source.config.data
    if data.task_type != "cv":
        raise ConfigError(f"{model} was trained with data.task_type = {data.task_type}, and names no classes of images")
    if data.is_own or data.dataset_name in BUILTINS:
        raise ConfigError(
            f"{model} was trained on data.dataset_name = {data.dataset_name}, whose samples are made of no files; "
            "`shoal evaluate` measures it, and in Python `shoal.load_model` takes samples as tensors"
        )


def _likeliest(probabilities_K: NDArray[np.float32], data: DataConfig, top: int) -> Iterable[tuple[str, float]]:
    names = data.classes
    numbers: list[int] = np.argsort(-probabilities_K, kind="stable")[:top].tolist()
    for number in numbers:
        name = str(number) if names is None or number >= len(names) else names[number]
        yield name, float(probabilities_K[number])
