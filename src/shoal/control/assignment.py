"""A server without a given stage finds one: waits until it sees the others, then follows `swarm.assignment`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import anyio
import msgspec

from shoal.control.membership import Membership
from shoal.control.records import StageRecord
from shoal.control.registry import Registry
from shoal.errors import ConfigError
from shoal.ids import PeerId, StageIndex
from shoal.swarm.assignment import assign
from shoal.swarm.view import SwarmView

logger = logging.getLogger(__name__)

SETTLE_S = 1.0
# While fewer servers are seen than are known to start, the wait is longer by this factor.
_MISSING_FACTOR = 3.0


class StageChooser:
    """Chooses a stage for one server."""

    def __init__(
        self,
        registry: Registry,
        peer: PeerId,
        record: StageRecord,
        num_stages: int,
        *,
        num_servers: int | None = None,
        stage_bytes: Sequence[int] = (),
        settle_s: float = SETTLE_S,
    ) -> None:
        """Prepare.

        Args:
            registry: running; the record is announced through it.
            peer: this server.
            record: of this server, with `stage` None.
            num_stages: stages are 0..num_stages-1.
            num_servers: how many servers are known to start, so that nobody needs to wait for more; None: not known.
            stage_bytes: memory that each stage needs; empty: any fits.
            settle_s: without a change of servers for so long, those that are seen are all there are.
        """
        self._registry = registry
        self._membership: Membership = registry.membership
        self._peer = peer
        self._record = record
        self._num_stages = num_stages
        self._num_servers = num_servers
        self._stage_bytes = stage_bytes
        self._settle_s = settle_s

    async def choose(self) -> StageIndex:
        """Announce this server as a candidate, wait for the others, and announce and return the stage that it takes.

        Raises:
            ConfigError: no stage fits into this server's memory.
        """
        self._registry.advertise(self._record)
        with self._membership.eager():
            settle_s = self._settle_s * (1.0 if self._num_servers is None else _MISSING_FACTOR)
            await self._settled(self._complete, settle_s)
        stage = assign(self._membership.view, self._num_stages, self._stage_bytes).get(self._peer)
        if stage is None:
            needed = min(self._stage_bytes, default=0)
            raise ConfigError(
                f"no stage fits into the {self._record.free_memory_bytes} bytes of free memory here: the smallest one "
                f"needs {needed}; cut the model into more stages (model_pipeline.stages) or use a larger machine"
            )
        logger.info("stage.chosen", extra={"stage": stage, "servers": self._membership.view.num_servers})
        self._registry.advertise(msgspec.structs.replace(self._record, stage=stage))
        return stage

    def _complete(self, view: SwarmView) -> bool:
        return self._num_servers is not None and view.num_servers >= self._num_servers

    async def _settled(self, done: Callable[[SwarmView], bool], settle_s: float) -> None:
        """Return when `done`, or when the servers and their stages have not changed for `settle_s`."""
        seen = _servers(self._membership.view)
        while not (self._sees_itself() and done(self._membership.view)):
            with anyio.move_on_after(settle_s) as timer:
                while _servers(self._membership.view) == seen:
                    await self._membership.changed()
            if timer.cancelled_caught:
                return
            seen = _servers(self._membership.view)

    def _sees_itself(self) -> bool:
        view = self._membership.view
        return view.replica(self._peer) is not None or any(c.peer == self._peer for c in view.candidates)


def _servers(view: SwarmView) -> tuple[object, ...]:
    return (tuple(c.peer for c in view.candidates), tuple((r.peer, r.stage) for r in view.replicas))
