"""What the files of a run say twice, compared: records with each other, with the step logs, with the replicas' logs.

Nothing is computed with a model here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest

from shoal.averaging.signing import unsealer
from shoal.errors import ShoalError
from shoal.ids import PeerId
from shoal.replay.generations import Members, Segment
from shoal.replay.run_files import RunFiles
from shoal.replay.verdict import Difference
from shoal.swarm.cut_rule import CutRule
from shoal.swarm.records import Logs, Tip, build_record, record_hash
from shoal.swarm.sample_ranges import Ranges
from shoal.wire.messages.round import Basis, Join, Record, SignedRecord
from shoal.wire.messages.step import StepEntry


def whole_chain(files: RunFiles) -> tuple[list[tuple[Record, SignedRecord]], list[Difference]]:
    """Return the records after the base as far as each names the one before, and why there are no more."""
    open_record = unsealer(files.run_id, files.genesis.authority)
    base, later = files.base, files.records
    chain: list[tuple[Record, SignedRecord]] = []
    if base.signed is not None:
        if open_record(base.signed).previous != files.genesis.hash(files.run_id):
            return chain, [Difference(base.round, None, None, "the fork's first record does not follow its D_0")]
        later = later[1:]
    previous = base.hash
    for record, signed in later:
        due = base.round + len(chain) + 1
        if record.round != due:
            return chain, [Difference(due, None, None, f"rounds/round_{due:04d}.json is missing")]
        try:
            open_record(signed)
        except ShoalError as error:
            return chain, [Difference(due, None, None, f"the record is not signed by who may: {error}")]
        if record.previous != previous:
            what = f"the record follows {record.previous[:16]}, the one before is {previous[:16]}"
            return chain, [Difference(due, None, None, what)]
        chain.append((record, signed))
        previous = record_hash(signed)
    return chain, []


def record_follows(record: Record, previous: Tip, logs: Logs, recorded: Ranges) -> Iterator[Difference]:
    """Compare a record with what its coordinator had to make of the step logs.

    Args:
        logs: the round's.
        recorded: samples of all earlier records, and those that a fork began with.
    """
    joins: dict[PeerId, Join] = {}
    for outcome in record.stages:
        for peer in outcome.members:
            _, log = logs.get(peer, (outcome.stage, ()))
            joins[peer] = Join(record.ballot, record.round, outcome.stage, 0, (), log, ())
    restored: Mapping[int, Basis] = {o.stage: o.restored for o in record.stages if o.restored is not None}
    due = build_record(
        run_id=record.run_id,
        previous=previous,
        ballot=record.ballot,
        quorums=record.stages,
        joins=joins,
        recorded=recorded,
        generations=record.generations,
        restored=restored,
    )
    for name in ("samples", "skipped", "recorded"):
        mine, theirs = getattr(due, name), getattr(record, name)
        if mine != theirs:
            what = f"{name} {_ranges(theirs)} in the record, {_ranges(mine)} by the step log"
            yield Difference(record.round, None, None, what)
    for mine, theirs in zip(due.stages, record.stages, strict=True):
        if mine.steps_lost != theirs.steps_lost:
            what = f"{theirs.steps_lost} lost steps in the record, {mine.steps_lost} by the step log"
            yield Difference(record.round, theirs.stage, None, what)


def logs_agree(record: Record, logs: Logs, members: Members, cuts: CutRule) -> Iterator[Difference]:
    """Compare a round's step log with the logs of the replicas themselves, and the weights with both.

    Where a weight is of several rounds, only the replica's own log says what it has had left of earlier ones.
    """
    for outcome in record.stages:
        for peer, weight in zip(outcome.members, outcome.weights, strict=True):
            _, told = logs.get(peer, (outcome.stage, ()))
            segment = members.get((outcome.stage, peer))
            if segment is not None:
                yield from _same_log(record.round, outcome.stage, peer, told, segment)
            elif cuts.keeps_own:
                continue  # that its log is missing is said elsewhere
            earlier = () if segment is None else segment.earlier
            counted = cuts.brought(record.round, told, earlier).num_targets
            if counted != weight:
                before = f", with {sum(each.num_targets for each in earlier)} of earlier rounds" if earlier else ""
                what = f"its weight is {weight}, its step log has {counted} targets{before}"
                yield Difference(record.round, outcome.stage, peer, what)


def _same_log(
    round: int, stage: int, peer: PeerId, told: tuple[StepEntry, ...], segment: Segment
) -> Iterator[Difference]:
    """Compare two logs; the first entry that differs stands for all."""
    for place, (claimed, done) in enumerate(zip_longest(told, segment.log)):
        if claimed == done:
            continue
        if claimed is None or done is None:
            missing = "step log" if claimed is None else "log of the replica"
            key = next(entry.key for entry in (claimed, done) if entry is not None)
            what = f"commit {place}, step {key}, is not in the {missing}"
        elif claimed.key != done.key:
            what = f"commit {place} is step {claimed.key} in the step log, the replica's own has {done.key}"
        else:
            names = [name for name in claimed.__struct_fields__ if getattr(claimed, name) != getattr(done, name)]
            told_and_done = "; ".join(f"{n} {getattr(claimed, n)!r} and {getattr(done, n)!r}" for n in names)
            what = f"commit {place}, step {claimed.key}: step log and the replica's own differ: {told_and_done}"
        yield Difference(round, stage, peer, what)
        return


def _ranges(ranges: Ranges) -> str:
    return ", ".join(f"{item.pass_number}:{item.start}-{item.stop}" for item in ranges) or "none"
