"""The version of shoal that runs here as a wheel, so that other hosts get the very same, published or not.

A wheel is an archive of the package and of its metadata (the binary distribution format of the Python Packaging
Authority), and both are here wherever shoal can be run. Nothing is built: an installation from a wheel has no sources.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import shoal

_TAG: Final = "py3-none-any"
_WHEEL: Final = f"Wheel-Version: 1.0\nGenerator: shoal {shoal.__version__}\nRoot-Is-Purelib: true\nTag: {_TAG}\n"
_EARLIEST: Final = (1980, 1, 1, 0, 0, 0)
"""The time of each entry: equal content makes equal bytes."""


def own_wheel() -> tuple[str, bytes]:
    """Return the name of the wheel's file, and its bytes."""
    found = importlib.metadata.distribution("shoal")
    info = f"shoal-{found.version}.dist-info"
    contents = dict(_package_files())
    contents[f"{info}/METADATA"] = str(found.read_text("METADATA") or found.read_text("PKG-INFO")).encode()
    contents[f"{info}/entry_points.txt"] = str(found.read_text("entry_points.txt")).encode()
    contents[f"{info}/WHEEL"] = _WHEEL.encode()
    lines = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in contents.items()]
    contents[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(zipfile.ZipInfo(name, _EARLIEST), content, zipfile.ZIP_DEFLATED)
    return f"shoal-{found.version}-{_TAG}.whl", buffer.getvalue()


def _package_files() -> Iterator[tuple[str, bytes]]:
    root = Path(shoal.__path__[0])
    # In a checkout the shipped configurations are a link to a folder beside the sources.
    for folder, below, names in os.walk(root, followlinks=True):
        below[:] = sorted(set(below) - {"__pycache__"})
        for path in (Path(folder) / name for name in sorted(names)):
            yield f"shoal/{path.relative_to(root).as_posix()}", path.read_bytes()


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
