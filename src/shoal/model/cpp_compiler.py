"""Whether this host has what torch builds libraries with. No torch."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from shoal.errors import ConfigError


def require_compiler() -> None:
    """Check that what torch builds libraries with is there.

    Raises:
        ConfigError: It is not.
    """
    # As torch itself finds them.
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"model_pipeline.compile needs a C++ compiler on this host, and there is no {compiler}: install one "
            "(Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++), name yours in CXX, or train without "
            "compile"
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise ConfigError(
            f"model_pipeline.compile needs Python's C headers on this host, and there is no {header}: install them "
            "(Debian and Ubuntu: apt install python3-dev; Fedora: dnf install python3-devel), or train without compile"
        )
