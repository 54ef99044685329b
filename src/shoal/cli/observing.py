"""A look at a swarm from any host with its key, by a command that takes no part in it.

the client where it was found last, or on this host ----------------------.
   '- it does not answer -> initial peers -> registry, read only -> client --'--> one question to it, over TLS

Neither torch nor hivemind is loaded before the registry is needed.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from shoal.cli.asking import Answer, ask
from shoal.clock import Clock
from shoal.config import Config
from shoal.control.initial_peers import require_reachable
from shoal.control.known_client import known_client, remember_client
from shoal.errors import ConfigError
from shoal.identity import Identity
from shoal.ids import RunId
from shoal.runtime.run_dir import RunNote
from shoal.swarm.view import SwarmView
from shoal.transport.base import Endpoint
from shoal.transport.endpoint import open_endpoint
from shoal.transport.reach import why_unreachable
from shoal.transport.tls import tls_contexts
from shoal.transport.unix import open_unix_endpoint
from shoal.wire.messages import Message
from shoal.wire.messages.base import Hop

_ANSWER_S = 10.0
_KNOWN_ANSWER_S = 3.0
"""Of a client that was there before; it costs as much if it has gone and its host says nothing."""


@dataclass(frozen=True)
class ClientTarget:
    """A client, and how it is reached.

    Attributes:
        swarm_key: None: over the Unix socket of its host alone, which only its own user can open.
    """

    run_id: str
    hop: Hop
    swarm_key: bytes | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[Endpoint]:
        """Give an endpoint that dials and is dialled by nobody."""
        identity, run_id = Identity.generate(), RunId(self.run_id)
        if self.swarm_key is None:
            opened = open_unix_endpoint(peer_id=identity.peer_id, run_id=run_id, role="observer", path=None)
        else:
            opened = open_endpoint(
                identity=identity, run_id=run_id, role="observer", unix_path=None, swarm_key=self.swarm_key
            )
        async with opened as endpoint:
            yield endpoint

    async def asked(self, question: Message, kind: type[Answer], within_s: float) -> tuple[Answer | None, str]:
        """Return what it answers, or why it says nothing."""
        async with self.opened() as endpoint:
            return await ask(endpoint, self.hop, question, kind, within_s)

    async def why_unreachable(self) -> str:
        """Return why it can be dialled at none of its addresses; empty: it can be."""
        if self.swarm_key is None:
            return ""
        return await why_unreachable(self.hop, tls_contexts(Identity.generate(), self.swarm_key))


def target_here(note: RunNote) -> ClientTarget:
    """Return the client of a run of this host."""
    return ClientTarget(note.run_id, Hop(note.client, (f"unix:{note.socket}",)))


@dataclass(frozen=True)
class SwarmObserver:
    """Whoever looks at one swarm."""

    config: Config
    swarm_key: bytes
    clock: Clock

    def known(self) -> ClientTarget | None:
        """Return the client where it was found last; None if nothing is known of this swarm."""
        network = self.config.network
        known = known_client(self.swarm_key, self.config.experiment_prefix, network.initial_peers)
        return None if known is None else ClientTarget(known.run_id, known.hop, self.swarm_key)

    async def tell(
        self, wanted: str, order: Message, kind: type[Answer], obeys: Callable[[Answer], bool]
    ) -> tuple[str, Answer | None, str]:
        """Return the run, and what its client answers, or why it says nothing.

        Args:
            wanted: how the run's id begins.
            obeys: whether a client does what it is told; another one may lead by now.

        Raises:
            BootstrapError: the swarm cannot be joined, or announces no run; says why.
            ConfigError: it has another run.
        """
        known = self.known()
        if known is not None and known.run_id.startswith(wanted):
            answer, _ = await known.asked(order, kind, _KNOWN_ANSWER_S)
            if answer is not None and obeys(answer):
                return known.run_id, answer, ""
        view = await self.registry()
        run_id = "" if view.run is None else view.run.run_id
        if not run_id.startswith(wanted):
            raise ConfigError(f"no run {wanted} there: the swarm has run {run_id}")
        target = self.client_of(view)
        if target is None:
            return run_id, None, ""
        answer, problem = await target.asked(order, kind, _ANSWER_S)
        if answer is None:
            return run_id, None, await target.why_unreachable() or problem
        self.remember(view)
        return run_id, answer, ""

    async def registry(self) -> SwarmView:
        """Return what the registry says.

        Raises:
            BootstrapError: the swarm cannot be joined, or announces no run.
        """
        from shoal.cli.registry_look import look_in_registry

        await require_reachable(self.config.network.initial_peers, self.clock, _say)
        return await look_in_registry(self.config, self.swarm_key, self.clock)

    def client_of(self, view: SwarmView) -> ClientTarget | None:
        """Return the client that leads the run of a view."""
        if not view.clients or view.run is None:
            return None
        return ClientTarget(view.run.run_id, view.clients[0].hop, self.swarm_key)

    def remember(self, view: SwarmView) -> None:
        """Keep where the client of a view is: it has answered there."""
        if (target := self.client_of(view)) is None:
            return
        peers = view.maddrs, self.config.network.initial_peers
        with suppress(OSError):  # then the registry is asked again next time
            remember_client(self.swarm_key, self.config.experiment_prefix, target.run_id, target.hop, *peers)


def _say(text: str) -> None:
    """Tell whoever waits how far it is, beside what is printed in the end."""
    print(text, file=sys.stderr, flush=True)
