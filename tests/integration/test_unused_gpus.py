"""A host whose GPUs torch cannot use: the commands that start servers there say so first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.identity import Identity, create_swarm_key

ON_SUCH_A_HOST = """
import sys
from shoal.cli import app, devices
from shoal.server.visible_gpus import VisibleGpus

devices.has_gpu_driver = lambda: True
devices.visible_gpus = lambda: VisibleGpus("9.9+cu999", reason="The NVIDIA driver on your system is too old")
sys.exit(app.run(sys.argv[1:]))
"""
NOTICE = (
    "servers compute on the CPU, although this host has a driver for GPUs: torch 9.9+cu999 sees no GPU (The NVIDIA "
    "driver on your system is too old)"
)


@pytest.mark.usual("start-servers")
@pytest.mark.parametrize("command", ["run-local", "start-servers"])
def test_who_starts_servers_beside_gpus_that_torch_cannot_use_is_told(command: str, tmp_path: Path) -> None:
    flags = [f"--log-dir={tmp_path / 'logs'}", "--num-servers=2"]
    if command == "run-local":
        flags += ["--wandb=false", "--diloco.outer-steps=1", "--diloco.inner-steps=1"]
    else:
        create_swarm_key(tmp_path / "key")
        nobody = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"
        flags += [f"--swarm-key-file={tmp_path / 'key'}", f"--initial-peers={nobody}"]
    runtime = tmp_path / "run"
    runtime.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", ON_SUCH_A_HOST, command, *flags],
        env=os.environ | {"XDG_RUNTIME_DIR": str(runtime), "PYTHONUNBUFFERED": "1", "COLUMNS": "300"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = ""
        # What comes after it is of no interest here.
        for line in process.stdout:
            said += line
            if NOTICE in line:
                process.terminate()
                process.stdout.read()
                return
    pytest.fail(f"nothing was said of it:\n{said}")
