"""Where a replica's states come from and where they go, beside the rounds in which it takes part itself.

D_0 is computed by each replica.
record -> fetch: the peers that hold its state       -> hold: newcomers get it from here
round begins -> resumable: a buddy's snapshot of it
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from shoal.averaging.replica_state import Contribution, OuterState
from shoal.swarm.round_effects import Fetch
from shoal.swarm.snapshots import Base
from shoal.wire.messages.round import StageHashes
from shoal.wire.messages.snapshot import Snapshot

Successor = Callable[[OuterState, Contribution], Awaitable[OuterState]]
"""The outer step: the state that follows from one and the averages of the round after it."""

TakeState = Callable[[OuterState, StageHashes], Awaitable[None]]
"""Given a state that is complete, with its hashes."""


class Resumable(NamedTuple):
    """What a new generation goes on from."""

    snapshot: Snapshot
    content: Tensor


class StateSource(Protocol):
    """What a `RoundMember` knows of all that."""

    # -- a state that a record names

    def follow(self, order: Fetch) -> bool:
        """A newer record is committed; returns whether what is being fetched leads to it, and `fetch` goes on to it."""
        ...

    async def fetch(
        self,
        order: Fetch,
        template: OuterState,
        base: tuple[OuterState, StageHashes] | None,
        successor: Successor,
        take: TakeState,
    ) -> Fetch:
        """Get the state that a record names for this stage, or that of a newer record that it was told to `follow`.

        One call at a time: a caller that wants another state cancels it.

        Args:
            order: Names the record and the hashes of its state.
            template: Has the sizes and types of the state.
            base: The state of the record before, with its hashes; None: it is not here.
            take: Is given the state, verified; and again if a newer record has been committed meanwhile.

        Returns:
            The order of the record whose state was taken last.
        """
        ...

    # -- a snapshot of a round that is under way

    @property
    def may_resume(self) -> bool:
        """Whether there may be one: then the member begins its first round itself."""
        ...

    async def settled(self, base: Base) -> None:
        """Return when the snapshot that continues this state is here, or will not come."""
        ...

    def resumable(self, base: Base) -> Resumable | None:
        """The replica begins to train from this state: return the snapshot that continues it, if there is one, once."""
        ...

    # -- what the replica holds

    @property
    def is_followed(self) -> bool:
        """Whether somebody is on the way, and may need the averages of the next round."""
        ...

    def hold(self, round: int, record_hash: str, state: OuterState | None, average: Contribution | None) -> None:
        """The replica has gone to this record.

        Args:
            state: That the record names; its vectors do not change any more. None: the stage was restored from another.
            average: The ring's result in the record's round, if it is at hand; does not change any more either.
        """
        ...

    def release(self) -> None:
        """This machine's memory is not to be trusted: nobody gets anything of it."""
        ...
