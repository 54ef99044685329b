"""What the function of a peer process sees and offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

Calls = Mapping[str, Callable[..., Any]]
"""What a peer can be called for. Arguments and results are what JSON can carry: numbers, texts, lists, mappings."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Which of the peers a process is.

    Attributes:
        index: 0 .. num_peers - 1.
        arguments: the same for all of them.
    """

    index: int
    num_peers: int
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


PeerMain = Callable[[Seat], AbstractContextManager[Calls]]
"""The function of a peer: a context manager that sets up, gives the calls, and cleans up when there are no more."""
