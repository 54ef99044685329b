"""The benchmark `pipeline`: what a swarm of one pipeline trains, beside a plain loop over the whole model.

A turn measures all sides of one model one after the other: a burst of each swarm, then the plain loop with one thread
and with two. The n-th repetition of every case reads the n-th turn. There is no turn that is not measured: swarms and
loops have trained before the first one.
"""

from __future__ import annotations

import statistics
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from shoal.errors import MachineBusy
from shoal.runtime.hardware import num_usable_cores
from shoal.swarm.step_operations import Schedule
from shoal_lab.bench.bubble import bubble_of
from shoal_lab.bench.case import BenchmarkOptions, Case
from shoal_lab.bench.measure import Turns
from shoal_lab.bench.peers import PeerProcesses
from shoal_lab.bench.pipeline_models import WORKLOADS, Workload, schedule_of

_STAGES = (2, 4)
_THREADS = (1, 2)
_BURST_STEPS = 2
_PLAIN_STEPS = 1
_GAIN = 1.3
"""How much faster a plain loop with two threads is at least, if two cores are free."""
_TIMEOUT_S = 100.0

Figures = Mapping[str, float]


@contextmanager
def open_cases(options: BenchmarkOptions) -> Generator[Sequence[Case], None, None]:
    """Start nothing yet: the processes of a model run from the first turn of its cases to the first of another one."""
    with ExitStack() as stack:
        models = [_Model(stack, name, workload, options) for name, workload in WORKLOADS.items()]
        yield [case for model in models for case in model.cases]
        for model in models:
            model.require_second_core()


class _Model:
    """The turns of one model, and its cases, of which only those that are asked for are measured."""

    def __init__(self, stack: ExitStack, name: str, workload: Workload, options: BenchmarkOptions) -> None:
        self._stack = stack
        self._name = name
        self._workload = workload
        self._cores = num_usable_cores()
        self._ignore_busy = options.ignore_busy
        self._turns = Turns(self._turn, warms_up=False)
        chosen = [(stages, [case for case in self._cases(stages) if options.chooses(case.name)]) for stages in _STAGES]
        self._stages = [stages for stages, cases in chosen if cases]
        self.cases = [case for _, cases in chosen for case in cases]
        self._swarms: dict[int, PeerProcesses] = {}
        self._plain: dict[int, PeerProcesses] = {}

    def require_second_core(self) -> None:
        """Check that the plain loop had two cores.

        Raises:
            MachineBusy: two threads were not much faster than one.
        """
        turns = self._turns.taken
        if self._ignore_busy or not turns:
            return
        one, two = (statistics.median(turn[f"plain {threads}"] for turn in turns) for threads in _THREADS)
        if two < _GAIN * one:
            raise MachineBusy(
                f"the machine is too busy to measure, or has no second core: the plain loop of {self._name} trained "
                f"{two:.1f} samples/s with two threads and {one:.1f} with one; {_GAIN:g} times as many are needed\n"
                "end what else runs, or say --ignore-busy for figures that do not count"
            )

    def _cases(self, stages: int) -> list[Case]:
        name = f"{self._name} {stages} stages"
        speed = Case(
            name=f"plain loop {name}",
            unit="samples/s",
            ours=self._turns.reader(f"rate {stages}"),
            reference=self._turns.reader("plain best"),
        )
        cpu = Case(
            name=f"cpu per sample {name}",
            unit="ms",
            ours=self._turns.reader(f"cpu {stages}"),
            reference=self._turns.reader("plain cpu"),
        )
        # With fewer cores than stages they take turns, and no schedule says how long each waits for its core.
        schedule = Schedule(schedule_of(stages, self._cores))
        theory = 100.0 * (1.0 - bubble_of(schedule, stages, self._workload.microbatches, 1.0, 1.0, 1.0))
        in_theory = (lambda: theory) if stages <= self._cores else None
        busy = [
            Case(
                name=f"busy share {name} stage {stage}",
                unit="%",
                ours=self._turns.reader(f"busy {stages} {stage}"),
                reference=in_theory,
            )
            for stage in range(stages)
        ]
        return [speed, cpu, *busy]

    def _turn(self) -> Figures:
        if not self._plain:
            self._start()
        figures: dict[str, float] = {}
        for stages, swarm in self._swarms.items():
            [burst] = swarm.call("burst", _BURST_STEPS)
            figures |= _of_burst(burst, stages, self._workload.batch)
        for threads, peers in self._plain.items():
            [[rate, cpu_s]] = peers.call("train", _PLAIN_STEPS)
            figures[f"plain {threads}"] = rate
            if threads == 1:
                figures["plain cpu"] = 1e3 * cpu_s
        return figures | {"plain best": max(figures[f"plain {threads}"] for threads in _THREADS)}

    def _start(self) -> None:
        """End the processes of the model before, and start those of this one."""
        self._stack.close()
        flags = self._workload.all_flags
        for stages in self._stages:
            schedule = f"--model-pipeline.schedule={schedule_of(stages, self._cores)}"
            arguments = {"flags": [*flags, schedule, f"--model-pipeline.stages={stages}"]}
            peers = PeerProcesses("shoal_lab.bench.pipeline_swarm:main", 1, arguments, timeout_s=_TIMEOUT_S)
            self._swarms[stages] = self._stack.enter_context(peers)
        for threads in _THREADS:
            arguments = {"flags": flags, "threads": threads}
            peers = PeerProcesses("shoal_lab.bench.pipeline_reference:main", 1, arguments, timeout_s=_TIMEOUT_S)
            self._plain[threads] = self._stack.enter_context(peers)
            self._plain[threads].call("choose")


def _of_burst(burst: Mapping[str, Any], stages: int, batch: int) -> dict[str, float]:
    step_s, num_steps = burst["step_s"], burst["num_steps"]
    busy = {
        f"busy {stages} {stage}": 100.0 * device_s / num_steps / step_s
        for stage, device_s in enumerate(burst["device_s"])
    }
    return {f"rate {stages}": batch / step_s, f"cpu {stages}": 1e3 * burst["cpu_s"] / num_steps / batch, **busy}
