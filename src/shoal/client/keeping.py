"""Keeps the state of a stage that no server holds, until the stage has servers again.

    Leave -> others hold the newest record: MayLeave
         '-> it is the last: fetch its state -> keep it, give it to newcomers -> MayLeave
                                  '-> a newer record was committed meanwhile: fetch that one
    the run is resumed -> read each stage from the checkpoint -> keep it, give it to newcomers

A newcomer asks the clients as it asks the replicas of its stage, and gets it by the same transfer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import anyio
import anyio.to_thread

from shoal.averaging.contents import Contents
from shoal.averaging.coordinator import RoundCoordinator, RoundOutcome
from shoal.averaging.replica_state import OuterState
from shoal.averaging.stage_fetch import StageFetch, state_bytes
from shoal.averaging.state_donor import StateDonor
from shoal.checkpoint.model_layout import StageLayout, stage_layouts
from shoal.checkpoint.stored import StoredCheckpoint
from shoal.client.ledger import Ledger
from shoal.client.watch import Watch
from shoal.config.schema import Config
from shoal.errors import RemoteProtocolError, StorageError
from shoal.events.stages import StageKept, StageNotKept, StageRead, StageReleased
from shoal.ids import PeerId
from shoal.runtime.memory import shortage
from shoal.runtime.waking import Mailbox, Signal
from shoal.swarm.records import Tip, outcome_of, record_hash
from shoal.swarm.resumption import is_superseded, stays_held
from shoal.transport.base import Received
from shoal.wire.messages.control import Leave, MayLeave
from shoal.wire.messages.round import SignedRecord


@dataclass(frozen=True)
class _KeptState:
    round: int
    record_hash: str
    state: OuterState
    donor: StateDonor


@dataclass(eq=False, repr=False)
class Keeping:
    """The states that one client keeps. A `transport.dispatch.Handler`.

    Attributes:
        contents: gives what is kept to newcomers.
        coordinator: names the holders of the newest record, and is told what this client keeps.
        checkpoint: from which the run was resumed; `run` reads it.
        changed: notified when something is handed over, or somebody is gone.
    """

    config: Config
    contents: Contents
    coordinator: RoundCoordinator
    fetch: StageFetch
    ledger: Ledger
    watch: Watch
    checkpoint: StoredCheckpoint | None = None
    _layouts: list[StageLayout] = field(default_factory=list[StageLayout])
    _kept: dict[int, _KeptState] = field(default_factory=dict[int, _KeptState])
    _leaving: dict[PeerId, Leave] = field(default_factory=dict[PeerId, Leave])
    _refused: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])
    _to_fetch: Mailbox[int] = field(default_factory=Mailbox[int])
    _awaited: set[int] = field(default_factory=set[int])
    _going: set[PeerId] = field(default_factory=set[PeerId])
    changed: Signal = field(default_factory=Signal, init=False)

    def __post_init__(self) -> None:
        self._endpoint = self.contents.endpoint
        if self.checkpoint is not None:
            # Before anything is read: what is safe on a disk is not lost, however long reading it takes.
            manifest = self.checkpoint.manifest
            for stage in range(self.config.num_stages):
                self.coordinator.keep(stage, Tip(manifest.round, manifest.record, self.checkpoint.signed))

    def state(self, stage: int, digest: str) -> OuterState | None:
        """Return what is kept of a stage, if it is the state of this record."""
        kept = self._kept.get(stage)
        return kept.state if kept is not None and kept.record_hash == digest else None

    @property
    def is_handing_over(self) -> bool:
        """Whether the last state of a stage is being fetched."""
        return bool(self._awaited)

    @property
    def is_letting_go(self) -> bool:
        """Whether a server that may leave, since its state is kept here, has not ended yet."""
        return bool(self._going)

    # -- events

    def receive(self, event: Received) -> bool:
        """Take a server's word that it leaves.

        Raises:
            RemoteProtocolError: the sender serves no such stage.
        """
        if not isinstance(event.message, Leave):
            return False
        self._leave(event.peer, event.message)
        return True

    def peer_lost(self, peer: PeerId) -> None:
        self._leaving.pop(peer, None)
        self._going.discard(peer)
        self.changed.notify()

    async def run(self) -> None:
        """Read what the checkpoint has, and fetch what is to be kept, until cancelled.

        Raises:
            StateMismatch: the checkpoint is not what it was.
            StorageError: it cannot be read.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._drop_what_is_old)
            if self.checkpoint is not None:
                tasks.start_soon(self._read, self.checkpoint)
            async for stage in self._to_fetch:
                await self._take_over(stage)
                self._awaited.discard(stage)
                for peer in [peer for peer, said in self._leaving.items() if said.stage == stage]:
                    self._answer(peer, stage)
                self.changed.notify()

    # -- parts

    def _leave(self, peer: PeerId, message: Leave) -> None:
        stage = message.stage
        if self.coordinator.stages.get(peer, stage) != stage or not 0 <= stage < self.config.num_stages:
            raise RemoteProtocolError(f"{peer} leaves stage {stage}, which it does not serve")
        if peer not in self._leaving:
            self.watch.leaves(peer, stage)
        self._leaving[peer] = message
        self._answer(peer, stage)

    def _answer(self, peer: PeerId, stage: int) -> None:
        if self.coordinator.holders is None:
            # It takes the run over, or goes on after a restart: who holds what is not known yet.
            self._endpoint.post(peer, MayLeave(stage, 0, False, refused="the client does not know yet what stands"))
            return
        standing = self.coordinator.standing
        if standing is None or self._others_hold(stage):
            self._endpoint.post(peer, MayLeave(stage, 0 if standing is None else standing.record.round, True))
            return
        round, digest = standing.record.round, record_hash(standing.signed)
        if self.state(stage, digest) is not None:
            self._going.add(peer)
            self._endpoint.post(peer, MayLeave(stage, round, True, digest))
            return
        refused_for, reason = self._refused.get(stage, ("", ""))
        if refused_for == digest:
            self._endpoint.post(peer, MayLeave(stage, round, False, refused=reason))
            return
        if stage not in self._awaited:
            self._awaited.add(stage)
            self._to_fetch.put(stage)
        self._endpoint.post(peer, MayLeave(stage, round, False))

    def _others_hold(self, stage: int) -> bool:
        """Whether a server that stays holds the record that stands."""
        return stays_held(stage, self._holders, self._all_leaving)

    @property
    def _holders(self) -> Mapping[PeerId, int]:
        return self.coordinator.holders or {}

    @property
    def _all_leaving(self) -> set[PeerId]:
        """Also those that have not said it themselves yet: who is let go since they stay is no donor any more."""
        return self._leaving.keys() | {peer for said in self._leaving.values() for peer in said.others}

    async def _take_over(self, stage: int) -> None:
        """Fetch the state of the record that stands, from the servers that leave, unless it is here or cannot be."""
        standing = self.coordinator.standing
        if standing is None or self._others_hold(stage):
            return
        record, digest = standing.record, record_hash(standing.signed)
        outcome = outcome_of(record, stage)
        if outcome is None or self.state(stage, digest) is not None:
            return
        layout = (await self._every_layout())[stage]
        state = None
        if short := shortage(state_bytes(layout)):
            reason = f"the client's host {short}"
        else:
            reason = f"no server gives its state after round {record.round}"
            state = await self.fetch.fetch(stage, layout, record, digest)
        if state is None:
            self._refused[stage] = (digest, reason)
            self.ledger.note(StageNotKept(stage, record.round, reason))
            return
        self._keep(stage, record.round, standing.signed, state)
        self.ledger.note(StageKept(stage, record.round, digest))

    async def _read(self, checkpoint: StoredCheckpoint) -> None:
        """Give newcomers what the checkpoint has, unless the run has gone on from it before."""
        standing, digest = self.coordinator.standing, checkpoint.manifest.record
        if standing is None or record_hash(standing.signed) != digest:
            return
        layouts, round = await self._every_layout(), checkpoint.manifest.round
        if short := shortage(sum(map(state_bytes, layouts))):
            raise StorageError(
                f"the client's host {short} for the checkpoint's model, until servers have taken it over: free some "
                "there, or resume on another host"
            )
        for stage, layout in enumerate(layouts):
            try:
                state = OuterState(*await anyio.to_thread.run_sync(checkpoint.vectors, stage, layout))
            except OSError as error:
                raise StorageError(f"the checkpoint of round {round} cannot be read: {error}") from error
            self._keep(stage, round, standing.signed, state)
            self.ledger.note(StageRead(stage, round, digest))

    async def _every_layout(self) -> list[StageLayout]:
        if not self._layouts:
            self._layouts = await anyio.to_thread.run_sync(stage_layouts, self.config)
        return self._layouts

    def _keep(self, stage: int, round: int, signed: SignedRecord, state: OuterState) -> None:
        if (older := self._kept.get(stage)) is not None:
            older.donor.release()
        donor = StateDonor(self.contents, stage)
        digest = record_hash(signed)
        donor.hold(round, digest, state)
        self._kept[stage] = _KeptState(round, digest, state, donor)
        self.coordinator.keep(stage, Tip(round, digest, signed))

    async def _drop_what_is_old(self) -> None:
        """What is kept of a record is needed until the next one is committed, whose bytes the stage's members hold."""
        while True:
            await self.coordinator.changed()
            standing: RoundOutcome | None = self.coordinator.standing
            round = 0 if standing is None else standing.record.round
            holders, leaving = self._holders, self._all_leaving
            for stage in [
                stage for stage, kept in self._kept.items() if is_superseded(stage, kept.round, round, holders, leaving)
            ]:
                self._kept.pop(stage).donor.release()
                self.coordinator.keep(stage, None)
                self.ledger.note(StageReleased(stage, round))
