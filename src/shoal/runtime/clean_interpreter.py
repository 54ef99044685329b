"""Starting a module in a clean interpreter, which has of this process the module path and what is handed over."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO


def start_interpreter(
    module: str,
    arguments: Sequence[object],
    *,
    pass_fds: Sequence[int],
    environment: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
    new_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start `python -m module`, without waiting for it.

    It finds its modules where this process finds its own. Its standard input is empty.

    Args:
        module: what is run.
        arguments: for its command line.
        pass_fds: descriptors that it inherits, under the same numbers.
        environment: what it has besides the environment of this process, or instead of parts of it.
        output: takes its output and its errors; None leaves both to those of this process.
        new_session: whether it is out of reach of the terminal's Ctrl-C.

    Raises:
        OSError: the system refuses another process.
    """
    return subprocess.Popen(
        # -P keeps the working directory out of the module path, unless it is in ours.
        [sys.executable, "-P", "-m", module, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(sys.path)},
        pass_fds=pass_fds,
        start_new_session=new_session,
    )
