"""Which commit is checked out: it decides which of many seeds, and which of the long tests, are run for it."""

from __future__ import annotations

import subprocess
from functools import cache


@cache
def present_commit() -> str:
    """Return the hash of the commit that is checked out; empty where there is no repository."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return "" if done.returncode else done.stdout.strip()
