"""Looks at the initial peers, and from there into the swarm as far as it goes.

What takes part in the DHT (`joined_facts`) is loaded when there is a way to it.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Mapping
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from shoal.cli.doctor.diagnosis import failed, skipped
from shoal.cli.doctor.facts import Facts
from shoal.cli.doctor.host_checks import ip_of
from shoal.cli.doctor.host_facts import is_known
from shoal.config import Config
from shoal.control.initial_peers import Obstacle, look, misspelt, parse, unknown_name
from shoal.runtime.role import leaves
from shoal.runtime.run_dir import RunDir

_JOINED = "shoal.cli.doctor.joined_facts"


async def see_swarm(
    facts: Facts, config: Config, origins: Mapping[str, str], swarm_key: bytes | None, tasks: TaskGroup
) -> Config | None:
    """Go as far into the swarm as it goes, and note what is there; return the configuration of this host in its run.

    Args:
        tasks: in which peers are looked at that take longer than the first one that can be joined at.
    """
    peers = config.network.initial_peers
    if not peers:
        facts.peers = facts.joined = facts.swarm = facts.client = skipped("no initial peer is given: --initial-peers")
        return None
    facts.joined = facts.swarm = facts.client = skipped(
        "the initial peers cannot be joined at" if swarm_key is not None else "without a swarm key nothing can be read"
    )
    looks: dict[str, Obstacle | None] = {maddr: _silent(maddr, facts.within_s) for maddr in peers}
    facts.peers = looks
    looked = anyio.Event()

    async def look_at(maddr: str) -> None:
        place = parse(maddr)
        is_written_well = misspelt(maddr) is None
        if is_written_well and place is not None and ip_of(place.host) is None and not await is_known(place.host):
            looks[maddr] = unknown_name(place)
            return
        [looks[maddr]] = await look((maddr,))
        if looks[maddr] is None:
            looked.set()

    async def look_at_all() -> None:
        async with anyio.create_task_group() as looking:
            for maddr in peers:
                looking.start_soon(look_at, maddr)
        looked.set()

    tasks.start_soon(look_at_all)
    await looked.wait()
    if swarm_key is None or all(looks.values()):
        return None
    facts.joined = facts.swarm = facts.client = skipped(
        f"an initial peer answers, and the DHT was not joined within {facts.within_s:.0f} s: this host or the network "
        "is slow; try again"
    )
    return await _joined(facts, config, origins, swarm_key)


def _silent(maddr: str, within_s: float) -> Obstacle:
    place = parse(maddr)
    where = maddr if place is None else f"{place.host} port {place.port}"
    return Obstacle(
        maddr,
        f"{where}: no answer within {within_s:.0f} s",
        "see whether the run is up there, and whether its host is very busy",
    )


async def _joined(facts: Facts, config: Config, origins: Mapping[str, str], swarm_key: bytes) -> Config | None:
    """Go on in a directory of its own: that of runs may be what is wrong."""
    # hivemind takes seconds to load, in which other looks go on.
    module = await anyio.to_thread.run_sync(importlib.import_module, _JOINED, abandon_on_cancel=True)
    try:
        # Where sockets have short paths, wherever temporary files are.
        with tempfile.TemporaryDirectory(prefix="shoal-", dir="/tmp") as parent, RunDir(Path(parent)) as run_dir:
            return await module.see_joined(facts, config, origins, swarm_key, run_dir)
    except* OSError as errors:
        facts.joined = failed(f"sockets cannot be made in /tmp: {next(leaves(errors))}", "free space there: df /tmp")
        facts.swarm = facts.client = skipped("the DHT could not be joined")
    return None
