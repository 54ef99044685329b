"""What a mirror fetches, and what it says that it holds: a pure machine, events in, effects out.

    nothing of a stage --Follow(D_r)--> fetching its bytes --they are here--> held at D_r, said to the coordinator
                                           ^                                    |
                                           '------- Follow(D_r+1) --------------'

A mirror holds the outer state of every stage, each at the newest record that it could fetch, and gives it to newcomers.
It takes no part in any round, and nobody waits for it. What it holds of a stage it goes on holding until it has the
bytes of a later record, or those of a chain that was chosen in place of the own one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shoal.ids import NO_BALLOT, Ballot, PeerId
from shoal.swarm.record_chains import is_before
from shoal.swarm.records import Tip, outcome_of, record_hash
from shoal.swarm.round_effects import Fetch, Send
from shoal.swarm.round_orders import check_ballot
from shoal.wire.messages.mirror import Follow, HeldRecord, Mirrored
from shoal.wire.messages.round import Record, SignedRecord, StaleBallot


@dataclass(frozen=True, slots=True)
class FetchStage:
    """Get the bytes of a stage, then report `fetched`. Replaces what is being fetched of the stage; where the record is
    the next one after that, what is under way may be brought to its end first (`StateChain.follow`)."""

    stage: int
    order: Fetch


MirrorEffect = Send | FetchStage
Effects = list[MirrorEffect]

_MAX_BEFORE = 8
"""Older records that were wanted of a stage and have not come; who is further behind begins anew."""


class MirrorMachine:
    """The machine of one mirror.

    Args:
        unseal: checks and decodes a record; raises SignatureError or RemoteProtocolError.
        held: what a checkpoint has given it.

    Attributes:
        held: by stage, the record whose own bytes of the stage are here.
        promised: the highest ballot that it has heard of, as long as its client is connected.
    """

    def __init__(
        self,
        num_stages: int,
        unseal: Callable[[SignedRecord], Record],
        held: Mapping[int, Tip] | None = None,
    ) -> None:
        self.held: dict[int, Tip] = dict(held or {})
        self.promised: Ballot = NO_BALLOT
        self._num_stages = num_stages
        self._unseal = unseal
        self._wanted: dict[int, tuple[Ballot, Tip]] = {}  # what is being fetched, and who has said that it stands
        self._before: dict[int, dict[str, Tip]] = {}  # what was, of the same chain: it may still be brought to its end

    def follow(self, peer: PeerId, message: Follow) -> Effects:
        """A client says which record stands, or only asks.

        Raises:
            RemoteProtocolError: It acts under another peer's ballot, or names what is no record of this run.
            SignatureError: The record's signature does not verify.
        """
        check_ballot(peer, message.ballot, self.promised)
        if message.ballot < self.promised:
            return [self._said(message.ballot), Send(peer, StaleBallot(self.promised))]
        effects: Effects = []
        if message.record is not None:
            record = self._unseal(message.record)
            tip = Tip(record.round, record_hash(message.record), message.record)
            for stage in range(self._num_stages):
                effects += self._aim(stage, tip, record, message)
        self.promised = message.ballot
        return [self._said(message.ballot), *effects]

    def lost(self, peer: PeerId) -> None:
        """The connection to a peer has ended. A mirror decides nothing, so it needs no promise: if that was the client
        which it follows, it follows the next one that asks, whatever its ballot."""
        if peer == self.promised.peer:
            self.promised = NO_BALLOT

    def fetched(self, stage: int, record_hash: str) -> Effects:
        """The bytes of a stage that this record names are here: the one that is wanted, or one before it that was."""
        wanted = self._wanted.get(stage)
        if wanted is None:
            return []
        if wanted[1].hash == record_hash:
            self._before.pop(stage, None)
            here: Tip | None = self._wanted.pop(stage)[1]
        else:
            here = self._before.get(stage, {}).pop(record_hash, None)
        held = self.held.get(stage)
        if here is None or (held is not None and is_before(here, held, self._unseal)):
            return []
        self.held[stage] = here
        return [] if self.promised == NO_BALLOT else [self._said(self.promised)]

    # -- parts

    def _aim(self, stage: int, tip: Tip, record: Record, message: Follow) -> Effects:
        outcome, held = outcome_of(record, stage), self.held.get(stage)
        if outcome is None or (held is not None and not self._goes_on(held, tip, message.instead_of)):
            return []
        ballot, wanted = self._wanted.get(stage, (NO_BALLOT, None))
        if wanted is not None and ballot == message.ballot and is_before(tip, wanted, self._unseal):
            return []  # it is late
        self._wanted[stage] = message.ballot, tip
        if wanted is not None and wanted.hash == tip.hash:
            return []
        if wanted is not None and is_before(wanted, tip, self._unseal):
            before = self._before.setdefault(stage, {})
            before[wanted.hash] = wanted
            if len(before) > _MAX_BEFORE:
                del before[next(iter(before))]
        else:
            self._before.pop(stage, None)
        anew = outcome.restored is not None
        follows = held is not None and held.hash == record.previous and not anew
        return [FetchStage(stage, Fetch(record, tip.hash, outcome.hashes, follows, anew))]

    def _goes_on(self, held: Tip, tip: Tip, instead_of: str) -> bool:
        """Whether what is held of a stage is to be given up for this record, once that is here."""
        left = next((other for other in self.held.values() if other.hash == instead_of), None)
        if held.hash == tip.hash or is_before(held, tip, self._unseal):
            return held.hash != tip.hash
        is_left = left is not None and (held.hash == left.hash or is_before(held, left, self._unseal))
        return is_left and not is_before(tip, held, self._unseal)

    def _said(self, ballot: Ballot) -> Send:
        """What is held, the newest record first, for the client of this ballot, also one that is not followed:
        on its side of a split nobody else may know of these records."""
        tips = sorted(set(self.held.values()), key=lambda tip: (-tip.round, tip.hash))
        held = tuple(
            HeldRecord(tip.signed, tuple(stage for stage, its in sorted(self.held.items()) if its == tip))
            for tip in tips
            if tip.signed is not None
        )
        return Send(ballot.peer, Mirrored(ballot, held))
