"""The weights that a server's stage begins from: of this host's files, of the hub, or of peers."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass

import anyio

from shoal.averaging.contents import Contents
from shoal.averaging.starts import Starts, record_stands
from shoal.checkpoint.model_layout import stage_layouts
from shoal.checkpoint.start_weights import StartWeights, fill_start
from shoal.clock import Clock
from shoal.config.schema import Config
from shoal.errors import WeightsMissing
from shoal.events.base import tell
from shoal.events.state import WeightsElsewhere
from shoal.ids import PeerId
from shoal.pipeline.configured_stage import Fill
from shoal.runtime.device_thread import DeviceThread
from shoal.server.replica import LocalReplica
from shoal.swarm.view import SwarmView
from shoal.transport.base import Endpoint, PeerLost
from shoal.transport.dispatch import Rest, dispatch

logger = logging.getLogger(__name__)

BuildReplica = Callable[[Fill | None], Awaitable[LocalReplica]]
"""Builds a replica that begins with this; with None it waits for the record that stands."""


@dataclass(eq=False, repr=False)
class ServerWeights:
    """What a server of a run with `model.pretrained` knows of D_0.

    Attributes:
        starts: Gives the weights of this server's stage to others.
    """

    config: Config
    genesis: str
    _: KW_ONLY
    endpoint: Endpoint
    device: DeviceThread
    clock: Clock
    view: Callable[[], SwarmView]
    notice: Callable[[str], None]

    def __post_init__(self) -> None:
        self.starts = Starts(
            Contents(self.endpoint, self.clock),
            self.genesis,
            self.config.num_stages,
            view=self.view,
            notice=self.notice,
        )

    async def built(self, stage: int, build: BuildReplica) -> LocalReplica:
        """Build a replica of a stage with its weights, wherever they are.

        Raises:
            WeightsMissing: They are not here, and quantised stages get none from peers.
            Exception: What `build` raises.
        """
        if record_stands(self.view()):
            return await build(None)
        try:
            replica = await build(fill_start)
        except WeightsMissing as error:
            if self.config.quant is not None:
                raise
            tell(logger, WeightsElsewhere(stage, str(error)), self.notice)
            replica = await build(await self._fetched(stage))
        if self.config.quant is None and replica.member.offered_round == 0:
            self.starts.offer(stage, replica.state.base.values)
        return replica

    @asynccontextmanager
    async def heard(self, endpoint: Endpoint) -> AsyncGenerator[Collection[PeerId]]:
        """Inside, before there is a replica, what peers say about D_0 is heard. Yields those that are connected."""
        connected: set[PeerId] = set()

        def lost(event: PeerLost) -> None:
            connected.discard(event.peer)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(dispatch, endpoint, (self.starts, Rest()), connected.add, lost)
            tasks.start_soon(self.starts.run)
            yield connected
            tasks.cancel_scope.cancel()

    async def _fetched(self, stage: int) -> Fill | None:
        weights = StartWeights(self.config)
        layouts = await self.device.run(stage_layouts, self.config)
        layout = layouts[stage]
        vectors = await self.starts.fetch(stage, layout, lambda found: weights.are_right(layout, found))
        return None if vectors is None else lambda _, module: weights.fill_from(module, vectors)
