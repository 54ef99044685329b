"""What a run leaves of its model: the parameters of its last record, fetched from a replica of each stage and written.

    last record on the disk -> stage 0: fetch -> write -> forget -> stage 1 ... -> put into place
                                           '-> nobody holds it: say so, and leave no folder

It is fetched as a newcomer fetches it, over the connections that the client has with servers of all hosts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread

from shoal.averaging.journal import last_record
from shoal.averaging.stage_fetch import StageFetch, state_bytes
from shoal.checkpoint.model_folder import ModelFolder, has_model_of
from shoal.checkpoint.model_layout import stage_layouts
from shoal.client.checkpoints import LastCheckpoint
from shoal.client.keeping import Keeping
from shoal.client.ledger import Ledger
from shoal.client.succession import Succession
from shoal.clock import Clock
from shoal.config.schema import Config
from shoal.errors import RecordRejected, ShoalError, StateMismatch, StorageError
from shoal.events.run import ModelFetching, ModelMissing, ModelWritten
from shoal.pipeline.out_of_memory import DEVICE_ERRORS, is_out_of_memory
from shoal.runtime.memory import shortage
from shoal.runtime.role import leaves
from shoal.swarm.records import record_hash
from shoal.wire.messages.round import Record, SignedRecord

FOLDER = "model"
_MOST_S = 3600.0
_SAY_EVERY_S = 5.0
_MAX_DEATHS = 2
"""Of clients of a run that is trained: what kills two of them there, mostly want of memory, kills the next one too."""


class ModelLeft(NamedTuple):
    """What there is of the model at the end of a run.

    Attributes:
        folder: None if there is no model.
        round: the round whose record has these parameters; 0 without a folder.
        reason: why there is no model, as a sentence for the user.
    """

    folder: Path | None = None
    round: int = 0
    reason: str = ""


@dataclass(eq=False, repr=False)
class ModelExport:
    """Leaves the model of a run in its log folder.

    Attributes:
        log_dir: holds the records; the model's folder is made in it.
        keeping: has the state of stages whose servers have left.
        deaths: how many clients before this one have died when the run was trained.
    """

    config: Config
    run_id: str
    log_dir: Path
    fetch: StageFetch
    keeping: Keeping
    clock: Clock
    ledger: Ledger
    deaths: int = 0
    left: ModelLeft = field(default_factory=lambda: ModelLeft(reason="the run has not ended"), init=False)

    @asynccontextmanager
    async def left_at_the_end(self, succession: Succession, checkpoint: LastCheckpoint) -> AsyncGenerator[None]:
        """Leave the model when what is done inside is over or has failed, if that is the run's end.

        Args:
            checkpoint: is written at the same time.
        """

        async def leave() -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(checkpoint.left)
                await self.leave()

        try:
            yield
        except* ShoalError:
            if succession.ends_run:
                await leave()
            raise
        if succession.ends_run:
            await leave()

    async def leave(self) -> None:
        """Fetch and write; what hinders it is said, and is no failure of the run."""
        try:
            newest = await anyio.to_thread.run_sync(last_record, self.log_dir)
            if newest is None:
                self.left = ModelLeft(reason="no round was completed, so there is nothing but the initial parameters")
                return
            if self.deaths >= _MAX_DEATHS:
                self._say_missing(f"{self.deaths} clients were killed while they fetched it, mostly for want of memory")
                return
            with anyio.move_on_after(_MOST_S):
                self.left = await self._leave(*newest)
                self.ledger.note(ModelWritten(str(self.left.folder), self.left.round))
                return
            reason = f"its parameters had not all come within {_MOST_S:.0f} s"
        except* (RecordRejected, StateMismatch, StorageError, OSError) as errors:
            reason = "; ".join(map(str, leaves(errors)))
        except* DEVICE_ERRORS as errors:
            if not all(map(is_out_of_memory, leaves(errors))):
                raise
            reason = "; ".join(str(error) or "the client's host has no memory left" for error in leaves(errors))
        self._say_missing(reason)

    def _say_missing(self, reason: str) -> None:
        self.left = ModelLeft(reason=reason)
        self.ledger.note(ModelMissing(reason))

    async def _leave(self, record: Record, signed: SignedRecord) -> ModelLeft:
        if await anyio.to_thread.run_sync(has_model_of, self.log_dir / FOLDER, record_hash(signed)):
            return ModelLeft(self.log_dir / FOLDER, record.round)  # by an earlier start of this client
        layouts = await anyio.to_thread.run_sync(stage_layouts, self.config)
        path = self.log_dir / FOLDER
        folder = await anyio.to_thread.run_sync(ModelFolder, path, layouts)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._say, sum(map(state_bytes, layouts)))
                for stage, layout in enumerate(layouts):
                    if short := shortage(state_bytes(layout)):
                        raise MemoryError(f"the client's host {short} for stage {stage}")
                    digest = record_hash(signed)
                    state = self.keeping.state(stage, digest) or await self.fetch.fetch(stage, layout, record, digest)
                    if state is None:
                        raise StateMismatch(
                            f"nobody holds the parameters of stage {stage} after round {record.round} any more"
                        )
                    vectors = (state.parameters_N, state.floats_F, state.integers_I)
                    del state
                    await anyio.to_thread.run_sync(folder.write_stage, stage, vectors, record)
                    del vectors
                tasks.cancel_scope.cancel()
            await anyio.to_thread.run_sync(folder.commit, self.config, self.run_id, record, signed)
        finally:
            folder.discard()
        return ModelLeft(path, record.round)

    async def _say(self, num_bytes: int) -> None:
        """Say how far it is, where it takes long."""
        while True:
            await self.clock.sleep_s(_SAY_EVERY_S)
            done = min(1.0, self.fetch.fetched_bytes / max(1, num_bytes))
            self.ledger.note(ModelFetching(round(done, 3), num_bytes))
