"""What a run has come to so far: a pure fold over its events.

event --apply--> RunTotals --> summary.json, `shoal status`, the monitor
                    '--> snapshot in the diary, from which the next start of the client goes on
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from shoal.client.progress import Progress
from shoal.events.base import Event
from shoal.events.run import (
    ClientStarted,
    DataSized,
    EvaluationDone,
    RoleCounted,
    RoundBegun,
    RoundRecorded,
    RunLaunched,
    RunPaused,
    RunResumed,
    RunTakenOver,
    ShareEvaluated,
    StepReported,
    TrainerFinished,
)
from shoal.events.stages import ChainLost, MoveEnded, StageBeganAnew, StageStands
from shoal.ids import PeerId
from shoal.swarm.incidents import Incidents
from shoal.swarm.round_boundary import RunTime
from shoal.wire.messages.control import MAX_COUNTERS, MetricReport

START_TIME: Final = "process.start_time_seconds"
THIS_CLIENT = PeerId("")
"""Where the client's own counters are among those of its peers."""


@dataclass
class Counted:
    """What the processes of a run have counted.

    Attributes:
        latest: what the last process of each peer has counted.
        earlier: the sum over that peer's earlier processes: a process that is started again counts from 0.
        started_unix_s: when the last process of each peer was started, where it has said so.
    """

    latest: dict[PeerId, dict[str, int]] = field(default_factory=dict[PeerId, dict[str, int]])
    earlier: dict[PeerId, dict[str, int]] = field(default_factory=dict[PeerId, dict[str, int]])
    started_unix_s: dict[PeerId, float] = field(default_factory=dict[PeerId, float])

    def newest(self, peer: PeerId) -> RoleCounted:
        """Return what the last process of a peer has counted; nothing, if nothing is known of it."""
        return RoleCounted(peer, self.latest.get(peer, {}), self.started_unix_s.get(peer, 0.0))

    def take(self, counted: RoleCounted) -> None:
        """Take the newest counts of a peer."""
        if counts_anew(self.newest(counted.peer), counted):
            self.started_again(counted.peer)
        self.latest[counted.peer] = dict(counted.counts)
        self.started_unix_s[counted.peer] = counted.started_unix_s

    def started_again(self, peer: PeerId) -> None:
        """The peer's process has ended; the next one begins with nothing."""
        sums = Counter(self.earlier.get(peer, {})) + Counter(self.latest.pop(peer, {}))
        # As many as one process may have: another one with other names counts nothing that is shown.
        self.earlier[peer] = dict(islice(sums.items(), MAX_COUNTERS))

    def sums(self) -> dict[str, int]:
        """Return the sums by name."""
        sums = Counter[str]()
        for counts in (*self.latest.values(), *self.earlier.values()):
            sums.update(counts)
        return dict(sorted(sums.items()))


def counted_by(peer: PeerId, report: MetricReport) -> RoleCounted:
    """Return what a peer's report says of its counters."""
    return RoleCounted(peer, report.counters, report.gauges.get(START_TIME, 0.0))


def counts_anew(before: RoleCounted, now: RoleCounted) -> bool:
    """Whether a peer's counts are those of another process than before.

    It was started at another time, or, where one of them has not said when, a count has fallen, which none ever does.
    """
    if before.started_unix_s and now.started_unix_s:
        return before.started_unix_s != now.started_unix_s
    return any(now.counts.get(name, 0) < count for name, count in before.counts.items())


@dataclass
class RunTotals:
    """The totals of one run, as one client knows them.

    Attributes:
        time: of the run, which a user can pause.
        launched_s: when the run was launched, in monotonic seconds; None before its client has started.
        num_train: samples of a pass.
        num_holdout: size of the held-out set; 0 until the data server has said it.
        rounds: records committed by this client.
        num_replicas: replicas that took part at most, all stages together.
        idle_rounds: how many of the last rounds have trained nothing.
        durations_s: of the rounds that this client has begun, without their pauses.
        hashes: of each stage's outer parameters after the last record.
        last_numbers: the last step that each slot has reported.
        servers_moved: how many servers have come to another stage.
    """

    time: RunTime = field(default_factory=RunTime)
    paused_by: str = ""
    launched_s: float | None = None
    num_train: int = 0
    num_holdout: int = 0
    rounds: int = 0
    num_replicas: int = 0
    idle_rounds: int = 0
    durations_s: list[float] = field(default_factory=list[float])
    hashes: dict[int, str] = field(default_factory=dict[int, str])
    last_numbers: dict[int, int] = field(default_factory=dict[int, int])
    servers_moved: int = 0
    progress: Progress = field(default_factory=Progress)
    counted: Counted = field(default_factory=Counted)
    incidents: Incidents = field(default_factory=Incidents)
    stages_restored: list[StageBeganAnew] = field(default_factory=list[StageBeganAnew])
    chains_lost: list[ChainLost] = field(default_factory=list[ChainLost])

    @property
    def seconds_to_first_step(self) -> float | None:
        """From the launch to the first committed step; None before it."""
        first_s = self.progress.first_step_at_s
        return None if first_s is None else round(self.since_launch_s(first_s), 3)

    def since_launch_s(self, at_s: float) -> float:
        """Return how long after the launch that was."""
        return at_s - (self.launched_s or 0.0)

    def move(self, at_s: float, now_s: float) -> None:
        """Go on at `now_s` from what was known at `at_s`, with none of the processes that were there; clocks may have
        begun anew in between. A pause is over."""
        self.time.resume(at_s)
        moved_s = now_s - at_s
        if self.launched_s is not None:
            self.launched_s += moved_s
        self.progress.move(moved_s)
        self.incidents.move(moved_s, now_s)
        for peer in list(self.counted.latest):
            self.counted.started_again(peer)

    def apply(self, event: Event) -> Sequence[Event]:
        """Take what has happened; return what follows from it."""
        match event:
            case RunLaunched():
                self.launched_s = event.at_s
            case StepReported():
                self.progress.step(event)
                self.last_numbers[event.slot] = event.number
            case ShareEvaluated():
                return self._evaluated(event)
            case TrainerFinished():
                self.progress.done(event)
            case RoleCounted():
                self.counted.take(event)
            case ClientStarted():
                self.counted.started_again(THIS_CLIENT)
            case DataSized():
                self.num_train, self.num_holdout = event.num_train, event.num_holdout
            case RoundBegun():
                self.num_replicas = max(self.num_replicas, event.replicas)
                self.progress.begin_round(event)
            case RoundRecorded():
                self._recorded(event)
            case RunTakenOver():
                self._taken_over(event)
            case RunPaused():
                self.time.pause(event.at_s)
                self.paused_by = event.by
            case RunResumed():
                self.progress.resumed(self.time.pause_s(event.at_s))
                self.time.resume(event.at_s)
            case MoveEnded():
                self.servers_moved += event.from_stage != event.to_stage
            case StageBeganAnew() | StageStands():
                self._restored(event)
            case ChainLost():
                self.chains_lost.append(event)
            case _:
                pass
        return self.incidents.apply(event)

    def _evaluated(self, event: ShareEvaluated) -> Sequence[Event]:
        loss = self.progress.evaluated(event, self.num_holdout)
        return () if loss is None else (EvaluationDone(event.base_round, loss),)

    def _recorded(self, event: RoundRecorded) -> None:
        self.rounds += 1
        self.hashes = event.hashes
        self.idle_rounds = 0 if event.trained else self.idle_rounds + 1
        if event.duration_s is not None:
            self.durations_s.append(event.duration_s)
        self.progress.recorded(event)

    def _taken_over(self, event: RunTakenOver) -> None:
        """Steps have numbers again that were reported already, and what was evaluated was something else."""
        self.rounds, self.idle_rounds = event.base_round, 0
        self.hashes = event.hashes
        self.last_numbers.clear()
        self.progress.eval_losses.clear()

    def _restored(self, event: StageBeganAnew | StageStands) -> None:
        """The same stage of the same round may be restored once more, or stand after all."""
        place = event.in_round, event.stage
        kept = [each for each in self.stages_restored if (each.in_round, each.stage) != place]
        if isinstance(event, StageBeganAnew):
            kept.append(event)
        self.stages_restored = sorted(kept, key=lambda each: (each.in_round, each.stage))
