"""What makes a file that was written last: that it is whole, and that its folder knows it on the disk."""

from __future__ import annotations

import os
from pathlib import Path


def require_size(path: Path, size_bytes: int) -> None:
    """Check that a file has all that was written to it: a full disk may have taken less without a word.

    Raises:
        OSError: it has not.
    """
    found = path.stat().st_size
    if found != size_bytes:
        raise OSError(f"{path.name} has {found} of {size_bytes} bytes; is the disk full?")


def sync_directory(directory: Path) -> None:
    """Force to the disk which files a directory has.

    Raises:
        OSError: that failed.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
