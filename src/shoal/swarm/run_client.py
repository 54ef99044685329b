"""A client's run, from the first server to the last record: what comes next, and when. Pure state, no I/O.

    WAIT_TURN -> GATHER -> SETTLE -> LEAD -> CATCH_UP -> PLACE -> take up: RECORD, or STAFF
                                       ^ |                            | begin: FORM
                                       | '-> go on for others: INHERIT -> HAND_OVER
                                       |
                                       '-- overtaken, in any of these:
                                           FORM -> STAFF -> GIVE -> TRAIN -> HAND_OVER -> AVERAGE -> RECORD -> FORM ...
                                        after the last record: FORM -> STAFF -> GIVE -> TRAIN -> MIRROR -> OVER

Each phase looks at the facts: the view, what the coordinator has found, the trainers. It waits, or it orders something
and goes on. What takes a while (`INHERIT`, `GIVE`, `RECORD`) is carried out by the driver, which says when it is done.
What a round commits is the coordinator's (`swarm.round_coordinator`), who trains its steps the slots'
(`swarm.trainer_slots`), whose turn it is among the clients of several hosts `swarm.client_turn`'s; this machine says
when each begins and ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from shoal.errors import ControlError, NoPipeline, RoundAborted, ShoalError
from shoal.events.mirror import MirrorsBehind
from shoal.events.run import EvaluationIncomplete, RoundSlow, RoundTakenUp, RunEnded
from shoal.events.stages import ServersFewer, StagesMissing
from shoal.events.trainers import TrainersSilent
from shoal.ids import Ballot, PeerId
from shoal.swarm.client_turn import ClientTurn, TakeTurn
from shoal.swarm.records import Tip
from shoal.swarm.round_boundary import RoundBoundary, RunTime, boundary_s
from shoal.swarm.round_effects import RoundReady
from shoal.swarm.routing import Pipeline, form_pipelines
from shoal.swarm.run_effects import (
    BeginRound,
    CloseRound,
    EndTraining,
    Failed,
    GiveInner,
    InheritRecord,
    PlaceServers,
    RoundPlan,
    RunEffect,
    RunEffects,
    RunFacts,
    RunPhase,
    RunRules,
    Stand,
    WriteRecord,
)
from shoal.swarm.trainer_slots import TrainerSlots
from shoal.wire.messages.base import StepRange

SETTLE_S = 1.0
"""So long nobody has come when all that start together are there, and so long a stage lacks servers that have come."""
NO_FURTHER_S = 30.0
"""Of a mirror that can be reached: a stage over a slow link takes as long."""
PATIENCE_S = 1.5
"""A spare has the state of its new stage, and a server that was killed is back, within about this time."""
RETURN_S = 5.0
"""So long may a trainer that is there take to dial a client that was started again."""
GONE_S = 5.0
"""So long may a server take to end that may leave."""
MAX_EVALUATIONS = 3
MAX_STARTS = 5
"""Of trainers, in a round of a run that has trained: what hinders all of them may be gone a moment later."""
AGAIN_S = 1.0
"""So long after one start the next one follows."""


class RunClient:
    """The machine of one client.

    Attributes:
        has_turn: whether it has the run, or had it in an earlier start.
        is_replaced: another client goes on with the run.
        pipelines: of the round; none between two chains of records.
        holders: the replicas that held the record when the round began, with their stages.
        base: hash of the record on top of which the round is trained.
        wake_at_s: when to `look` again if nothing has changed before (monotonic).
    """

    def __init__(
        self,
        rules: RunRules,
        slots: TrainerSlots,
        time: RunTime,
        *,
        turn: ClientTurn | None = None,
        left: RoundPlan | None = None,
        base: str = "",
    ) -> None:
        """Wait for this client's turn, then for servers.

        Args:
            time: of the run, which others pause.
            turn: among the clients of other hosts; None: it is this one's.
            left: the round in which an earlier start of this client was.
            base: on which that is trained, or from which the run is resumed; empty: not known.
        """
        self.phase = RunPhase.WAIT_TURN
        self.has_turn, self.is_replaced = turn is None, False
        self.pipelines: tuple[Pipeline, ...] = ()
        self.holders: Mapping[PeerId, int] = {}
        self.base = base
        self.wake_at_s = math.inf
        self._rules, self._slots, self._time = rules, slots, time
        self._turn, self._left = turn, left
        self._end: RunEnded | Failed | None = None
        self._expected = rules.expected_servers if left is None else 0
        self._since_s: float | None = None  # when the phase was looked at first
        self._num_entered = 0  # phases so far
        self._seen: object = None  # what the phase waits for to stay as it is, or to be another, and since when it is
        self._seen_s = 0.0
        self._is_carried_out = self._has_said = False
        self._is_overtaken = self._has_led = self._has_trained = False
        self._led = RoundReady(Tip(0, "", None), {}, {})  # from which record it has gone on last
        self._round, self._steps, self._begun_s = 0, StepRange(0, 0), 0.0
        self._has_begun = False  # it was this client, or an earlier start of it, that has begun the round
        self._before: tuple[Pipeline, ...] = ()
        self._awaited: list[int] = []
        self._is_all_new = True  # all trainers were started for this round
        self._boundary = RoundBoundary(time, math.inf, 0.0)
        self._closed_s: float | None = None
        self._evaluating_s: list[float] = []  # how long those rounds have taken that began with an evaluation
        self._evaluations_left = MAX_EVALUATIONS
        self._starts_left = 1
        self._begins: dict[RunPhase, Callable[[RunFacts, float], RunEffects]] = {
            RunPhase.LEAD: self._begin_lead,
            RunPhase.FORM: self._begin_form,
            RunPhase.STAFF: self._begin_staff,
            RunPhase.TRAIN: self._begin_train,
            RunPhase.AVERAGE: self._begin_average,
        }
        self._phases: dict[RunPhase, Callable[[RunFacts, float], RunEffects]] = {
            RunPhase.WAIT_TURN: self._wait_turn,
            RunPhase.GATHER: self._gather,
            RunPhase.SETTLE: self._settle,
            RunPhase.LEAD: self._lead,
            RunPhase.CATCH_UP: self._catch_up,
            RunPhase.PLACE: self._place,
            RunPhase.INHERIT: self._inherit,
            RunPhase.FORM: self._form,
            RunPhase.STAFF: self._staff,
            RunPhase.GIVE: self._give,
            RunPhase.TRAIN: self._train,
            RunPhase.HAND_OVER: self._hand_over,
            RunPhase.AVERAGE: self._average,
            RunPhase.RECORD: self._record,
            RunPhase.MIRROR: self._mirror,
            RunPhase.OVER: _nothing,
        }

    @property
    def is_hurried(self) -> bool:
        """Whether others are waited for to appear, so that the registry should be asked often."""
        if self.phase is RunPhase.WAIT_TURN:
            return self._turn is not None and not self._turn.knows_run
        return self.phase in (RunPhase.GATHER, RunPhase.SETTLE, RunPhase.FORM)

    # -- events

    def look(self, facts: RunFacts, now_s: float) -> RunEffects:
        """Return what is to be done now, in this order; to be called again when it is done, until there is nothing.

        To be called whenever a fact has changed, and at `wake_at_s`.
        """
        while True:
            if self._end is not None and self.phase is not RunPhase.OVER:
                return self._enter(RunPhase.OVER, self._end)
            if self._is_overtaken and self.phase not in (RunPhase.MIRROR, RunPhase.OVER):
                self._is_overtaken = False
                if self.phase is RunPhase.TRAIN:
                    return self._enter(RunPhase.LEAD, EndTraining())
                self._enter(RunPhase.LEAD)
            phase, num_entered = self.phase, self._num_entered
            begin = self._begins.get(phase) if self._since_s is None else None
            self._since_s = now_s if self._since_s is None else self._since_s
            self.wake_at_s = math.inf
            effects = (begin or self._phases[phase])(facts, now_s)
            if effects or (begin is None and self._num_entered == num_entered):
                return effects

    def overtaken(self) -> None:
        """What it knows of its round is void, see `round_effects.Overtaken`: its pipelines are none any more."""
        self.pipelines = ()
        self._is_overtaken = self._has_led

    def deposed(self, highest: Ballot) -> None:
        """Another client coordinates the run, under a higher ballot; this one does not come back."""
        taken = f"peer {highest.peer}, a client of another host, has taken the run over under ballot {highest.number}"
        self.is_replaced, self._end = True, Failed(RoundAborted(f"{taken}; it goes on there, and ends here"))

    def ended(self, reason: str, *, well: bool) -> None:
        """The client for which this one waits has ended the run. With its turn it waits for nobody."""
        if self.phase is RunPhase.WAIT_TURN:
            self._end = RunEnded(reason) if well else Failed(ControlError(reason))

    def carried_out(self) -> None:
        """What takes a while is done."""
        self._is_carried_out = True

    def begun(self, now_s: float) -> None:
        """Trainers have been told of the round. Until then its file may have had to wait for a disk."""
        self._boundary.begin(now_s)

    # -- servers

    def _wait_turn(self, facts: RunFacts, now_s: float) -> RunEffects:
        if self._turn is None:
            return self._enter(RunPhase.GATHER, TakeTurn())
        effects = self._turn.look(facts.view, now_s)
        self.wake_at_s = self._turn.wake_at_s
        if TakeTurn() not in effects:
            return [*effects]
        self.has_turn = True
        return self._enter(RunPhase.GATHER, *effects)

    def _gather(self, facts: RunFacts, now_s: float) -> RunEffects:
        rules, view = self._rules, facts.view
        is_complete = view.max_pipelines(rules.num_stages) > 0
        if is_complete and len(view.replicas) >= self._expected:
            is_settled = bool(self._expected) or self._left is not None
            return self._enter(RunPhase.LEAD if is_settled else RunPhase.SETTLE)
        if not rules.patient and self._has_passed(now_s, rules.servers_timeout_s):
            if not is_complete:
                return self._fail(_no_replica(view.missing_stages(rules.num_stages)))
            return self._enter(RunPhase.LEAD, ServersFewer(self._expected, len(view.replicas)))
        return [] if self._has_said else self._look_for_gap(facts, now_s)

    def _look_for_gap(self, facts: RunFacts, now_s: float) -> RunEffects:
        """Servers that start together on several hosts may not see each other in time, and take the same stage."""
        view, num_stages = facts.view, self._rules.num_stages
        missing = tuple(view.missing_stages(num_stages))
        has_gap = len(view.replicas) >= num_stages and not view.candidates and bool(missing)
        if not self._stays(has_gap, now_s, SETTLE_S if has_gap else math.inf):
            return []
        self._has_said = True
        return [StagesMissing(missing), Stand()]

    def _settle(self, facts: RunFacts, now_s: float) -> RunEffects:
        peers = frozenset(replica.peer for replica in facts.view.replicas)
        return self._enter(RunPhase.LEAD) if self._stays(peers, now_s, SETTLE_S) else []

    def _begin_lead(self, facts: RunFacts, _: float) -> RunEffects:
        # Once: who is deposed afterwards has lost the run to another client.
        return [] if facts.leads or self._has_led else [Stand()]

    def _lead(self, facts: RunFacts, now_s: float) -> RunEffects:
        rules, ready = self._rules, facts.ready
        if ready is None:
            missing = facts.view.missing_stages(rules.num_stages)
            has_waited = self._stays(bool(missing), now_s, rules.servers_timeout_s if missing else math.inf)
            must_end = has_waited and not rules.patient and not self._has_led
            return self._fail(_no_replica(missing)) if must_end else []
        self._led = ready
        if self._has_led:
            return self._inherit_from(ready)
        self._has_led = True
        return self._enter(RunPhase.CATCH_UP)

    def _catch_up(self, facts: RunFacts, now_s: float) -> RunEffects:
        if self._left is not None:
            return self._go_on(facts)
        lacking = {replica.peer for replica in facts.view.replicas} - (facts.holders or {}).keys()
        if self.base and lacking and not self._has_passed(now_s, self._rules.servers_timeout_s):
            return []
        return self._go_on(facts) if self._rules.succeeds else self._enter(RunPhase.PLACE, PlaceServers())

    def _place(self, facts: RunFacts, now_s: float) -> RunEffects:
        return [] if facts.is_placing else self._go_on(facts)

    # -- where the run stands

    def _go_on(self, facts: RunFacts) -> RunEffects:
        """Begin the run, or go on where an earlier start of this client was, or others have been."""
        ready, left = self._led, self._left
        try:
            is_where_it_was = self._is_where_it_was(facts, ready)
        except ControlError as error:
            return self._fail(error)
        if not is_where_it_was:
            return self._inherit_from(ready)
        self.holders = ready.holders
        if left is None:
            return self._next_round()
        self.pipelines = left.pipelines
        taken_up = RoundTakenUp(left.round, ready.tip.round)
        if ready.tip.signed is not None and ready.tip.round != left.round - 1:
            self._left = None
            return [taken_up, *self._enter(RunPhase.RECORD, WriteRecord(ready, left.begun_s, None))]
        self._round, self._steps, self._begun_s, self._has_begun = left.round, left.steps, left.begun_s, True
        return [taken_up, *self._enter(RunPhase.STAFF)]

    def _is_where_it_was(self, facts: RunFacts, ready: RoundReady) -> bool:
        """Whether the run has not gone on without this client since its last start; a successor was never there.

        Raises:
            ControlError: the replicas are further back.
        """
        left, base = self._left, self.base
        if left is None:
            return not self._rules.succeeds and base in ("", ready.tip.hash)
        if ready.tip.round == left.round - 1 and base in ("", ready.tip.hash):
            return True
        if ready.tip.signed is None:
            raise ControlError(
                f"the servers hold record {ready.tip.round}, but this client was in round {left.round} before it "
                "was started again: start a new run, or servers that hold the record before"
            )
        # Where another client has made the record of its round, that one may have trained on: what it has used is in
        # no record yet, and free here.
        return ready.tip.round == left.round and facts.is_own(ready, base)

    def _inherit_from(self, ready: RoundReady) -> RunEffects:
        self.pipelines, self.holders, self._left = (), ready.holders, None
        return self._enter(RunPhase.INHERIT, InheritRecord(ready))

    def _inherit(self, facts: RunFacts, _: float) -> RunEffects:
        if not self._is_carried_out:
            return []
        self._has_begun = False
        self._round = self._led.tip.round + 1
        # The round that others have begun is ended as it is: of its steps nothing else is known here.
        is_left = self._round <= self._rules.num_rounds
        return self._enter(RunPhase.HAND_OVER) if is_left else self._next_round()

    # -- a round

    def _next_round(self) -> RunEffects:
        rules, round = self._rules, self._led.tip.round + 1
        self._round, self._has_begun = round, True
        none = StepRange(rules.total_steps, rules.total_steps)
        self._steps = rules.steps_of(round) if round <= rules.num_rounds else none
        self._evaluations_left = MAX_EVALUATIONS
        self._starts_left = MAX_STARTS if self._has_trained else 1
        return self._enter(RunPhase.FORM)

    def _begin_form(self, facts: RunFacts, now_s: float) -> RunEffects:
        self._begun_s, self._before = self._time.at_s(now_s), self.pipelines
        return self._form(facts, now_s)

    def _form(self, facts: RunFacts, now_s: float) -> RunEffects:
        """A trainer that has no pipeline when a round begins has none until its end. So if there are fewer than in the
        round before, a spare that takes the place of a lost server, or its next generation, is waited for a moment:
        the longer a round takes, the more that is worth."""
        if facts.is_unfed:
            return []  # nobody could train, and who is here now may be gone by then
        formed = form_pipelines(facts.usable(self.holders), self._rules.num_stages, self._before)
        # Slots count without holes, since batches are dealt out by slot. A pipeline whose slot changes gets another
        # trainer, which loses nothing: optimizers live with the replicas.
        self.pipelines = tuple(Pipeline(slot, pipeline.path) for slot, pipeline in enumerate(formed))
        last_s = facts.durations_s[-1] if facts.durations_s else 0.0
        is_less = len(self.pipelines) < len(self._before)
        if not self.pipelines or (is_less and not self._has_passed(now_s, min(PATIENCE_S, last_s / 4))):
            return []
        return self._enter(RunPhase.STAFF)

    def _begin_staff(self, facts: RunFacts, _: float) -> RunEffects:
        if self._left is not None:
            self._awaited = self._slots.booting
            return []
        self._awaited = [slot for slot in range(len(self.pipelines)) if slot not in self._slots.present]
        starts = self._slots.want(len(self.pipelines))
        self._is_all_new = len(starts) == len(self.pipelines)
        return list(starts)

    def _staff(self, facts: RunFacts, now_s: float) -> RunEffects:
        """One that cannot be started, or does not say hello in time, is left behind, as long as there is another; the
        round starts it anew as soon as it begins."""
        slots, left, awaited = self._slots, self._left, self._awaited
        if facts.is_unfed and left is None:
            return self._enter(RunPhase.FORM)  # before they report, trainers ask the data server what it has
        if slots.launching(awaited):
            self._since_s = now_s  # their time begins when they run
        is_waiting = any(not slots.refusal(slot) for slot in slots.silent(awaited))
        if is_waiting and not self._has_passed(now_s, RETURN_S if left else slots.start_timeout_s):
            return []
        if awaited and not slots.present and self._starts_left > 1 and not self._has_passed(now_s, AGAIN_S):
            return []
        missing = slots.forgo(awaited)
        if left is not None:
            return self._enter(RunPhase.TRAIN)
        if missing and not slots.present:
            return self._start_again(missing)
        silent = tuple(slot for slot in missing if not slots.refusal(slot))
        said = [TrainersSilent(silent, slots.start_timeout_s)] if silent else []
        return self._enter(RunPhase.GIVE, *said, GiveInner(self._led.tip.hash))

    def _start_again(self, missing: Sequence[int]) -> RunEffects:
        """No trainer is there: start all of them once more, or fail with what has hindered them."""
        if not self._is_all_new:
            return self._enter(RunPhase.STAFF)  # some were there before: one that hangs, or was lost meanwhile
        if self._starts_left > 1:
            self._starts_left -= 1
            return self._enter(RunPhase.STAFF)
        slots = self._slots
        reasons = [slots.refusal(slot) for slot in missing if slots.refusal(slot)]
        if silent := [slot for slot in missing if not slots.refusal(slot)]:
            within = f"within {slots.start_timeout_s:.0f} s"
            reasons.append(f"trainers {silent} were started but did not report {within}; see their logs")
        return self._fail(ControlError("; ".join(reasons)))

    def _give(self, facts: RunFacts, _: float) -> RunEffects:
        return self._enter(RunPhase.TRAIN) if self._is_carried_out else []

    def _begin_train(self, facts: RunFacts, now_s: float) -> RunEffects:
        left, self._left, rules = self._left, None, self._rules
        self._has_trained = True
        if left is None:
            self.base = self._led.tip.hash
        is_limited = math.isfinite(rules.first_deadline_s)
        timeout_s = boundary_s(self._like_this_s(facts), rules.first_deadline_s) if is_limited else math.inf
        self._boundary = RoundBoundary(self._time, timeout_s, now_s)
        return [BeginRound(self._round, self._steps, self.base, self._begun_s, left)]

    def _like_this_s(self, facts: RunFacts) -> Sequence[float]:
        """How long those rounds have taken that tell how long this one does."""
        rules, round = self._rules, self._round
        if round >= rules.num_rounds:
            # What a slow trainer has under way in the last round, nobody trains in a later one; how long the evaluation
            # after it takes, no round has told.
            return ()
        # Where only some rounds begin with an evaluation, the others do not tell how long these take.
        is_longer = rules.evaluates(round) and not rules.evaluates(round + 1)
        return self._evaluating_s if is_longer else facts.durations_s

    def _train(self, facts: RunFacts, now_s: float) -> RunEffects:
        all_done = all(self._slots.is_done(pipeline.slot) for pipeline in self.pipelines)
        is_stuck = bool(facts.stuck) or facts.is_unfed or facts.is_refused
        if not self._boundary.is_over(now_s, all_done=all_done, is_stuck=is_stuck):
            self.wake_at_s = now_s + self._boundary.left_s(now_s)
            return []
        if self._round <= self._rules.num_rounds:
            return self._enter(RunPhase.HAND_OVER, EndTraining())
        if facts.is_evaluated(self._round - 1):
            return self._enter(RunPhase.MIRROR, EndTraining())
        # Some trainers were lost with their shares.
        self._evaluations_left -= 1
        incomplete = EvaluationIncomplete(self._round - 1)
        return self._enter(RunPhase.FORM if self._evaluations_left else RunPhase.MIRROR, EndTraining(), incomplete)

    # -- its end

    def _hand_over(self, facts: RunFacts, now_s: float) -> RunEffects:
        if facts.is_handing_over:
            return []
        is_gone = not facts.is_letting_go or self._stays(facts.is_letting_go, now_s, GONE_S)
        return self._enter(RunPhase.AVERAGE) if is_gone else []

    def _begin_average(self, facts: RunFacts, now_s: float) -> RunEffects:
        self._closed_s = self._time.at_s(now_s)
        return [CloseRound(self._round, self._closed_s - self._begun_s if self._has_begun else None)]

    def _average(self, facts: RunFacts, now_s: float) -> RunEffects:
        ready, timeout_s = facts.ready, self._rules.averaging_timeout_s
        if ready is None or ready.tip.round < self._round:
            # As long as it takes: for a stage that nobody serves any more, for servers of it.
            if not self._has_passed(now_s, timeout_s):
                return []
            self._since_s = now_s
            self._has_passed(now_s, timeout_s)
            return [] if facts.stuck else [RoundSlow(self._round, timeout_s)]
        if facts.committed_round != self._round:
            stands = f"record {ready.tip.round} stands"
            self.is_replaced = True
            return self._fail(RoundAborted(f"round {self._round} was committed by another coordinator: {stands}"))
        self._led = ready
        begun_s = self._begun_s if self._has_begun else None
        if begun_s is not None and self._rules.evaluates(self._round):
            self._evaluating_s.append(self._time.at_s(now_s) - begun_s)
        return self._enter(RunPhase.RECORD, WriteRecord(ready, begun_s, self._closed_s))

    def _record(self, facts: RunFacts, _: float) -> RunEffects:
        if not self._is_carried_out:
            return []
        self.holders = self._led.holders
        return self._next_round()

    def _mirror(self, facts: RunFacts, now_s: float) -> RunEffects:
        """Let mirrors take the last record before servers leave, as long as they get further."""
        lacking = facts.unmirrored
        if not lacking:
            return self._enter(RunPhase.OVER)
        if not self._stays(lacking, now_s, NO_FURTHER_S):
            return []
        num_behind = len({peer for peer, _ in lacking})
        return self._enter(RunPhase.OVER, MirrorsBehind(self._led.tip.round, num_behind, NO_FURTHER_S))

    # -- parts

    def _enter(self, phase: RunPhase, *effects: RunEffect) -> RunEffects:
        self.phase = phase
        self._num_entered += 1
        self._since_s = self._seen = None
        self._is_carried_out = self._has_said = False
        return list(effects)

    def _fail(self, error: ShoalError) -> RunEffects:
        return self._enter(RunPhase.OVER, Failed(error))

    def _has_passed(self, now_s: float, wait_s: float) -> bool:
        """Whether the phase has lasted for so long."""
        return self._is_after(now_s, (now_s if self._since_s is None else self._since_s) + wait_s)

    def _stays(self, seen: object, now_s: float, wait_s: float) -> bool:
        """Whether something has been as it is for so long."""
        if seen != self._seen:
            self._seen, self._seen_s = seen, now_s
        return self._is_after(now_s, self._seen_s + wait_s)

    def _is_after(self, now_s: float, at_s: float) -> bool:
        """Whether it is that late; if not, it is looked at then."""
        if now_s < at_s:
            self.wake_at_s = min(self.wake_at_s, at_s)
        return now_s >= at_s


def _nothing(_: RunFacts, now_s: float) -> RunEffects:
    return []


def _no_replica(stages: Sequence[int]) -> NoPipeline:
    """Say that these stages have no replica, and what to do."""
    names = ", ".join(map(str, stages)) or "of some pipeline"
    return NoPipeline(
        f"no replica serves stage {names} any more: start servers for it; see the servers' logs for why they ended"
    )
