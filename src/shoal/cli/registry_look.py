"""What the registry of a swarm says, read by a command that takes no part in it. It loads hivemind, and so torch."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from shoal.cli.host_network import LOOPBACK_MADDRS
from shoal.clock import Clock, Deadline
from shoal.config import Config, config_to_json
from shoal.control.dht import DhtNode
from shoal.control.greeting import Greeter
from shoal.control.join import open_registry, require_same_swarm
from shoal.control.membership import Membership
from shoal.control.records import topics
from shoal.control.role_start import RoleStart
from shoal.errors import BootstrapError
from shoal.identity import Identity
from shoal.runtime.run_dir import RunDir
from shoal.swarm.view import SwarmView

_FIND_S = 10.0
"""How long the registry is asked for a run: the initial peers are in the swarm, and answer at once unless their hosts
are very busy."""
_ANSWER_S = 10.0
_PAUSE_S = 0.3


async def look_in_registry(config: Config, swarm_key: bytes, clock: Clock) -> SwarmView:
    """Return what the registry says.

    Raises:
        BootstrapError: the swarm cannot be joined, or announces no run.
    """
    with RunDir() as run_dir:
        return await Observer(config, swarm_key, clock, Identity.generate(), run_dir).view()


@dataclass(frozen=True)
class Observer:
    """A peer that announces nothing: nobody waits for it when it is gone."""

    config: Config
    swarm_key: bytes
    clock: Clock
    identity: Identity
    run_dir: RunDir

    async def view(self) -> SwarmView:
        """Return what the registry says.

        Raises:
            BootstrapError: the swarm cannot be joined, or announces no run.
        """
        config = self.config
        async with self.node() as node:
            await require_same_swarm(
                node, Greeter(self.swarm_key, config.experiment_prefix), config.network.initial_peers
            )
            membership = await self.read(node, _FIND_S)
        if membership.view.run is None:
            raise BootstrapError(
                f"the swarm is there, but announces no run called {config.experiment_prefix}: "
                "it has ended, or has not begun; start its client, or name another run with --experiment-prefix"
            )
        return membership.view

    async def read(self, node: DhtNode, within_s: float) -> Membership:
        """Return what the registry says, as soon as it names a run and a client; else what it has said in this time."""
        membership = Membership(self.clock)
        deadline = Deadline.after(self.clock, within_s)
        num_stages = None
        while not deadline.expired():
            run = membership.view.run
            # The client has a topic of its own, which may be found later than that of its run.
            if run is not None and num_stages == run.num_stages and membership.view.clients:
                break
            asked, num_stages = num_stages, 0 if run is None else run.num_stages
            if asked == num_stages:
                await self.clock.sleep_s(_PAUSE_S)
            membership.update(await node.get(topics(num_stages)))
        return membership

    @asynccontextmanager
    async def node(self) -> AsyncGenerator[DhtNode]:
        """Give a node that others need not be able to join through.

        Raises:
            BootstrapError: none of the initial peers answered.
        """
        start = RoleStart(
            run_id="",
            role="observer",
            index=0,
            config_json=config_to_json(self.config),
            identity_key=self.identity.private_bytes,
            swarm_key=self.swarm_key,
            socket_path=str(self.run_dir.socket_path("observer")),
            log_dir="",
        )
        peers = self.config.network.initial_peers
        async with open_registry(start, self.clock, peers, LOOPBACK_MADDRS) as (node, _):
            yield node
