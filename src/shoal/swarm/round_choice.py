"""Which record stands when a client takes a new ballot, from what every reachable replica holds.

The newest record that some replica has swapped to stands. There may be several that are newest, where sides of a split
have gone on apart: then one chain is chosen, by the samples of its newest record that has a live holder of every stage,
then one whose newest record some replica holds, then by the samples of that record, then the smaller hash. (A stage
that holds an older record alone is restored from that.) Replicas are heard of one after the other, so a chain that
would be chosen if it did not lack a holder of some stage is waited for, or the order of arrival would choose.

On top of what stands, a record that replicas have prepared may have been committed, so the one of the highest ballot is
finished. It is dropped only when it cannot be finished: no replica has swapped it, no holder of some stage's bytes
answers for long enough, and the record before it has holders of every stage. Where that one has not either, dropping it
would gain nothing, and the stage has to be restored. D_0 has holders wherever a replica has just started, which says
nothing, so the first record is never dropped. One of its members may show that nobody has committed it, and then it is
not waited for: a member prepares records in the order of their ranks, so what it holds prepared is the last.

Everybody can compute D_0, so newcomers hold it at any time. It stands only as long as nothing speaks for a record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from shoal.ids import PeerId
from shoal.swarm.record_chains import heads, is_before, num_samples
from shoal.swarm.records import Tip, record_hash
from shoal.swarm.view import NO_BASE
from shoal.wire.messages.round import Record, RoundState, SignedRecord


@dataclass(frozen=True, slots=True)
class Choice:
    """The record that the run goes on from.

    Attributes:
        tip: the record that every replica is to hold.
        missing: stages without a reachable holder of the tip's bytes; the run waits until each has one.
        may_be_dropped: the tip is prepared, not known to be committed, and still waited for; after that the one before
            it stands.
        is_contested: the tip belongs to a chain that is still waited for; after that another chain stands.
        left: the newest records of the chains that were not chosen.
    """

    tip: Tip
    missing: tuple[int, ...]
    may_be_dropped: bool = False
    is_contested: bool = False
    left: tuple[Tip, ...] = ()


def tip_of(state: RoundState, genesis: str) -> Tip:
    """The record that a replica says it holds."""
    if state.record is None:
        return Tip(0, genesis, None)
    return Tip(state.base_round, record_hash(state.record), state.record)


def choose(
    states: Mapping[PeerId, RoundState],
    num_stages: int,
    genesis: str,
    unseal: Callable[[SignedRecord], Record],
    drop_prepared: bool,
    has_records: bool = False,
    known: Collection[Tip] = (),
) -> Choice:
    """Choose the record to go on from among those that the replicas hold.

    Args:
        states: What each reachable replica holds; not empty.
        drop_prepared: What is not there has been waited for long enough.
        has_records: The coordinator knows of records: D_0 is not what stands.
        known: Committed records that the coordinator knows, though no replica may hold them any more.
    """
    tips = {tip_of(state, genesis) for state in states.values()}
    held = {tip.hash for tip in tips}
    tips.update(tip for tip in known if tip.signed is not None)
    prepared: dict[str, SignedRecord] = {}
    for state in states.values():
        if state.prepared is not None:
            prepared[record_hash(state.prepared)] = state.prepared

    def missing(tip: Tip) -> tuple[int, ...]:
        return _stages_without(
            num_stages,
            (
                state.stage
                for state in states.values()
                if tip_of(state, genesis).hash == tip.hash
                or (state.prepared is not None and record_hash(state.prepared) == tip.hash)
            ),
        )

    def samples(tip: Tip) -> int:
        return num_samples(tip, unseal)

    def safe_samples(head: Tip) -> int:
        chain = (tip for tip in tips if tip == head or is_before(tip, head, unseal))
        return max((samples(tip) for tip in chain if not missing(tip)), default=0)

    chains = heads(tips, unseal)
    # A record that is only known may be the newest of a chain whose older ones replicas hold.
    best = min(chains, key=lambda tip: (-safe_samples(tip), tip.hash not in held, -samples(tip), tip.hash))
    candidates = [tip for tip in chains if tip.hash in held or tip == best]
    first = min(candidates, key=lambda tip: (-samples(tip), tip.hash))
    left = tuple(sorted((tip for tip in chains if tip != best), key=lambda tip: tip.hash))
    if first != best and not drop_prepared:
        return Choice(first, missing(first), is_contested=True)
    records = {digest: unseal(signed) for digest, signed in prepared.items()}
    above = [digest for digest, record in records.items() if record.previous == best.hash]
    can_drop = best.signed is not None and not missing(best)
    if above:
        digest = max(above, key=lambda digest: _rank(records[digest]))
        tip = Tip(records[digest].round, digest, prepared[digest])
        gives_up = drop_prepared or _has_passed_over(records[digest], states, unseal)
        if not (missing(tip) and gives_up and can_drop):
            return Choice(tip, missing(tip), can_drop, left=left)
    if best.signed is None:
        # Those that are behind do not count at first; if nobody is there who is not, they are what there is.
        sure = (state.stage for state in states.values() if state.base_round != NO_BASE)
        absent = _stages_without(num_stages, () if has_records else sure)
        if has_records or not drop_prepared:
            return Choice(best, absent)
    return Choice(best, missing(best), left=left)


def _has_passed_over(
    record: Record, states: Mapping[PeerId, RoundState], unseal: Callable[[SignedRecord], Record]
) -> bool:
    """Whether a member of the record's quorums holds an earlier proposal for its place, so has never prepared it."""
    members = {peer for outcome in record.stages for peer in outcome.members}
    held = (unseal(state.prepared) for peer, state in states.items() if peer in members and state.prepared is not None)
    return any(other.previous == record.previous and _rank(other) < _rank(record) for other in held)


def _rank(record: Record) -> tuple[object, ...]:
    """Later proposals rank higher: of the higher ballot, and under one ballot of the later epochs."""
    return (record.ballot, sum(outcome.epoch for outcome in record.stages))


def _stages_without(num_stages: int, held: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(range(num_stages)) - set(held)))
