"""Every record that reaches this peer passes here: what does not verify is dropped and counted by reason.

The DHT asks for each record that it is to store or that an answer contains (`check`), the reader once more for those
that it uses (`accept`, which also knows the time and the newest sequence number of each peer).
"""

from __future__ import annotations

import logging
import statistics
from collections import OrderedDict
from collections.abc import Callable, Mapping

from shoal.clock import Clock
from shoal.control.records import MAX_TTL_S, TTL_S, Rejection, VerifiedRecord, unseal
from shoal.control.view_builder import label_of
from shoal.events.base import emit
from shoal.events.registry import ClockDiffers, RecordRefused
from shoal.ids import PeerId
from shoal.log import FloodGate
from shoal.telemetry.registry import MetricRegistry

logger = logging.getLogger(__name__)

# hivemind lets clocks differ by 3 s before it refuses a peer.
_CLOCK_SKEW_S = 3.0
# No node with a right clock passes on what has expired so long ago.
_CLEARLY_S = 60.0
_CACHE_ENTRIES = 4096
_MAX_DIFFERENCES = 64
# Copies that lag behind are nothing to warn of: every swarm has them.
_USUAL = (Rejection.EXPIRED, Rejection.OUTDATED)


class RecordChecker:
    """Verifies sealed records of one namespace; remembers verdicts, since the DHT shows the same bytes often.

    Attributes:
        rejected: how many records were dropped, by reason.
        clock_differences: by how much the clock of each of these others is ahead of this host's, and what it is called.
    """

    def __init__(self, namespace: str, key_of: Callable[[str], bytes], clock: Clock, metrics: MetricRegistry) -> None:
        """Start with nothing seen.

        Args:
            key_of: returns the DHT's binary key of a topic.
            clock: its wall clock decides what has expired.
            metrics: counts what is dropped, as `records.dropped` by reason.
        """
        self._namespace = namespace
        self._key_of = key_of
        self._clock = clock
        self._counters = {reason: metrics.counter("records.dropped", reason=reason.value) for reason in Rejection}
        self._gate = FloodGate(logger, clock)
        # The newest sequence number of each peer and topic, and until when an older record could still be alive.
        self._newest: OrderedDict[tuple[PeerId, str], tuple[int, float]] = OrderedDict()
        self.clock_differences: OrderedDict[PeerId, tuple[float, str]] = OrderedDict()
        self._verdicts: OrderedDict[tuple[str, bytes], VerifiedRecord | Rejection] = OrderedDict()

    @property
    def rejected(self) -> Mapping[Rejection, int]:
        """Counts by reason; only reasons that occurred."""
        return {reason: counter.value for reason, counter in self._counters.items() if counter.value}

    @property
    def clock_difference_s(self) -> float | None:
        """By how much the clocks of others are ahead of this host's, as their refused records say; None if none was."""
        differences_s = [ahead_s for ahead_s, _ in self.clock_differences.values()]
        return statistics.median(differences_s) if differences_s else None

    def check(self, key: bytes, subkey: str, value: bytes, expires_unix_s: float) -> bool:
        """Return whether the DHT may store or pass on a record.

        A record that has just expired passes: the DHT drops it by itself, and a refusal would drop all of an answer.

        Args:
            key: the binary key under which the record stands.
            subkey: the peer id under which it stands.
            expires_unix_s: the expiry that the DHT goes by; must equal the signed one.
        """
        opened = self._unseal(subkey, value)
        if isinstance(opened, Rejection):
            return self._reject(opened, subkey)
        if self._key_of(opened.topic) != key:
            return self._reject(Rejection.WRONG_TOPIC, subkey)
        if opened.expires_unix_s != expires_unix_s:
            return self._reject(Rejection.BAD_EXPIRY, subkey)
        if opened.expires_unix_s > self._latest_expiry_unix_s():
            self._note_difference(opened)
            return self._reject(Rejection.BAD_EXPIRY, subkey)
        return True

    def accept(self, topic: str, subkey: str, value: bytes) -> VerifiedRecord | None:
        """Return the record if it is to be believed now: verified, alive, and not older than one seen before."""
        opened = self._unseal(subkey, value)
        if isinstance(opened, Rejection):
            self._reject(opened, subkey)
            return None
        if opened.topic != topic:
            self._reject(Rejection.WRONG_TOPIC, subkey)
            return None
        if opened.expires_unix_s <= self._clock.unix_s():
            if opened.expires_unix_s < self._clock.unix_s() - _CLEARLY_S:
                self._note_difference(opened)
            self._reject(Rejection.EXPIRED, subkey)
            return None
        if opened.expires_unix_s > self._latest_expiry_unix_s():
            self._note_difference(opened)
            self._reject(Rejection.BAD_EXPIRY, subkey)
            return None
        newest, _ = self._newest.get((opened.peer, topic), (-1, 0.0))
        if opened.sequence < newest:
            self._reject(Rejection.OUTDATED, subkey)
            return None
        self._remember(opened)
        self.clock_differences.pop(opened.peer, None)
        return opened

    def malformed(self, subkey: object) -> bool:
        """Count something that is not even a sealed record; return False for the convenience of validators."""
        return self._reject(Rejection.MALFORMED, str(subkey)[:64])

    def _latest_expiry_unix_s(self) -> float:
        return self._clock.unix_s() + MAX_TTL_S + _CLOCK_SKEW_S

    def _remember(self, opened: VerifiedRecord) -> None:
        """Note the newest record of a peer, and forget peers whose older ones have all expired by now."""
        key = (opened.peer, opened.topic)
        self._newest[key] = (opened.sequence, self._latest_expiry_unix_s())
        self._newest.move_to_end(key)
        now_unix_s = self._clock.unix_s()
        while (oldest := next(iter(self._newest.values())))[1] < now_unix_s and oldest is not self._newest[key]:
            self._newest.popitem(last=False)

    def _note_difference(self, opened: VerifiedRecord) -> None:
        """Name a peer whose clock and this host's differ so much that neither believes the other's records."""
        difference_s = opened.expires_unix_s - TTL_S - self._clock.unix_s()
        self.clock_differences[opened.peer] = difference_s, str(label_of(opened.record) or "")
        if len(self.clock_differences) > _MAX_DIFFERENCES:
            self.clock_differences.popitem(last=False)
        self._gate.emit(ClockDiffers(opened.peer, round(difference_s)), opened.peer)

    def _unseal(self, subkey: str, value: bytes) -> VerifiedRecord | Rejection:
        seen = (subkey, value)
        verdict = self._verdicts.get(seen)
        if verdict is None:
            verdict = unseal(value, self._namespace, subkey)
            # Junk is cheap to make and mostly cheap to refuse: it must not push the good ones out.
            if isinstance(verdict, VerifiedRecord):
                self._verdicts[seen] = verdict
                if len(self._verdicts) > _CACHE_ENTRIES:
                    self._verdicts.popitem(last=False)
        return verdict

    def _reject(self, reason: Rejection, subkey: str) -> bool:
        self._counters[reason].add()
        refused = RecordRefused(subkey[:64], reason.value)
        if reason not in _USUAL:
            self._gate.emit(refused, refused.subkey)
        else:
            emit(logger, refused, level=logging.DEBUG)
        return False
