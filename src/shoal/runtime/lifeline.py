"""The lifeline: a pipe that nobody writes to, whose write end only the supervisor holds.

However the supervisor ends, kill -9 included, the kernel closes the write end and every reader sees the end of file.
Nothing has to be sent, so nothing can fail to be sent.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from shoal.runtime.process_control import kill_descendants

EXIT_LIFELINE_CUT = 70
"""Exit code of a role that ended because its supervisor was gone."""


def watch_in_thread(read_fd: int, run_dir: str) -> None:
    """End this process and its descendants at once when the lifeline is cut. Call this only after the last fork.

    It uses a thread and not the event loop, because it must also work when the loop hangs.

    Args:
        run_dir: directory that ends with the run; empty: there is none.
    """
    threading.Thread(target=_wait_and_exit, args=(read_fd, run_dir), name="lifeline", daemon=True).start()


def _wait_and_exit(read_fd: int, run_dir: str) -> None:
    os.read(read_fd, 1)
    # The fork server does this as well, unless it was killed together with the supervisor.
    kill_descendants()
    if run_dir:
        shutil.rmtree(run_dir, ignore_errors=True)
    os._exit(EXIT_LIFELINE_CUT)


@contextmanager
def watched_by_signal(read_fd: int, when_cut: Callable[[], None]) -> Generator[None, None, None]:
    """Call `when_cut` in the main thread if the lifeline is cut inside this context, which starts no thread.

    The kernel sends SIGIO when the pipe changes (`O_ASYNC`, fcntl(2)), so this works while the main thread is busy.
    """
    before = signal.signal(signal.SIGIO, lambda _signal, _frame: when_cut())
    flags = fcntl.fcntl(read_fd, fcntl.F_GETFL)
    fcntl.fcntl(read_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(read_fd, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([read_fd], [], [], 0)[0]:
        when_cut()
    try:
        yield
    finally:
        fcntl.fcntl(read_fd, fcntl.F_SETFL, flags)
        signal.signal(signal.SIGIO, before)
