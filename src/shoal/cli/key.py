"""`shoal key`: the secret that all hosts of a swarm share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from shoal.cli.arguments import SET_UP

key_app = App(name="key", group=SET_UP, help="Make and compare the secret that all hosts of a swarm share.")

KeyFile = Annotated[
    Path | None, Parameter(help="Where the key is; the default is network.swarm_key_file, ~/.config/shoal/swarm.key.")
]


@key_app.command
def new(*, swarm_key_file: KeyFile = None) -> None:
    """Make a new key. Copy the file to every host of the swarm, over a way that nobody else can read."""
    from shoal.identity import create_swarm_key, swarm_key_fingerprint

    path = _path(swarm_key_file)
    swarm_key = create_swarm_key(path)
    print(f"wrote {path}, fingerprint {swarm_key_fingerprint(swarm_key)}")


@key_app.command
def fingerprint(*, swarm_key_file: KeyFile = None) -> None:
    """Print a name for the key that tells whether two hosts have the same; it is no secret."""
    from shoal.identity import load_swarm_key, swarm_key_fingerprint

    print(swarm_key_fingerprint(load_swarm_key(_path(swarm_key_file))))


def _path(given: Path | None) -> Path:
    from shoal.config.host import NetworkConfig

    return (given or NetworkConfig().swarm_key_file).expanduser()
