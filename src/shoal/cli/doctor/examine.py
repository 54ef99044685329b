"""All checks of a host at once, within a few seconds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import anyio

from shoal.cli.doctor.checking import diagnosis
from shoal.cli.doctor.diagnosis import Diagnosis, skipped
from shoal.cli.doctor.facts import Facts, nothing_seen
from shoal.cli.doctor.host_checks import HOST_CHECKS
from shoal.cli.doctor.host_facts import (
    addresses_of,
    compiler_for,
    configuration,
    daemon_file,
    devices_of,
    hub_for,
    key_file_at,
    lan_of,
    misread,
    said_servers,
    see_host,
    stage_room,
)
from shoal.cli.doctor.swarm_checks import SWARM_CHECKS
from shoal.cli.doctor.swarm_facts import see_swarm
from shoal.clock import Deadline, SystemClock
from shoal.config import Config
from shoal.errors import ConfigError
from shoal.identity import load_swarm_key

WITHIN_S: Final = 6.0
"""What is not known then is said to be unknown. The start of this program and the end of p2pd make it 8 s at most."""
CHECKS: Final = (*HOST_CHECKS, *SWARM_CHECKS)


def unread(error: ConfigError) -> Diagnosis:
    """Return the diagnosis of a host whose configuration cannot be read: of what would the others be checks?"""
    facts = nothing_seen(WITHIN_S, "the configuration cannot be read")
    facts.configuration = misread(error)
    return diagnosis("", CHECKS, facts)


async def examine(
    config: Config, origins: Mapping[str, str], *, are_remembered: bool = False, within_s: float = WITHIN_S
) -> Diagnosis:
    """Look at everything, and judge it.

    Args:
        origins: names the keys that the user sets.
        are_remembered: nobody has named the initial peers; the newest run of this host has left them.
        within_s: when what is not known yet is left out.
    """
    facts = nothing_seen(within_s)
    facts.are_remembered = are_remembered
    with anyio.move_on_after(within_s):
        await _see(facts, config, origins, Deadline.after(SystemClock(), within_s))
    return diagnosis(config.experiment_prefix, CHECKS, facts)


async def _see(facts: Facts, config: Config, origins: Mapping[str, str], deadline: Deadline) -> None:
    facts.configuration = configuration(config, origins)
    facts.key = key_file_at(config.network.swarm_key_file)
    see_host(facts, config, origins)

    async def note(fact: str, look: Callable[[], Awaitable[object]]) -> None:
        try:
            setattr(facts, fact, await look())
        except OSError as error:
            # A full disk, or no more processes: another check says so.
            setattr(facts, fact, skipped(f"that cannot be looked at here: {error.strerror or error}"))

    async def see_run() -> None:
        joined = await see_swarm(facts, config, origins, _key(config), tasks)
        whole = joined or (config if any(key.startswith("model.") for key in origins) else None)
        facts.compiler = compiler_for(whole)
        if whole is None:
            facts.room = skipped("what a stage needs is not known without the run's configuration")
        else:
            await note("room", lambda: stage_room(whole, said_servers(config, origins), deadline.remaining_s()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(note, "addresses", lambda: addresses_of(config))
        tasks.start_soon(note, "daemon", daemon_file)
        tasks.start_soon(note, "devices", lambda: devices_of(config, deadline.remaining_s()))
        tasks.start_soon(note, "lan", lambda: lan_of(config, _key(config)))
        tasks.start_soon(note, "hub", lambda: hub_for(config, origins))
        tasks.start_soon(see_run)


def _key(config: Config) -> bytes | None:
    try:
        return load_swarm_key(config.network.swarm_key_file)
    except ConfigError:
        return None
