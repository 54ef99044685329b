"""A run again, from its first record to its last: what its files say is compared, then computed, round by round.

files -> claims (records, step logs, replicas' logs) -> order -> engine -> hashes of each round -> verdict
                                                          '---> processes, an engine in each
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Protocol

import torch

from shoal.averaging.audit import audit_of
from shoal.averaging.journal import StepLine
from shoal.clock import SystemClock
from shoal.config.schema import Config
from shoal.data.source import DataSet
from shoal.errors import Contradiction, RecordRejected
from shoal.ids import PeerId
from shoal.pipeline.replica_log import place_of
from shoal.replay.claims import logs_agree, record_follows
from shoal.replay.engine import Engine
from shoal.replay.order import Action, Average, Compute
from shoal.replay.own_code import NOTHING_NAMED, NamedCode, require_named
from shoal.replay.plan import ReplayPlan, plan_of
from shoal.replay.processes import Processes
from shoal.replay.run_files import RunFiles, read_run
from shoal.replay.samples import Samples
from shoal.replay.verdict import Difference, Verdict
from shoal.swarm.cut_rule import CutRule
from shoal.swarm.records import Tip, record_hash
from shoal.swarm.sample_ranges import Ranges, merge

Progress = Callable[[int, int, int], None]
"""Told how many steps of how many are computed, and in which round."""


def replay(
    directory: Path,
    *,
    config: Config | None = None,
    dataset: DataSet | None = None,
    authority: PeerId | None = None,
    named: NamedCode = NOTHING_NAMED,
    num_processes: int = 1,
    steps_per_process: int = 1,
    note: Callable[[str], None] = lambda text: None,
    progress: Progress = lambda done, total, round: None,
) -> Verdict:
    """Compute a run again and compare.

    While it runs, it changes torch's number of threads and uses torch's random generator.

    Args:
        directory: `logs/<run_id>`.
        config: replaces the one in `config.yaml`.
        dataset: replaces the one that the configuration names.
        authority: of the swarm that the run must belong to; None: of the one that D_0 names.
        named: code that may be imported if `config.yaml` names it; what `config` names may be.
        num_processes: the most that may compute; with `config` or `dataset` only this process does.
        steps_per_process: another process is only started for this many steps.
        note: is told, before any comparison, what may keep the bits from being the same here.

    Raises:
        ConfigError: the folder is not one of a run, names code that is not `named`, or its data set cannot be opened.
        RecordRejected: the run belongs to another swarm than that of `authority`, or names code while its first record
            is none of the run.
        ShoalError: the replay cannot be carried out.
    """
    clock = SystemClock()
    begun_s = clock.now_s()
    files = read_run(directory, config)
    if authority is not None and files.genesis.authority != authority:
        raise RecordRejected(
            f"{directory} is of a run of another swarm: its first record lets {files.genesis.authority} say who may "
            f"sign, and the swarm key that was given {authority}: compare the keys with `shoal key fingerprint`"
        )
    if config is None:
        require_named(files, named, opens_data=dataset is None)
    notes = tuple(_circumstances(files))
    for text in notes:
        note(text)
    samples = Samples(files.config, dataset, files.records[-1][0].marks)
    plan = plan_of(files)
    homes = plan.homes(num_processes if config is None and dataset is None else 1, steps_per_process)
    run = _Replay(files, plan, progress)
    num_threads = torch.get_num_threads()
    try:
        if any(homes):
            with Processes(files.directory, homes, run.has_computed, named) as engines:
                differences = list(run.differences(engines))
        else:
            differences = list(
                run.differences(
                    _Alone(Engine(files.config, samples, plan.generations, beginning=files.beginning), run.has_computed)
                )
            )
    finally:
        torch.set_num_threads(num_threads)
        samples.close()
    lines = {
        round: [StepLine(peer, stage, entry) for peer, (stage, log) in logs.items() for entry in log]
        for round, logs in run.logs.items()
    }
    num_rounds = files.config.diloco.outer_steps
    records = [record for record, _ in files.records]
    counts = audit_of(lines, records, samples.num_per_pass, num_rounds, CutRule.of(files.config.diloco))
    if counts.duplicates:
        differences.append(Difference(0, None, None, f"{counts.duplicates} samples were trained a second time"))
    if counts.missing:
        differences.append(Difference(0, None, None, f"{counts.missing} samples are in no step, and should be"))
    return Verdict(
        run_id=files.run_id,
        rounds=len(files.records) - (files.beginning is not None),
        rounds_agreed=run.rounds_agreed,
        steps=run.steps,
        samples=counts.samples,
        skipped=counts.skipped,
        repeated=counts.duplicates,
        missing=counts.missing,
        steps_lost=counts.steps_lost,
        differences=tuple(differences),
        notes=notes,
        took_s=clock.now_s() - begun_s,
    )


class _Engines(Protocol):
    """Who computes."""

    def act(self, action: Action) -> Iterator[Difference]:
        """Carry an action out; the differences of a round are all there with those of its end."""
        ...

    def finish(self) -> Iterator[Difference]:
        """The differences of what there was after the last round that has ended."""
        ...


class _Alone:
    """One engine, in this process."""

    def __init__(self, engine: Engine, on_step: Callable[[int], None]) -> None:
        self._engine = engine
        self._on_step = on_step

    def act(self, action: Action) -> Iterator[Difference]:
        yield from self._engine.act(action)
        if isinstance(action, Compute):
            self._on_step(action.round)

    def finish(self) -> Iterator[Difference]:
        return iter(())


class _Replay:
    """The comparison; it ends with the first round in which something differs.

    Attributes:
        rounds_agreed: rounds before the first one that differs.
        steps: number of steps in the rounds that were computed.
        logs: the step log of each round; of the members themselves where another host has the client's.
    """

    def __init__(self, files: RunFiles, plan: ReplayPlan, progress: Progress) -> None:
        self.rounds_agreed = 0
        self.steps = 0
        self.logs = dict(files.logs)
        self._files = files
        self._plan = plan
        self._order = plan.order()
        self._progress = progress
        self._computed = 0

    def has_computed(self, round: int) -> None:
        """A step is computed."""
        self._computed += 1
        self._progress(self._computed, self._order.num_steps, round)

    def differences(self, engines: _Engines) -> Iterator[Difference]:
        """Compare everything, and yield what differs."""
        files, plan = self._files, self._plan
        claims: dict[int, list[Difference]] = {}
        previous = plan.base
        recorded: Ranges = () if files.beginning is None else files.beginning.record.recorded
        for (record, signed), of_round in zip(plan.chain, plan.members, strict=True):
            own = {peer: (stage, segment.log) for (stage, peer), segment in of_round.items()}
            logs = self.logs[record.round] = files.logs.get(record.round) or own
            claims[record.round] = [
                *record_follows(record, previous, logs, recorded),
                *logs_agree(record, logs, of_round, CutRule.of(files.config.diloco)),
                *(stray for stray in plan.strays if stray.round == record.round),
            ]
            previous = Tip(record.round, record_hash(signed), signed)
            recorded = merge((*recorded, *record.samples, *record.skipped))
        found = yield from self._compare(engines, claims)
        if not found:
            yield from plan.broken

    def _compare(self, engines: _Engines, claims: dict[int, list[Difference]]) -> Generator[Difference, None, bool]:
        """Compute round by round; return whether something differed."""
        found: dict[object, Difference] = {}
        try:
            for action in self._order:
                for difference in engines.act(action):
                    found.setdefault(_subject(difference), difference)
                if isinstance(action, Compute):
                    self.steps += 1
                if isinstance(action, Average):
                    yield from claims[action.record.round]
                    if claims[action.record.round] or found:
                        yield from found.values()
                        return True
                    self.rounds_agreed = action.record.round - self._plan.base.round
        except Contradiction as error:
            for difference in engines.finish():
                found.setdefault(_subject(difference), difference)
            yield from claims.get(error.round, ())
            yield from found.values()
            yield Difference(error.round, error.stage, PeerId(error.peer), str(error))
            return True
        return False


def _subject(difference: Difference) -> object:
    """What a difference is about: after the first one of a replica its later steps differ as well."""
    return difference.round, difference.stage, difference.replica, difference.what.partition(" ")[0]


def _circumstances(files: RunFiles) -> Iterator[str]:
    """What may keep the bits from being the same here, though nothing was wrong."""
    here = place_of("cpu", 1, torch.backends.cpu.get_cpu_capability(), None)
    told: set[str] = set()
    for generation in files.generations:
        for mine, theirs in ((here.machine, generation.place.machine), (here.versions, generation.place.versions)):
            for name, value in theirs.items():
                if name != "gpu" and mine.get(name) != value:
                    told.add(f"{name} was {value}, here it is {mine.get(name)}: the last bits may differ")
        if generation.place.device != "cpu":
            gpu = generation.place.machine.get("gpu", "a GPU")
            own = torch.cuda.get_device_name() if torch.cuda.is_available() else "the processor"
            place = gpu if own == gpu else f"{gpu}, here it is {own}"
            told.add(f"replicas computed on {place}: not all kernels of a GPU give the same bits every time")
    yield from sorted(told)
    for record, _ in files.records:
        if not files.logs.get(record.round) and any(sum(outcome.weights) for outcome in record.stages):
            yield (
                f"there is no step log of round {record.round}, as the client that gathered it was on another host: "
                "the replicas' own logs stand for it"
            )
