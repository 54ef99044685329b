"""What a coordinator has chosen among: when it has to choose again, and what it has to say about it.

    a replica holds a record --it was judged, or comes before the tip--> nothing new
                             '-- it is new -----------------------------> hear everyone, choose once more

A record on top of the tip is new in the same way if a replica has prepared it under another client's ballot.

A chain that was not chosen is judged for as long as its holders are heard. One of a stage that nobody had spoken for
may complete it; so may another client while a holder is away, and who comes back with its record is new again.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.ids import Ballot
from shoal.swarm.record_chains import Unseal, heads, is_before, parted_after
from shoal.swarm.records import Tip, record_hash, used_samples
from shoal.swarm.round_choice import Choice, tip_of
from shoal.swarm.round_effects import ChainLeft
from shoal.swarm.sample_ranges import count, subtract
from shoal.wire.messages.round import RoundState, SignedRecord

MIRRORED = -1
"""Stands for the stage of who holds a record and is no replica."""


class Judgement:
    """The judgement of one coordinator.

    Args:
        ballot: Any of this start of the client.
        genesis: Hash that stands for D_0.

    Attributes:
        heard: The records that replicas and mirrors have said they hold since the last choice. Each was committed, even
            if all who hold it are lost before the next choice.
    """

    def __init__(self, ballot: Ballot, genesis: str, unseal: Unseal) -> None:
        self._ballot = ballot
        self._genesis = genesis
        self._unseal = unseal
        self._judged: set[tuple[str, int]] = set()  # hashes of records, and stages of those that hold them
        self._judged_prepared: set[tuple[str, int]] = set()  # the same, of records that are only prepared
        self._left: set[Tip] = set()
        self._named: set[str] = set()  # hashes of the records that replicas have named, of which some could be reached
        self.heard: set[Tip] = set()

    def check(self, state: RoundState) -> None:
        """Refuse what cannot be, before it is believed.

        Raises:
            RemoteProtocolError: The replica speaks of what is no record of this run.
            SignatureError: A signature does not verify.
        """
        for signed in _named(state):
            self._unseal(signed)

    def note(self, state: RoundState) -> bool:
        """Take note of the records that a replica names; returns whether one of them is new, or was named by nobody who
        can be reached."""
        named = _hashes(state)
        is_news = not named <= self._named
        self._named |= named
        return is_news

    def is_new(self, tip: Tip, stage: int, standing: Tip) -> bool:
        """Whether a replica of a stage holds a newer record than the one that stands, or one of another chain."""
        is_known = tip.hash == standing.hash or (tip.hash, stage) in self._judged
        return not is_known and not is_before(tip, standing, self._unseal)

    def is_unheard(self, state: RoundState, standing: Tip, ballot: Ballot) -> bool:
        """Whether a replica has prepared another coordinator's record on top of the one that stands,
        and no replica of its stage had named that record when this client chose. It may have been committed."""
        signed = state.prepared
        if signed is None or (record_hash(signed), state.stage) in self._judged_prepared:
            return False
        record = self._unseal(signed)
        return record.previous == standing.hash and record.ballot != ballot

    def chose(self, states: Iterable[RoundState], choice: Choice, mirrored: Iterable[Tip]) -> list[ChainLeft]:
        """Take note of what was chosen among; returns the chains that are left and were not before."""
        # Who was heard for an earlier choice and not for this one may hold more by now.
        self._judged = {(tip.hash, MIRRORED) for tip in (*self.heard, *mirrored)}
        self._judged_prepared.clear()
        self.heard.clear()
        for state in states:
            self._judged.add((tip_of(state, self._genesis).hash, state.stage))
            if state.prepared is not None:
                self._judged_prepared.add((record_hash(state.prepared), state.stage))
        new = [tip for tip in choice.left if not self._was_left(tip)]
        # Who trained on a chain may have committed one more record of it before it heard that the chain was left.
        self._left = set(heads((*self._left, *choice.left), self._unseal))
        return [self._chain_left(tip, choice.tip) for tip in new]

    def lost(self, state: RoundState, others: Iterable[RoundState]) -> None:
        """A replica that has said this cannot be reached, and only `others` can: what its chain becomes meanwhile is
        not heard. When all who named a record were away, those that come back first wait for the others again."""
        self._judged.discard((tip_of(state, self._genesis).hash, state.stage))
        self._named -= _hashes(state).difference(*map(_hashes, others))

    def is_held(self, tip: Tip) -> bool:
        """Whether somebody who was heard holds this record."""
        return tip.hash in {digest for digest, _ in self._judged}

    def is_own(self, tip: Tip, before: Tip) -> bool:
        """Whether this start of the client has committed the record, on top of the one before. What an earlier one has
        trained since is nothing that this one knows of."""
        if tip.signed is None:
            return False
        record = self._unseal(tip.signed)
        is_mine = (record.ballot.peer, record.ballot.generation) == (self._ballot.peer, self._ballot.generation)
        return is_mine and record.previous == before.hash

    def _was_left(self, tip: Tip) -> bool:
        """Whether a record belongs to a chain that was left before."""
        return any(
            tip == known or is_before(known, tip, self._unseal) or is_before(tip, known, self._unseal)
            for known in self._left
        )

    def _chain_left(self, left: Tip, kept: Tip) -> ChainLeft:
        if left.signed is None or kept.signed is None:
            return ChainLeft(left, kept, 0, 0, 0)
        one, other = self._unseal(left.signed), self._unseal(kept.signed)
        used = used_samples(one)
        freed = count(subtract(used, used_samples(other)))
        return ChainLeft(left, kept, parted_after(one, other), count(used), freed)


def _hashes(state: RoundState) -> set[str]:
    return {record_hash(signed) for signed in _named(state)}


def _named(state: RoundState) -> list[SignedRecord]:
    return [signed for signed in (state.record, state.prepared) if signed is not None]
