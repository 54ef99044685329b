"""Which attempts a replica has heard of, which it must refuse, and which it has committed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from shoal.ids import PeerId, StepKey
from shoal.swarm.step_operations import Decision
from shoal.wire.messages.step import StepEntry

_NEVER = StepKey(1 << 62, 0, 0, 0)
"""Higher than every attempt."""


class AttemptLedger:
    """A replica's memory of attempts; its size has a bound that peers cannot raise.

    A trainer's attempts are ordered by their keys, and it opens the next one only when the last is over. So one key per
    trainer, the newest that was opened here, is the tombstone of all older ones: an attempt that is not newer, not open
    and not committed is aborted. Of attempts that were never opened here anybody can speak, so what is said of them
    binds no more than it has to: an abort the attempts of who has sent it, an answer the one that was asked for.

    Attributes:
        is_steady: the replica has entered the round once only, and has dropped nothing of it.
    """

    def __init__(self) -> None:
        self._round = 0
        self.is_steady = True
        self._lowest_generation: dict[int, int] = {}
        self._newest: dict[int, StepKey] = {}
        self._oldest_opened: dict[int, StepKey] = {}
        self._committed: dict[StepKey, Decision] = {}
        # An answer to a Commit may be lost with its connection, and be asked for again in the next round.
        self._committed_before: dict[StepKey, Decision] = {}
        # Of each trainer the lowest attempt that somebody was told of that it is not committed here.
        self._denied: dict[int, StepKey] = {}
        # Of attempts that were not opened here, of peers that are connected: the last one that a peer has ended itself,
        # and of each trainer the last one that a peer was told of that it is not committed.
        self._ended: dict[PeerId, StepKey] = {}
        self._answered: defaultdict[int, dict[PeerId, StepKey]] = defaultdict(dict)

    def is_fenced(self, key: StepKey) -> bool:
        """Whether the attempt's generation has been replaced."""
        return key.generation < self.lowest_generation(key.trainer)

    def is_new(self, key: StepKey) -> bool:
        """Whether the attempt is newer than all of its trainer that were opened here."""
        newest = self._newest.get(key.trainer)
        return newest is None or key > newest

    def may_open(self, sender: PeerId, key: StepKey) -> bool:
        """Whether `sender` may open the attempt: it is new, and was not said to be over before it came."""
        ended = self._ended.get(sender)
        is_ended = ended is not None and ended.trainer == key.trainer and key <= ended
        return self.is_new(key) and not is_ended and key not in self._answered[key.trainer].values()

    def end(self, sender: PeerId, key: StepKey) -> None:
        """`sender` opens neither this attempt, which was not opened here, nor an older one any more."""
        self._ended[sender] = max(key, self._ended.get(sender, key))

    def forget(self, peer: PeerId) -> None:
        """The connection to a peer has ended. What it had sent before is not on its way any more."""
        self._ended.pop(peer, None)
        for answered in self._answered.values():
            answered.pop(peer, None)

    def opened(self, key: StepKey) -> None:
        """The attempt, which is new, is opened here."""
        self._newest[key.trainer] = key
        oldest = self._oldest_opened.get(key.trainer)
        if oldest is None or key.generation > oldest.generation:
            self._oldest_opened[key.trainer] = key

    def remembers(self, key: StepKey) -> bool:
        """Whether an earlier generation of this replica cannot have had the attempt: this one has had it, or an older
        one.

        Older ones of the same generation of the trainer only: one that has been replaced may still open steps here,
        where nobody knows that, after an earlier generation of this replica has had steps of its successor.
        """
        oldest = self._oldest_opened.get(key.trainer)
        return oldest is not None and key.generation == oldest.generation and key >= oldest

    def answer(self, peer: PeerId, key: StepKey) -> None:
        """A peer has asked for this attempt, of which nothing is known here: it is denied, and not opened any more."""
        self._answered[key.trainer][peer] = key
        self.deny(key)

    def deny(self, key: StepKey) -> None:
        """Somebody is told that this attempt, of which nothing is known here, is not committed; and so it stays."""
        self._denied[key.trainer] = min(key, self._denied.get(key.trainer, key))

    def lowest_generation(self, trainer: int) -> int:
        """Lowest generation of the trainer that is not fenced; 0 if none is."""
        return self._lowest_generation.get(trainer, 0)

    def fence(self, generations: dict[int, int]) -> None:
        """Refuse every generation of a trainer below the given one."""
        for trainer, lowest in generations.items():
            self._lowest_generation[trainer] = max(lowest, self.lowest_generation(trainer))

    def since(self, generations: dict[int, int]) -> dict[int, StepKey]:
        """Of each trainer that has opened attempts here below the given generation, the oldest: see `remembers`."""
        opened = {trainer: self._oldest_opened.get(trainer) for trainer in generations}
        return {
            trainer: oldest
            for trainer, oldest in opened.items()
            if oldest is not None and oldest.generation < generations[trainer]
        }

    def committed(self, key: StepKey) -> Decision | None:
        """With what the attempt was committed here, in this round or the one before; None if it was not."""
        return self._committed.get(key) or self._committed_before.get(key)

    def commit(self, key: StepKey, decision: Decision) -> None:
        """The attempt is applied."""
        self._committed[key] = decision

    def resume(self, log: Iterable[StepEntry]) -> bool:
        """Take over what an earlier generation of this replica has committed in this round.

        Returns:
            False, and nothing is changed, if some peer may have been told meanwhile that part of it is not committed.
        """
        decisions = {entry.key: Decision(entry.scale, entry.lr, entry.skipped) for entry in log}
        if any(self.is_fenced(key) or key >= self._denied.get(key.trainer, _NEVER) for key in decisions):
            return False
        for key, decision in decisions.items():
            self._newest[key.trainer] = max(key, self._newest.get(key.trainer, key))
            self.commit(key, decision)
        return True

    def start_round(self, round: int) -> None:
        """Forget the commits of the round before the one that has ended.

        If the new round is not the next one, commits were dropped that nobody has recorded: then this replica is like
        one that was started again, and forgets what was opened too.
        """
        self._committed_before, self._committed = self._committed, {}
        if round != self._round + 1:
            self._oldest_opened.clear()
            self.is_steady = False
        elif self._round > 0:
            self.is_steady = True
        self._round = round

    def committed_below(self, generations: dict[int, int]) -> tuple[StepKey, ...]:
        """This round's commits of generations below the given ones."""
        return keys_below(self._committed, generations)


def keys_below(keys: Iterable[StepKey], generations: dict[int, int]) -> tuple[StepKey, ...]:
    """Those of `keys` whose generation is below their trainer's in `generations`."""
    return tuple(key for key in keys if key.generation < generations.get(key.trainer, 0))
