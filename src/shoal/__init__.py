"""shoal: train one model on a swarm of machines that nobody manages.

Importing the package imports neither torch nor hivemind nor pydantic; public names load what they need on first use.
"""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.checkpoint.loading import load_model
    from shoal.config.load import load_config
    from shoal.report.loaded import load_run

__all__ = ["__version__", "load_config", "load_model", "load_run"]

__version__ = "0.1.0"

# Until a process has a log file, what it logs goes nowhere: names of events are not what people read.
logging.getLogger(__name__).addHandler(logging.NullHandler())

# torch imports pynvml where it is installed, which says this on every terminal and in the output of every host. Neither
# torch nor shoal needs the package: who reads it there can do nothing about it for his run.
warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)


def __getattr__(name: str) -> object:
    """Load a public name on first use (PEP 562)."""
    if name == "load_config":
        from shoal.config.load import load_config

        return load_config
    if name == "load_model":
        from shoal.checkpoint.loading import load_model

        return load_model
    if name == "load_run":
        from shoal.report.loaded import load_run

        return load_run
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
