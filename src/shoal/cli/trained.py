"""`shoal evaluate` and `shoal generate`: what a trained model is worth, and what it says, in this one process."""

from __future__ import annotations

import importlib
import json
import secrets
import sys
from pathlib import Path
from typing import Literal

from shoal.checkpoint.model_source import ModelSource
from shoal.cli.arguments import Wording
from shoal.cli.cuts import profiled_device
from shoal.cli.exporting import opened
from shoal.cli.output import without_controls
from shoal.config.load import load_config
from shoal.config.named_code import dataset_problem
from shoal.data.catalog import open_source
from shoal.data.speech import characters_of
from shoal.errors import ConfigError, StorageError
from shoal.inference.evaluation import Transcribed, held_out_accuracy, held_out_figures, held_out_loss, transcribed
from shoal.inference.generation import Continuation, Finish, TextRequest, require_generates
from shoal.inference.images import image_grid
from shoal.inference.sampling import Sampling
from shoal.inference.text import tokens_of
from shoal.model.stage import StageModule
from shoal.quant.fold import fold_weights
from shoal.runtime.own_limits import within_free_memory

_SHOWN = 5
_ENDS: dict[Finish, str] = {"stop": "", "length": "", "context": "the context of the model is full"}
_COLUMNS = 10


def evaluate(
    model: Path,
    family: str | None,
    device: str,
    *,
    dataset_name: str | None = None,
    eval_split: str | None = None,
    as_json: bool = False,
) -> None:
    """Print the eval loss of a model on the data of its own configuration, of images the accuracy, and of speech
    the character error rate with some clips.

    Args:
        dataset_name: the class of somebody's own that the samples may come from.
        eval_split: what is evaluated on in place of what the run has held out, as `data.eval_split` says it.

    Raises:
        ConfigError: this is no folder of a model, or its data cannot be opened, or means something else to it.
        ShoalError: the model cannot be read.
    """
    with opened(model, family) as source:
        where = f"the configuration in {source.folder}"
        if problem := dataset_problem(source.config, dataset_name, where, "--dataset-name {name}"):
            raise ConfigError(problem)
        is_own = source.config.data.task_type == "llm" and source.config.data.tokenizer is None
        if is_own and (source.tokenizer is not None or not source.is_bytes):
            raise ConfigError(
                f"{model} has a tokenizer of its own, and the text that shoal holds out is bytes: its loss on it says "
                "nothing"
            )
        module = whole(source, device, for_loss=True)
    config = source.config
    if eval_split:
        # A run that holds out a split has no folds.
        other = config.data.model_copy(update={"eval_split": eval_split, "holdout_fold": 0})
        config = config.model_copy(update={"data": other})
    data = config.data
    dataset = open_source(config)
    if dataset.windows is not None:
        dataset.windows.close()
    holdout = dataset.holdout
    report = {"eval_loss": held_out_loss(module, holdout)}
    if data.task_type == "cv":
        report["accuracy"] = held_out_accuracy(module, holdout, str(next(module.parameters()).device))
    figures = held_out_figures(module, holdout)
    report |= figures
    heard: Transcribed | None = None
    if data.task_type == "speech":
        heard = transcribed(module, holdout, characters_of(config))
        report["character_error_rate"] = heard.character_error_rate
    if as_json:
        shown = {} if heard is None else {"transcripts": heard.pairs[:_SHOWN]}
        named = {"dataset": data.dataset_name} | ({"eval_split": eval_split} if eval_split else {})
        more = {"samples": holdout.num_samples, **named, **shown}
        print(json.dumps({**report, **more}), flush=True)
        return
    if heard is not None:
        for said, decoded in heard.pairs[:_SHOWN]:
            print(f"said:  {without_controls(said)}\nheard: {without_controls(decoded)}")
    accuracy = f", accuracy {100 * report['accuracy']:.2f} %," if "accuracy" in report else ""
    if heard is not None:
        accuracy = f", character error rate {100 * heard.character_error_rate:.2f} %,"
    beside = "".join(f", {name} {value:.4f}" for name, value in figures.items())
    loss = f"eval loss {report['eval_loss']:.6f}{accuracy}{beside}"
    measured_on = without_controls(eval_split or data.dataset_name)
    print(f"{loss} over {holdout.num_samples} samples of {measured_on}", flush=True)


def generate(
    model: Path,
    prompt: str,
    *,
    wording: Wording,
    stops: tuple[str, ...],
    family: str | None,
    device: str,
    dtype: Literal["float32", "float64"],
    as_json: bool,
) -> None:
    """Print what follows a prompt, as it comes; as JSON, when it has ended.

    Args:
        wording: without a seed one is drawn.

    Raises:
        ConfigError: this is no folder of a model that generates, or what is wanted makes no sense.
        ShoalError: the model cannot be read.
    """
    request = request_of(prompt, wording, stops)
    with opened(model, family) as source:
        module = whole(source, device)
        require_generates(module, str(model))
        tokens = tokens_of(source, module)
    fold_weights(module)
    module = module.double() if dtype == "float64" else module
    # A tokenizer is of whoever has made the model: a small one makes of a word what fills the memory.
    with within_free_memory():
        generation = Continuation(module, tokens, request, context=source.context)
        if as_json:
            text = "".join(generation)
            report = {"text": text, "tokens": generation.tokens, "prompt_tokens": generation.prompt_tokens}
            print(json.dumps({**report, "finish": generation.finish, "seed": request.sampling.seed}), flush=True)
            return
        is_terminal = sys.stdout.isatty()
        for text in generation:
            print(without_controls(text) if is_terminal else text, end="", flush=True)
        if is_terminal:
            print(flush=True)
        if request.sampling.temperature and wording.seed is None:
            print(f"--seed {request.sampling.seed} gives the same again", file=sys.stderr)
        if generation.finish is not None and (note := _ENDS[generation.finish]):
            print(note, file=sys.stderr)


def images(
    model: Path,
    to: Path,
    *,
    rows: int,
    first_class: int,
    classes: int | None,
    scale: int,
    seed: int,
    device: str,
    force: bool,
) -> None:
    """Write images that a model makes as one PNG.

    Raises:
        ConfigError: this is no folder of a model that makes images, what is wanted makes no sense, there is a file
            already, or Pillow is missing.
        ShoalError: the model cannot be read, or the file not written.
    """
    given = {"rows": rows, "scale": scale} | ({} if classes is None else {"classes": classes})
    if odd := [f"{name} {value}" for name, value in given.items() if value < 1]:
        raise ConfigError(f"{', '.join(odd)}: give 1 at least")
    if to.exists() and not force:
        raise ConfigError(f"--to {to}: there is something already; choose another place, or add --force")
    try:
        image = importlib.import_module("PIL.Image")
    except ImportError as error:
        raise ConfigError("to write a PNG needs Pillow, which is not installed: pip install 'shoal[hf]'") from error
    with opened(model, None) as source:
        num_classes = source.config.model.num_classes
        columns = min(_COLUMNS, num_classes - first_class) if classes is None else classes
        module = whole(source, device)
    picture = image_grid(module, range(first_class, first_class + columns), rows, seed, scale)
    try:
        image.fromarray(picture).save(to, format="PNG")
    except OSError as error:
        raise StorageError(f"cannot write {to}: {error.strerror or error}") from error
    print(f"wrote {to}: {rows} images of each class from {first_class} to {first_class + columns - 1}", flush=True)


def request_of(prompt: str, wording: Wording, stops: tuple[str, ...] = ()) -> TextRequest:
    """Check what is wanted before a model is loaded; without a seed, draw one.

    Raises:
        ConfigError: it makes no sense; all that is wrong is named together.
    """
    problems: list[str] = []
    chosen, seed = Sampling(), secrets.randbits(32) if wording.seed is None else wording.seed
    try:
        chosen = Sampling(wording.temperature, wording.top_k, wording.top_p, wording.min_p, seed)
    except ConfigError as error:
        problems.append(str(error))
    try:
        request = TextRequest(prompt, chosen, wording.max_tokens, stops)
    except ConfigError as error:
        raise ConfigError("\n".join((*problems, str(error)))) from None
    if problems:
        raise ConfigError("\n".join(problems))
    return request


def whole(source: ModelSource, device: str, *, for_loss: bool = False) -> StageModule:
    """Return the model in one piece, where it is to compute.

    Raises:
        ConfigError: there is no such device.
        ShoalError: the model cannot be read.
    """
    return source.whole(for_loss=for_loss).to(profiled_device(load_config(None, {"device": device}, {})))
