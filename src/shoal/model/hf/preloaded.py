"""What a fork server imports once for a run of a model of transformers: 2.3 s of a processor for each role, else."""

from __future__ import annotations

import importlib
from contextlib import suppress

# A run without it is refused where the configuration is known, with what to install.
with suppress(ImportError):
    for _name in ("modeling_utils", "masking_utils", "models.auto.modeling_auto", "models.llama.modeling_llama"):
        importlib.import_module(f"transformers.{_name}")


def preload(kind: str) -> None:
    """Import the code of one kind of model, which each server would import for itself.

    Args:
        kind: A model_type, of which nothing but the code of transformers is imported. What is no kind that has a causal
            language model stays without: the roles say what is wrong with it.
    """
    # An optional package that a kind needs may be missing, which the roles say as well.
    with suppress(AttributeError, ImportError, LookupError, RuntimeError, ValueError):
        auto = importlib.import_module("transformers.models.auto.modeling_auto")
        configs = importlib.import_module("transformers.models.auto.configuration_auto")
        if kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            _ = auto.MODEL_FOR_CAUSAL_LM_MAPPING[configs.CONFIG_MAPPING[kind]]
