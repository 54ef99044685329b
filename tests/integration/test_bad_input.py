"""Bad input to the real script: one clear message that says what to do, exit code 2, no traceback, nothing left.

The wordings of all cases are tested in `tests/unit`; here the common ones go the whole way through a process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.usual(
    "arguments0-did you mean diloco.inner_steps?",
    "arguments6-use --num-servers 2 or more",
    "arguments7-choose another with --log-dir",
    "arguments8-/corpus: there is no such folder or file here",
)
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--config-path", "{tmp}/unknown_key.yaml"], "did you mean diloco.inner_steps?"),
        (["--diloco.iner-steps", "5"], "did you mean --diloco.inner-steps?"),
        (["--config-path", "{tmp}/no_mapping.yaml"], "no_mapping.yaml"),
        (["--config-path", "nowhere.yaml"], "there is no configuration file nowhere.yaml"),
        (["--device", "cuda:77"], "use --device auto or --device cpu"),
        (["--device", "tpu"], "use auto, cpu, mps, cuda or cuda:<index>"),
        (["--num-servers", "1"], "use --num-servers 2 or more"),
        (["--log-dir", "{tmp}/file/logs"], "choose another with --log-dir"),
        (["--data.dataset-name", "{tmp}/corpus"], "/corpus: there is no such folder or file here"),
        (["--data.dataset-name", "{tmp}/*.jsonl"], "*.jsonl: there is no such folder or file here"),
        (["--data.eval-split", "{tmp}/held"], "data.eval_split = "),
    ],
)
def test_bad_input_ends_with_exit_code_2_and_one_message(arguments: list[str], part: str, tmp_path: Path) -> None:
    (tmp_path / "unknown_key.yaml").write_text("diloco:\n  inner_stps: 5\n")
    (tmp_path / "no_mapping.yaml").write_text("- diloco\n")
    (tmp_path / "file").touch()
    logs, runtime = tmp_path / "logs", tmp_path / "run"
    runtime.mkdir()
    arguments = ["--log-dir", str(logs), *(argument.format(tmp=tmp_path) for argument in arguments)]
    done = subprocess.run(
        [sys.executable, "run_local.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"XDG_RUNTIME_DIR": str(runtime)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 2
    assert part in done.stderr
    assert done.stderr.startswith("shoal: error: ")
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout
    # Nothing was begun: no log directory, and of the runtime directory only the lock that all runs share.
    assert not logs.exists()
    assert [path.name for path in runtime.rglob("*") if path.is_dir()] in ([], [f"shoal-{os.getuid()}"])


@pytest.mark.parametrize("script", ["run_local.py", "start_servers.py", "start_trainer_client.py"])
def test_a_script_that_another_python_runs_says_how_to_get_the_right_one(script: str) -> None:
    # Without what is installed: as that of the system, where nobody has activated the environment.
    command = [sys.executable, "-S", "-I", str(ROOT / script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"shoal: error: {sys.executable} has no shoal: `make setup`, then `source .venv/bin/activate`\n"
    )
