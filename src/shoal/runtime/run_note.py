"""What a launcher says of its run in the directory that it has locked, to other commands of the same user (run.json).

The directory's mode decides who may read it, and its lock says whether it still holds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec

from shoal.errors import ConfigError
from shoal.ids import PeerId
from shoal.runtime.durable_files import put_whole

NOTE_NAME: Final = "run.json"


class RunNote(msgspec.Struct, frozen=True, kw_only=True):
    """A run on this host.

    Attributes:
        hosts: what of it runs here: its client, or servers or a mirror alone.
        launcher_pid: of the process that Ctrl-C reaches.
        begun_unix_s: when it was launched here.
        client: who the client is; empty: it runs on another host.
        socket: the client's Unix socket.
    """

    run_id: str
    hosts: Literal["client", "servers", "mirror"]
    launcher_pid: int
    begun_unix_s: float
    log_dir: str
    client: PeerId = PeerId("")
    socket: str = ""


def write_note(directory: Path, note: RunNote) -> None:
    """Write it, whole or not at all.

    Raises:
        ConfigError: it cannot be written.
    """
    path = directory / NOTE_NAME
    try:
        put_whole(path, msgspec.json.encode(note), lasting=False)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path} ({error.strerror or error}): free space there, or set XDG_RUNTIME_DIR"
        ) from error


def read_note(directory: Path) -> RunNote | None:
    """Return the note in a directory; None if there is none, or it is of another version."""
    try:
        return msgspec.json.decode((directory / NOTE_NAME).read_bytes(), type=RunNote)
    except (OSError, msgspec.MsgspecError):
        return None
