"""Fetches the state of a stage as a newcomer of the stage would, and gives up where nobody has it: for the client, and
for mirrors."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio
import torch

from shoal.averaging.contents import Contents
from shoal.averaging.replica_state import Contribution, OuterState
from shoal.averaging.state_sync import StateSync, Successor, donors
from shoal.checkpoint.model_layout import StageLayout
from shoal.control.membership import Membership
from shoal.errors import InvariantViolation
from shoal.ids import PeerId
from shoal.optim.fragments import Fragment
from shoal.swarm.content_transfer import TransferSettings
from shoal.swarm.records import outcome_of
from shoal.swarm.round_effects import Fetch
from shoal.transport.base import Received
from shoal.transport.dispatch import Handler
from shoal.wire.messages.round import Record, StageHashes
from shoal.wire.messages.transfer import Chunk, Have, Missing

_LOOK_S = 0.5
_NOBODY_S = 2.0
"""After nobody is left that may give the state: one that refuses may be about to swap."""
_SILENT_S = 30.0
"""Without a word from those that may hold it; longer of a large state, which they hash before they offer it."""
_HASHED_BYTES_PER_S = 100e6
"""Of a busy host without instructions for it."""


async def _no_successor(state: OuterState, average: Contribution, fragment: Fragment) -> OuterState:
    raise InvariantViolation("whoever begins with a whole state needs no averages before a newer record")


@dataclass(eq=False, repr=False)
class StageFetch(Handler):
    """Fetches the state that a record names, stage by stage. A `transport.dispatch.Handler`, which comes before that of
    the contents: it only hears what donors say.

    Attributes:
        num_fragments: See `StateSync`; only averages depend on it.
    """

    contents: Contents
    membership: Membership
    settings: TransferSettings = field(default_factory=TransferSettings)
    num_fragments: int = 1

    def __post_init__(self) -> None:
        self._clock = self.contents.clock
        self._stage = 0
        self._refused: set[PeerId] = set()
        self._heard_s = 0.0
        self.fetched_bytes = 0

    def receive(self, event: Received) -> bool:
        """Listen to a donor's answer; takes nothing."""
        match event.message:
            case Missing():
                self._refused.add(event.peer)
            case Have() | Chunk():
                self._refused.discard(event.peer)
                self.fetched_bytes += sum(tensor.data.nbytes for tensor in event.tensors)
            case _:
                return False
        self._heard_s = self._clock.now_s()
        return False

    async def fetch(self, stage: int, layout: StageLayout, record: Record, digest: str) -> OuterState | None:
        """Return the state of a stage, verified; None if nobody gives it."""
        outcome = outcome_of(record, stage)
        if outcome is None:
            return None
        return await self.fetch_ordered(stage, layout, Fetch(record, digest, outcome.hashes, follows_base=False))

    async def fetch_ordered(
        self,
        stage: int,
        layout: StageLayout,
        order: Fetch,
        base: tuple[OuterState, StageHashes] | None = None,
        successor: Successor = _no_successor,
    ) -> OuterState | None:
        """Return the state that an order names, verified; None if nobody gives it.

        Args:
            base: the state of the record before, with its hashes, if that is here: the averages of one round do then.
            successor: the outer step; needed with a base.
        """
        self._stage, self._refused, self._heard_s = stage, set(), self._clock.now_s()
        sync = StateSync(
            self.contents,
            stage,
            view=lambda: self.membership.view,
            settings=self.settings,
            num_fragments=self.num_fragments,
        )
        found: OuterState | None = None

        async def take(state: OuterState, hashes: StageHashes) -> None:
            nonlocal found
            found = state

        async with anyio.create_task_group() as tasks:
            silent_s = _SILENT_S + state_bytes(layout) / _HASHED_BYTES_PER_S
            tasks.start_soon(self._watch, sync, tasks.cancel_scope, silent_s)
            await sync.fetch(order, _template(layout), base, successor, take)
            tasks.cancel_scope.cancel()
        return found

    async def _watch(self, sync: StateSync, fetching: anyio.CancelScope, silent_s: float) -> None:
        """Give up when nobody who is there can give it, or nobody says anything any more."""
        nobody_since_s: float | None = None
        while True:
            await self._clock.sleep_s(_LOOK_S)
            now_s = self._clock.now_s()
            asked = donors(self.membership.view, self._stage, self.contents.endpoint.peer_id)
            others = asked.keys() - self._refused - sync.distrusted
            nobody_since_s = None if others else nobody_since_s or now_s
            is_hopeless = nobody_since_s is not None and now_s - nobody_since_s >= _NOBODY_S
            if is_hopeless or now_s - self._heard_s >= silent_s:
                fetching.cancel()


def state_bytes(layout: StageLayout) -> int:
    """Return the bytes of a stage's state."""
    sizes = [each.numel * each.dtype.itemsize for each in layout]
    return sizes[0] + sum(sizes)


def _template(layout: StageLayout) -> OuterState:
    """Sizes and types of a state; memory that is not touched is not used."""
    parameters, floats, integers = (torch.empty(each.numel, dtype=each.dtype) for each in layout)
    return OuterState(parameters, torch.empty_like(parameters), floats, integers)
