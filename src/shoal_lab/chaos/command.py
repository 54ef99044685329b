"""`shoal chaos`: a swarm on this machine under faults from a seed, and the verdict on it as the last line."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from shoal.cli.early import Interrupts
from shoal.cli.exits import DONE, FAILED
from shoal.clock import Clock, SystemClock, utc_stamp
from shoal.config import Config
from shoal.errors import ConfigError, RecordRejected, RunFailed
from shoal_lab.chaos.plan import PlannedFault, plan_faults
from shoal_lab.chaos.session import Chaos, Injected, RunOutcome, not_got_over, swarm_of_one_host
from shoal_lab.verdict import Finding, judge


@dataclass(frozen=True)
class ChaosOptions:
    """What is to be done.

    Attributes:
        seed: of the plan of faults.
        every_s: one fault falls into each such interval.
        emulated_call_s: least time of each stage call; 0 computes as fast as this machine can.
        goodput: also train without faults, for the same time, and print the ratios of throughput and of kept work.
        report: file for all findings; None writes none.
    """

    seed: int
    for_s: float
    every_s: float
    kinds: Sequence[str]
    emulated_call_s: float = 0.0
    goodput: bool = False
    report: Path | None = None


@dataclass(frozen=True)
class _JudgedRun:
    """One of the two runs, and what the checks have found."""

    outcome: RunOutcome
    findings: Sequence[Finding]

    @property
    def problems(self) -> list[str]:
        return [f"{finding.check}: {problem}" for finding in self.findings for problem in finding.problems]


def run_chaos(config: Config, run_flags: Sequence[str], options: ChaosOptions) -> int:
    """Run the swarm, show each fault, print the verdict as the last line, and return the exit code.

    Args:
        config: must be what `run_flags` make.
        run_flags: of `shoal run-local`.

    Raises:
        ConfigError: the options make no plan, or the configuration no swarm that survives a fault.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the swarm has been ended.
    """
    plan = plan_faults(options.seed, options.for_s, options.every_s, options.kinds)
    num_slots = config.num_servers // config.num_stages
    if num_slots < 2:
        raise ConfigError(
            f"{config.num_servers} servers for {config.num_stages} stages: with one replica of a stage nobody can go "
            f"on for a dead one; use --num-servers {2 * config.num_stages + 1}"
        )
    clock = SystemClock()
    console = Console(highlight=False, soft_wrap=True)
    directory = config.log_dir.absolute() / f"chaos-{utc_stamp(clock.unix_s())}-{options.seed}"
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"log_dir: cannot write to {directory} ({error.strerror}); choose another") from error
    if options.emulated_call_s:
        run_flags = (*run_flags, f"--emulation.call-s={options.emulated_call_s}")
    console.print(f"seed {options.seed}: {len(plan)} faults in {options.for_s:g} s, logs in {directory}")
    runs: dict[str, _JudgedRun] = {}
    with Interrupts() as interrupts:
        before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            for name, faults in (("quiet", ()), ("chaos", plan)) if options.goodput else (("chaos", plan),):
                console.print(f"[dim]{name}: starting")
                runs[name] = _run(directory / name, num_slots, run_flags, options.for_s, faults, clock, console)
                interrupts.check()
        except (RunFailed, RecordRejected) as error:
            return _broken(console, [f"{error}"], options, runs, plan)
        finally:
            signal.signal(signal.SIGTERM, before)
    problems = [f"{name}: {problem}" for name, run in runs.items() for problem in run.problems]
    if problems:
        return _broken(console, problems, options, runs, plan)
    _write(options, runs, plan, [])
    console.print(f"[bold green]chaos holds:[/] {_verdict(runs, options)}")
    return DONE


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run(
    directory: Path,
    num_slots: int,
    flags: Sequence[str],
    for_s: float,
    plan: Sequence[PlannedFault],
    clock: Clock,
    console: Console,
) -> _JudgedRun:
    """Run one swarm and check what is left of it.

    Raises:
        RunFailed: it did not train, or has ended by itself.
    """
    with swarm_of_one_host(directory, num_slots, flags) as swarm:
        console.print(f"[dim]trains; logs in {swarm.client.require_log_dir()}")
        log = swarm.client.require_log_dir() / "chaos.jsonl"
        outcome = Chaos(swarm, plan, clock, log=log, on_change=_shown(console)).run(for_s)
        findings = [
            *judge(outcome.evidence),
            Finding("faults", f"{len(outcome.faults)} faults got over", tuple(not_got_over(outcome))),
        ]
    for name in ("tmp", "cache"):
        shutil.rmtree(directory / name, ignore_errors=True)
    return _JudgedRun(outcome, findings)


def _shown(console: Console) -> Callable[[Injected], None]:
    def show(fault: Injected) -> None:
        line = f"{fault.after_s:8.1f} s  {fault.planned.kind}: {fault.strike.victim}"
        if fault.whole_s is not None:
            line = f"[green]{line}: as before after {fault.whole_s:.1f} s"
        elif fault.is_over:
            slowest_s = max(fault.seconds.values(), default=0.0)
            line = f"{line}: next step after {slowest_s:.2f} s" if fault.seconds else f"{line}: no trainer was hit"
        else:
            line = f"[yellow]{line}"
        console.print(line)

    return show


def _broken(
    console: Console,
    problems: Sequence[str],
    options: ChaosOptions,
    runs: dict[str, _JudgedRun],
    plan: Sequence[PlannedFault],
) -> int:
    for problem in problems[1:]:
        console.print(f"[red]{problem}", markup=True)
    _write(options, runs, plan, problems)
    first = " ".join(problems[0].split())
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    console.print(f"[bold red]chaos BROKEN:[/] seed {options.seed}: {first}{more}")
    return FAILED


def _verdict(runs: dict[str, _JudgedRun], options: ChaosOptions) -> str:
    run = runs["chaos"]
    found = ", ".join(finding.text for finding in run.findings)
    throughput, kept = run.outcome.samples_per_s, run.outcome.kept_per_s
    if "quiet" not in runs:
        return f"seed {options.seed}: {found}, throughput {throughput:.1f} samples/s, kept {kept:.1f}"
    quiet = runs["quiet"].outcome
    return (
        f"seed {options.seed}: {found}, throughput {throughput / quiet.samples_per_s:.1%} and kept "
        f"{kept / quiet.kept_per_s:.1%} of {quiet.kept_per_s:.1f} samples/s without faults"
    )


def _ratios(runs: dict[str, _JudgedRun]) -> dict[str, float | None]:
    """Return what is left under faults of what is trained, and of what is kept, without them; None: not measured."""
    if not {"quiet", "chaos"} <= runs.keys():
        return {"throughput_ratio": None, "kept_ratio": None}
    chaos, quiet = runs["chaos"].outcome, runs["quiet"].outcome
    return {
        "throughput_ratio": chaos.samples_per_s / quiet.samples_per_s,
        "kept_ratio": chaos.kept_per_s / quiet.kept_per_s,
    }


def _write(
    options: ChaosOptions, runs: dict[str, _JudgedRun], plan: Sequence[PlannedFault], problems: Sequence[str]
) -> None:
    """Write everything to the file that the user has named."""
    if options.report is None:
        return
    content: dict[str, Any] = {
        "seed": options.seed,
        "for_s": options.for_s,
        "every_s": options.every_s,
        "kinds": list(options.kinds),
        "emulated_call_s": options.emulated_call_s,
        "holds": not problems,
        "problems": list(problems),
        **_ratios(runs),
        "plan": [asdict(fault) for fault in plan],
        "runs": {
            name: {
                "samples_per_s": run.outcome.samples_per_s,
                "kept_per_s": run.outcome.kept_per_s,
                "trained_s": run.outcome.trained_s,
                "faults": [fault.as_json() for fault in run.outcome.faults],
                "findings": [asdict(finding) for finding in run.findings],
            }
            for name, run in runs.items()
        },
    }
    try:
        options.report.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--json: cannot write {options.report} ({error.strerror})") from error
