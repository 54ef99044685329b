"""What the coordinator knows of the replicas: who is reachable, what each holds, who is out.

known --RoundState--> holder of the tip ------------------------> takes part
                 '--> holder of another record --CommitRecord (told)--> swapped: takes part, or refused: out
                 '--> or of other bytes than its stage goes on from --Restore (told)--> the same
                 '--> or of another D_0 than its stage has begun with --> out until the next record
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from shoal.ids import Ballot, PeerId
from shoal.swarm.record_chains import Unseal, is_before
from shoal.swarm.records import Tip, record_hash
from shoal.swarm.round_choice import Choice, tip_of
from shoal.swarm.round_effects import CoordinatorEffect, ReplicaIn, ReplicaOut, Send
from shoal.swarm.round_restoration import Here, Restoration
from shoal.swarm.view import hosts_of
from shoal.wire.messages.base import Hop
from shoal.wire.messages.round import Basis, CommitRecord, RecordName, Restore, RoundState, StageHashes, Swapped

_OTHER_START = (
    "its initial parameters are not those of the other replicas of its stage: it takes part once it has been given the "
    "next record's; compare the versions of shoal, torch and transformers on both hosts"
)


class RoundReplicas:
    """The replicas of a run as one coordinator sees them under its ballot.

    Args:
        restoration: names the bytes that stand for the tip's.

    Attributes:
        known: replicas that the client has named, with their addresses.
        states: the answers of the replicas that can be reached.
        told: replicas that were sent the tip's record, and have neither swapped nor refused.
        here: the stage and the bytes of each replica that has answered.
    """

    def __init__(self, genesis: str, restoration: Restoration, unseal: Unseal) -> None:
        self.genesis = genesis
        self._unseal = unseal
        self._restoration = restoration
        self.known: dict[PeerId, Hop] = {}
        self.states: dict[PeerId, RoundState] = {}
        self.told: set[PeerId] = set()
        self.here: dict[PeerId, Here] = {}
        self._tips: dict[PeerId, str] = {}
        self._prepared: dict[PeerId, str] = {}  # hash of the record that a replica has said it has prepared last
        self._named: set[PeerId] = set()  # those of `told` that were told the tip's name alone
        self._swapped: dict[PeerId, tuple[int, str]] = {}  # round and hash of the record that a replica swapped to last
        self._reachable: set[PeerId] = set()
        self._out: set[PeerId] = set()
        self._reported: set[PeerId] = set()
        self._sent_bytes: dict[PeerId, dict[str, int]] = {}
        self._hinted: set[tuple[PeerId, str]] = set()
        self._offered: set[tuple[PeerId, str]] = set()
        self._given_up: tuple[int, frozenset[str]] = (0, frozenset())
        self._starts: dict[int, StageHashes] = {}  # the D_0 with which a stage has begun
        self._odd: set[PeerId] = set()  # those that have computed another D_0

    def name(self, peer: PeerId, hop: Hop) -> bool:
        """Take note of a replica; returns whether it or its address is new."""
        if self.known.get(peer) == hop:
            return False
        self.known[peer] = hop
        self._reachable.add(peer)
        return True

    def forget(self, known: Mapping[PeerId, Hop]) -> list[PeerId]:
        """The replicas that are not named any more."""
        gone = [peer for peer in self.known if peer not in known]
        for peer in gone:
            del self.known[peer]
        return gone

    def lose(self, peer: PeerId) -> None:
        """A replica cannot be reached; when it answers again it is taken as new."""
        self._reachable.discard(peer)
        self.states.pop(peer, None)
        self.here.pop(peer, None)
        self._swapped.pop(peer, None)
        self._tips.pop(peer, None)
        self._prepared.pop(peer, None)
        self.told.discard(peer)
        self._out.discard(peer)
        self._odd.discard(peer)
        self._reported.discard(peer)

    def without(self, accuser: PeerId, accused: PeerId, round: int) -> PeerId:
        """Choose which of two replicas leaves, when they do not reach each other but this client reaches both.

        The accused leaves. But between two machines that are cut off from each other, all stages must choose the same
        machine: if each kept some of the stages, there would be no path. So the accuser leaves if the round already
        goes on without another replica of its machine.
        """
        given_up = self._given_up[1] if self._given_up[0] == round else frozenset[str]()
        goes = accuser if self._hosts(accuser) & given_up and not self._hosts(accused) & given_up else accused
        self._given_up = (round, given_up | self._hosts(goes))
        return goes

    def _hosts(self, peer: PeerId) -> frozenset[str]:
        hop = self.known.get(peer)
        return frozenset() if hop is None else hosts_of(hop)

    def begin_asking(self) -> None:
        """Forget all answers: they were given under another ballot, or before something was lost. Who could not be
        reached then may be there now, and counts until it cannot be again."""
        self._reachable = set(self.known)
        self.states.clear()
        self.here.clear()
        self._swapped.clear()
        self._tips.clear()
        self._prepared.clear()
        self.told.clear()
        self._out.clear()
        self._odd.clear()
        self._hinted.clear()
        self._offered.clear()

    def hear(self, peer: PeerId) -> None:
        """A replica can be reached, whatever it has said: what it holds is waited for."""
        if peer in self.known:
            self._reachable.add(peer)

    def unhear(self, peer: PeerId) -> None:
        """What a replica has said is true no more, and it has not said yet what is: it holds nothing until then."""
        for said in (self.states, self.here, self._tips):
            said.pop(peer, None)
        self.told.discard(peer)

    def is_older(self, peer: PeerId, state: RoundState) -> bool:
        """Whether a replica had said this before it swapped, and the message is late. Under one ballot a replica never
        goes back to an older record, nor to a second record of the same round."""
        known = self.states.get(peer)
        if known is None or known.stage != state.stage or peer not in self._swapped:
            return False
        round, digest = self._swapped[peer]
        is_other = tip_of(state, self.genesis).hash != digest
        return state.base_round < round or (state.base_round == round and is_other)

    def answer(self, peer: PeerId, state: RoundState) -> Tip:
        """Take note of what a replica holds."""
        self.hear(peer)
        self.states[peer] = state
        self.here[peer] = Here(state.stage, state.basis)
        tip = tip_of(state, self.genesis)
        self._tips[peer] = tip.hash
        self.prepared(peer, "" if state.prepared is None else record_hash(state.prepared))
        return tip

    def prepared(self, peer: PeerId, digest: str) -> None:
        """A replica has said which record it has prepared; empty: none."""
        self._prepared[peer] = digest

    def swapped(self, peer: PeerId, message: Swapped) -> bool:
        """A replica has swapped to a record; returns whether it was out until then."""
        self.told.discard(peer)
        self._reported.discard(peer)
        self._sent_bytes[peer] = message.sent_bytes
        self._swapped[peer] = message.round, message.record_hash
        is_known = message.hashes == self.here[peer].basis.hashes
        if not is_known:
            self.here[peer] = Here(self.here[peer].stage, Basis(message.round, message.hashes))
        # A late repetition of what is known says nothing about why the replica is out now.
        was_out = peer in self._out and not (is_known and self._tips[peer] == message.record_hash)
        if was_out:
            self._out.discard(peer)
        self._tips[peer] = message.record_hash
        return was_out

    @property
    def sent_bytes(self) -> Mapping[str, int]:
        """What those that have swapped to the tip have sent in its round, by traffic."""
        total: Counter[str] = Counter()
        for sent in self._sent_bytes.values():
            total.update(sent)
        return total

    def mark_out(self, peer: PeerId, reason: str) -> list[CoordinatorEffect]:
        """Leave a replica out of the round; reported once until it takes part again."""
        self.told.discard(peer)
        self._out.add(peer)
        if peer in self._reported:
            return []
        self._reported.add(peer)
        return [ReplicaOut(peer, reason)]

    def compare_starts(self, tip: Tip) -> list[CoordinatorEffect]:
        """While D_0 is the tip: leave out who has computed other initial parameters than its stage has begun with.

        Of those that are there when it is chosen, what most have counts, and from then on as long as somebody has it:
        steps may have been trained on it. If nobody has it any more, those of the others are as good.
        """
        if tip.signed is not None:
            return []
        there = {peer: here for peer, here in self.here.items() if self._tips[peer] == tip.hash}
        starts: dict[int, Counter[StageHashes]] = {}
        for here in there.values():
            starts.setdefault(here.stage, Counter())[here.basis.hashes] += 1
        for stage, counted in starts.items():
            if self._starts.get(stage) not in counted:
                self._starts[stage] = min(counted, key=lambda hashes: (-counted[hashes], hashes.parameters))
        odd = {peer for peer, here in there.items() if here.basis.hashes != self._starts[here.stage]}
        effects: list[CoordinatorEffect] = []
        for peer in sorted(odd - self._odd):
            effects += self.mark_out(peer, _OTHER_START)
        for peer in sorted(self._odd & there.keys() - odd):
            self._out.discard(peer)
            self._reported.discard(peer)
            effects.append(ReplicaIn(peer))
        self._odd = odd
        return effects

    def readmit(self) -> None:
        """There is a new tip: whoever was out is offered it, and learns by it that it has fallen behind."""
        self._out.clear()
        self._odd.clear()
        self._sent_bytes.clear()

    def holders(self, tip: Tip) -> dict[PeerId, int]:
        """The replicas that hold `tip` and take part, with their stages."""
        return {peer: state.stage for peer, state in self.states.items() if self.takes_part(peer, tip)}

    def takes_part(self, peer: PeerId, tip: Tip) -> bool:
        """Whether a replica holds `tip` and is not left out."""
        return peer in self.states and self._holds(peer, tip) and peer not in self._out

    def at(self, tip: Tip) -> list[Here]:
        """What the replicas have that hold `tip`, whichever bytes of it."""
        return [here for peer, here in self.here.items() if self._tips[peer] == tip.hash]

    def invite(self, stage: int, basis: Basis) -> None:
        """Who was out for want of the record's bytes is not any more, if it has those that stand for them; and whoever
        was told of other ones before is told anew."""
        self._out -= {peer for peer, here in self.here.items() if here == (stage, basis)}
        self.told -= {peer for peer, here in self.here.items() if here.stage == stage}

    def tell(self, ballot: Ballot, tip: Tip, others: Iterable[PeerId] = ()) -> list[CoordinatorEffect]:
        """Offer the tip to the replicas that lack it and are not out: they swap if they have its bytes, or refuse.

        Args:
            others: replicas that are told as well; those that hold the tip say so again.
        """
        effects: list[CoordinatorEffect] = []
        again = set(others)
        for peer in sorted(self.states):
            is_told = peer in self.told and (peer not in self._named or self._has(peer, tip))
            is_there = self._holds(peer, tip) or is_told or peer in self._out
            if tip.signed is None and not is_there:
                effects += self.mark_out(peer, "it holds a record of another run")
            elif tip.signed is not None and (not is_there or peer in again):
                self.told.add(peer)
                effects += self.offer(peer, ballot, tip)
        return effects

    def offer(self, peer: PeerId, ballot: Ballot, tip: Tip) -> list[CoordinatorEffect]:
        """Tell a replica of the tip; and of the bytes that stand for it if that concerns the replica."""
        if tip.signed is None:
            return []
        here = self.here[peer]
        standing = self._restoration.standing(here.stage)
        instead_of = self._other_chain(peer, tip)
        is_concerned = self._tips[peer] == tip.hash or here.stage in self._restoration.bases
        has_bytes = standing is not None and standing.hashes == here.basis.hashes
        if self._holds(peer, tip):
            return [self._commit(peer, ballot, tip)]
        if standing is not None and is_concerned and (has_bytes or self._tips[peer] == tip.hash):
            return [Send(peer, Restore(ballot, tip.signed, here.stage, standing, instead_of))]
        return [self._commit(peer, ballot, tip, instead_of)]

    def _commit(self, peer: PeerId, ballot: Ballot, tip: Tip, instead_of: str = "") -> Send:
        """Whoever has said that it has the record, and not since that it lacks it, is told its name alone."""
        if self._has(peer, tip):
            self._named.add(peer)
            return Send(peer, CommitRecord(ballot, None, known=RecordName(tip.round, tip.hash)))
        self._named.discard(peer)
        return Send(peer, CommitRecord(ballot, tip.signed, instead_of))

    def _has(self, peer: PeerId, tip: Tip) -> bool:
        return tip.hash in (self._tips[peer], self._prepared.get(peer))

    def _other_chain(self, peer: PeerId, tip: Tip) -> str:
        """The hash of the record that a replica holds, if it is none of those before the tip; empty otherwise."""
        held = tip_of(self.states[peer], self.genesis)
        has_swapped = self._tips[peer] != held.hash  # since it said that: to the tip, or to the record before
        is_own = has_swapped or held.hash == tip.hash or is_before(held, tip, self._unseal)
        return "" if is_own else held.hash

    def _holds(self, peer: PeerId, tip: Tip) -> bool:
        return self._tips[peer] == tip.hash and self._restoration.fits(self.here[peer])

    def takers(self, stage: int, kept: Tip) -> list[PeerId]:
        """The replicas of a stage that are to take bytes that somebody keeps, since none of them has as new ones: those
        that hold a record before.

        Who holds a later one, with older bytes since its stage was restored, cannot go back; and who is of another
        chain leaves that only for the record that is chosen.
        """
        there = [peer for peer, here in self.here.items() if here.stage == stage]
        if any(self.here[peer].basis.round >= kept.round for peer in there):
            return []
        return sorted(peer for peer in there if is_before(tip_of(self.states[peer], self.genesis), kept, self._unseal))

    def offer_kept(self, takers: Iterable[PeerId], kept: Tip, ballot: Ballot) -> list[CoordinatorEffect]:
        """Tell these replicas, once until `repeat_offers`, of a record of which somebody keeps their stage's bytes."""
        new = [peer for peer in takers if (peer, kept.hash) not in self._offered]
        self._offered |= {(peer, kept.hash) for peer in new}
        return [Send(peer, CommitRecord(ballot, kept.signed)) for peer in new if kept.signed is not None]

    def repeat_offers(self) -> None:
        """Whoever was told of a record that somebody keeps may have been told of something else since."""
        self._offered.clear()

    def hint(self, choice: Choice, ballot: Ballot, known: Iterable[Tip]) -> list[CoordinatorEffect]:
        """Tell the replicas of the stages that lack a holder, once, what they are to look for: if it is committed.

        That a replica has swapped to a record shows that it is, and so it is if the coordinator has known it before;
        one that is only prepared may still be dropped.
        """
        signed, digest = choice.tip.signed, choice.tip.hash
        if signed is None or digest not in {*(tip.hash for tip in known), *self._tips.values()}:
            return []
        concerned = {(peer, digest) for peer, state in self.states.items() if state.stage in choice.missing}
        new = sorted(concerned - self._hinted)
        self._hinted |= concerned
        return [Send(peer, CommitRecord(ballot, signed)) for peer, _ in new]

    @property
    def silent(self) -> list[PeerId]:
        """Those that have not answered, whether they can be reached or not."""
        return [peer for peer in self.known if peer not in self.states]

    @property
    def all_answered(self) -> bool:
        """Whether every replica that can be reached has said what it holds."""
        return self._reachable <= self.states.keys()
