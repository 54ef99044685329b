"""What a run has trained, recomputed from its step logs alone: promise 2 checked from outside.

A step counts if some replica's log holds it; it is on up to S logs, one for each stage of its path, and counts once. Of
rounds whose logs another host has, a client's journal holds a record at most: these samples count as used before. So do
those of a round whose log cannot be read. Of a round whose record cannot be read, what later ones say of it counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.averaging.journal import (
    StepLine,
    read_genesis,
    read_record,
    read_records,
    read_steps,
    record_files,
    rounds_with_steps,
)
from shoal.averaging.signing import unsealer
from shoal.errors import RecordRejected, RemoteProtocolError
from shoal.events.incidents import LostSteps
from shoal.ids import PeerId, StepKey
from shoal.swarm.contribution_guard import Suspect, suspects
from shoal.swarm.cut_rule import EVERY_STEP, CutRule
from shoal.swarm.incidents import LostStep
from shoal.swarm.records import GENERATIONS_APART, uncounted
from shoal.swarm.sample_ranges import count, merge, subtract
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.round import Record, SignedRecord
from shoal.wire.messages.step import StepEntry, StepsTrained


@dataclass(frozen=True, slots=True)
class Audit:
    """Counts over a whole run.

    Attributes:
        steps: Committed steps, including skipped ones.
        samples: Distinct samples in steps that were not skipped.
        skipped: Distinct samples in steps that were skipped.
        duplicates: Samples in a step that an earlier step has too, counted each time.
        missing: Samples of a pass that no step contains: of a finished pass all such samples, of the last pass those
            below the highest one that was trained.
        unreached: Samples that no step contains because a later round was to train them and the run ended before: it
            was interrupted, a client that took its last round over ended that round early, or replicas were lost in
            its last round, with the steps that nobody else had.
        first_round: The first round with a step log; 0: there is none.
        samples_before: Distinct samples, including skipped ones, of the rounds whose step logs other hosts have.
        lost: By stage, the steps that the stage has no part in: those that none of its replicas held when their round
            ended, those held only by replicas whose contribution did not count, and all steps of the rounds that were
            lost when the stage was restored.
        lost_steps: Each of these steps, with its round and the server that has computed it for the stage.
        lost_in_part: By stage, further steps that some average of it has not, of a fragment or of what was trained
            behind a cut: those of replicas that were gone, or had to begin with the record's parameters, before each
            fragment was averaged.
        suspects: By round, the replicas whose contribution or bytes were not as they should be.
        unread: The rounds whose step logs cannot be read, and why.
        unread_records: The rounds whose records cannot be read or are none of the run, and why; 0: D_0.
    """

    rounds: int
    steps: int
    samples: int
    skipped: int
    duplicates: int
    missing: int
    lost: Mapping[int, Collection[StepKey]]
    unreached: int = 0
    lost_steps: tuple[LostStep, ...] = ()
    lost_in_part: Mapping[int, int] = field(default_factory=dict[int, int])
    suspects: tuple[tuple[int, Suspect], ...] = ()
    first_round: int = 1
    samples_before: int = 0
    unread: Mapping[int, str] = field(default_factory=dict[int, str])
    unread_records: Mapping[int, str] = field(default_factory=dict[int, str])

    @property
    def steps_lost(self) -> Mapping[int, int]:
        """By stage, how many steps it has no part in."""
        return {stage: len(lost) for stage, lost in self.lost.items()}


def audit(directory: Path, num_samples_per_pass: int, *, is_strict: bool = True) -> Audit:
    """Recompute a run's counts.

    Args:
        directory: The run's, with `steps/` in it.
        num_samples_per_pass: N: positions 0..N-1 of each pass.
        is_strict: What is wrong with a record is raised; else it is named in `Audit.unread_records`, and what the other
            files say is counted.

    Raises:
        RecordRejected: A file is no record, or its signer may not coordinate the run by D_0.
        OSError: A record cannot be read; D_0 is one of them, where there is another.
    """
    unread: dict[int, str] = {}

    @contextmanager
    def noted(round: int) -> Generator[None]:
        try:
            yield
        except (RecordRejected, OSError) as error:
            if is_strict:
                raise
            unread[round] = str(error)

    files: dict[int, tuple[Path, Record, SignedRecord]] = {}
    for round, path in record_files(directory):
        with noted(round):
            if (found := read_record(path)) is not None:
                files[round] = (path, *found)
    records = [record for _, record, _ in files.values()]
    cuts = EVERY_STEP
    if files:
        with noted(0):
            genesis = read_genesis(directory)
            cuts = CutRule.said(genesis.configuration["diloco"])
            # Of what is damaged its run may be as well.
            [(run_id, _)] = Counter(record.run_id for record in records).most_common(1)
            unseal = unsealer(run_id, genesis.authority)
            records.clear()
            for round, (path, _, signed) in files.items():
                with noted(round):
                    records.append(_unsealed(path, signed, unseal))
    found = _audit_readable(directory, records, num_samples_per_pass, cuts, unread)
    return replace(found, unread_records=unread)


def _unsealed(path: Path, signed: SignedRecord, unseal: Callable[[SignedRecord], Record]) -> Record:
    try:
        return unseal(signed)
    except RemoteProtocolError as error:
        raise RecordRejected(f"{path} is none of this run: {error}; restore it from a copy") from error


def _audit_readable(
    directory: Path, records: Sequence[Record], num_samples_per_pass: int, cuts: CutRule, unread: Collection[int]
) -> Audit:
    """Recompute a run's counts from its records and those step logs that can be read."""
    lines = _StepLogs(directory)
    while True:
        known = len(lines.unread)
        found = audit_of(lines, records, num_samples_per_pass, cuts.last_round, cuts, unread)
        if len(lines.unread) == known:
            return replace(found, unread=lines.unread)


class _StepLogs(Mapping[int, Sequence[StepLine]]):
    """The step logs of a run, each read whenever it is asked for: all of a long run take more memory than its client
    has. One that cannot be read is empty, and from then on none.

    Attributes:
        unread: As in `Audit`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._rounds = dict.fromkeys(rounds_with_steps(directory))
        self.unread: dict[int, str] = {}

    def __getitem__(self, round: int) -> Sequence[StepLine]:
        if round not in self._rounds:
            raise KeyError(round)
        try:
            return read_steps(self._directory, round)
        except (RecordRejected, OSError) as error:
            del self._rounds[round]
            self.unread[round] = str(error)
            return ()

    def __contains__(self, round: object) -> bool:
        return round in self._rounds

    def __iter__(self) -> Iterator[int]:
        return iter([*self._rounds])

    def __len__(self) -> int:
        return len(self._rounds)


def lost_in(directory: Path, record: Record) -> tuple[LostSteps, ...]:
    """Count the steps that have no part in a record, by round, stage and server: what the record adds to `Audit.lost`.

    Args:
        directory: The run's; the record and its step log are in it.

    Raises:
        RecordRejected: A file is none of these.
        OSError: A file cannot be read.
    """
    gone = {round for outcome in record.stages for round in _gone(record, outcome.stage)}
    rounds = {record.round, *(gone & set(rounds_with_steps(directory)))}
    lines = {round: read_steps(directory, round) for round in rounds}
    return newly_lost(record, lines, [each for each, _ in read_records(directory)] if gone else ())


def newly_lost(
    record: Record, lines: Mapping[int, Sequence[StepLine]], records: Iterable[Record]
) -> tuple[LostSteps, ...]:
    """See `lost_in`.

    Args:
        lines: The step logs of its round, and of those that a stage has nothing of any more with this record.
        records: If there are such rounds, all that there are.
    """
    earlier = {each.round: each for each in records if each.round < record.round}
    counts = Counter[tuple[int, int, PeerId]]()
    for round, of_round in lines.items():
        of = record if round == record.round else earlier.get(round)
        known = set(_lost(of_round, frozenset() if of is None else _left_out(of)))
        paths = {line.entry.key: line.entry.path for line in of_round}
        if of is record:
            counts.update((round, stage, paths[key][stage]) for stage, key in known)
        for stage in [outcome.stage for outcome in record.stages if round in _gone(record, outcome.stage)]:
            # What was lost before, in its own round or when the stage had begun anew for the first time, was counted.
            if not any(round in _gone(each, stage) for each in earlier.values()):
                counts.update((round, stage, paths[key][stage]) for key in paths if (stage, key) not in known)
    return tuple(LostSteps(*each, steps) for each, steps in sorted(counts.items()))


def _gone(record: Record, stage: int) -> range:
    """The rounds of which a stage has nothing any more since it has begun anew with this record."""
    basis = next((outcome.restored for outcome in record.stages if outcome.stage == stage), None)
    return range(record.round, record.round) if basis is None else range(basis.round + 1, record.round)


def _left_out(record: Record) -> frozenset[PeerId]:
    """The replicas whose contribution does not count."""
    return frozenset(p for outcome in record.stages for p in uncounted(outcome.members, outcome.scales))


def audit_of(
    lines: Mapping[int, Sequence[StepLine]],
    records: Sequence[Record],
    num_samples_per_pass: int,
    num_rounds: int,
    cuts: CutRule = EVERY_STEP,
    unread: Collection[int] = (),
) -> Audit:
    """Recompute a run's counts from what its files say.

    Args:
        lines: The step log of each round.
        records: D_1, D_2, ...
        num_samples_per_pass: As in `audit`.
        num_rounds: How many rounds were planned; 0: those that there are.
        cuts: Which steps the average of a round has.
        unread: The rounds whose records are not among those that are given.
    """
    left_out = {record.round: _left_out(record) for record in records}
    steps: dict[tuple[int, StepKey], StepEntry] = {}
    # By stage, each step with the record since which it is lost.
    lost: defaultdict[int, dict[tuple[int, StepKey], int]] = defaultdict(dict)
    for round, of_round in lines.items():
        for stage, key in _lost(of_round, left_out.get(round, frozenset())):
            lost[stage][round, key] = round
        steps.update({(round, line.entry.key): line.entry for line in of_round})
    before: list[SampleRange] = []
    if records and not any(0 < round < records[0].round for round in unread):
        before += records[0].recorded
    for record in records:
        if record.round not in lines:
            before += (*record.samples, *record.skipped)
        for outcome in record.stages:
            if outcome.restored is not None:
                for step in [step for step in steps if step[0] in _gone(record, outcome.stage)]:
                    lost[outcome.stage].setdefault(step, record.round)
    lost_steps = {
        (stage, key): LostStep(round, stage, steps[round, key].path[stage], in_round)
        for stage, of_stage in lost.items()
        for (round, key), in_round in of_stage.items()
    }
    num_stages = max((len(entry.path) for entry in steps.values()), default=0)
    trained = [item for entry in steps.values() for item in entry.samples]
    if unread and records:
        # What no other file says of the rounds that cannot be read, the newest record does.
        before += subtract(merge(records[-1].recorded), merge((*before, *trained)))
    inherited = merge(before)
    everything = [*inherited, *trained]
    distinct = merge(everything)
    cut = _cut_short(records, lines, num_rounds, loses={step.round for step in lost_steps.values()})
    due = merge(
        [*inherited, *(item for (round, _), entry in steps.items() if round not in cut for item in entry.samples)]
    )
    missing = _missing(distinct, due, num_samples_per_pass)
    return Audit(
        rounds=len(lines),
        steps=len(steps),
        samples=count(merge(item for entry in steps.values() if not entry.skipped for item in entry.samples)),
        skipped=count(merge(item for entry in steps.values() if entry.skipped for item in entry.samples)),
        duplicates=count(everything) - count(distinct),
        missing=missing,
        unreached=_missing(distinct, distinct, num_samples_per_pass) - missing,
        lost={stage: frozenset(key for _, key in lost[stage]) for stage in range(num_stages)},
        lost_steps=tuple(sorted(lost_steps.values())),
        lost_in_part=_lost_in_part(lines, records, cuts),
        suspects=tuple((record.round, suspect) for record in records for suspect in suspects(record)),
        first_round=min(lines, default=0),
        samples_before=count(inherited),
    )


def _lost(lines: Iterable[StepLine], left_out: frozenset[PeerId]) -> list[tuple[int, StepKey]]:
    """Of one round: stages, and the steps that are in some log, but in that of no replica of this stage that counts."""
    stages: defaultdict[StepKey, set[int]] = defaultdict(set)
    lengths: dict[StepKey, int] = {}
    for line in lines:
        stages[line.entry.key] |= {line.stage} - ({line.stage} if line.peer in left_out else set())
        lengths[line.entry.key] = len(line.entry.path)
    return [(stage, key) for key, held in stages.items() for stage in set(range(lengths[key])) - held]


def _lost_in_part(lines: Mapping[int, Sequence[StepLine]], records: Sequence[Record], cuts: CutRule) -> dict[int, int]:
    """See `Audit.lost_in_part`.

    A weight says what a member has joined with: if that is less than what it had left of earlier rounds and has trained
    in this one, it has lost what was left.
    """
    lost = Counter[int]()
    if not cuts.keeps_own:
        return {}
    logs: defaultdict[tuple[int, int, PeerId], list[StepEntry]] = defaultdict(list)
    for round, of_round in lines.items():
        for line in of_round:
            logs[round, line.stage, line.peer].append(line.entry)
    # By stage and peer, round after round, what is still to be averaged in some fragment.
    left: dict[tuple[int, PeerId], tuple[StepsTrained, ...]] = {}
    for record in records:
        before, left = left, {}
        if record.round not in lines:
            continue  # another host knows
        for outcome in record.stages:
            stage, without = outcome.stage, uncounted(outcome.members, outcome.scales)
            weights = {p: w for p, w in zip(outcome.members, outcome.weights, strict=True) if p not in without}
            for peer in [peer for of, peer in before if of == stage]:
                due = cuts.brought(record.round, logs[record.round, stage, peer], before[stage, peer])
                if weights.get(peer, -1) < due.num_targets:
                    # What the stage has nothing of at all is counted there.
                    parts = cuts.before(before.pop((stage, peer)), len(_gone(record, stage)))
                    lost[stage] += sum(each.num_steps for each in parts)
            for peer in weights:
                log = logs[record.round, stage, peer]
                left[stage, peer] = cuts.still_earlier(record.round, before.get((stage, peer), ()), log)
    return dict(sorted(lost.items()))


def _cut_short(
    records: Sequence[Record], lines: Mapping[int, Sequence[StepLine]], num_rounds: int, loses: Collection[int]
) -> frozenset[int]:
    """Return the rounds at the end of the run after which some samples were to be trained again, and were not.

    A round that is not the last one is ended without its slowest trainers. Any is by a client that takes the run over:
    its record lets trainers of that client go on, and all steps are by those of an earlier one. What only replicas have
    had that are lost before the record is free again: after the last round for nobody.

    Args:
        loses: The rounds of which some stage has not all steps.
    """
    cut: set[int] = set()
    for record in records[-1:]:
        if record.round < num_rounds or record.round in loses or _has_lost_members(records[-2:]):
            cut.add(record.round)
    for record in reversed(records):
        keys = [line.entry.key for line in lines.get(record.round, ())]
        apart = [record.generations.get(key.trainer, 0) - key.generation for key in keys]
        if record.round not in cut and (not apart or min(apart) < GENERATIONS_APART // 2):
            break
        cut.add(record.round)
    return frozenset(cut)


def _has_lost_members(records: Sequence[Record]) -> bool:
    """Whether some member of the first record is none of the last one."""
    first, last = (
        {(o.stage, peer) for o in record.stages for peer in o.members} for record in (records[0], records[-1])
    )
    return bool(first - last)


def _missing(distinct: Iterable[SampleRange], due: Iterable[SampleRange], num_samples_per_pass: int) -> int:
    """Count the samples that are not in `distinct`, of all passes up to the highest sample that is in `due`."""
    frontier: Counter[int] = Counter()
    for item in due:
        frontier[item.pass_number] = max(frontier[item.pass_number], item.stop)
    if not frontier:
        return 0
    last = max(frontier)

    def end_of(number: int) -> int:
        """Behind the last sample of a pass that is due; records may name any pass, so there is no list of all."""
        return frontier[last] if number == last else num_samples_per_pass if number < last else 0

    trained = sum(max(0, min(item.stop, end_of(item.pass_number)) - item.start) for item in distinct)
    return last * num_samples_per_pass + frontier[last] - trained
