"""The quick start of DistQat, as docs/moving.md has it, and the pages that steer a run, serve one or look at one that
goes on: what stands there runs, in order, at a tiny size.

Those of the other systems: smolcluster's is what `test_up.py` does on three machines, MacFleet's what
`test_inviting.py` does on two; pmetal's runs with the pages on transformers, in `test_tasks.py`.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from tests.documented import quick_start
from tests.e2e.launched import END_S, ENDLESS, ROOT
from tests.site_commands import LIVE, to_run

from shoal.runtime.process_control import end_tagged

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_TAG = "TEST_QUICK_STARTS"
_FEW = "--no-wandb --diloco.inner-steps=3 --diloco.outer-steps=1"
_MANY = "--no-wandb --diloco.inner-steps=3 --diloco.outer-steps=10000"
DISTQAT = {
    "make setup": "",
    "python run_local.py --config-path configs/resnet18.yaml --device cpu": "{} --print-config",
    "python run_local.py --config-path configs/resnet18.yaml --wandb-project None": "{} --print-config",
    "python run_local.py --config-path configs/resnet18_split.yaml --num-servers 2": f"{{}} {_FEW}",
    "python start_trainer_client.py --config-path configs/resnet18.yaml": f"""
        {{}} {_MANY} & pids=$!
        until [ -s logs/resnet18/initial_peers.txt ]; do kill -0 $pids; sleep 0.1; done""",
    'python start_servers.py --initial-peers "${INITIAL_PEERS}" --experiment-prefix resnet18': """
        {} & pids="$pids $!"
        until ls logs/resnet18/rounds/round_0001.json; do kill -0 $pids; sleep 0.1; done 2>/dev/null""",
    "shoal logs --follow": "",
    # All leave by it, and leave well.
    "shoal stop resnet18": "{}; for pid in $pids; do wait $pid; done",
    "python test_failover.py --public-ip 203.0.113.7": "",  # tests/e2e/test_failover_script.py
    "shoal up hosts.yaml --ui": "",  # tests/e2e/test_up.py
}
"""How commands are done that train for long, that stay, or that another test does; the others run as they are."""

CLIENT = f"""
python start_trainer_client.py --num-servers=3 {" ".join(ENDLESS)} & pids=$!
until [ -s logs/sandbox/initial_peers.txt ]; do kill -0 $pids; sleep 0.1; done
run=$(basename $(readlink -f logs/sandbox))"""
_THERE = 'INITIAL_PEERS=$(cat logs/sandbox/initial_peers.txt) {} & pids="$pids $!"'
BESIDE = {
    "python start_servers.py --num-servers 2 --threads 4,1 --nice 0,10 --device cpu": _THERE,
    "python start_servers.py --num-servers 1 --diloco-batch-size-per-step 1 --device cpu": f"""
        {_THERE}
        until ls logs/sandbox/rounds/round_0001.json; do kill -0 $pids; sleep 0.1; done 2>/dev/null""",
    # Another test may have a run on this host too.
    "shoal status": "{} $run",
    "shoal status --json": "{} $run",
    "shoal status --watch": "{} $run | head -1",
    "shoal status --watch --json": "{} $run | head -1",
    **dict.fromkeys(("shoal pause", "shoal resume-run", "shoal checkpoint"), "{} $run"),
    # On a host of its own it would write to another disk.
    "shoal mirror": f"""
        {_THERE.replace("{}", "{} --checkpoint-dir=mirrored")}
        until grep -q mirror.serves logs/*.mirror/*.log; do kill -0 $pids; sleep 0.1; done 2>/dev/null""",
    # All leave by it, and leave well; of its block it is the last one here.
    "shoal stop": "",
    "shoal runs": "shoal stop $run; for pid in $pids; do wait $pid; done; {}",
}
"""How commands are done that stay, or that end the others, beside a run of which no command ends by itself."""


@pytest.fixture
def short() -> Iterator[Path]:
    """Give a folder with a short name: paths of sockets have 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def _run_in_order(lines: Iterable[str], directory: Path, short: Path) -> str:
    """Run commands where a reader of the documents is, until one fails; end all that is left, and return what was said.

    Args:
        short: for the sockets of runs.
    """
    for name in ("run_local.py", "start_trainer_client.py", "start_servers.py", "configs"):
        (directory / name).symlink_to(ROOT / name)
    tag = secrets.token_hex(4)
    environment = {
        **os.environ,
        _TAG: tag,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(directory),
        "XDG_CACHE_HOME": str(directory / "cache"),
        "XDG_RUNTIME_DIR": str(short),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    output = directory / "output"
    try:
        # Into a file: what stays, when a command has failed, would keep a pipe open.
        with output.open("wb") as file:
            done = subprocess.run(
                ["bash", "-e", "-x", "-c", "\n".join(lines)],
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                timeout=END_S,
                check=False,
            )
    finally:
        end_tagged(f"{_TAG}={tag}")
    assert done.returncode == 0, output.read_text()
    return output.read_text()


def test_what_stands_in_place_of_a_quick_start_runs_in_order(tmp_path: Path, short: Path) -> None:
    commands = quick_start("DistQat")
    assert DISTQAT.keys() <= {*commands}
    _run_in_order((DISTQAT.get(command, "{}").replace("{}", command) for command in commands), tmp_path, short)


def test_the_commands_for_a_run_that_goes_on_run_beside_one(tmp_path: Path, short: Path) -> None:
    commands = to_run(LIVE)
    assert BESIDE.keys() <= {*commands}
    # What asks, asks before the run ends: it is told to stop once all that steers it has.
    asking = [command for command in commands if command.startswith("shoal status")]
    first = [command for command in commands if command.startswith("python start_servers.py")]
    others = [command for command in commands if command not in (*asking, *first)]
    lines = [BESIDE.get(command, "{}").replace("{}", command) for command in (*first, *asking, *others)]
    said = _run_in_order([CLIENT, *lines], tmp_path, short)
    for told in (
        "is paused in round",
        "goes on in round",
        "a checkpoint of the next record is wanted",
        "stops in round",
    ):
        assert told in said, said
    summary = json.loads((tmp_path / "logs/sandbox/summary.json").read_text())
    assert (summary["exit"], summary["duplicates"], summary["missing"]) == ("interrupted", 0, 0)
