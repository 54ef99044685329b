"""Who keeps stages' bytes beside their replicas, as one coordinator sees it: mirrors, and the client itself.

    announced --Follow--> unanswered --Mirrored--> keeps what it says --its connection ends--> unanswered
                              ^                        |
                              '---- a record stands ---'

What a keeper says counts as long as its connection lasts: it goes on holding it, or says that it holds something newer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shoal.errors import RemoteProtocolError
from shoal.ids import Ballot, PeerId
from shoal.swarm.record_chains import Unseal, is_before
from shoal.swarm.records import Tip, outcome_of, record_hash
from shoal.swarm.round_effects import CoordinatorEffect, Introduce, Send
from shoal.swarm.round_restoration import Here
from shoal.wire.messages.base import Hop
from shoal.wire.messages.mirror import Follow, Mirrored
from shoal.wire.messages.round import Basis


class RoundMirrors:
    """The mirrors of a run under one coordinator's ballot, and what it keeps itself.

    Attributes:
        known: mirrors that are announced, with their addresses.
        unanswered: those of them that have not answered what they were told last.
    """

    def __init__(self, num_stages: int, unseal: Unseal) -> None:
        self._num_stages = num_stages
        self._unseal = unseal
        self.known: dict[PeerId, Hop] = {}
        self.unanswered: set[PeerId] = set()
        self._told: dict[PeerId, Follow] = {}
        self._held: dict[PeerId, Mapping[int, Tip]] = {}
        self._answered: set[PeerId] = set()  # since they were asked last: others may have led before
        self._asked_s = 0.0
        self._own: dict[int, Tip] = {}

    def keep(self, stage: int, tip: Tip | None) -> None:
        """The client has a stage's bytes of this record; None: it keeps them no more."""
        if tip is None:
            self._own.pop(stage, None)
        else:
            self._own[stage] = tip

    def name(self, known: Mapping[PeerId, Hop]) -> list[CoordinatorEffect]:
        """Take note of the mirrors that are announced; one that is so no more counts no more."""
        for peer in self.known.keys() - known.keys():
            self.lose(peer)
            self.unanswered.discard(peer)
            self._told.pop(peer, None)
            del self.known[peer]
        new = [hop for peer, hop in known.items() if self.known.get(peer) != hop]
        for hop in new:
            self.known[hop.peer] = hop
            self.lose(hop.peer)
            self._told.pop(hop.peer, None)
        return [Introduce(hop) for hop in new]

    def lose(self, peer: PeerId) -> None:
        """A mirror cannot be reached; what it holds counts again when it answers."""
        self._held.pop(peer, None)
        self._answered.discard(peer)
        self.unanswered.add(peer)

    def ask(self, ballot: Ballot, now_s: float) -> list[CoordinatorEffect]:
        """Ask every mirror what it holds now, under another ballot."""
        self._told.clear()
        self._answered.clear()
        self._asked_s = now_s
        return self.tell(ballot, None)

    def tell(self, ballot: Ballot, stands: Tip | None) -> list[CoordinatorEffect]:
        """Tell every mirror, once, which record stands; None if that is not known: then each is only asked."""
        return [effect for peer in sorted(self.known) for effect in self._tell(peer, ballot, stands)]

    def _tell(self, peer: PeerId, ballot: Ballot, stands: Tip | None) -> list[CoordinatorEffect]:
        told = self._told.get(peer)
        if stands is None or stands.signed is None:
            message = told if told is not None and told.ballot == ballot else Follow(ballot, None)
        else:
            message = Follow(ballot, stands.signed, self._other_chain(peer, stands))
        if message == told:
            return []
        self._told[peer] = message
        self.unanswered.add(peer)
        return [Send(peer, message)]

    def repeat(self, to_all: bool) -> list[CoordinatorEffect]:
        """Say again what was not answered, or `to_all` what each was told last."""
        peers = self.known if to_all else self.unanswered
        return [Send(peer, self._told[peer]) for peer in sorted(peers) if peer in self._told]

    def answer(self, peer: PeerId, message: Mirrored) -> None:
        """Take note of what a mirror holds. It may have said so before what is known already: as long as its connection
        lasts it never goes back.

        Raises:
            RemoteProtocolError: That cannot be, or a record is none of this run.
            SignatureError: A record's signature does not verify.
        """
        held: dict[int, Tip] = {}
        for each in message.held:
            record = self._unseal(each.record)
            tip = Tip(record.round, record_hash(each.record), each.record)
            for stage in each.stages:
                if stage in held or not 0 <= stage < self._num_stages or outcome_of(record, stage) is None:
                    raise RemoteProtocolError(f"{peer} says that it mirrors stage {stage} of record {record.round}")
                held[stage] = tip
        for stage, tip in self._held.get(peer, {}).items():
            if stage not in held or is_before(held[stage], tip, self._unseal):
                held[stage] = tip
        self._held[peer] = held
        self._answered.add(peer)
        self.unanswered.discard(peer)

    def is_waited_for(self, patience_s: float, now_s: float) -> bool:
        """Whether a mirror that was asked less than `patience_s` ago is about to say what it holds now."""
        return not self._held.keys() <= self._answered and now_s - self._asked_s < patience_s

    @property
    def is_silent(self) -> bool:
        """Whether some mirror that is announced has not said what it holds now."""
        return not self.known.keys() <= self._answered

    def lacking(self, head: Tip) -> frozenset[tuple[PeerId, int]]:
        """The stages that each mirror which can be reached does not yet have of this record, or of one after it."""
        return frozenset(
            (peer, stage)
            for peer, held in self._held.items()
            for stage in range(self._num_stages)
            if stage not in held or held[stage].round < head.round
        )

    @property
    def tips(self) -> set[Tip]:
        """The records that mirrors hold something of: each is committed."""
        return {tip for held in self._held.values() for tip in held.values()}

    def kept(self, head: Tip) -> dict[int, Tip]:
        """By stage the newest record, `head` or one before it, whose bytes somebody keeps."""
        found: dict[int, Tip] = {}
        for held in (self._own, *self._held.values()):
            for stage, tip in held.items():
                is_newer = stage not in found or tip.round > found[stage].round
                if is_newer and (tip.hash == head.hash or is_before(tip, head, self._unseal)):
                    found[stage] = tip
        return found

    def own(self, head: Tip) -> Iterator[Here]:
        """The stages whose bytes in this very record somebody keeps."""
        for stage, tip in self.kept(head).items():
            if tip.hash == head.hash:
                yield Here(stage, self.basis(stage, tip))

    def bases(self, peer: PeerId) -> Iterator[Basis]:
        """The bytes that a mirror holds."""
        return (self.basis(stage, tip) for stage, tip in self._held.get(peer, {}).items())

    def basis(self, stage: int, tip: Tip) -> Basis:
        """The bytes of a stage that a record which is kept names."""
        outcome = None if tip.signed is None else outcome_of(self._unseal(tip.signed), stage)
        if outcome is None:
            raise RemoteProtocolError(f"record {tip.round} says nothing of stage {stage}, whose bytes are kept")
        return Basis(tip.round, outcome.hashes)

    def _other_chain(self, peer: PeerId, stands: Tip) -> str:
        """The hash of the newest record that a mirror holds something of, which is none of those before the one that
        stands; empty if there is none."""
        others = {
            tip
            for tip in self._held.get(peer, {}).values()
            if tip.hash != stands.hash and not is_before(tip, stands, self._unseal)
        }
        return max(others, key=lambda tip: (tip.round, tip.hash)).hash if others else ""
