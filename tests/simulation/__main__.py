"""Run seeds of the worlds: `python -m tests.simulation 0:1000`, as `make sim SEEDS=0:1000` does.

`make sim SEEDS=HEAD` runs two hundred that nobody has seen yet: those of the present commit, as `.ci/run` does.

All worlds, or those that `--world` names; by as many processes as there are cores. Exits 1 if anything was violated.
What fails is written to `tests/simulation/seeds/`, whose files `make test` runs again, and printed with the command
that shows its trace. The last line is `N schedules, V violations, R/min`, where R is of one core: per minute of the
time for which the processes have computed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.commit import present_commit
from tests.simulation import rates
from tests.simulation.catalogue import FAILURES, WORLDS
from tests.simulation.mutants import MUTANTS
from tests.simulation.network import Network
from tests.simulation.parts import Outcome, Part, end_with_runner, run_part

SEEDS = Path(__file__).parent / "seeds"
_CHUNK = 25
_MUTANT_SEEDS = 3_000
_COMMIT_SEEDS = 200
"""About two minutes of two cores, for all worlds."""


def show(world: str, seed: int, last: int) -> int:
    """Run one seed with its trace; returns the exit code."""
    made = WORLDS[world].make(seed)
    network = made.network
    if isinstance(network, Network):
        network.trace = []
    try:
        made.run()
    except FAILURES as error:
        what, code = f"{type(error).__name__}: {error}", 1
    else:
        what, code = "holds", 0
    if isinstance(network, Network):
        print(f"{network.manners}")
        for at_s, sender, receiver, message in (network.trace or [])[-last:] if last else []:
            print(f"{at_s:9.3f}  {sender:6} {receiver:6} {message}")
    print(f"{world} {seed}: {what}")
    return code


def seeds_of_commit(commit: str) -> str:
    """Return A:B, seeds that no other commit has (but one in a hundred million)."""
    first = int(commit[:7], 16) * _COMMIT_SEEDS
    return f"{first}:{first + _COMMIT_SEEDS}"


def main() -> int:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "seeds",
        nargs="?",
        default="0:1000",
        help="A:B runs seeds A to B-1 of each world; HEAD those of this commit; one number that one with its trace",
    )
    parser.add_argument("--world", action="append", choices=sorted(WORLDS), help="only this one (may be repeated)")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--last", type=int, default=200, help="so many lines of a trace")
    parser.add_argument("--forget", action="store_true", help="write no file for a seed that fails")
    parser.add_argument("--mutants", action="store_true", help="find the first seed that notices each mutant")
    parser.add_argument(
        "--rates", nargs="*", metavar="MUTANT", help="measure how often these mutants are noticed; else those not known"
    )
    options = parser.parse_args()
    if options.rates is not None:
        return rates.measure(options.rates or list(MUTANTS), anew=bool(options.rates))
    if options.mutants:
        return find_mutants()
    worlds = options.world or list(WORLDS)
    seeds = options.seeds
    if seeds == "HEAD":
        commit = present_commit()
        if not commit:
            sys.exit("SEEDS=HEAD needs a commit: give A:B instead, or call this in a clone of the repository")
        seeds = seeds_of_commit(commit)
        print(f"the seeds of commit {commit[:7]}: make sim SEEDS={seeds}", flush=True)
    first, colon, stop = seeds.partition(":")
    if not colon:
        return max(show(world, int(first), options.last) for world in worlds)
    parts = [
        Part(world, at, min(at + _CHUNK, int(stop))) for at in range(int(first), int(stop), _CHUNK) for world in worlds
    ]
    return report(run_all(parts, options.processes), worlds, keep=not options.forget)


def find_mutants() -> int:
    """Print for each mutant the first seed that notices; returns 1 if one survives."""
    survivors = 0
    for name, mutant in MUTANTS.items():
        seed = mutant.noticed(range(_MUTANT_SEEDS))
        survivors += seed is None
        print(f"{name:40} {'survives' if seed is None else seed}", flush=True)
    return 1 if survivors else 0


def run_all(parts: list[Part], processes: int) -> Iterator[Outcome]:
    """Run parts by so many processes."""
    if processes <= 1 or len(parts) <= 1:
        yield from map(run_part, parts)
        return
    with multiprocessing.get_context("spawn").Pool(processes, end_with_runner) as pool:
        yield from pool.imap_unordered(run_part, parts)


def report(outcomes: Iterator[Outcome], worlds: list[str], keep: bool) -> int:
    """Print what comes in, and the sum; returns the exit code."""
    schedules, cpu_s = dict.fromkeys(worlds, 0), dict.fromkeys(worlds, 0.0)
    num_violations = 0
    for outcome in outcomes:
        part = outcome.part
        schedules[part.world] += part.stop - part.first
        cpu_s[part.world] += outcome.cpu_s
        for seed, what in outcome.violations:
            num_violations += 1
            print(
                f"{part.world} {seed}: {what}\n    python -m tests.simulation {seed} --world {part.world}", flush=True
            )
            if keep:
                text = json.dumps({"world": part.world, "seed": seed, "violated": what}, indent=2)
                (SEEDS / f"{part.world}-{seed}.json").write_text(text + "\n")
    for world in worlds:
        print(f"{world:12} {schedules[world]:7} schedules {_per_minute(schedules[world], cpu_s[world]):6}/min a core")
    total = sum(schedules.values())
    print(f"{total} schedules, {num_violations} violations, {_per_minute(total, sum(cpu_s.values()))}/min")
    return 1 if num_violations else 0


def _per_minute(number: int, seconds: float) -> int:
    return round(60 * number / seconds) if seconds else 0


if __name__ == "__main__":
    sys.exit(main())
