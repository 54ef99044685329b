"""What the machines have in common: events in, effects out, and a time at which they want to be asked.

    message --> receive --.
    loss    --> lost    --+--> effects, for the driver to carry out in their order
    time    --> tick    --'
                  ^-- not before `wake_at_s`

`transport.drive` does the last line for all of them. What a machine is told besides has names of its own. One to which
time means nothing, as the member of a round, has the first two without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from shoal.ids import PeerId

_Message = TypeVar("_Message", contravariant=True)
_Effect = TypeVar("_Effect", covariant=True)


class Machine(Protocol[_Message, _Effect]):
    """Decides one thing, without I/O and without a clock: `now_s` is monotonic, and never goes back."""

    @property
    def wake_at_s(self) -> float:
        """When to call `tick` if no event comes before (monotonic); infinite if only an event changes anything."""
        ...

    def receive(self, peer: PeerId, message: _Message, now_s: float, /) -> Sequence[_Effect]:
        """Take what a peer has said; what is not, or no longer, of this machine's business has no effect."""
        ...

    def lost(self, peer: PeerId, now_s: float, /) -> Sequence[_Effect]:
        """The connection to a peer has ended."""
        ...

    def tick(self, now_s: float, /) -> Sequence[_Effect]:
        """`wake_at_s` has come; afterwards it lies ahead."""
        ...
