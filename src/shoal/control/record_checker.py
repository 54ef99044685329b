"""Every record that reaches this peer passes here: what does not verify is dropped and counted by reason.

The DHT asks for each record that it is to store or that an answer contains (`check`), the reader once more for those
that it uses (`accept`, which also knows the time and the newest sequence number of each peer).
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping

from shoal.clock import Clock
from shoal.control.records import MAX_TTL_S, Opened, Rejection, unseal
from shoal.ids import PeerId

logger = logging.getLogger(__name__)

# hivemind lets clocks differ by 3 s before it refuses a peer.
_CLOCK_SKEW_S = 3.0
_CACHE_ENTRIES = 4096


class RecordChecker:
    """Verifies sealed records of one namespace; remembers verdicts, since the DHT shows the same bytes often.

    Attributes:
        rejected: how many records were dropped, by reason.
    """

    def __init__(self, namespace: str, key_of: Callable[[str], bytes], clock: Clock) -> None:
        """Start with nothing seen.

        Args:
            namespace: of this swarm and experiment.
            key_of: gives the DHT's binary key of a topic.
            clock: its wall clock decides what has expired.
        """
        self._namespace = namespace
        self._key_of = key_of
        self._clock = clock
        self._rejected: Counter[Rejection] = Counter()
        self._newest: dict[tuple[PeerId, str], int] = {}
        self._verdicts: OrderedDict[tuple[str, bytes], Opened | Rejection] = OrderedDict()

    @property
    def rejected(self) -> Mapping[Rejection, int]:
        """Counts by reason."""
        return self._rejected

    def check(self, key: bytes, subkey: str, value: bytes, expires_unix_s: float) -> bool:
        """Return whether the DHT may store or pass on a record.

        What has just expired passes: the DHT drops it by itself, and refusing it would drop an answer's other records.

        Args:
            key: binary key under which it stands.
            subkey: peer id under which it stands.
            value: the sealed record.
            expires_unix_s: the expiry that the DHT goes by; it has to be the signed one.
        """
        opened = self._unseal(subkey, value)
        if isinstance(opened, Rejection):
            return self._reject(opened, subkey)
        if self._key_of(opened.topic) != key:
            return self._reject(Rejection.WRONG_TOPIC, subkey)
        too_late = self._clock.unix_s() + MAX_TTL_S + _CLOCK_SKEW_S
        if opened.expires_unix_s != expires_unix_s or opened.expires_unix_s > too_late:
            return self._reject(Rejection.BAD_EXPIRY, subkey)
        return True

    def accept(self, topic: str, subkey: str, value: bytes) -> Opened | None:
        """Return the record if it is to be believed now: verified, alive, and not older than one seen before."""
        opened = self._unseal(subkey, value)
        if isinstance(opened, Rejection):
            self._reject(opened, subkey)
            return None
        if opened.topic != topic:
            self._reject(Rejection.WRONG_TOPIC, subkey)
            return None
        if opened.expires_unix_s <= self._clock.unix_s():
            self._reject(Rejection.EXPIRED, subkey)
            return None
        newest = self._newest.get((opened.peer, topic), -1)
        if opened.sequence < newest:
            self._reject(Rejection.OUTDATED, subkey)
            return None
        self._newest[opened.peer, topic] = opened.sequence
        return opened

    def malformed(self, subkey: object) -> bool:
        """Count something that is not even a sealed record; return False for the convenience of validators."""
        return self._reject(Rejection.MALFORMED, str(subkey)[:64])

    def _unseal(self, subkey: str, value: bytes) -> Opened | Rejection:
        seen = (subkey, value)
        verdict = self._verdicts.get(seen)
        if verdict is None:
            verdict = unseal(value, self._namespace, subkey)
            # Junk is cheap to make and mostly cheap to refuse: it must not push the good ones out.
            if isinstance(verdict, Opened):
                self._verdicts[seen] = verdict
                if len(self._verdicts) > _CACHE_ENTRIES:
                    self._verdicts.popitem(last=False)
        return verdict

    def _reject(self, reason: Rejection, subkey: str) -> bool:
        self._rejected[reason] += 1
        logger.debug("record.rejected", extra={"reason": reason.value, "subkey": subkey[:64]})
        return False
