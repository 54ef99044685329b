"""The process of the benchmark `startup`: starts a sandbox, or plain interpreters, and sees what they take."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import Process

from shoal.clock import SystemClock
from shoal.errors import RemoteError
from shoal.runtime.process_info import command_line, descendants, pss_bytes
from shoal_lab.bench.peer import Calls, Seat
from shoal_lab.event_log import logged_below, time_of

_RUN = ("--diloco.inner-steps=10", "--diloco.outer-steps=10000", "--run.deterministic=true")
_TIMEOUT_S = 50.0
_LOOK_S = 0.05
_PLAIN = "import torch, hivemind; print(flush=True); input()"
_MB = 1e6


@contextmanager
def main(seat: Seat) -> Generator[Calls, None, None]:
    """Offer one run of the sandbox up to its first record, and interpreters that import for themselves."""

    def sandbox(roles: list[str]) -> dict[str, float]:
        return anyio.run(_sandbox, roles)

    yield {"sandbox": sandbox, "interpreters": _interpreters}


async def _sandbox(roles: Sequence[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        log_root = Path(folder)
        command = [sys.executable, "-m", "shoal", "run-local", *_RUN, f"--log-dir={log_root}"]
        launcher = await anyio.open_process(command, stdin=subprocess.DEVNULL, stdout=None, stderr=None)
        with anyio.fail_after(_TIMEOUT_S):
            await _recorded(log_root, launcher)
            figures = _memory(launcher.pid, roles)
            launcher.send_signal(signal.SIGTERM)
            await launcher.wait()
        return figures | _causes(logged_below(log_root), _summary(log_root)["seconds_to_first_step"])


async def _recorded(log_root: Path, launcher: Process) -> None:
    """Return when the first round has its record: every role then has done everything once.

    If that never comes, this process ends, and all that it has started with it.
    """
    clock = SystemClock()
    while not any(event["event"] == "round.recorded" for event in logged_below(log_root, "client_*.log")):
        if launcher.returncode is not None:
            raise RemoteError(f"the sandbox has ended early, with exit code {launcher.returncode}")
        await clock.sleep_s(_LOOK_S)


def _summary(log_root: Path) -> dict[str, Any]:
    [path] = [path for path in log_root.glob("*/summary.json") if not path.parent.is_symlink()]
    return json.loads(path.read_text())


def _causes(events: Sequence[dict[str, Any]], first_step_s: float) -> dict[str, float]:
    """Return the seconds to the first step, and those of each cause, which follow each other and add up to it."""
    ready = next(event for event in events if event["event"] == "fork_server.ready")
    launched_unix_s = time_of(ready) - ready["after_s"]

    def last(name: str) -> float:
        return max(time_of(event) for event in events if event["event"] == name) - launched_unix_s

    leading = next(event for event in events if event["event"] == "round.ready")
    ends = {
        "imports": ready["after_s"],
        "monitor": last("swarm.open"),
        "stages": last("server.ready"),
        "leading": time_of(leading) - launched_unix_s,
        "trainers": last("trainer.ready"),
        "step": first_step_s,
    }
    begins = [0.0, *list(ends.values())[:-1]]
    spent = {name: end - begin for (name, end), begin in zip(ends.items(), begins, strict=True)}
    return {"first_step": first_step_s, **spent}


def _memory(launcher_pid: int, roles: Sequence[str]) -> dict[str, float]:
    """Return MB (PSS) of a process of each role, of the others together by name, and of all; and how many they are."""
    found: dict[str, list[float]] = {"launcher": [pss_bytes(launcher_pid) / _MB]}
    for stat in descendants(launcher_pid):
        if stat.state != "Z":
            found.setdefault(_kind(command_line(stat.pid)), []).append(pss_bytes(stat.pid) / _MB)
    sums = {name: sum(values) for name, values in found.items()}
    means = {role: sums[role] / len(found[role]) for role in roles}
    return {
        **{f"{name}_mb": value for name, value in (sums | means).items()},
        "roles_mb": sums["fork_server"] + sum(sums[role] for role in roles),
        "all_mb": sum(sums.values()),
        "processes": float(sum(map(len, found.values()))),
    }


def _kind(command: Sequence[str]) -> str:
    """Return what a process is: its role, or the library whose program it runs."""
    title = command[0] if command else ""
    if title.startswith("shoal:"):
        return title.split(":")[1]
    name = Path(title).name
    return "wandb" if name.startswith("wandb") or "wandb" in " ".join(command[1:]) else name


def _interpreters(num_processes: int) -> dict[str, float]:
    """Start interpreters that import torch and hivemind at the same time; return their seconds and MB (PSS)."""
    clock = SystemClock()
    start_s = clock.now_s()
    processes = [
        subprocess.Popen([sys.executable, "-c", _PLAIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(num_processes)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        ready_s = clock.now_s() - start_s
        all_mb = sum(pss_bytes(process.pid) for process in processes) / _MB
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return {"seconds": ready_s, "all_mb": all_mb, "each_mb": all_mb / num_processes}
