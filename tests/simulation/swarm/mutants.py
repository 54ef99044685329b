"""What the machines ask of each other, left out on purpose, with the first seed that notices (`test_mutants.py`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from tests.simulation.network import DEADLINE_S
from tests.simulation.run.mutants import ForgetsItsRound, NeedsThoseThatItHad, WaitsForThoseThatHang
from tests.simulation.step.hosts import Join
from tests.simulation.swarm.hosts import Client, Server, Steps
from tests.simulation.swarm.world import World

from shoal.ids import PeerId
from shoal.swarm.cut_rule import CutRule
from shoal.swarm.lease import LeaseTable, _Lease  # pyright: ignore[reportPrivateUsage]
from shoal.swarm.records import trained
from shoal.swarm.round_coordinator import Effects, RoundCoordinatorMachine
from shoal.swarm.round_effects import TrainedTwice
from shoal.swarm.round_member import RoundMemberMachine
from shoal.swarm.round_quorums import RoundQuorums, first_quorum
from shoal.swarm.round_settings import CloseRequest, RoundSettings
from shoal.swarm.step_operations import SendStepMessage
from shoal.swarm.step_replica import StepReplica
from shoal.swarm.takeover import Settled, TakeoverMachine
from shoal.wire.messages.round import Join as RoundJoin
from shoal.wire.messages.round import Record, StageHashes
from shoal.wire.messages.step import StepEntry, StepsTrained


class _JoinsWithWhatItHas(Steps):
    def close(self) -> None:
        self._do(self.machine.close())
        self.joined = Join(self.machine.round, self.generation, (), ())
        self.server.steps_closed()


class JoinsTooEarly(Server):
    """Joins the round while steps are still open."""

    steps_class = _JoinsWithWhatItHas


class _StaysInItsRound(Steps):
    def begin(self, round: int) -> None:
        if round <= 1:
            super().begin(round)


class TrainsOnInTheOldRound(Server):
    """Swaps to a record, and goes on with the steps of the round before."""

    steps_class = _StaysInItsRound


class MovesLeasesAtOnce(LeaseTable):
    """Frees what a dead trainer had without asking what was committed."""

    def _is_untrained(self, held: _Lease, settled: Settled, has_all_notes: bool) -> bool:
        return True


class _HearsOfNobodyElse(TakeoverMachine):
    def settled(self, everyone: Collection[PeerId], steady: Collection[PeerId]) -> Settled:
        return super().settled(self._answers, steady)


class CountsTheLostAsSettled(LeaseTable):
    """Frees what no replica that can be reached has committed, as if one that is cut off had committed nothing."""

    def _is_untrained(self, held: _Lease, settled: Settled, has_all_notes: bool) -> bool:
        return not (held.done or held.left) and has_all_notes


class FreesWhatIsLeftToTheRecord(LeaseTable):
    """Frees what its trainer has left to the record, when that one dies later."""

    def _is_untrained(self, held: _Lease, settled: Settled, has_all_notes: bool) -> bool:
        return held.left or super()._is_untrained(held, settled, has_all_notes)


class TrainsTwice(World):
    """What trainers leave is freed too early, and only the coordinator is left to notice.

    Attributes:
        noticed: What it has noticed.
    """

    def __init__(self, seed: int, coordinator_class: type[RoundCoordinatorMachine] = RoundCoordinatorMachine) -> None:
        self.noticed: list[TrainedTwice] = []
        super().__init__(
            seed,
            coordinator_class=coordinator_class,
            table_class=CountsTheLostAsSettled,
            takeover_class=_HearsOfNobodyElse,
        )

    def trained_twice(self, found: TrainedTwice) -> None:
        self.noticed.append(found)


class _LooksAtNoSamples(RoundQuorums):
    def begin(
        self, settings: RoundSettings, joins: Mapping[PeerId, RoundJoin], slots: Mapping[PeerId, int]
    ) -> list[TrainedTwice]:
        for stage in range(settings.num_stages):
            self[stage] = first_quorum(
                stage, joins, slots, self.epochs[stage], settings.max_gradient_ratio, settings.cuts
            )
        return []


class RecordsWhatWasTrainedTwice(RoundCoordinatorMachine):
    """Merges steps into one record that share samples."""

    def _propose_all(self, request: CloseRequest, now_s: float) -> Effects:
        quorums = _LooksAtNoSamples()
        quorums.epochs = self._quorums.epochs
        self._quorums = quorums
        return super()._propose_all(request, now_s)


class WaitsForTheDeadline(TakeoverMachine):
    """Settles nothing before whoever is silent has lost its connection, though all have answered."""

    def is_over(self, live: Collection[PeerId], now_s: float) -> bool:
        return now_s - self._begun_s > DEADLINE_S and super().is_over(live, now_s)


class TakesAnyReplicaForAWitness(LeaseTable):
    """Believes a replica that is not on the path of the attempt."""

    def _is_untrained(self, held: _Lease, settled: Settled, has_all_notes: bool) -> bool:
        paths = {key: tuple(settled.witnesses) for key in held.attempts}
        return super()._is_untrained(replace(held, attempts=paths), settled, has_all_notes)


class KeepsWhatIsInNoRecord(RoundMemberMachine):
    """Goes on with its own parameters of other fragments, though the record is without what it has trained."""

    def _has_part_in(self, record: Record, hashes: StageHashes) -> bool:
        return True


class WeighsTheRoundAlone(StepReplica):
    """Joins as if its fragment had been averaged in the round before."""

    def start_round(self, round: int, base: str = "", keeps_rest: bool = False) -> list[SendStepMessage]:
        return super().start_round(round, base, False)


class AveragesTheRestTwice(CutRule):
    """Weighs all steps of a round, and those behind its cut once more in the next one."""

    def _parts(self, round: int, log: Sequence[StepEntry]) -> tuple[StepsTrained, ...]:
        _, *rest = super()._parts(round, log)
        return (trained(log), *rest)


class ForgetsTheRest(CutRule):
    """Weighs what was trained behind a cut in no round."""

    def _parts(self, round: int, log: Sequence[StepEntry]) -> tuple[StepsTrained, ...]:
        return (super()._parts(round, log)[0], StepsTrained())


class CutsAtTheJoin(CutRule):
    """Joins as if the pseudo-gradient were of all steps, although it was taken before the last ones."""

    def commits(self, round: int) -> int | None:
        return None


class CutsTheLastRound(CutRule):
    """Leaves to a later round what was trained behind the cut of the last one."""

    def commits(self, round: int) -> int | None:
        return self.cut_after


class BeginsItsRoundAnew(Client):
    """Has its trainers begin a round anew that another process has begun before."""

    run_class = ForgetsItsRound


class WaitsForItsTrainers(Client):
    """Waits for a trainer's hello before a round, however long."""

    run_class = WaitsForThoseThatHang


class GivesUpWithItsTrainers(Client):
    """Ends if trainers do not come that another process has started."""

    run_class = NeedsThoseThatItHad


MUTANTS: dict[str, tuple[Callable[[int], World], int]] = {
    "JoinsTooEarly": (lambda seed: World(seed, host_class=JoinsTooEarly), 0),
    "TrainsOnInTheOldRound": (lambda seed: World(seed, host_class=TrainsOnInTheOldRound), 0),
    "MovesLeasesAtOnce": (lambda seed: World(seed, table_class=MovesLeasesAtOnce), 4),
    "CountsTheLostAsSettled": (
        lambda seed: World(seed, table_class=CountsTheLostAsSettled, takeover_class=_HearsOfNobodyElse),
        22,
    ),
    "RecordsWhatWasTrainedTwice": (lambda seed: TrainsTwice(seed, RecordsWhatWasTrainedTwice), 22),
    "FreesWhatIsLeftToTheRecord": (lambda seed: World(seed, table_class=FreesWhatIsLeftToTheRecord), 8),
    "WaitsForTheDeadline": (lambda seed: World(seed, takeover_class=WaitsForTheDeadline), 0),
    "KeepsWhatIsInNoRecord": (lambda seed: World(seed, member_class=KeepsWhatIsInNoRecord), 0),
    "WeighsTheRoundAlone": (lambda seed: World(seed, replica_class=WeighsTheRoundAlone), 0),
    "AveragesTheRestTwice": (lambda seed: World(seed, cuts_class=AveragesTheRestTwice), 0),
    "ForgetsTheRest": (lambda seed: World(seed, cuts_class=ForgetsTheRest), 0),
    "CutsAtTheJoin": (lambda seed: World(seed, cuts_class=CutsAtTheJoin), 0),
    "CutsTheLastRound": (lambda seed: World(seed, cuts_class=CutsTheLastRound), 0),
    "BeginsItsRoundAnew": (lambda seed: World(seed, client_class=BeginsItsRoundAnew), 72),
    "WaitsForItsTrainers": (lambda seed: World(seed, client_class=WaitsForItsTrainers), 0),
    "GivesUpWithItsTrainers": (lambda seed: World(seed, client_class=GivesUpWithItsTrainers), 101),
    "TakesAnyReplicaForAWitness": (lambda seed: World(seed, table_class=TakesAnyReplicaForAWitness), 22),
}
