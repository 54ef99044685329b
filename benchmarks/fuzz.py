#!/usr/bin/env python3
"""Feed all parsers of what comes from the network or a disk with wrong inputs: no crash, no hang, no growing memory.

    python benchmarks/fuzz.py --inputs 1000000 --seed 1 --json
    python benchmarks/fuzz.py --seed 7 --cpu-s 60
    python benchmarks/fuzz.py --only manifest,kept_record,tensor_file
    python benchmarks/fuzz.py --again fuzz-failures/frames_1_4711.json

An input is made from the seed and its number alone; `--start` goes on from a number. It ends with exit code 1 when an
input did anything but be taken or be refused with the parser's own typed error, took more than 10 s of computing, or
when the process grew by more than 64 MiB. Failing inputs are written to `--save`, and tried again with `--again`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

import msgspec
from rich.progress import Progress

from shoal_lab.fuzz.campaign import MAX_GROWTH_BYTES, Campaign, Failure, FixedClock, Report
from shoal_lab.fuzz.parsers import all_parsers


def main() -> int:
    """Try, print, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--start", type=int, default=0, help="number of the first input")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cpu-s", type=float, help="end after so much processor time, however few inputs that were")
    parser.add_argument("--only", default="", help="parsers with commas; else all")
    parser.add_argument("--save", type=Path, default=Path("fuzz-failures"), help="folder for failing inputs")
    parser.add_argument("--again", type=Path, help="try one failing input again, from its file")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    # What is refused is counted here, not logged.
    logging.disable(logging.CRITICAL)
    if options.again is not None:
        failure = msgspec.json.decode(options.again.read_bytes(), type=Failure)
        error = Campaign(failure.seed).again(failure)
        print("it is refused, or taken, as it should be" if error is None else f"{type(error).__name__}: {error}")
        return int(error is not None)
    wanted = set(options.only.split(",")) - {""}
    known = all_parsers(options.seed, FixedClock())
    if unknown := wanted - {each.name for each in known}:
        parser.error(f"--only: there is no parser {', '.join(sorted(unknown))}")
    parsers = [each for each in known if each.name in wanted] or known
    campaign = Campaign(options.seed, parsers, save=options.save)
    with Progress(disable=options.json or not sys.stderr.isatty()) as shown:
        task = shown.add_task("inputs", total=options.inputs)
        report = campaign.run(
            options.start,
            options.start + options.inputs,
            options.cpu_s,
            lambda count: shown.update(task, completed=count),
        )
    figures = _figures(report, options.seed)
    print(json.dumps(figures) if options.json else _text(figures))
    for failure in report.failures:
        print(f"{failure.parser}, input {failure.number}: {failure.error}", file=sys.stderr)
    if report.failures:
        print(f"the failing inputs are in {options.save}; try one again with --again FILE", file=sys.stderr)
    return int(not report.is_good)


def _figures(report: Report, seed: int) -> dict[str, object]:
    inputs = sum(report.inputs.values())
    return {
        "seed": seed,
        "inputs": inputs,
        "failed": report.failed,
        "growth_mib": round(report.growth_bytes / 2**20, 2),
        "limit_mib": MAX_GROWTH_BYTES / 2**20,
        "cpu_s": round(report.cpu_s, 1),
        "inputs_per_cpu_s": round(inputs / report.cpu_s) if report.cpu_s else None,
        "by_parser": {
            name: {"inputs": count, "taken": report.taken[name], **report.reached.get(name, {})}
            for name, count in report.inputs.items()
        },
        "good": report.is_good,
    }


def _text(figures: dict[str, object]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in figures.items())


if __name__ == "__main__":
    sys.exit(main())
