"""The quick start of DistQat, as docs/moving.md has it: what stands there runs, in order, at a tiny size.

Those of the other systems: smolcluster's is what `test_up.py` does on three machines, MacFleet's what
`test_inviting.py` does on two; the commands of pmetal's are those of docs/tasks/chat.md, which `test_tasks.py` runs.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.documented import quick_start
from tests.e2e.launched import END_S, ROOT

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


@pytest.fixture
def short() -> Iterator[Path]:
    """Give a folder with a short name: paths of sockets have 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_what_stands_in_place_of_a_quick_start_runs_in_order(tmp_path: Path, short: Path) -> None:
    commands = quick_start("DistQat")
    assert DISTQAT.keys() <= {*commands}
    lines = [DISTQAT.get(command, "{}").replace("{}", command) for command in commands]
    for name in ("run_local.py", "start_trainer_client.py", "start_servers.py", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    tag = secrets.token_hex(4)
    environment = {
        **os.environ,
        _TAG: tag,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "XDG_RUNTIME_DIR": str(short),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    output = tmp_path / "output"
    try:
        # Into a file: what stays, when a command has failed, would keep a pipe open.
        with output.open("wb") as file:
            done = subprocess.run(
                ["bash", "-e", "-x", "-c", "\n".join(lines)],
                cwd=tmp_path,
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
