"""From the configuration to a data set.

The name of the data set decides where it comes from, never whether there is a network: built-in names are read from
this installation, files and folders from this host, `package.module:Class` by code of the user's own, every other name
from the Hugging Face hub.
"""

from __future__ import annotations

import difflib
import logging
from dataclasses import replace
from pathlib import Path

import msgspec

from shoal.config.dump import config_to_json
from shoal.config.load import config_from_json
from shoal.config.schema import Config
from shoal.config.training import AugmentConfig, DataConfig
from shoal.data.augmentation import Augmentation
from shoal.data.builtin import BUILTINS
from shoal.data.checked_samples import checked
from shoal.data.huggingface import open_images
from shoal.data.own_data import open_own
from shoal.data.places import is_place
from shoal.data.source import DataSet, Windows
from shoal.data.speech import TONES, open_speech
from shoal.data.stream_windows import open_stream, opened_stream
from shoal.data.text_corpus import Say, open_text, require_vocabulary
from shoal.data.tones import open_tones
from shoal.data.worker_messages import Opening
from shoal.errors import ConfigError
from shoal.events.base import Event, emit
from shoal.events.data import DatasetWanted

logger = logging.getLogger(__name__)


def log_event(event: Event) -> None:
    """Write what happens to the log, where nobody watches."""
    emit(logger, event)


def open_source(config: Config, say: Say = log_event) -> DataSet:
    """Open the data set that the configuration names. Reads files, so call it from a worker thread.

    Args:
        say: told what happens while text is made into tokens, which may take long.

    Raises:
        ConfigError: there is no such data set, it cannot be reached, it does not fit `data.task_type` or the model, or
            it has more classes than the model.
        StorageError: the tokens of its text cannot be kept.
        RemoteError: who makes them was killed.
    """
    if config.data.streaming:
        if (wanted := wanted_of_hub(config.data)) is not None:
            say(wanted)
        dataset = open_stream(config, say)
        try:
            return _fitting(config, dataset)
        except ConfigError:
            if dataset.windows is not None:
                dataset.windows.close()
            raise
    return replace(_opened(config, say), shuffle_window=config.data.shuffle_window)


def _opened(config: Config, say: Say) -> DataSet:
    data = config.data
    if data.dataset_name == TONES:
        return open_tones(data)
    if (wanted := wanted_of_hub(data)) is not None:
        say(wanted)
    if data.task_type == "speech":
        return checked(open_speech(config, say), data, say)
    is_text = data.task_type == "llm"
    if data.is_own:
        dataset = open_own(config)
    elif is_text:
        dataset = open_text(config, say) if _is_made_to_tokens(config) else BUILTINS[data.dataset_name](data)
    else:
        dataset = BUILTINS.get(data.dataset_name, open_images)(data)
    # Documents that cannot be read are left out before text becomes samples.
    may_fail = data.is_own or not (is_text or data.dataset_name in BUILTINS)
    return _fitting(config, checked(dataset, data, say) if may_fail else dataset)


def _fitting(config: Config, dataset: DataSet) -> DataSet:
    """Check that the model has all labels; return the data set with what is done to its images."""
    data, model = config.data, config.model
    name = f"data.dataset_name = {data.dataset_name}"
    if data.task_type == "llm":
        require_vocabulary(config, dataset.num_classes, name)
    elif model.num_classes < dataset.num_classes:
        raise ConfigError(
            f"model.num_classes = {model.num_classes} is too small for {name}: it has {dataset.num_classes} different "
            f"labels; set model.num_classes to at least {dataset.num_classes}"
        )
    if data.augment == AugmentConfig():
        return dataset
    shape = dataset.fields.inputs.shape
    return replace(dataset, augmentation=Augmentation(data.augment, config.run.seed, shape, data.dataset_name))


def wanted_of_hub(data: DataConfig) -> DatasetWanted | None:
    """Return what to say of a data set that is asked for elsewhere, which may take long; None: it is here, or was asked
    for when its classes were named."""
    name = data.dataset_name
    if data.classes is not None or data.is_own or name in BUILTINS or is_place(name) or Path(name).exists():
        return None
    near = difflib.get_close_matches(name, BUILTINS, n=1, cutoff=0.5)
    return DatasetWanted(name, near[0] if near else "")


def _is_made_to_tokens(config: Config) -> bool:
    """Whether its tokens lie on the disk: those of a small text that shoal carries are its bytes, in memory."""
    data = config.data
    said = (data.tokenizer, data.eval_split, data.max_documents)
    return data.dataset_name not in BUILTINS or any(value is not None for value in said)


def opening_of(config: Config, windows: Windows | None = None) -> Opening:
    """Return how another process opens the same data set; it holds the secrets of the configuration.

    Args:
        windows: of the data set, which this process has opened.
    """
    if windows is None:
        return Opening("shoal.data.catalog:open_configured", config_to_json(config))
    there = OpenedHere(config_to_json(config), str(windows.folder))
    return Opening("shoal.data.catalog:open_windows", msgspec.msgpack.encode(there))


class OpenedHere(msgspec.Struct, frozen=True):
    """A stream that another process of this host has read."""

    config_json: bytes
    folder: str


def open_windows(payload: bytes) -> DataSet:
    """Open a stream that another process of this host has opened, and reads.

    Raises:
        ConfigError: it is not there.
    """
    there = msgspec.msgpack.decode(payload, type=OpenedHere)
    config = config_from_json(there.config_json)
    return _fitting(config, opened_stream(config, there.folder))


def open_configured(config_json: bytes) -> DataSet:
    """Open the data set of a configuration that came from another process of this run.

    Raises:
        ConfigError: as `open_source`.
    """
    # What there is to say of it, that process says.
    return open_source(config_from_json(config_json), say=lambda event: None)
