"""What the fuzzer needs of a parser: inputs made from a seed, and somebody who has them parsed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from random import Random


class Parser(ABC):
    """One parser, and its valid inputs."""

    name: str

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    @property
    def reached(self) -> Mapping[str, int]:
        """How many inputs came how far, where a parser tells: by the reason for which they were refused."""
        return {}

    @abstractmethod
    def make(self, random: Random) -> bytes:
        """Return a wrong input (sometimes a valid one, by chance)."""

    @abstractmethod
    def feed(self, data: bytes, random: Random) -> bool:
        """Have `data` parsed; returns whether the parser took it.

        Args:
            random: cuts the input into reads, for parsers that read in parts.

        Raises:
            InvariantViolation: the parser did what no input may bring it to.
            Exception: whatever the parser raises that is not its own error.
        """
