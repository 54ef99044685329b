"""The joins of one round, and the fate of the steps that some replica holds in doubt.

A step in doubt was prepared by a replica whose trainer, and then another replica of the path that could tell, was lost.
It is committed if any join holds it and aborted otherwise; that is decided once everyone has joined, and it stays so
for the round.

Coordinators that follow each other, or lead on two sides of a split, may have settled a step in different ways. What a
replica has committed or aborted by an order it cannot take back, so it contradicts the others, and is left out of the
round: what this coordinator has settled itself counts, and where it has settled nothing, that some replica has aborted
the step. But a stage keeps its replicas if all of them contradict. Without them the round could not end; so the step is
in the record if one of them holds it, and counts as lost for the stages of which nobody does.

A replica that names samples which the data do not have is left out as well, unless all replicas of its stage do: these
may have been given such a step, and the record names it then. So is one whose samples lie behind more gaps than a
record can name: batches are dealt in order, so nobody was given these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId, StepKey
from shoal.swarm.records import steps_held
from shoal.swarm.sample_ranges import Ranges, merge
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.round import MAX_RECORDED, Join

_Found = TypeVar("_Found")

MAX_RANGES = 2 * MAX_RECORDED
"""Of samples, in a replica's log: batches follow each other, but for what was put back and what fills gaps."""


class Fate(NamedTuple):
    """How a step in doubt was settled; scale, learning rate and skipped are those of the entry that holds it."""

    key: StepKey
    commit: bool
    scale: float
    lr: float
    skipped: bool


class RoundJoins:
    """The joins of one round.

    Attributes:
        joins: by replica; a replica whose doubts are being settled joins again.
        awaited: replicas that took part and had not joined when that was looked at last, without those that have since,
            by their stages.
    """

    def __init__(self) -> None:
        self.joins: dict[PeerId, Join] = {}
        self.awaited: dict[PeerId, int] = {}
        self._num_ranges: dict[PeerId, int] = {}
        self._fates: dict[StepKey, Fate] = {}

    def restart(self) -> None:
        """Forget the joins, not the fates: replicas have acted on them."""
        self.joins.clear()
        self.awaited.clear()

    def keep(self, holders: Mapping[PeerId, int]) -> Mapping[PeerId, Join]:
        """Only these replicas still take part, with their stages; returns their joins."""
        for peer in self.joins.keys() - holders.keys():
            del self.joins[peer]
        self.awaited = {peer: stage for peer, stage in holders.items() if peer not in self.joins}
        return self.joins

    def note(self, peer: PeerId, join: Join) -> None:
        """Take a join, with what an earlier coordinator had aborted there.

        Raises:
            RemoteProtocolError: Its samples are in so many pieces that records which name them could not be sent.
        """
        num_ranges = len(merge(item for entry in join.log for item in entry.samples))
        if num_ranges > MAX_RANGES:
            raise RemoteProtocolError(
                f"{peer} joins with samples in {num_ranges} pieces, at most {MAX_RANGES} are taken"
            )
        self.joins[peer], self._num_ranges[peer] = join, num_ranges
        self.awaited.pop(peer, None)
        for key in join.aborted:
            self._fates.setdefault(key, Fate(key, False, 0.0, 0.0, False))

    def leave_out(self) -> dict[PeerId, StepKey]:
        """Drop the joins that contradict, once all replicas have joined and no doubt is left.

        Before that it is not known which replicas are the last of their stage.

        Returns:
            The replicas whose joins were dropped, each with a step that it has ended against its fate.
        """
        return self._drop(self._contradicting())

    def leave_out_strange(self, num_samples: int) -> dict[PeerId, SampleRange]:
        """Drop the joins that name samples which a pass over so many does not have, once all replicas have joined.

        Returns:
            The replicas whose joins were dropped, each with samples that there are not.
        """
        found: dict[PeerId, SampleRange] = {}
        for peer, join in self.joins.items():
            strange = [item for entry in join.log for item in entry.samples if item.stop > num_samples]
            if strange:
                found[peer] = strange[0]
        return self._drop(found)

    def leave_out_scattered(self, recorded: Ranges) -> dict[PeerId, SampleRange]:
        """Drop the joins that scatter samples behind more ranges than the record can name, once all replicas have
        joined. Who has no more ranges than steps may have come to so many passes over few samples.

        Args:
            recorded: samples of all earlier records.

        Returns:
            The replicas whose joins were dropped, each with such samples.
        """
        if len(recorded) + sum(self._num_ranges[peer] for peer in self.joins) <= MAX_RECORDED:
            return {}  # however they lie
        named = {peer: merge(item for entry in join.log for item in entry.samples) for peer, join in self.joins.items()}
        used = merge((*recorded, *(item for ranges in named.values() for item in ranges)))
        if len(used) <= MAX_RECORDED:
            return {}
        last = used[MAX_RECORDED - 1]
        found: dict[PeerId, SampleRange] = {}
        for peer, ranges in named.items():
            behind = [item for item in ranges if item > last]
            if behind and len(ranges) > len(self.joins[peer].log):
                found[peer] = behind[0]
        return self._drop(found)

    def _drop(self, found: Mapping[PeerId, _Found]) -> dict[PeerId, _Found]:
        """Drop these joins, but those of a stage that would have none left."""
        sound = {join.stage for peer, join in self.joins.items() if peer not in found}
        out = {peer: what for peer, what in found.items() if self.joins[peer].stage in sound}
        for peer in out:
            del self.joins[peer]
        return out

    def _contradicting(self) -> dict[PeerId, StepKey]:
        found: dict[PeerId, StepKey] = {}
        if not self._fates:
            return found
        for peer, join in self.joins.items():
            denied = [key for key in join.aborted if self._fates[key].commit]
            held = [entry.key for entry in join.log if self._is_aborted(entry.key)]
            if denied or held:
                found[peer] = (*denied, *held)[0]
        return found

    def _is_aborted(self, key: StepKey) -> bool:
        fate = self._fates.get(key)
        return fate is not None and not fate.commit

    def settle(self) -> list[tuple[PeerId, Fate]]:
        """Decide all doubts: who is to be told of which fate. Empty if there are none."""
        orders: list[tuple[PeerId, Fate]] = []
        if not any(join.in_doubt for join in self.joins.values()):
            return orders
        held = steps_held(join.log for join in self.joins.values())
        for peer, join in list(self.joins.items()):
            for key in join.in_doubt:
                entry = held.get(key)
                if entry is None:
                    fate = Fate(key, False, 0.0, 0.0, False)
                else:
                    fate = Fate(key, True, entry.scale, entry.lr, entry.skipped)
                orders.append((peer, self._fates.setdefault(key, fate)))
                self.joins.pop(peer, None)
        return orders
