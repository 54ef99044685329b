"""What the coordinator knows of the replicas: who is reachable, what each holds, who is out.

known --RoundState--> holder of the tip ------------------------> takes part
                 '--> holder of another record --Decide (told)--> swapped: takes part, or refused: out
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from shoal.ids import Ballot, PeerId
from shoal.swarm.records import Tip
from shoal.swarm.round_choice import Choice, tip_of
from shoal.swarm.round_effects import CoordinatorEffect, ReplicaOut, Send
from shoal.wire.messages.base import Hop
from shoal.wire.messages.round import Decide, RoundState, Swapped


class RoundReplicas:
    """The replicas of a run as one coordinator sees them under its ballot.

    Attributes:
        known: Those that the client has named, with their addresses.
        states: What those have answered that can be reached.
        told: Those that have been sent the tip's record and have neither swapped nor refused.
        genesis: Hash that stands for D_0.
    """

    def __init__(self, genesis: str) -> None:
        self.genesis = genesis
        self.known: dict[PeerId, Hop] = {}
        self.states: dict[PeerId, RoundState] = {}
        self.told: set[PeerId] = set()
        self._tips: dict[PeerId, str] = {}
        self._reachable: set[PeerId] = set()
        self._out: set[PeerId] = set()
        self._reported: set[PeerId] = set()
        self._sent_bytes: dict[PeerId, dict[str, int]] = {}
        self._hinted: set[tuple[PeerId, str]] = set()

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
        self._tips.pop(peer, None)
        self.told.discard(peer)
        self._out.discard(peer)
        self._reported.discard(peer)

    def begin_asking(self) -> None:
        """Forget all answers: they were given under another ballot, or before something was lost."""
        self.states.clear()
        self._tips.clear()
        self.told.clear()
        self._out.clear()
        self._hinted.clear()

    def answer(self, peer: PeerId, state: RoundState) -> Tip:
        """Take note of what a replica holds."""
        self._reachable.add(peer)
        self.states[peer] = state
        tip = tip_of(state, self.genesis)
        self._tips[peer] = tip.hash
        return tip

    def swapped(self, peer: PeerId, message: Swapped) -> bool:
        """A replica has swapped to a record; returns whether it was out until then."""
        self.told.discard(peer)
        self._reported.discard(peer)
        self._sent_bytes[peer] = message.sent_bytes
        # A late repetition of what is known says nothing about why the replica is out now.
        was_out = peer in self._out and self._tips[peer] != message.record_hash
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

    def readmit(self) -> None:
        """There is a new tip: whoever was out is offered it, and learns by it that it has fallen behind."""
        self._out.clear()
        self._sent_bytes.clear()

    def holders(self, tip: Tip) -> dict[PeerId, int]:
        """The replicas that hold `tip` and take part, with their stages."""
        return {
            peer: state.stage
            for peer, state in self.states.items()
            if self._tips[peer] == tip.hash and peer not in self._out
        }

    def lacking(self, tip: Tip) -> list[PeerId]:
        """The replicas that do not hold `tip`, have not been told of it, and are not out."""
        return [
            peer
            for peer in sorted(self.states)
            if self._tips[peer] != tip.hash and peer not in self.told and peer not in self._out
        ]

    def hint(self, choice: Choice, ballot: Ballot) -> list[CoordinatorEffect]:
        """Tell the replicas of the stages that lack a holder, once, what they are to look for: if it is decided.

        That a replica has swapped to a record shows that it is; one that is only held may still be dropped.
        """
        signed, digest = choice.tip.signed, choice.tip.hash
        if signed is None or digest not in self._tips.values():
            return []
        concerned = {(peer, digest) for peer, state in self.states.items() if state.stage in choice.missing}
        new = sorted(concerned - self._hinted)
        self._hinted |= concerned
        return [Send(peer, Decide(ballot, signed)) for peer, _ in new]

    @property
    def silent(self) -> list[PeerId]:
        """Those that have not answered, whether they can be reached or not."""
        return [peer for peer in self.known if peer not in self.states]

    @property
    def all_answered(self) -> bool:
        """Whether every replica that can be reached has said what it holds."""
        return self._reachable <= self.states.keys()
