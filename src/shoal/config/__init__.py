"""The configuration: a frozen tree, filled from file, environment and flags; nothing else reads any of the three."""

from shoal.config.dump import config_to_json, dump_config, public_values, published_values
from shoal.config.load import config_from_json, load_config
from shoal.config.schema import Config

__all__ = [
    "Config",
    "config_from_json",
    "config_to_json",
    "dump_config",
    "load_config",
    "public_values",
    "published_values",
]
