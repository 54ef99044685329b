"""How the receiving process of a benchmark tells the sending one where it can be reached: by a named pipe."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class Rendezvous:
    """One of two processes that know a folder."""

    def __init__(self, folder: Path, *, is_first: bool) -> None:
        """Remember who this is.

        Args:
            folder: for sockets and pipes; the same for both processes.
            is_first: this process tells the other one; False: it is told.
        """
        self.folder = folder
        self.is_first = is_first

    def share(self, name: str, text: str) -> str:
        """Return what the first process says under this name; waits until both have called."""
        path = self.folder / f"{name}.fifo"
        with suppress(FileExistsError):
            os.mkfifo(path)
        if self.is_first:
            path.write_text(text)
            return text
        return path.read_text()
