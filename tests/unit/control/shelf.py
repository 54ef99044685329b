"""A store that all registries of a test share, and a clock for them."""

from __future__ import annotations

from collections import Counter

import anyio
import anyio.lowlevel
from tests.alongside import until

from shoal.clock import SystemClock
from shoal.control.record_checker import RecordChecker
from shoal.control.records import VerifiedRecord
from shoal.errors import BootstrapError
from shoal.telemetry.registry import MetricRegistry

NAMESPACE = "n" * 64
ADDRESSES = ("unix:/a",)
Shelf = dict[str, dict[str, tuple[float, bytes]]]


class BriefClock(SystemClock):
    """Real wall time; the pauses between two reads only yield."""

    async def sleep_s(self, duration_s: float) -> None:
        await anyio.sleep(min(duration_s, 0.001))


class ShelfStore:
    """What a DHT node does, on a shared dictionary."""

    def __init__(self, shelf: Shelf, peer: str) -> None:
        self.alive = True
        self.maddrs = (f"/maddr/of/{peer}",)
        self.clock_difference_s: float | None = None
        self.clock_differences = {}
        self.revivals = 0
        self.full = False
        self.num_stored: Counter[str] = Counter()
        self._shelf = shelf
        self._peer = peer
        self._checker = RecordChecker(NAMESPACE, str.encode, SystemClock(), MetricRegistry())

    async def store(self, topic: str, value: bytes, expires_unix_s: float) -> bool:
        await anyio.lowlevel.checkpoint()
        self.num_stored[topic] += 1
        records = self._shelf.setdefault(topic, {})
        old_expiry_unix_s, _ = records.get(self._peer, (0.0, b""))
        if self.full or expires_unix_s <= old_expiry_unix_s:
            return False
        assert self._checker.check(topic.encode(), self._peer, value, expires_unix_s)
        records[self._peer] = (expires_unix_s, value)
        return True

    async def get(self, topics: tuple[str, ...], holders: int | None, age_s: float) -> tuple[VerifiedRecord, ...]:
        await anyio.lowlevel.checkpoint()
        found = [self._checker.accept(t, p, value) for t in topics for p, (_, value) in self._shelf.get(t, {}).items()]
        return tuple(opened for opened in found if opened is not None)

    async def revive(self) -> None:
        self.revivals += 1
        if self.revivals < 2:
            raise BootstrapError("not yet")
        self.alive = True


async def registry_has(shelf: Shelf) -> None:
    """Wait until something is stored."""
    await until(lambda: shelf)
