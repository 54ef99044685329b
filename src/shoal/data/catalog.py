"""From the configuration to a data set.

The name of the data set decides where it comes from, never whether there is a network: built-in names are read from
this installation, every other name from the Hugging Face hub.
"""

from __future__ import annotations

from shoal.config.dump import config_to_json
from shoal.config.load import config_from_json
from shoal.config.schema import Config
from shoal.data.builtin import BUILTINS
from shoal.data.huggingface import open_hub
from shoal.data.source import DataSet
from shoal.data.worker_messages import Opening
from shoal.errors import ConfigError


def open_source(config: Config) -> DataSet:
    """Open the data set that the configuration names. Reads files, so call it from a worker thread.

    Raises:
        ConfigError: there is no such data set, it cannot be reached, it does not fit `data.task_type`, or it has more
            classes than the model.
    """
    data, model = config.data, config.model
    dataset = BUILTINS.get(data.dataset_name, open_hub)(data)
    key, limit = ("vocab_size", model.vocab_size) if data.task_type == "llm" else ("num_classes", model.num_classes)
    if limit < dataset.num_classes:
        raise ConfigError(
            f"model.{key} = {limit} is too small for data.dataset_name = {data.dataset_name}: it has "
            f"{dataset.num_classes} different labels; set model.{key} to at least {dataset.num_classes}"
        )
    return dataset


def opening_of(config: Config) -> Opening:
    """Return how another process opens the same data set; it holds the secrets of the configuration."""
    return Opening("shoal.data.catalog:open_configured", config_to_json(config))


def open_configured(config_json: bytes) -> DataSet:
    """Open the data set of a configuration that came from another process of this run.

    Raises:
        ConfigError: as `open_source`.
    """
    return open_source(config_from_json(config_json))
