"""What W&B has written offline."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def rows_of(part: Path) -> list[dict[str, float]]:
    """Read the rows of one folder of W&B back from its own file."""
    (path,) = part.glob("*.wandb")
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    records = [json.loads(line) for line in output.splitlines()]
    return [record["history"]["item"] for record in records if record["type"] == "history"]
