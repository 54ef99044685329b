"""The parts of a mirror, put together: what the role's process runs, and a cluster in one process as well.

client -- Follow --> MirrorMachine -- FetchStage --> StageCopies -- fetched --> MirrorMachine -- Mirrored --> client
                                                         '-- Want, Read ... --> replicas, clients, other mirrors
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import anyio
from torch import Tensor

from shoal.averaging.contents import Contents
from shoal.averaging.inner_fetch import InnerFetch
from shoal.averaging.round_average import Device
from shoal.averaging.signing import unsealer
from shoal.averaging.stage_fetch import StageFetch, state_bytes
from shoal.averaging.starts import Starts
from shoal.checkpoint.model_layout import stage_layouts
from shoal.checkpoint.start_weights import read_start
from shoal.checkpoint.store import CheckpointStore
from shoal.clock import Clock
from shoal.config.schema import Config
from shoal.config.shared import shared_configuration
from shoal.control.membership import Membership
from shoal.events.base import tell
from shoal.events.mirror import MirrorTooSmall
from shoal.ids import NO_BALLOT, PeerId, RunId
from shoal.mirror.checkpoints import Checkpoints, WholeRecord
from shoal.mirror.copies import StageCopies
from shoal.runtime.memory import free_memory_bytes
from shoal.swarm.content_transfer import TransferSettings
from shoal.swarm.mirror import FetchStage, MirrorEffect, MirrorMachine
from shoal.swarm.records import genesis_hash
from shoal.swarm.round_effects import Send
from shoal.swarm.view import NO_BASE
from shoal.transport.base import Endpoint, Received
from shoal.transport.dispatch import Handler
from shoal.wire.messages.control import Heartbeat
from shoal.wire.messages.mirror import Follow, LastKept, RunCounts

logger = logging.getLogger(__name__)


class Mirror:
    """One mirror. A `transport.dispatch.Handler`, one of its `handlers`.

    Args:
        authority: of the swarm; warrants the signers of the run's records.
        device: computes outer steps.
        membership: names those who have states.
        on_held: told which record it holds, or a newer one, of every stage, when that changes.
        store: gets checkpoints; None: none are written.
        notice: tells the user what he may want to act on.
        transfer: None: as configured.
    """

    def __init__(
        self,
        *,
        config: Config,
        run_id: str,
        authority: PeerId,
        endpoint: Endpoint,
        device: Device,
        membership: Membership,
        clock: Clock,
        on_held: Callable[[int], None] = lambda _: None,
        store: CheckpointStore | None = None,
        notice: Callable[[str], None] = lambda _: None,
        transfer: TransferSettings | None = None,
    ) -> None:
        self._config = config
        self._endpoint = endpoint
        self._device = device
        self._notice = notice
        self._membership = membership
        self._num_stages = config.num_stages
        self._on_held = on_held
        self._held_round = NO_BASE
        self._unseal = unsealer(run_id, authority)
        self._machine = MirrorMachine(config.num_stages, self._unseal)
        transfer = transfer or TransferSettings(timeout_s=config.diloco.load_state_timeout_s)
        self._contents = Contents(endpoint, clock, transfer.chunk_bytes)
        self._fetch = StageFetch(self._contents, membership, transfer, config.diloco.fragments)
        self._inner = InnerFetch(self._contents, membership)
        self._copies = StageCopies(
            contents=self._contents,
            fetch=self._fetch,
            membership=membership,
            outer=config.diloco.outer_optim,
            device=device,
            read_layouts=partial(stage_layouts, config),
            free_bytes=free_memory_bytes,
            on_held=self._fetched,
            on_idle=self._idle,
            notice=notice,
        )
        self._starts: Starts | None = None
        if config.begins_from_weights and config.quant is None:
            genesis = genesis_hash(RunId(run_id), config.run.seed, shared_configuration(config), authority)
            self._starts = Starts(
                Contents(endpoint, clock, transfer.chunk_bytes),
                genesis,
                config.num_stages,
                view=lambda: membership.view,
                read=self._read_start,
            )
        self._whole: WholeRecord | None = None
        self._checkpoints: Checkpoints | None = None
        if store is not None:
            self._checkpoints = Checkpoints(
                config,
                store,
                lambda: self._copies.layouts,
                clock,
                notice,
                self._inner,
                lambda: self._copies.is_idle,
                self._say_kept,
                endpoint.metrics,
            )

    @property
    def handlers(self) -> tuple[Handler, ...]:
        """Who takes the endpoint's events."""
        parts = self._fetch, self._inner, self._contents, self
        return parts if self._starts is None else (self._starts, *parts)

    @property
    def held_rounds(self) -> dict[int, int]:
        """By stage the round of the record whose bytes are here."""
        return {stage: tip.round for stage, tip in self._machine.held.items()}

    async def run(self) -> None:
        """Work until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._contents.run)
            tasks.start_soon(self._copies.run)
            tasks.start_soon(self._dial_newcomers)
            if self._starts is not None:
                tasks.start_soon(self._starts.run)
            if self._checkpoints is not None:
                tasks.start_soon(self._checkpoints.run)

    async def finish(self) -> None:
        """The run ends, or this mirror: write the last checkpoint.

        Raises:
            StorageError: its disk takes nothing.
        """
        if self._checkpoints is not None:
            await self._checkpoints.finish()

    # -- events

    def receive(self, event: Received) -> bool:
        """Take a client's word which record stands.

        Raises:
            RemoteProtocolError: it names no record of this run, or acts under another peer's ballot.
        """
        if isinstance(event.message, RunCounts):
            self._counted(event.peer, event.message)
            return True
        if not isinstance(event.message, Follow):
            return False
        self._do(self._machine.follow(event.peer, event.message))
        self._say_held()
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """A client, or a donor, is gone, whatever the registry says."""
        self._machine.lost(peer)
        if any(client.peer == peer for client in self._membership.view.clients):
            # Clients are looked for all the same: their word is waited for.
            self._membership.unlinked(peer)
        else:
            self._membership.lost(peer)

    def peer_up(self, peer: PeerId) -> None:
        """There is a connection with a peer."""
        self._membership.found(peer)

    # -- parts

    def _counted(self, client: PeerId, counts: RunCounts) -> None:
        follows = client == self._machine.promised.peer
        if follows and self._checkpoints is not None:
            self._checkpoints.counted(counts)
        elif counts.is_last:
            # One that can write none has said so when it began.
            lacks = "" if follows else "its mirror follows another client"
            self._endpoint.post(client, LastKept(counts.record_hash, lacks))

    def _say_kept(self, kept: LastKept) -> None:
        if self._machine.promised != NO_BALLOT:
            self._endpoint.post(self._machine.promised.peer, kept)

    def _idle(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.idle()

    async def _read_start(self, stage: int) -> Sequence[Tensor] | None:
        """The weights of a stage that the run begins from, if they are on this host and it has the memory."""
        layouts = await self._device.run(stage_layouts, self._config)
        needed, free = state_bytes(layouts[stage]), free_memory_bytes()
        if free and needed > free:
            tell(logger, MirrorTooSmall(needed / 1e6, free / 1e6), self._notice)
            return None
        return await self._device.run(read_start, self._config, stage)

    async def _dial_newcomers(self) -> None:
        """Connect with every replica: it may be unable to dial this host, and want what is held here."""
        dialled: set[PeerId] = set()
        while True:
            hops = {replica.peer: replica.hop for replica in self._membership.view.replicas}
            for peer in hops.keys() - dialled:
                self._endpoint.introduce(hops[peer])
                self._endpoint.post(peer, Heartbeat())
            dialled = set(hops)
            await self._membership.changed()

    def _fetched(self, stage: int, record_hash: str) -> None:
        if self._starts is not None:
            self._starts.withdraw()
        self._do(self._machine.fetched(stage, record_hash))
        self._say_held()

    def _do(self, effects: Sequence[MirrorEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self._endpoint.post(peer, message)
                case FetchStage(stage, order):
                    self._copies.order(stage, order)

    def _say_held(self) -> None:
        self._look_whole()
        rounds = self.held_rounds
        held_round = min(rounds.values()) if len(rounds) == self._num_stages else NO_BASE
        if held_round != self._held_round:
            self._held_round = held_round
            self._on_held(held_round)

    def _look_whole(self) -> None:
        """Take note of the record whose bytes are here of every stage."""
        held = self._machine.held
        tips = set(held.values())
        tip = tips.pop() if len(held) == self._num_stages and len(tips) == 1 else None
        if tip is None or tip.signed is None:
            whole = None
        elif self._whole is not None and self._whole.hash == tip.hash:
            return
        else:
            states = {stage: self._copies.state(stage) for stage in held}
            whole = WholeRecord(self._unseal(tip.signed), tip.signed, states)
        self._whole = whole
        if self._checkpoints is not None:
            self._checkpoints.held(whole)
