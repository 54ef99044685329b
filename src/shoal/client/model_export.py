"""What a run leaves of its model: the parameters of its last record, fetched from a replica of each stage and written.

    last record on the disk -> stage 0: fetch -> write -> forget -> stage 1 ... -> put into place
                                           '-> nobody holds it: say so, and leave no folder

It is fetched as a newcomer fetches it, over the connections that the client has with servers of all hosts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
import torch

from shoal.averaging.journal import last_record
from shoal.averaging.replica_state import Contribution, OuterState
from shoal.averaging.state_sync import StateSync
from shoal.checkpoint.model_folder import ModelFolder
from shoal.checkpoint.model_layout import StageLayout, stage_layouts
from shoal.clock import Clock
from shoal.config.schema import Config
from shoal.control.membership import Membership
from shoal.errors import InvariantViolation, RecordRejected, StateMismatch, StorageError
from shoal.ids import PeerId
from shoal.runtime.role import leaves
from shoal.swarm.records import outcome_of, record_hash
from shoal.swarm.round_effects import Fetch
from shoal.swarm.state_transfer import TransferSettings
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.round import NoState, Record, SignedRecord, StageHashes, StateChunk, StateOffer

logger = logging.getLogger(__name__)

FOLDER = "model"
_LOOK_S = 0.5
_NOBODY_S = 2.0
"""After all replicas of a stage have said that they do not hold the record, or are gone: one may be about to swap."""
_SILENT_S = 30.0
"""Without a word from those that may hold it: they hash a large state before they offer it."""
_MOST_S = 3600.0
_SAY_EVERY_S = 5.0


class ModelLeft(NamedTuple):
    """What there is of the model at the end of a run.

    Attributes:
        folder: Where it is; None: nowhere.
        round: Of the record whose parameters these are; 0 without a folder.
        reason: Why there is none, in words.
    """

    folder: Path | None = None
    round: int = 0
    reason: str = ""


class _NobodyHolds(Exception):
    """No replica gives the state of a stage."""


class StageFetch:
    """Fetches the state that a record names, stage by stage. A `transport.dispatch.Handler`."""

    def __init__(self, endpoint: Endpoint, membership: Membership, clock: Clock) -> None:
        self._endpoint = endpoint
        self._membership = membership
        self._clock = clock
        self._sync: StateSync | None = None
        self._stage = 0
        self._refused: set[PeerId] = set()
        self._heard_s = 0.0
        self.fetched_bytes = 0

    def receive(self, event: Received) -> bool:
        """Take a donor's answer."""
        message = event.message
        if not isinstance(message, StateOffer | NoState | StateChunk):
            return False
        self._heard_s = self._clock.now_s()
        if isinstance(message, NoState):
            self._refused.add(event.peer)
        else:
            self._refused.discard(event.peer)
            self.fetched_bytes += sum(tensor.data.nbytes for tensor in event.tensors)
        return self._sync is None or self._sync.receive(event)

    def peer_lost(self, peer: PeerId) -> None:
        """See `transport.dispatch.Handler`."""
        if self._sync is not None:
            self._sync.peer_lost(peer)

    async def fetch(self, stage: int, layout: StageLayout, record: Record, digest: str) -> OuterState | None:
        """Return the state of a stage, verified; None if nobody gives it."""
        outcome = outcome_of(record, stage)
        if outcome is None:
            return None
        self._stage, self._refused, self._heard_s = stage, set(), self._clock.now_s()
        self._sync = StateSync(
            self._endpoint,
            stage,
            view=lambda: self._membership.view,
            clock=self._clock,
            settings=TransferSettings(),
        )
        found: OuterState | None = None

        async def take(state: OuterState, hashes: StageHashes) -> None:
            nonlocal found
            found = state

        order = Fetch(record, digest, outcome.hashes, follows_held=False)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, tasks.cancel_scope)
                await self._sync.fetch(order, _template(layout), None, _no_successor, take)
                tasks.cancel_scope.cancel()
        finally:
            self._sync = None
        return found

    async def _watch(self, fetching: anyio.CancelScope) -> None:
        """Give up when nobody who is there can give it, or nobody says anything any more."""
        nobody_since_s: float | None = None
        while True:
            await self._clock.sleep_s(_LOOK_S)
            now_s = self._clock.now_s()
            others = {replica.peer for replica in self._membership.view.by_stage(self._stage)} - self._refused
            nobody_since_s = None if others else nobody_since_s or now_s
            is_hopeless = nobody_since_s is not None and now_s - nobody_since_s >= _NOBODY_S
            if is_hopeless or now_s - self._heard_s >= _SILENT_S:
                fetching.cancel()


class ModelExport:
    """Leaves the model of a run in its log folder.

    Attributes:
        left: what there is now.
    """

    def __init__(
        self,
        config: Config,
        run_id: str,
        log_dir: Path,
        *,
        fetch: StageFetch,
        clock: Clock,
        notice: Callable[[str], None],
    ) -> None:
        """Leave nothing yet.

        Args:
            config: of the run.
            run_id: the training job.
            log_dir: has the records; gets the folder.
            fetch: gets the states.
            clock: for saying how far it is.
            notice: tells the user something that stays on the screen.
        """
        self.left = ModelLeft(reason="the run has not ended")
        self._config, self._run_id, self._log_dir = config, run_id, log_dir
        self._fetch = fetch
        self._clock = clock
        self._notice = notice

    async def leave(self) -> None:
        """Fetch and write; what hinders it is said, and is no failure of the run."""
        try:
            newest = await anyio.to_thread.run_sync(last_record, self._log_dir)
            if newest is None:
                self.left = ModelLeft(reason="no round was completed, so there is nothing but the initial parameters")
                return
            with anyio.move_on_after(_MOST_S):
                self.left = await self._leave(*newest)
                logger.info("model.left", extra={"folder": str(self.left.folder), "round": self.left.round})
                return
            reason = f"its parameters had not all come within {_MOST_S:.0f} s"
        except* (_NobodyHolds, RecordRejected, StateMismatch, StorageError, OSError) as errors:
            reason = "; ".join(map(str, leaves(errors)))
        self.left = ModelLeft(reason=reason)
        logger.error("model.not_left", extra={"reason": reason})
        self._notice(f"no model is left: {reason}")

    async def _leave(self, record: Record, signed: SignedRecord) -> ModelLeft:
        layouts = await anyio.to_thread.run_sync(stage_layouts, self._config)
        path = self._log_dir / FOLDER
        folder = await anyio.to_thread.run_sync(ModelFolder, path, layouts)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._say, sum(map(_state_bytes, layouts)))
                for stage, layout in enumerate(layouts):
                    state = await self._fetch.fetch(stage, layout, record, record_hash(signed))
                    if state is None:
                        raise _NobodyHolds(
                            f"nobody holds the parameters of stage {stage} after round {record.round} any more"
                        )
                    vectors = (state.parameters_N, state.floats_F, state.integers_I)
                    del state
                    await anyio.to_thread.run_sync(folder.write_stage, stage, vectors, record)
                    del vectors
                tasks.cancel_scope.cancel()
            await anyio.to_thread.run_sync(folder.commit, self._config, self._run_id, record, signed)
        finally:
            folder.discard()
        return ModelLeft(path, record.round)

    async def _say(self, num_bytes: int) -> None:
        """Say how far it is, where it takes long."""
        while True:
            await self._clock.sleep_s(_SAY_EVERY_S)
            done = min(1.0, self._fetch.fetched_bytes / max(1, num_bytes))
            self._notice(f"fetching the model from the servers: {done:.0%} of {num_bytes / 1e6:,.0f} MB")


def _state_bytes(layout: StageLayout) -> int:
    sizes = [each.numel * each.dtype.itemsize for each in layout]
    return sizes[0] + sum(sizes)


def _template(layout: StageLayout) -> OuterState:
    """Sizes and types of a state; memory that is not touched is not used."""
    parameters, floats, integers = (torch.empty(each.numel, dtype=each.dtype) for each in layout)
    return OuterState(parameters, torch.empty_like(parameters), floats, integers)


async def _no_successor(state: OuterState, average: Contribution) -> OuterState:
    raise InvariantViolation("whoever begins with a whole state needs no averages before a newer record")
