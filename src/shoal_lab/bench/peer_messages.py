"""What a benchmark and its peer processes, its children (`runtime.child`), say to each other.

    benchmark                 peer
      Start ------------------->
      <------------------- Ready   the context of its function is entered
      Call -------------------->
      <------------------- Ready   waits at the barrier
      Go ---------------------->   sent when all peers are there
      <------------------ Result
      end of the stream ------->   leaves the context, and ends

A peer in which something is raised ends, with the traceback in what it has printed.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message: which function to enter, and in which seat."""

    target: str
    index: int
    num_peers: int
    arguments: dict[str, Any]


class Call(msgspec.Struct, frozen=True, tag=True):
    """What to do when all peers are ready."""

    name: str
    args: list[Any]


class Go(msgspec.Struct, frozen=True, tag=True):
    """All peers are ready."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """At the barrier."""


class Result(msgspec.Struct, frozen=True, tag=True):
    """What the call has returned."""

    value: Any


Request = Start | Call | Go
Reply = Ready | Result
