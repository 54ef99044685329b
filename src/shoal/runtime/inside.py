"""Files of a folder that others have made: what is read of it, and goes on to others, lies in it.

A link, or a name in its metadata, may lead anywhere, as to `/proc/self/environ` with the tokens of its reader.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import ConfigError


def places_of(*folders: Path) -> list[Path]:
    """Return where the files of what is in these folders may lie."""
    places = [folder.expanduser().resolve() for folder in folders]
    # The hub's cache has links in place of files, to what lies beside all snapshots.
    return places + [place.parents[1] / "blobs" for place in places if place.parent.name == "snapshots"]


def require_inside(path: Path, places: Sequence[Path], of: str = "its data set") -> None:
    """Refuse a file that lies, or leads, elsewhere, and what is none: nobody may ever write into a pipe.

    Args:
        of: what the file is, in words.

    Raises:
        ConfigError: it does, or is none.
    """
    if "\0" in str(path) or not any(Path(os.path.realpath(path)).is_relative_to(place) for place in places):
        raise ConfigError(
            f"{str(path)!r} is outside of {of}, {places[0]}, and is not read; copy or hard-link it into there"
        )
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigError(f"{str(path)!r} is no file but a pipe, a socket or a device, and is not read; remove it")
