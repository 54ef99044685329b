"""The quorum of one stage while its members average: who is in it, who has staged, and whether all staged the same
bytes.

A member that is lost, or whose bytes differ from the others', leads to a new epoch without it, from the same inputs.
Bytes that differ are first computed once more by all: a disturbance that passes costs nobody his place. Either way the
record names who differed. What each pseudo-gradient counts is judged once, from all joins (`contribution_guard`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shoal.ids import Ballot, PeerId, StepKey
from shoal.swarm.contribution_guard import scales_of
from shoal.swarm.cut_rule import EVERY_STEP, CutRule
from shoal.swarm.records import steps_held
from shoal.swarm.ring_order import ring_order
from shoal.swarm.round_effects import Send, TrainedTwice
from shoal.swarm.round_orders import changed_quorum
from shoal.swarm.round_settings import RoundSettings
from shoal.swarm.sample_ranges import merge
from shoal.wire.messages.base import Hop
from shoal.wire.messages.round import Join, Payload, Propose, QuorumTag, StageHashes, StageOutcome
from shoal.wire.messages.step import StepEntry

_MOST_PAIRS = 1000
"""That are looked at together."""


@dataclass(slots=True)
class StageQuorum:
    """One stage's quorum.

    Attributes:
        members: in ring order.
        weights: targets of each member, see `CutRule.brought`; 0 if its contribution does not count.
        scales: factors on the members' pseudo-gradients; a member without one has factor 1.
        payloads: what the pseudo-gradients are encoded as; of members that have weight, or of none.
        epoch: number of the present proposal.
        staged: the hashes that members of this epoch have staged so far.
        differed: members whose bytes differed from the others' in some epoch, or from those of the record before.
        is_told: the coordinator tells each member itself: the quorum has not ended, and may not have come to all.
    """

    stage: int
    members: tuple[PeerId, ...]
    weights: Mapping[PeerId, int]
    epoch: int = 0
    staged: dict[PeerId, StageHashes] = field(default_factory=dict[PeerId, StageHashes])
    scales: Mapping[PeerId, float] = field(default_factory=dict[PeerId, float])
    payloads: Mapping[PeerId, Payload] = field(default_factory=dict[PeerId, Payload])
    differed: set[PeerId] = field(default_factory=set[PeerId])
    is_told: bool = False
    _repeated: bool = False

    @property
    def agreed(self) -> bool:
        """Whether all members have staged the same bytes."""
        return len(self.staged) == len(self.members) and len(set(self.staged.values())) == 1

    def final(self) -> StageOutcome:
        """The quorum as the record names it, but for the steps that are lost; only when it is agreed."""
        weights = tuple(self.weights[peer] for peer in self.members)
        hashes, differed = self.staged[self.members[0]], tuple(sorted(self.differed))
        said = self.member_scales, differed, self.member_payloads
        return StageOutcome(self.stage, self.epoch, self.members, weights, hashes, 0, None, *said)

    @property
    def member_scales(self) -> tuple[float, ...]:
        """What each member's pseudo-gradient is multiplied by; empty if nobody's is changed."""
        if self.scales.keys().isdisjoint(self.members):
            return ()
        return tuple(self.scales.get(peer, 1.0) for peer in self.members)

    @property
    def member_payloads(self) -> tuple[Payload | None, ...]:
        """What each member's pseudo-gradient is encoded as; empty if nobody's is encoded as a whole."""
        if self.payloads.keys().isdisjoint(self.members):
            return ()
        return tuple(self.payloads.get(peer) for peer in self.members)

    def next_epoch(self, without: frozenset[PeerId] = frozenset()) -> None:
        """Begin a new epoch from the same inputs, without some members."""
        self.members = tuple(peer for peer in self.members if peer not in without)
        self.epoch += 1
        self.staged = {}

    def note(self, peer: PeerId, epoch: int, hashes: StageHashes) -> frozenset[PeerId] | None:
        """Note the hashes that a member has staged.

        Returns:
            None if the quorum goes on; otherwise the members that a new epoch leaves out (empty: it repeats the epoch).
        """
        if epoch != self.epoch or peer not in self.members:
            return None
        self.staged[peer] = hashes
        if len(self.staged) < len(self.members) or self.agreed:
            return None
        odd = odd_ones_out(self.members, self.staged)
        self.differed |= odd
        if not self._repeated:
            self._repeated = True
            return frozenset()
        return odd


_NOBODY = StageQuorum(-1, (), {})


class _Foreseen(NamedTuple):
    joins: Mapping[PeerId, Join]
    slots: Mapping[PeerId, int]
    quorum: StageQuorum


class RoundQuorums(dict[int, StageQuorum]):
    """The quorums of all stages in one round, by stage.

    Attributes:
        epochs: the first unused epoch of each stage; a quorum that is begun again counts on from it.
        proposed: what was proposed last of each stage.
        last: the quorums of the round before, by member: those that are told only what is different since.
    """

    def __init__(self, last: Mapping[PeerId, Propose] | None = None) -> None:
        super().__init__()
        self.epochs: Counter[int] = Counter()
        self.proposed: dict[int, Propose] = {}
        self.last = dict(last or {})
        self._foreseen: dict[int, _Foreseen] = {}
        self._told_changes: set[PeerId] = set()

    def begin(
        self, settings: RoundSettings, joins: Mapping[PeerId, Join], slots: Mapping[PeerId, int]
    ) -> list[TrainedTwice]:
        """Begin the quorums of all that have joined; `contribution_guard` bounds their pseudo-gradients.

        Returns:
            Steps that share samples; the replicas that had to be left out for them are in no quorum.
        """
        twice = trained_twice(joins)
        out = {peer for each in twice for peer in each.out}
        joins = {peer: join for peer, join in joins.items() if peer not in out}
        for stage in range(settings.num_stages):
            self.foresee(stage, settings, joins, slots)
            self[stage] = replace(self._foreseen.pop(stage).quorum, epoch=self.epochs[stage])
        return twice

    def foresee(
        self, stage: int, settings: RoundSettings, joins: Mapping[PeerId, Join], slots: Mapping[PeerId, int]
    ) -> None:
        """All replicas of a stage have joined: what their quorum is to be is found while others are waited for, a stage
        at a time, and holds if nothing of it has changed when the quorums begin."""
        here = {peer: join for peer, join in joins.items() if join.stage == stage}
        foreseen = self._foreseen.get(stage)
        if foreseen is None or (foreseen.joins, foreseen.slots) != (here, slots):
            quorum = first_quorum(stage, here, slots, 0, settings.max_gradient_ratio, settings.cuts)
            self._foreseen[stage] = _Foreseen(here, slots, quorum)

    def propose(self, quorum: StageQuorum, ballot: Ballot, round: int, hops: Mapping[PeerId, Hop]) -> list[Send]:
        """Tell the members of a quorum that they are, and use up its epoch."""
        self.epochs[quorum.stage] = quorum.epoch + 1
        members = tuple(hops[peer] for peer in quorum.members)
        weights = tuple(quorum.weights[peer] for peer in quorum.members)
        said = weights, quorum.member_scales, quorum.member_payloads
        whole = self.proposed[quorum.stage] = Propose(ballot, round, quorum.epoch, quorum.stage, members, *said)
        changed: dict[QuorumTag, Propose] = {}
        sends: list[Send] = []
        for peer in quorum.members:
            # What a member has been in is known of the round before alone: each further proposal is told as a whole.
            last, message = self.last.pop(peer, None), whole
            self._told_changes.discard(peer)
            if last is not None:
                tag = QuorumTag.of(last)
                message = changed[tag] = changed.get(tag) or changed_quorum(whole, last)
                self._told_changes.add(peer)
            sends.append(Send(peer, message))
        return sends

    def again(self, peer: PeerId, stage: int) -> list[Send]:
        """A member was told only what is different, and has said what it holds in place of an answer: all of it."""
        if peer not in self._told_changes or peer not in self.get(stage, _NOBODY).members:
            return []
        self._told_changes.discard(peer)
        return [Send(peer, self.proposed[stage])]

    def lose(self, peer: PeerId) -> None:
        """A replica cannot be reached; when it is there again it may have been in nothing."""
        self.last.pop(peer, None)

    @property
    def ended(self) -> dict[PeerId, Propose]:
        """What each member was in, once all have agreed: all of them have had the last proposal of their stage."""
        return {peer: self.proposed[stage] for stage, quorum in self.items() for peer in quorum.members}

    @property
    def agreed(self) -> bool:
        """Whether all members of all stages have staged the bytes of their stage."""
        return all(quorum.agreed for quorum in self.values())

    @property
    def members(self) -> set[PeerId]:
        """Of all stages."""
        return {peer for quorum in self.values() for peer in quorum.members}


def first_quorum(
    stage: int,
    joins: Mapping[PeerId, Join],
    slots: Mapping[PeerId, int],
    epoch: int,
    max_ratio: float | None = None,
    cuts: CutRule = EVERY_STEP,
) -> StageQuorum:
    """The quorum of all that have joined for a stage.

    They stand in the order of their home slots, so that sums do not depend on random peer ids, and spares come last;
    where they have measured their links, in the order that makes the best ring of these (`ring_order`). A spare has
    trained nothing: its weight is 0, and the ring keeps it current. The same goes for one whose pseudo-gradient is not
    finite: it gets the others' average in place of what it has.
    """
    spare = max(slots.values(), default=0) + 1
    peers = [peer for peer, join in joins.items() if join.stage == stage]
    peers.sort(key=lambda peer: (slots.get(peer, spare), peer))
    order = ring_order(peers, {peer: joins[peer].links for peer in peers})
    scales = scales_of({peer: joins[peer] for peer in peers}, max_ratio, cuts)
    brought = {peer: cuts.brought(joins[peer].round, joins[peer].log, joins[peer].earlier) for peer in peers}
    weights = {peer: 0 if scales.get(peer) == 0 else brought[peer].num_targets for peer in peers}
    payloads = {peer: payload for peer in peers if weights[peer] and (payload := joins[peer].payload) is not None}
    return StageQuorum(stage, order, weights, epoch, scales=scales, payloads=payloads)


def odd_ones_out(members: Sequence[PeerId], staged: Mapping[PeerId, StageHashes]) -> frozenset[PeerId]:
    """The members whose bytes are not those of most; on a tie the bytes of the first in ring order stand."""
    votes = Counter(staged[peer] for peer in members)
    most = max(votes.values())
    standing = next(staged[peer] for peer in members if votes[staged[peer]] == most)
    return frozenset(peer for peer in members if staged[peer] != standing)


def trained_twice(joins: Mapping[PeerId, Join]) -> list[TrainedTwice]:
    """Every two steps of these joins that share samples, and who has to be left out for it.

    A record in which both stood would count samples once that were trained twice. Leases see to it that this never
    happens (`lease.py`, `takeover.py`). Should it happen all the same, the replicas that hold one of the two steps are
    left out of the round: those with fewer samples if there is a choice, and never the last ones of a stage.
    """
    left = dict(joins)
    found: list[TrainedTwice] = []
    while True:
        pairs, has_more = _sharing(steps_held(join.log for join in left.values()))
        new = _leave_out(left, pairs)
        found += [each for each in new if each not in found]
        # Without who was left out there are fewer, so that the others come to light.
        if not has_more or not any(each.out for each in new):
            return found


def _leave_out(left: dict[PeerId, Join], pairs: Collection[tuple[StepKey, StepKey]]) -> list[TrainedTwice]:
    """Take from `left` who has to be left out for these pairs of steps."""
    if not pairs:
        return []
    holders: dict[StepKey, set[PeerId]] = {}
    for peer, join in left.items():
        for entry in join.log:
            holders.setdefault(entry.key, set()).add(peer)
    found: list[TrainedTwice] = []
    for first, second in sorted(pairs):
        sides = [tuple(sorted(holders[key] & left.keys())) for key in (first, second)]
        if not all(sides):
            continue  # one of them is out already
        sides.sort(key=lambda side: (sum(left[peer].num_samples for peer in side), side))
        out = next((side for side in sides if _is_served_without(left, side)), ())
        for peer in out:
            del left[peer]
        found.append(TrainedTwice(first, second, out))
    return found


def _sharing(steps: Mapping[StepKey, StepEntry]) -> tuple[set[tuple[StepKey, StepKey]], bool]:
    """The pairs of steps that have a sample in common, and whether there may be more: one replica can make up any
    number of steps, and all pairs of these."""
    parts = ((step.samples if len(step.samples) == 1 else merge(step.samples), key) for key, step in steps.items())
    ranges = sorted((i.pass_number, i.start, i.stop, key) for items, key in parts for i in items if i.start < i.stop)
    pairs: set[tuple[StepKey, StepKey]] = set()
    reaching: list[tuple[int, int, StepKey]] = []
    for pass_number, start, stop, key in ranges:
        reaching = [each for each in reaching if each[0] == pass_number and each[1] > start]
        pairs.update((min(key, other), max(key, other)) for _, _, other in reaching if other != key)
        if len(pairs) > _MOST_PAIRS:
            return pairs, True
        reaching.append((pass_number, stop, key))
    return pairs, False


def _is_served_without(joins: Mapping[PeerId, Join], side: Collection[PeerId]) -> bool:
    stages = {join.stage for join in joins.values()}
    return stages == {join.stage for peer, join in joins.items() if peer not in side}
