"""The rules of snapshots, each left out on purpose, with the first seed that notices (`test_mutants.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec
from tests.simulation.swarm.snapshots import SnapshotServer, SnapshotWorld

from shoal.ids import PeerId
from shoal.swarm.open_step import AttemptLedger
from shoal.swarm.snapshots import Base, SearchEffects, SnapshotSearch, is_due
from shoal.swarm.step_replica import StepReplica
from shoal.wire.messages.snapshot import Snapshot
from shoal.wire.messages.step import StepEntry, StepsTrained


class TakesSnapshotsOfOtherRounds(SnapshotSearch):
    def take(self, base: Base) -> Snapshot | None:
        found = self.found
        return found and super().take(
            replace(base, round=found.round, record_hash=found.record_hash, hashes=found.hashes)
        )


class ComparesNoHash(SnapshotSearch):
    def fetched(self, is_right: bool, now_s: float) -> SearchEffects:
        return super().fetched(True, now_s)


class TakesSnapshotsOfOlderGenerations(SnapshotSearch):
    def receive(self, peer: PeerId, message: Snapshot | None, now_s: float) -> SearchEffects:
        if message is not None:
            message = msgspec.structs.replace(message, generation=self._generation - 1)
        return super().receive(peer, message, now_s)


class _Forgetful(AttemptLedger):
    def resume(self, log: Iterable[StepEntry]) -> bool:
        self._denied.clear()
        return super().resume(log)


class ForgetsWhatItHasDenied(StepReplica):
    """Goes on with a step of which it has told another replica that it is not committed here."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._ledger = _Forgetful()


class ForgetsWhatItHadTrainedBefore(StepReplica):
    """Goes on from a snapshot, and weighs the round of that alone."""

    def resume(self, log: tuple[StepEntry, ...], earlier: tuple[StepsTrained, ...] = ()) -> bool:
        return super().resume(log)


class KeepsSnapshotsBehindTheCut(SnapshotServer):
    """Who goes on from such a snapshot has the steps behind the cut, and not what was cut."""

    def is_due(self, num_commits: int) -> bool:
        return is_due(num_commits, self.world.every)


MUTANTS: dict[str, tuple[Callable[[int], SnapshotWorld], int]] = {
    "TakesSnapshotsOfOtherRounds": (lambda seed: SnapshotWorld(seed, search_class=TakesSnapshotsOfOtherRounds), 10),
    "ComparesNoHash": (lambda seed: SnapshotWorld(seed, search_class=ComparesNoHash), 19),
    "TakesSnapshotsOfOlderGenerations": (
        lambda seed: SnapshotWorld(seed, search_class=TakesSnapshotsOfOlderGenerations),
        194,
    ),
    "ForgetsWhatItHadTrainedBefore": (
        lambda seed: SnapshotWorld(seed, replica_class=ForgetsWhatItHadTrainedBefore),
        14,
    ),
    "KeepsSnapshotsBehindTheCut": (lambda seed: SnapshotWorld(seed, host_class=KeepsSnapshotsBehindTheCut), 58),
    "ForgetsWhatItHasDenied": (lambda seed: SnapshotWorld(seed, replica_class=ForgetsWhatItHasDenied), 51),
}
