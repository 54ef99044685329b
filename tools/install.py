"""Installs packages into the environment of the Python that runs this, as `pip install` with the same arguments would.

uv does it in a tenth of the time: it downloads and unpacks several packages at once. It does not read pip's
configuration, by which people behind a mirror or a proxy have said where packages are, so it is told what stands there.
Where it fails all the same (a keyring, an index that it does not understand), pip does the work.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

CONSTRAINTS: Final = Path(__file__).parents[1] / "constraints.txt"
PIP: Final = (sys.executable, "-m", "pip")

OPTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "index-url": "--default-index",
        "extra-index-url": "--index",
        "find-links": "--find-links",
        "constraint": "--constraint",
        "trusted-host": "--allow-insecure-host",
    }
)
"""What uv calls a setting of pip; each value may be several, with spaces between."""

VARIABLES: Final[Mapping[str, str]] = MappingProxyType({"cert": "SSL_CERT_FILE", "default-timeout": "UV_HTTP_TIMEOUT"})
"""Environment variables by which uv takes a setting of pip."""


def pip_settings(listing: str) -> dict[str, str]:
    """Return the settings for `pip install` of what `pip config list` prints, by their names.

    Where several files and the environment (`:env:`) set one, the more particular counts, as in pip.
    """
    settings: dict[str, str] = {}
    for counted in ("global", "install", ":env:"):
        for line in listing.splitlines():
            where, _, value = line.partition("=")
            section, _, name = where.rpartition(".")
            if section == counted:
                settings[name] = str(ast.literal_eval(value))
    return settings


def uv_arguments(settings: Mapping[str, str]) -> Iterator[str]:
    """Yield the options of `uv pip install` that say the same; of a package's versions the best, wherever it is."""
    yield from ("--index-strategy", "unsafe-best-match")
    for name, option in OPTIONS.items():
        for value in settings.get(name, "").split():
            yield from (option, value)


def main(arguments: Sequence[str]) -> int:
    """Install, and return the exit code."""
    pip_install = (*PIP, "install", "--quiet", "--no-compile", "--disable-pip-version-check")
    subprocess.run([*pip_install, "--constraint", CONSTRAINTS, "uv"], check=True)
    listing = subprocess.run([*PIP, "config", "list"], check=True, capture_output=True, text=True).stdout
    settings = pip_settings(listing)
    told = {VARIABLES[name]: value for name, value in settings.items() if name in VARIABLES}
    uv_install = (sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, *uv_arguments(settings))
    if subprocess.run([*uv_install, *arguments], check=False, env={**told, **os.environ}).returncode == 0:
        return 0
    print("uv could not install them: pip tries it, which takes some minutes.", file=sys.stderr, flush=True)
    return subprocess.run([*pip_install, *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
