"""What several commands take on the command line, and the configuration that it stands for."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Group, Parameter

from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.config.schema import Config

# Every key of the configuration is a flag; those are read by `shoal.config.flags`, which knows all spellings.
ConfigFlags = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        help="Any key of the configuration, e.g. --diloco.inner-steps 50; `shoal config keys` lists them.",
    ),
]
ConfigPath = Annotated[Path | None, Parameter(help="YAML file; configs/reference.yaml explains every key.")]
Switch = Parameter(negative=())
Tiny = Annotated[
    bool,
    Switch,
    Parameter(help="The same in small: structure as in the file, small sizes, data that shoal carries, a few rounds."),
]
Baseline = Annotated[
    bool,
    Switch,
    Parameter(help="Also train the plain loop, one process on the first device of --device, for comparison."),
]
PrintConfig = Annotated[bool, Switch, Parameter(help="Print the resolved configuration and stop.")]
Resume = Annotated[
    str | None,
    Parameter(
        help="Go on from a checkpoint: latest, which the flag alone means as well, or a folder or URL with checkpoints."
    ),
]
KnownPeers = Annotated[
    list[str] | None,
    Parameter(help="Addresses of the swarm as for start-servers; else INITIAL_PEERS, else this host's newest run's."),
]
AsJson = Annotated[bool, Switch, Parameter(name="--json", help="Print one JSON object.")]

SANDBOX: Final = Path("configs/sandbox.yaml")
_OWN_FLAGS = (
    "config-path",
    "baseline",
    "print-config",
    "run-locally",
    "trainer-id",
    "resume",
    "tiny",
    "watch",
    "interval",
    "invite",
    "code",
    "json",
    "help",
    "version",
)
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_TITLES = "Train", "See how a run is", "Steer a run", "Use a model", "Check and measure", "Set up"
TRAIN, WATCH, STEER, MODEL, CHECK, SET_UP = (Group(title, sort_key=place) for place, title in enumerate(_TITLES))
"""What commands are for: under these titles `shoal --help` lists them, in this order."""


@Parameter(name="*")
@dataclass(frozen=True)
class Wording:
    """How a model puts its text: of which tokens it draws the next one, and how many at most. Each field is a flag."""

    max_tokens: Annotated[int | None, Parameter(help="At most so many; else until the context is full.")] = None
    temperature: Annotated[float, Parameter(help="0: always the likeliest token; 1: as the model says.")] = 0.0
    top_k: Annotated[int | None, Parameter(help="Only so many of the likeliest tokens.")] = None
    top_p: Annotated[float | None, Parameter(help="Only the likeliest tokens that together have this probability.")] = (
        None
    )
    min_p: Annotated[
        float | None, Parameter(help="Only tokens with this share of the likeliest one's probability.")
    ] = None
    seed: Annotated[int | None, Parameter(help="The same seed gives the same text; else one is drawn, and said.")] = (
        None
    )


def found(path: Path) -> Path:
    """Return this file, or where the user has none of that name the one that comes with shoal (`configs/...`)."""
    shipped = Path(__file__).parents[1] / path
    return shipped if not path.exists() and shipped.is_file() else path


def load(config_path: Path | None, flags: Sequence[str], own_flags: Sequence[str] = _OWN_FLAGS) -> Config:
    """Load a configuration.

    Args:
        own_flags: of the command, beside those for keys: what a mistyped flag may have been.

    Raises:
        ConfigError: the file or a flag is wrong; so do the other functions of this module that load one.
    """
    from shoal.config.load import load_config

    return load_config(config_path and found(config_path), flags, other_flags=own_flags)


def load_new(
    config_path: Path | None, flags: Sequence[str], *, tiny: bool = False, own_flags: Sequence[str] = _OWN_FLAGS
) -> Config:
    """Load the configuration of a run that begins; with `tiny`, in small."""
    if not tiny:
        return load(config_path or SANDBOX, flags, own_flags)
    from shoal.cli.tiny import load_tiny

    return load_tiny(found(config_path or SANDBOX), flags, own_flags)


def load_whole(
    config_path: Path | None, flags: Sequence[str], *, tiny: bool = False, own_flags: Sequence[str] = _OWN_FLAGS
) -> Config:
    """Load the configuration of a swarm that this machine alone has to be."""
    config = load_new(config_path, flags, tiny=tiny, own_flags=own_flags)
    if problem := config.whole_swarm_problem():
        raise ConfigError(problem)
    return config


def load_resuming(
    config_path: Path | None, flags: Sequence[str], run: Mapping[str, Any], own: Path | None
) -> tuple[Config, Mapping[str, str]]:
    """Load what a host says that goes on with a run, and what sets each key.

    Args:
        run: its shared configuration; empty: it is not known yet, and nothing that is shared is looked at.
        own: the file that the run has left, for a user who names none; None: there is none.
    """
    from shoal.config.load import load_with_origins

    path = own if config_path is None else found(config_path)
    return load_with_origins(path, flags, other_flags=_OWN_FLAGS, run=run, is_left=config_path is None)


def load_joining(
    config_path: Path | None, flags: Sequence[str], initial_peers: Sequence[str] | None
) -> tuple[Config, Mapping[str, str]]:
    """Load the configuration by which a swarm is found, and what sets each key.

    Args:
        initial_peers: what stands after each `--initial-peers`.
    """
    from shoal.cli.joining import load_joining_config

    given = [flag for peers in initial_peers or () for flag in ("--initial-peers", peers)]
    return load_joining_config(config_path and found(config_path), (*flags, *given), os.environ, _OWN_FLAGS)


def load_client(
    config_path: Path | None, flags: Sequence[str], *, tiny: bool = False
) -> tuple[Config, Mapping[str, str] | None]:
    """Load the configuration of a client's host; of one that continues a run, also what sets each key."""
    from shoal.cli.joining import PEERS_VARIABLE, load_joining_config

    # That variable is set on a host for its servers.
    env = {name: value for name, value in os.environ.items() if name != PEERS_VARIABLE}
    try:
        config, origins = load_joining_config(config_path and found(config_path), flags, env, _OWN_FLAGS)
    except ConfigError:
        config = load_new(config_path, flags, tiny=tiny)
        if config.network.initial_peers:
            raise
        return config, None
    if config.network.initial_peers:
        if tiny:
            raise ConfigError("--tiny and --initial-peers: a run that goes on keeps its sizes; leave one out")
        return config, origins
    return load_new(config_path, flags, tiny=tiny), None


def parse_duration_s(text: str, flag: str) -> float:
    """Return the seconds that a text such as 30ms, 15s, 1.5m or 2h says.

    Raises:
        ConfigError: it says none; the message names the flag.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)", text.strip())
    if found is None:
        raise ConfigError(f"{flag} {text}: not a duration; write 30ms, 15s, 10m or 1h")
    return float(found[1]) * _UNITS_S[found[2]]
