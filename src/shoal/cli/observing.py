"""A look at a swarm from any host with its key, by a command that takes no part in it.

initial peers -> registry, read without announcing anything -> one question to the client, over TLS
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal.cli.asking import Answer, ask
from shoal.cli.host_network import LOOPBACK_MADDRS
from shoal.cli.run_files import LOCAL_MARK
from shoal.clock import Clock, Deadline, SystemClock
from shoal.config import Config, config_to_json, load_config
from shoal.config.start import RoleStart
from shoal.control.dht import DhtNode
from shoal.control.greeting import Greeter
from shoal.control.initial_peers import require_reachable
from shoal.control.join import open_registry, require_same_swarm
from shoal.control.membership import Membership
from shoal.control.peers_file import PEERS_FILE, read_peers_file
from shoal.control.records import topics
from shoal.errors import BootstrapError, ConfigError
from shoal.identity import Identity
from shoal.ids import RunId
from shoal.runtime.run_dir import RunDir
from shoal.swarm.view import SwarmView
from shoal.transport.endpoint import open_endpoint
from shoal.transport.reach import why_unreachable
from shoal.transport.tls import tls_contexts
from shoal.wire.messages import Message

_FIND_S = 10.0
"""How long the registry is asked for a run: the initial peers are in the swarm, and answer at once unless their hosts
are very busy."""
_ANSWER_S = 10.0
_PAUSE_S = 0.3


def with_known_peers(config: Config, origins: Mapping[str, str], folder: Path | None = None) -> Config:
    """Return a configuration with initial peers: without any, those of the newest run that this host has a folder of,
    and that run's prefix and key file, as far as they are not given.

    Args:
        folder: of the run that is meant; None: the newest one's.

    Raises:
        ConfigError: there is no such run.
    """
    if config.network.initial_peers:
        return config
    files = config.log_dir.glob(f"*/{PEERS_FILE}") if folder is None else (folder / PEERS_FILE,)
    left = {path: read_peers_file(path.parent) for path in files}
    seen = [path for path, peers in left.items() if peers and not (path.parent / LOCAL_MARK).exists()]
    newest = max(seen, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        raise ConfigError(
            f"nothing says where the swarm is: no run in {folder or config.log_dir} has left its addresses (one of "
            "run-local is seen on its own host only); give --initial-peers as the client's host has printed them, or "
            "--log-dir"
        )
    peers = left[newest]
    network, prefix = config.network, config.experiment_prefix
    if (resolved := newest.parent / "config.yaml").is_file():
        known = load_config(resolved, (), {})
        prefix = prefix if "experiment_prefix" in origins else known.experiment_prefix
        if "network.swarm_key_file" not in origins:
            network = network.model_copy(update={"swarm_key_file": known.network.swarm_key_file})
    network = network.model_copy(update={"initial_peers": peers})
    return config.model_copy(update={"experiment_prefix": prefix, "network": network})


async def look(
    config: Config,
    swarm_key: bytes,
    question: Message,
    kind: type[Answer],
    check: Callable[[SwarmView], None] = lambda _: None,
) -> tuple[SwarmView, Answer | None, str]:
    """Return what the registry says, and what the client of the run answers, or why it says nothing.

    Args:
        check: raises if this is not the run that is meant; then nothing is asked.

    Raises:
        BootstrapError: the swarm cannot be joined, or announces no run; says why.
    """
    clock = SystemClock()
    await require_reachable(config.network.initial_peers, clock, _say)
    with RunDir() as run_dir:
        observer = Observer(config, swarm_key, clock, Identity.generate(), run_dir)
        view = await observer.view()
        check(view)
        return (view, *await observer.ask(view, question, kind))


def _say(text: str) -> None:
    """Tell whoever waits how far it is, beside what is printed in the end."""
    print(text, file=sys.stderr, flush=True)


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
        membership = Membership(self.clock)
        async with self._node() as node:
            await require_same_swarm(
                node, Greeter(self.swarm_key, config.experiment_prefix), config.network.initial_peers
            )
            deadline = Deadline.after(self.clock, _FIND_S)
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
        if membership.view.run is None:
            raise BootstrapError(
                f"the swarm is there, but announces no run called {config.experiment_prefix}: "
                "it has ended, or has not begun"
            )
        return membership.view

    async def ask(self, view: SwarmView, question: Message, kind: type[Answer]) -> tuple[Answer | None, str]:
        """Return what the client says, or why it says nothing."""
        client, run = view.clients[0] if view.clients else None, view.run
        if client is None or run is None:
            return None, ""
        answer, problem = None, ""
        async with open_endpoint(
            identity=self.identity,
            run_id=RunId(run.run_id),
            role="observer",
            unix_path=self.run_dir.socket_path("observer"),
            swarm_key=self.swarm_key,
        ) as endpoint:
            answer, problem = await ask(endpoint, client.hop, question, kind, _ANSWER_S)
        if answer is None:
            contexts = tls_contexts(self.identity, self.swarm_key)
            return None, await why_unreachable(client.hop, contexts) or problem
        return answer, ""

    @asynccontextmanager
    async def _node(self) -> AsyncGenerator[DhtNode]:
        """Give a node that others need not be able to join through."""
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
        async with open_registry(start, self.identity, self.clock, peers, LOOPBACK_MADDRS) as (node, _):
            yield node
