"""Looks at the swarm from inside, without taking part in it.

DHT: greeting, clock and records at once -> a long question | the client, over TLS
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import anyio

from shoal.cli.asking import ask
from shoal.cli.doctor.diagnosis import Judged, failed, ok, skipped
from shoal.cli.doctor.facts import ClientSeen, Facts, SwarmSeen
from shoal.cli.registry_look import Observer
from shoal.clock import SystemClock
from shoal.config import Config
from shoal.config.shared import adopt_shared
from shoal.control.dht import DhtNode
from shoal.control.greeting import QUESTION_BYTES
from shoal.control.maddrs import peer_in
from shoal.control.membership import Membership
from shoal.control.run_question import unpack_configuration
from shoal.errors import BootstrapError, ConfigError, RecordRejected
from shoal.identity import Identity, swarm_key_fingerprint
from shoal.ids import PeerId, RunId
from shoal.runtime.hardware import machine_name
from shoal.runtime.run_dir import RunDir
from shoal.swarm.view import SwarmView
from shoal.transport.endpoint import open_endpoint
from shoal.transport.reach import why_unreachable
from shoal.transport.tls import tls_contexts
from shoal.wire.messages.control import AskRun, TellRun

_LARGE_BYTES: Final = 64 * 1024
_JOIN_S: Final = 4.0
_READ_S: Final = 3.0
_ANSWER_S: Final = 4.0
_MAX_ASKED: Final = 8


async def see_joined(
    facts: Facts, config: Config, origins: Mapping[str, str], swarm_key: bytes, run_dir: RunDir
) -> Config | None:
    """Join the DHT without being seen, and note what the swarm and its client say; return the configuration of this
    host in the run.
    """
    unknown = skipped(f"the swarm has not said within {facts.within_s:.0f} s what goes on there")
    facts.joined = facts.swarm = facts.client = unknown
    # An initial peer that is left to libp2p may lead nowhere.
    patient = config.network.model_copy(update={"bootstrap_timeout_s": _JOIN_S})
    observer = Observer(
        config.model_copy(update={"network": patient}), swarm_key, SystemClock(), Identity.generate(), run_dir
    )
    maddrs = config.network.initial_peers[:_MAX_ASKED]
    peers = [PeerId(peer) for peer in dict.fromkeys(map(peer_in, maddrs)) if peer]
    try:
        async with observer.node() as node:
            facts.joined = ok("the DHT has been joined")
            facts.swarm = swarm = await _swarm(observer, node, peers)
            async with anyio.create_task_group() as tasks:
                # Where its packets are lost, all that is asked on the same connection waits behind a long question.
                tasks.start_soon(see_large, facts, swarm, node, peers)
                return await _client(facts, observer, swarm.view, origins)
    except (BootstrapError, ConfigError) as error:
        facts.joined = failed(str(error), "see what host.p2pd and swarm.peers say, and whether the run is up")
        facts.swarm = facts.client = skipped("the DHT could not be joined")
        return None


async def see_large(facts: Facts, swarm: SwarmSeen, node: DhtNode, peers: list[PeerId]) -> None:
    """Ask a peer that answers a short question a long one, and note what comes of it.

    One of them has answered as the DHT was joined. If none does any more, a full packet is lost already: small ones
    that wait together leave as one, and all that follows waits behind it.
    """
    takes_large: Judged | bool = False if peers else skipped("no initial peer is named by its id")
    for peer in peers:
        if await node.takes(peer, QUESTION_BYTES):
            takes_large = await node.takes(peer, _LARGE_BYTES)
            break
    facts.swarm = replace(swarm, takes_large=takes_large)


async def _swarm(observer: Observer, node: DhtNode, peers: list[PeerId]) -> SwarmSeen:
    """Ask all that the DHT can say in short, at once."""
    config = observer.config
    prefixes: list[str | None] = []
    memberships: list[Membership] = []
    ahead_s: float | None = None

    async def greet() -> None:
        prefixes.extend(await node.prefixes_of(peers))

    async def compare_clocks() -> None:
        nonlocal ahead_s
        ahead_s = await node.ahead_s()

    async def read() -> None:
        memberships.append(await observer.read(node, _READ_S))

    async with anyio.create_task_group() as tasks:
        for look_for in (greet, compare_clocks, read):
            tasks.start_soon(look_for)
    [membership] = memberships
    return SwarmSeen(
        machine=machine_name(),
        own_prefix=config.experiment_prefix,
        key_fingerprint=swarm_key_fingerprint(observer.swarm_key),
        prefixes=tuple(prefixes),
        # What expires at another time than this host thinks tells it as well.
        ahead_s=node.clock_difference_s if ahead_s is None else ahead_s,
        takes_large=skipped("it was not known in time whether a long question is answered"),
        large_bytes=_LARGE_BYTES,
        view=membership.view,
        other_versions=dict(membership.other_versions),
    )


async def _client(facts: Facts, observer: Observer, view: SwarmView, origins: Mapping[str, str]) -> Config | None:
    """Dial the client, and take from it what all hosts of the run share."""
    run = view.run
    if run is None or not view.clients:
        facts.client = skipped("the swarm has no client now")
        return None
    client = view.clients[0]
    name = view.name_of(client.peer, "client")
    problem = await why_unreachable(client.hop, tls_contexts(observer.identity, observer.swarm_key))
    if problem:
        facts.client = ClientSeen(client, name, problem)
        return None
    told = None
    async with open_endpoint(
        identity=observer.identity,
        run_id=RunId(run.run_id),
        role="observer",
        unix_path=observer.run_dir.socket_path("doctor"),
        swarm_key=observer.swarm_key,
    ) as endpoint:
        told, problem = await ask(endpoint, client.hop, AskRun(), TellRun, _ANSWER_S)
    if told is None:
        facts.client = ClientSeen(client, name, problem)
        return None
    misfit, adopted = "", None
    try:
        adopted = adopt_shared(observer.config, origins, unpack_configuration(told.config), opens_data=False)
    except (ConfigError, RecordRejected) as error:
        misfit = str(error)
    facts.client = ClientSeen(client, name, "", misfit)
    return adopted
