"""`shoal status`: how the run of a swarm is, seen from any host that has its key.

initial peers -> registry, read without announcing anything -> one question to the client, over TLS -> text or JSON
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import msgspec

from shoal import log
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
from shoal.control.swarm_status import SwarmStatus, lines_of, swarm_status
from shoal.errors import BootstrapError, ConfigError
from shoal.identity import Identity, load_swarm_key
from shoal.ids import RunId
from shoal.runtime.run_dir import RunDir
from shoal.swarm.view import ClientPeer, SwarmView
from shoal.transport.base import PeerLost, Received, TransportEvent
from shoal.transport.endpoint import open_endpoint
from shoal.transport.reach import why_unreachable
from shoal.transport.tls import tls_contexts
from shoal.wire.messages.control import AskStatus, RunStatus

_FIND_S = 5.0
"""How long the registry is asked for a run: the initial peers are in the swarm and answer at once."""
_ANSWER_S = 5.0
_PAUSE_S = 0.3


def print_status(config: Config, origins: Mapping[str, str], *, as_json: bool) -> int:
    """Print how the run is, and return the exit code.

    Args:
        config: gives initial peers, swarm key and prefix; without peers, those of this host's newest run.
        origins: names the keys that are set.

    Raises:
        ConfigError: there is no swarm key, or nothing says where the swarm is.
        BootstrapError: the swarm cannot be joined, or announces no run; says why.
    """
    config = with_known_peers(config, origins)
    swarm_key = load_swarm_key(config.network.swarm_key_file)
    log.configure("status", None)
    status = anyio.run(_look, config, swarm_key, backend_options={"use_uvloop": True})
    if as_json:
        print(msgspec.json.encode(status).decode())
    else:
        print("\n".join(lines_of(status)))
    return 0


def with_known_peers(config: Config, origins: Mapping[str, str]) -> Config:
    """Return a configuration with initial peers: without any, those of the newest run that this host has a folder of,
    and that run's prefix and key file, as far as they are not given.

    Raises:
        ConfigError: there is no such run.
    """
    if config.network.initial_peers:
        return config
    left = {path: read_peers_file(path.parent) for path in config.log_dir.glob(f"*/{PEERS_FILE}")}
    seen = [path for path, peers in left.items() if peers and not (path.parent / LOCAL_MARK).exists()]
    newest = max(seen, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        raise ConfigError(
            f"nothing says where the swarm is: no run in {config.log_dir} has left its addresses (one of run-local is "
            "seen on its own terminal only); give --initial-peers as the client's host has printed them, or --log-dir"
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


async def _look(config: Config, swarm_key: bytes) -> SwarmStatus:
    clock = SystemClock()
    await require_reachable(config.network.initial_peers, clock, _say)
    with RunDir() as run_dir:
        observer = _Observer(config, swarm_key, clock, Identity.generate(), run_dir)
        view = await observer.view()
        answer, problem = await observer.ask(view)
    return swarm_status(config.experiment_prefix, view, answer, problem)


@dataclass(frozen=True)
class _Observer:
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
            num_stages = 0
            while (run := membership.view.run) is None or num_stages != run.num_stages:
                if run is None and deadline.expired():
                    raise BootstrapError(
                        f"the swarm is there, but announces no run called {config.experiment_prefix}: "
                        "it has ended, or has not begun"
                    )
                num_stages = 0 if run is None else run.num_stages
                membership.update(await node.get(topics(num_stages)))
                if membership.view.run is None:
                    await self.clock.sleep_s(_PAUSE_S)
        return membership.view

    async def ask(self, view: SwarmView) -> tuple[RunStatus | None, str]:
        """Return what the client says, or why it says nothing."""
        client, run = view.clients[0] if view.clients else None, view.run
        if client is None or run is None:
            return None, ""
        heard = _Answer(client)
        async with open_endpoint(
            identity=self.identity,
            run_id=RunId(run.run_id),
            role="status",
            unix_path=self.run_dir.socket_path("status"),
            swarm_key=self.swarm_key,
        ) as endpoint:
            endpoint.introduce(client.hop)
            endpoint.post(client.peer, AskStatus())
            with anyio.move_on_after(_ANSWER_S):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(endpoint.events().consume, heard.take)
                    await heard.done.wait()
                    tasks.cancel_scope.cancel()
        if heard.status is None:
            contexts = tls_contexts(self.identity, self.swarm_key)
            return None, await why_unreachable(client.hop, contexts) or heard.problem
        return heard.status, ""

    @asynccontextmanager
    async def _node(self) -> AsyncGenerator[DhtNode]:
        """Give a node that others need not be able to join through."""
        start = RoleStart(
            run_id="",
            role="status",
            index=0,
            config_json=config_to_json(self.config),
            identity_key=self.identity.private_bytes,
            swarm_key=self.swarm_key,
            socket_path=str(self.run_dir.socket_path("status")),
            log_dir="",
        )
        peers = self.config.network.initial_peers
        async with open_registry(start, self.identity, self.clock, peers, LOOPBACK_MADDRS) as (node, _):
            yield node


class _Answer:
    """What comes back from the client."""

    def __init__(self, client: ClientPeer) -> None:
        self.status: RunStatus | None = None
        self.problem = f"no answer within {_ANSWER_S:.0f} s"
        self.done = anyio.Event()
        self._client = client

    def take(self, event: TransportEvent) -> None:
        match event:
            case Received(peer, RunStatus() as status) if peer == self._client.peer:
                self.status, self.problem = status, ""
                self.done.set()
            case PeerLost(peer, reason) if peer == self._client.peer:
                self.problem = reason
                self.done.set()
            case _:
                pass


def _say(text: str) -> None:
    """Tell whoever waits how far it is, beside what is printed in the end."""
    print(text, file=sys.stderr, flush=True)
