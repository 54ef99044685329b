"""The copies of one mirror: the state of each stage, fetched stage after stage, and given to whoever asks.

    order -> waits for its turn -> averages of the round, or the whole state -> verified -> offered in the older's place
                 ^                              '- nobody gives it: when the swarm has changed -'
                 '------------------------------------------------------------------------------'

One stage is fetched at a time, so that beside what is held only one state is in memory, and no link has to carry more.
What is under way is brought to its end although a newer record has been committed: a mirror on a slow link would
otherwise hold nothing ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import anyio
import anyio.to_thread

from shoal.averaging.contents import Contents
from shoal.averaging.replica_state import Contribution, OuterState, outer_optimizer, outer_step
from shoal.averaging.round_average import Device
from shoal.averaging.stage_fetch import StageFetch, state_bytes
from shoal.averaging.state_donor import StateDonor
from shoal.checkpoint.model_layout import StageLayout
from shoal.config.diloco import OuterOptimConfig
from shoal.control.membership import Membership
from shoal.events.base import emit, tell
from shoal.events.mirror import MirrorHolds, MirrorTooSmall
from shoal.optim.flat import FlatLayout
from shoal.optim.fragments import Fragment
from shoal.runtime.waking import Signal
from shoal.swarm.round_effects import Fetch
from shoal.wire.messages.round import StageHashes

logger = logging.getLogger(__name__)

_ARRIVING = 2
"""So many states fit into what fetching one takes beside those that are held: the next state, the averages that lead to
it, and what the outer step computes with."""


@dataclass(frozen=True)
class _Copy:
    record_hash: str
    hashes: StageHashes
    state: OuterState


@dataclass(kw_only=True, eq=False, repr=False)
class StageCopies:
    """The states of all stages.

    Attributes:
        read_layouts: returns the tensors of each stage; takes long, and is called in a thread.
        free_bytes: returns the memory that is free on this host; 0: not known.
        on_held: told of each stage and record whose bytes are here and offered.
        on_idle: told when nothing is under way any more.
        notice: tells the user what he may want to act on.
        layouts: what was read; empty before anything is fetched.
    """

    contents: Contents
    fetch: StageFetch
    membership: Membership
    outer: OuterOptimConfig
    device: Device
    read_layouts: Callable[[], Sequence[StageLayout]]
    free_bytes: Callable[[], int]
    on_held: Callable[[int, str], None]
    on_idle: Callable[[], None]
    notice: Callable[[str], None]
    layouts: Sequence[StageLayout] = field(default=(), init=False)
    _copies: dict[int, _Copy] = field(default_factory=dict[int, _Copy])
    _donors: dict[int, StateDonor] = field(default_factory=dict[int, StateDonor])
    _ordered: dict[int, Fetch] = field(default_factory=dict[int, Fetch])  # in the order in which they are fetched
    _in_vain: dict[int, Fetch] = field(default_factory=dict[int, Fetch])
    _newest: dict[int, str] = field(default_factory=dict[int, str])
    _fetching: tuple[int, anyio.CancelScope] | None = None
    _is_too_small: bool = False
    _is_taking: bool = False
    _changed: Signal = field(default_factory=Signal)

    def order(self, stage: int, order: Fetch) -> None:
        """Have the state of a stage fetched that a record names, in place of what is still to be fetched of it."""
        goes_on = not order.starts_anew and order.record.previous == self._newest.get(stage)
        self._newest[stage] = order.record_hash
        self._in_vain.pop(stage, None)
        self._ordered[stage] = order
        if self._fetching is not None and self._fetching[0] == stage and not goes_on:
            self._fetching[1].cancel()
        self._changed.notify()

    def state(self, stage: int) -> OuterState:
        """What is held of a stage, of which something is held."""
        return self._copies[stage].state

    @property
    def is_idle(self) -> bool:
        """Whether nothing is fetched, and nothing waits for its turn: the rest has come, or nobody gives it."""
        return not self._ordered and not self._is_taking

    async def run(self) -> None:
        """Fetch until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._try_again)
            while True:
                while self._ordered:
                    stage = next(iter(self._ordered))
                    self._is_taking = True
                    await self._take(stage, self._ordered.pop(stage))
                    self._is_taking = False
                self.on_idle()
                await self._changed.wait()

    # -- parts

    async def _try_again(self) -> None:
        """Whenever the swarm has changed, somebody may give what nobody gave before."""
        while True:
            await self.membership.changed()
            if self._in_vain:
                self._ordered |= {stage: order for stage, order in self._in_vain.items() if stage not in self._ordered}
                self._in_vain.clear()
                self._changed.notify()

    async def _take(self, stage: int, order: Fetch) -> None:
        if not self.layouts:
            self.layouts = await anyio.to_thread.run_sync(self.read_layouts)
        if not self._has_room():
            return
        copy = self._copies.get(stage)
        is_next = copy is not None and copy.record_hash == order.record.previous and not order.starts_anew
        base = (copy.state, copy.hashes) if copy is not None and is_next else None
        state: OuterState | None = None
        with anyio.CancelScope() as scope:
            self._fetching = stage, scope
            layout = self.layouts[stage]
            successor = partial(self._successor, layout.parameters)
            state = await self.fetch.fetch_ordered(stage, layout, order, base, successor)
        self._fetching = None
        if state is not None:
            self._hold(stage, order.record.round, _Copy(order.record_hash, order.hashes, state))
            emit(logger, MirrorHolds(stage, order.record.round, order.record_hash))
            self.on_held(stage, order.record_hash)
        elif stage not in self._ordered:
            self._in_vain[stage] = order

    def _hold(self, stage: int, round: int, copy: _Copy) -> None:
        self._copies[stage] = copy
        donor = self._donors.setdefault(stage, StateDonor(self.contents, stage, self.fetch.num_fragments))
        donor.hold(round, copy.record_hash, copy.state)

    async def _successor(
        self, parameters: FlatLayout, state: OuterState, average: Contribution, fragment: Fragment
    ) -> OuterState:
        return await self.device.run(outer_step, outer_optimizer(self.outer, parameters), state, average, fragment)

    def _has_room(self) -> bool:
        """Whether this host has the memory for what is not here yet; says so once if it has not."""
        sizes = [state_bytes(layout) for layout in self.layouts]
        missing = sum(size for stage, size in enumerate(sizes) if stage not in self._copies)
        needed, free = missing + _ARRIVING * max(sizes), self.free_bytes()
        is_too_small = bool(free) and needed > free
        if is_too_small and not self._is_too_small:
            tell(logger, MirrorTooSmall(needed / 1e6, free / 1e6), self.notice)
        self._is_too_small = is_too_small
        return not is_too_small
