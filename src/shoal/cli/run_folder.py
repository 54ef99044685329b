"""What lies in the folder of a run on this host. Who only looks there does not load what makes a configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final, cast

from shoal.errors import MALFORMED

CONFIG_FILE: Final = "config.yaml"
LOCAL_MARK: Final = "run-local"
"""A file in the folder of a run that no other host can join, since nobody else has its key."""
LOCAL_KEY: Final = "swarm.key"
"""The key of such a run, which only its owner may read: whoever goes on with the run has to have it."""
LAUNCHER: Final = "launcher"
"""What the process is called in logs that starts the roles of a host."""


def is_run_id(name: str) -> bool:
    """Whether a name is one that `new_run_id` gives: no other folder beside those of runs has such a one."""
    return re.fullmatch(r"[^/]+-\d{8}-\d{6}-[0-9a-f]{4}", name) is not None


def read_object(path: Path) -> dict[str, Any]:
    """Return what a JSON object of a run holds; nothing where there is none, or it is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, *MALFORMED):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
