"""Bad input to the real script: one clear message that says what to do, exit code 2, no traceback.

The wordings of all cases are tested in `tests/unit`; here a few go the whole way through a process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--config-path", "{file}"], "did you mean diloco.inner_steps?"),
        (["--diloco.inner-steps", "many"], "must be a whole number"),
        (["--config-path", "nowhere.yaml"], "there is no configuration file nowhere.yaml"),
        (["--model-pipeline.stages", "99"], "can be cut into at most"),
        (["--num-servers", "-1"], "must be at least 1"),
    ],
    ids=["unknown key", "wrong type", "missing file", "wrong stage count", "negative number of servers"],
)
def test_bad_input_ends_with_exit_code_2_and_one_message(arguments: list[str], part: str, tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("diloco:\n  inner_stps: 5\n")
    command = [sys.executable, "run_local.py", *(argument.format(file=file) for argument in arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert part in done.stderr
    assert done.stderr.startswith("shoal: error: ")
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
