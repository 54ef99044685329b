"""The documents as a site, as `make site` builds it, in a folder of a test."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tools import site

ROOT = Path(__file__).parents[1]


def build_site(folder: Path) -> Path:
    """Build the site strictly, and return where it is."""
    shutil.copy(ROOT / "zensical.toml", folder)
    site.lay_out(folder / "build" / "docs")
    command = (str(Path(sys.executable).with_name("zensical")), "build", "--strict")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"
