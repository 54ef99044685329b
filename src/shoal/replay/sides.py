"""What of the replicas' work belongs to the chain of records that is replayed, where a split has left another. Pure.

    a generation of the side that was left   loaded D_4  trained  loaded D_5' ... loaded D_7'  |  anew with D_8  trained
                                             [-- on the chain -]  [----- not looked at -----]  |  [--- on the chain ---]

Which record a load was of, the log says by its hash. From the first load of another chain's record on, what a
generation did has left no trace on this one: a replica that takes the state of the chain that stands begins anew with
it, parameters and optimizer, as another generation. Only what it did before the sides parted may have been computed
with replicas of this one, and of the round in which they parted nobody says when that was: so much of it is kept as
others depend on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shoal.pipeline.replica_log import Applied, Began, Resumed
from shoal.replay.generations import AttemptedStep, Generation, Members, Segment, steps_at
from shoal.replay.run_files import RunFiles
from shoal.replay.verdict import Difference
from shoal.swarm.records import Tip, record_hash
from shoal.wire.messages.round import Record, SignedRecord


@dataclass(frozen=True, slots=True)
class Side:
    """The chain that is replayed, and what replicas did on it.

    Attributes:
        base: the record before these; D_0, or of a fork its first one.
        hashes: of the records after it.
        generations: all of the run, each up to the point where it went on to another chain's record.
        strays: generations that came back without having begun anew.
    """

    base: Tip
    hashes: tuple[str, ...]
    generations: tuple[Generation, ...]
    strays: tuple[Difference, ...]

    @property
    def last_round(self) -> int:
        """Of the last record."""
        return self.base.round + len(self.hashes)

    def has(self, segment: Segment) -> bool | None:
        """Whether a segment began with a record of this chain; None: with a later one than there are."""
        loaded = segment.loaded
        if loaded.round > self.last_round:
            return None
        place = loaded.round - self.base.round
        # Everybody has D_0. An older log does not say which record it was: the state itself will.
        if not loaded.round or not loaded.record:
            return True
        return place >= 0 and loaded.record == (self.base.hash, *self.hashes)[place]


def side_of(base: Tip, chain: Sequence[tuple[Record, SignedRecord]], generations: Sequence[Generation]) -> Side:
    """Return what generations did on a chain, from the record after `base` on."""
    side = Side(base, tuple(record_hash(signed) for _, signed in chain), tuple(generations), ())
    kept: list[Generation] = []
    strays: list[Difference] = []
    for generation in generations:
        left = next((segment for segment in generation.segments if side.has(segment) is False), None)
        kept.append(generation if left is None else _until(generation, left.start))
        if left is None:
            continue
        back = next((s for s in generation.segments if s.start > left.start and s.loaded.round and side.has(s)), None)
        if back is not None:
            what = (
                f"it comes to record {back.loaded.round} from record {left.loaded.round} of another chain with an "
                "optimizer that has trained there: its log was changed, or its replica did not know that it was left"
            )
            strays.append(Difference(back.round, generation.stage, generation.peer, what))
    return Side(base, side.hashes, tuple(kept), tuple(strays))


def later_records(side: Side, files: RunFiles) -> Iterator[Difference]:
    """What a replica has held after the last record that is there, one such replica at most."""
    for generation in files.generations:
        heir = None if generation.heir is None else files.generations[generation.heir].segments[0]
        on_chain = [side.has(segment) for segment in generation.segments]
        if False in on_chain or (heir is not None and side.has(heir)):
            continue  # what came last was of a chain that was left
        for segment, is_known in zip(generation.segments, on_chain, strict=True):
            number, record = segment.loaded.round, segment.loaded.record
            # What was prepared when its client died may have been committed: nobody has written that down.
            if is_known is None and number not in files.uncommitted and record not in files.left:
                what = f"this replica has held record {number}, whose file is missing"
                yield Difference(number, generation.stage, generation.peer, what)
                return
        if heir is not None and side.hashes:
            what = (
                f"this replica has gone on from record {heir.loaded.round} of another chain: these records are of the "
                "side that was left; replay the folder of the client that led at the end"
            )
            yield Difference(side.last_round, generation.stage, generation.peer, what)
            return


def needed_of(side: Side, generations: Sequence[Generation], members: Sequence[Members]) -> tuple[Generation, ...]:
    """Return the generations of a side. A generation that left the side ends with the last event that another
    generation depends on.

    Args:
        generations: all of the run, uncut.
    """
    return _Needs(side, generations, members).generations()


class _Needs:
    """How much of each generation is needed, which grows until everything is there on which something depends."""

    def __init__(self, side: Side, generations: Sequence[Generation], members: Sequence[Members]) -> None:
        self._generations = side.generations
        self._last_round = side.last_round
        self._steps = [steps_at(generation) for generation in self._generations]
        self._begun: defaultdict[AttemptedStep, list[tuple[int, int]]] = defaultdict(list)
        for generation, steps in zip(self._generations, self._steps, strict=True):
            for index, step in steps.items():
                if isinstance(generation.events[index], Began):
                    self._begun[step].append((generation.number, index))
        of_records = {(s.generation, s.start) for of_round in members for s in of_round.values()}
        self._stops = [
            _own_need(mine, of_records) if len(mine.events) < len(generation.events) else len(mine.events)
            for mine, generation in zip(self._generations, generations, strict=True)
        ]
        self._seen = [0] * len(self._generations)

    def generations(self) -> tuple[Generation, ...]:
        grown = {generation.number for generation in self._generations}
        while grown:
            grown = {other for number in sorted(grown) for other in self._follow(self._generations[number])}
        return tuple(_until(generation, stop) for generation, stop in zip(self._generations, self._stops, strict=True))

    def _follow(self, generation: Generation) -> Iterator[int]:
        """What another part of a generation depends on; yields the generations of which more is needed."""
        start, stop = self._seen[generation.number], self._stops[generation.number]
        self._seen[generation.number] = stop
        for segment in generation.segments:
            if segment.round > self._last_round:
                continue
            for index in range(max(start, segment.start), min(stop, segment.stop)):
                match generation.events[index]:
                    case Applied():
                        for other, begun in self._begun[self._steps[generation.number][index]]:
                            yield from self._need(other, begun + 1)
                    case Resumed() if segment.origin is not None:
                        origin = segment.origin
                        for before in self._generations[origin.generation].segments:
                            if before.round == origin.round:
                                yield from self._need(
                                    origin.generation, before.stop if origin.commits else before.start + 1
                                )
                    case _:
                        pass

    def _need(self, number: int, stop: int) -> Iterator[int]:
        if self._stops[number] < stop:
            self._stops[number] = stop
            yield number


def _own_need(generation: Generation, of_records: set[tuple[int, int]]) -> int:
    """Where that ends for which a generation is needed itself: its last part in a record, or the load of its last
    state."""
    stops = [s.stop if (s.generation, s.start) in of_records else s.start for s in generation.segments]
    return max(stops, default=0)


def _until(generation: Generation, stop: int) -> Generation:
    """The generation with so many of its events."""
    if stop >= len(generation.events):
        return generation
    segments = tuple(replace(s, stop=min(s.stop, stop)) for s in generation.segments if s.start < stop)
    return replace(generation, events=generation.events[:stop], segments=segments)
