"""Peers that succeed, fail, die, hang and have children, on demand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal_lab.bench.peer import Calls, Seat


@contextmanager
def main(seat: Seat) -> Iterator[Calls]:
    """Offer all that; leaves a file behind when it is left in peace."""

    def fail(index: int) -> None:
        if index == seat.index:
            raise ValueError(f"peer {index} cannot")
        signal.pause()

    def die(index: int) -> None:
        if index == seat.index:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    def hang(index: int) -> None:
        if index == seat.index:
            signal.pause()

    def hang_and_tell() -> None:
        if seat.index == 1:
            os.kill(os.getppid(), signal.SIGUSR1)
        signal.pause()

    def with_child() -> int:
        return subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid

    yield {
        "describe": lambda *args: [seat.index, seat.num_peers, dict(seat.arguments), *args],
        "threads": lambda: os.environ["OMP_NUM_THREADS"],
        "environment": lambda: dict(os.environ),
        "fail": fail,
        "die": die,
        "hang": hang,
        "hang_and_tell": hang_and_tell,
        "with_child": with_child,
    }
    if "left" in seat.arguments:
        Path(seat.arguments["left"], str(seat.index)).touch()


@contextmanager
def cannot_start(seat: Seat) -> Iterator[Calls]:
    """Fail in the second peer; the first one has started."""
    if seat.index == 1:
        raise RuntimeError("there is no such thing")
    yield {}
