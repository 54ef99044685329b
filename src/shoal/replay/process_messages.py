"""What a replay and its processes say to each other, over a socket each, in `runtime.frames`.

replay                    process
  ReplayStart ------------->
  <---------- Found, StepDone    in the order of the actions
  <------------------ Reached    for each record, and once more when there is no further action
  end of the stream ------->     ends at once, as by the lifeline
"""

from __future__ import annotations

import msgspec

from shoal.replay.own_code import NamedCode
from shoal.replay.verdict import Difference


class ReplayStart(msgspec.Struct, frozen=True):
    """The first and only message to a process.

    Attributes:
        process: the number of the receiver.
        homes: the process of each generation.
        link_fds: the receiver's ends of the sockets to all other processes.
        named: it may import.
    """

    directory: str
    process: int
    homes: list[int]
    link_fds: dict[int, int]
    named: NamedCode


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """A step is computed, as far as its first stage goes."""

    round: int


class Found(msgspec.Struct, frozen=True, tag=True):
    """Something is not as the logs say, by the action with this number."""

    action: int
    difference: Difference


class Reached(msgspec.Struct, frozen=True, tag=True):
    """A record's round is over; None: there is no further action."""

    round: int | None


class ReplayFailed(msgspec.Struct, frozen=True, tag=True):
    """It cannot go on."""

    reason: str


Report = StepDone | Found | Reached | ReplayFailed
