"""`shoal stop`, `pause`, `resume-run`, `checkpoint`: tells a run what to do, from any host with the swarm's key, or
from its client's host without.

a run of this host -> its client's Unix socket -> Steered
           '-> no client of it here, or --initial-peers: its client over TLS -> Steered
               (where it was found last, else where the registry says)
"""

from __future__ import annotations

import getpass
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from shoal.cli.asking import ask_here
from shoal.cli.runs_here import choose, living_runs, nothing_here
from shoal.clock import SystemClock
from shoal.errors import ConfigError, RemoteError
from shoal.wire.messages.control import Order, Steer, Steered

if TYPE_CHECKING:
    from shoal.config import Config

_ANSWER_S = 5.0
"""A client that is started again listens within this time."""

LoadConfig = Callable[[], "tuple[Config, Mapping[str, str]]"]


def steer(what: Order, wanted: str, load: LoadConfig, *, elsewhere: bool) -> int:
    """Tell a run what to do, say what was done, and return the exit code.

    Args:
        wanted: the run, or how its name begins; empty: the only one.
        load: returns the configuration, and what sets each key; called only where the run's client is elsewhere.
        elsewhere: the user has said where the swarm is.

    Raises:
        ConfigError: there is no such run, or no key; or nothing says which run, or where it is.
        BootstrapError: the swarm cannot be joined.
        RemoteError: its client does not do it, or does not answer.
    """
    runs = [] if elsewhere else living_runs()
    note = choose(wanted, runs)
    order = Steer(secrets.randbits(32), what, _me())
    if note is not None and note.hosts == "client":
        answer, problem = anyio.run(ask_here, note, order, Steered, _ANSWER_S, SystemClock())
        run_id, logs = note.run_id, note.log_dir
    else:
        config, origins = load()
        if note is None and not elsewhere and not config.network.initial_peers:
            raise ConfigError(nothing_here(wanted, runs))
        folder = None if note is None else Path(note.log_dir)
        name = wanted if note is None else note.run_id
        run_id, answer, problem = _from_elsewhere(name, order, config, origins, folder)
        logs = "the run's folder on its client's host"
    if answer is None:
        raise RemoteError(f"the client of run {run_id} does not answer: {problem or 'there is none'}")
    if answer.refused:
        raise RemoteError(f"run {run_id}: {answer.refused}")
    print(_done(what, run_id, answer, logs))
    return 0


def _from_elsewhere(
    wanted: str, order: Steer, config: Config, origins: Mapping[str, str], folder: Path | None
) -> tuple[str, Steered | None, str]:
    """Reach the client over the network.

    Args:
        folder: of the run's servers on this host; None: there are none.
    """
    from shoal import log
    from shoal.cli.known_peers import with_known_peers
    from shoal.cli.observing import SwarmObserver
    from shoal.identity import load_swarm_key

    config = with_known_peers(config, origins, folder)
    observer = SwarmObserver(config, load_swarm_key(config.network.swarm_key_file), SystemClock())
    log.configure("steering", None)
    return anyio.run(observer.tell, wanted, order, Steered, _obeys, backend_options={"use_uvloop": True})


def _obeys(answer: Steered) -> bool:
    return not answer.refused


def _me() -> str:
    """Return who gives the order, for the people who read it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user has a number, and no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[:100]


def _done(what: Order, run_id: str, answer: Steered, logs: str) -> str:
    where = f"in round {answer.round}" if answer.round else "before its first round"
    match what:
        case "stop":
            return (
                f"run {run_id} stops {where}: its model is saved and all hosts leave; model and summary.json go to "
                f"{logs}"
            )
        case "pause" if answer.already:
            return f"run {run_id} is paused already, {where}"
        case "pause":
            return (
                f"run {run_id} is paused {where}: steps that have begun are finished, no other one begins, nobody "
                "leaves; `shoal resume-run` lets it go on"
            )
        case "resume" if answer.already:
            return f"run {run_id} is not paused, {where}"
        case "resume":
            return f"run {run_id} goes on {where}"
        case "checkpoint":
            return (
                f"run {run_id}, {where}: a checkpoint of the next record is wanted; `shoal checkpoints` lists it when "
                "it is written"
            )
