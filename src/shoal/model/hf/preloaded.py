"""What a fork server imports once for a run of a model of transformers: 2.3 s of a processor for each role, else."""

from __future__ import annotations

import importlib
from contextlib import suppress

# A run without it is refused where the configuration is known, with what to install.
with suppress(ImportError):
    for _name in ("modeling_utils", "masking_utils", "models.auto.modeling_auto", "models.llama.modeling_llama"):
        importlib.import_module(f"transformers.{_name}")
