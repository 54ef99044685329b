"""Who is read from: what has been received and not been taken is bounded, for each connection and for all together."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Unread(Generic[Key]):
    """The bytes of received frames that the consumer has not taken. Decisions only.

    A connection is not read from any more when a frame of it brings its own bytes above its limit, or those of all
    above theirs; it is read again when both have fallen to a half. One whose frames were all taken is always read.
    """

    def __init__(self, max_each_bytes: int, max_total_bytes: int) -> None:
        self._max_each_bytes = max_each_bytes
        self._max_total_bytes = max_total_bytes
        self._bytes: dict[Key, int] = {}
        self._total_bytes = 0
        self._stopped: set[Key] = set()

    def received(self, key: Key, num_bytes: int) -> bool:
        """Count a frame; return whether its connection is not to be read from now."""
        self._bytes[key] = self._bytes.get(key, 0) + num_bytes
        self._total_bytes += num_bytes
        if self._bytes[key] > self._max_each_bytes or self._total_bytes > self._max_total_bytes:
            self._stopped.add(key)
            return True
        return False

    def taken(self, key: Key, num_bytes: int) -> list[Key]:
        """Count a frame that was taken; return the connections to be read from again."""
        self._bytes[key] -= num_bytes
        if not self._bytes[key]:
            del self._bytes[key]
        self._total_bytes -= num_bytes
        if not self._stopped:
            return []
        has_room = self._total_bytes * 2 <= self._max_total_bytes
        resumed = [
            stopped
            for stopped in (self._stopped if has_room else {key} & self._stopped)
            if not self._bytes.get(stopped) or (has_room and self._bytes[stopped] * 2 <= self._max_each_bytes)
        ]
        self._stopped.difference_update(resumed)
        return resumed
