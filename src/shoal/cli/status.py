"""`shoal status`: how a run is, seen from any host that has its swarm's key, or from its client's host without."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import anyio
import msgspec

from shoal import log
from shoal.cli.exits import DONE
from shoal.cli.known_peers import with_known_peers
from shoal.cli.listing_runs import ended_lines
from shoal.cli.observing import SwarmObserver
from shoal.cli.output import plain_json, without_controls
from shoal.cli.runs_here import choose, living_runs, nothing_here
from shoal.cli.watching import Finder, FinderHere, SwarmFinder, look_once
from shoal.clock import SystemClock
from shoal.config import Config
from shoal.control.peers_file import PEERS_FILE
from shoal.control.swarm_status import lines_of
from shoal.errors import BootstrapError, ConfigError
from shoal.events.base import SUMMARY_FILE
from shoal.identity import load_swarm_key
from shoal.runtime.run_dir import RunNote

MIN_INTERVAL_S = 0.2


def print_status(config: Config, origins: Mapping[str, str], wanted: str = "", *, as_json: bool) -> int:
    """Print how the run is, and return the exit code.

    Args:
        config: gives initial peers, swarm key and prefix; without peers, those of this host's newest run.
        origins: names the keys that are set.
        wanted: a run of this host, or how its name begins; empty: the newest.

    Raises:
        ConfigError: there is no such run, no swarm key, or nothing says where the swarm is; for JSON also if the runs
            that are meant have ended, which is said else.
        BootstrapError: the swarm cannot be joined, or announces no run; says why.
        RemoteError: the client of a run of this host does not answer.
    """
    log.configure("status", None)
    found = _found(config, origins, wanted)
    if isinstance(found, str):
        return _told_ended(found, as_json=as_json)
    try:
        status = anyio.run(look_once, found, backend_options={"use_uvloop": True})
    except BootstrapError:
        if wanted or config.network.initial_peers or not _ended_here(config):
            raise
        return _told_ended(_only_ended(config), as_json=as_json)
    if as_json:
        print(plain_json(msgspec.json.encode(status).decode()))
    else:
        print("\n".join(map(without_controls, lines_of(status))))
    return DONE


def watch_status(
    config: Config, origins: Mapping[str, str], wanted: str = "", *, interval_s: float, as_json: bool
) -> int:
    """Show how the run is until it has ended or the user ends it; return the exit code. Args and raises: see
    `print_status`."""
    if interval_s < MIN_INTERVAL_S:
        raise ConfigError(f"--interval {interval_s:g}: give seconds, at least {MIN_INTERVAL_S}")
    from shoal.cli.screen.watching import watch

    log.configure("status", None)
    try:
        found = _found(config, origins, wanted)
        if isinstance(found, str):
            return _told_ended(found, as_json=as_json)
        return anyio.run(watch, found, interval_s, as_json, backend_options={"use_uvloop": True})
    except KeyboardInterrupt:
        return DONE  # before it has begun to look


def finder_of(config: Config, origins: Mapping[str, str], wanted: str = "") -> Finder:
    """Return how the run is found that a user means, without peers one of this host.

    Args:
        wanted: its name, or how it begins; empty: the newest.

    Raises:
        ConfigError: there is no such run or it has ended, no swarm key, or nothing says where the swarm is.
    """
    found = _found(config, origins, wanted)
    if isinstance(found, str):
        raise ConfigError(found)
    return found


def _found(config: Config, origins: Mapping[str, str], wanted: str) -> Finder | str:
    """Return as `finder_of`, or if all runs that are meant have ended what to say of them; raises as it else."""
    if wanted:
        note = _named_here(wanted, config)
        if note is None:
            return _only_ended(config, wanted)
    else:
        note = None if config.network.initial_peers else _newest_here(config, origins)
    if note is not None and note.hosts == "client":
        return FinderHere(note)
    try:
        config = with_known_peers(config, origins, None if note is None else Path(note.log_dir))
    except ConfigError:
        if note is not None or not (ended := _only_ended(config)):
            raise
        return ended
    return SwarmFinder(SwarmObserver(config, load_swarm_key(config.network.swarm_key_file), SystemClock()))


def _ended_here(config: Config) -> bool:
    """Return whether the newest run that this host has addresses of is its client's and has ended."""
    newest = max(config.log_dir.glob(f"*/{PEERS_FILE}"), key=lambda path: path.stat().st_mtime, default=None)
    return newest is not None and (newest.parent / SUMMARY_FILE).exists()


def _only_ended(config: Config, wanted: str = "") -> str:
    """Return what to say where all runs that are meant have ended; empty: this host has none of them."""
    lines = ended_lines(config.log_dir, wanted)
    if not lines:
        return ""
    which = f"run {wanted} has ended" if wanted else "no run of this host goes on, these have ended"
    return "\n".join((f"{which}; for one of other hosts give --initial-peers", *lines))


def _told_ended(said: str, *, as_json: bool) -> int:
    """Print it; raises ConfigError for a program, which gets the status of a run or none."""
    if as_json:
        raise ConfigError(said)
    print(without_controls(said))
    return DONE


def _named_here(wanted: str, config: Config) -> RunNote | None:
    """Return the living run of this host that has this name; None: it has ended."""
    if config.network.initial_peers:
        raise ConfigError(f"{wanted} and initial peers: a swarm has one run, so leave one of them out")
    runs = living_runs()
    note = choose(wanted, runs)
    if note is None and not _only_ended(config, wanted):
        raise ConfigError(nothing_here(wanted, runs))
    return note


def _newest_here(config: Config, origins: Mapping[str, str]) -> RunNote | None:
    """Return the newest run of this host, unless the user says of which swarm it is to be."""
    if "experiment_prefix" in origins or "network.swarm_key_file" in origins:
        return None
    notes = living_runs()
    if "log_dir" in origins:
        notes = [note for note in notes if Path(note.log_dir).parent.resolve() == config.log_dir.resolve()]
    return notes[-1] if notes else None
