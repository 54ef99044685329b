#!/usr/bin/env python3
"""Measure what watching a run costs it: the rate of its steps, and the processor time of its monitor.

    python benchmarks/watching.py                          about eight minutes, on an idle machine
    python benchmarks/watching.py --pairs 2 --rounds 6 --json watching.json

Runs of configs/sandbox.yaml in turns: with everything that watches (W&B offline, the dashboard, the page for
Prometheus read every 5 s, a program for warnings), and with nothing but files. Counted from the second record to the
last but one. A monitor's processor time is its own: neither that of its p2pd nor of W&B's process. Of runs with nothing
but files it is also told how much of that is what only a monitor does, and how much the DHT node of its host, through
which all roles of the host read and store: by samples of where the process is (benchmarks/sampled).

Exit code: 0 if the median rate of steps with everything is at least 0.995 of that with nothing, and the monitor alone
takes at most 0.5 % of a core, and 0.3 % more with everything; else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.idle import used
from benchmarks.signals import ended_by_signals
from tests.e2e.launched import END_S, START_S, Launched, launched, until

from shoal_lab.event_log import time_of

SAMPLED = Path(__file__).parent / "sampled"
EVERYTHING = ("--dashboard.port=0", "--notify.command=/bin/true")
NOTHING = ("--no-wandb", "--dashboard.enable=false")
LEAST_RATE, MOST_MONITOR, MOST_MORE = 0.995, 0.005, 0.003
SCRAPE_S = 5.0


@dataclass(frozen=True)
class Figures:
    """One run: steps a second, the share of a core that its monitor takes, and what its DHT node takes of that; None:
    nobody has looked."""

    steps_per_s: float
    monitor_share: float
    node_share: float | None = None


def _core_s(pid: int) -> float:
    spent = used(pid)
    assert spent is not None, "the monitor has ended"
    return spent.core_s


@contextlib.contextmanager
def read(folder: Path) -> Iterator[None]:
    """Read now and then the page for Prometheus."""
    over = threading.Event()

    def scrape() -> None:
        url, token = (folder / "dashboard.url").read_text().strip(), (folder / "metrics.token").read_text().strip()
        own = {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"{url.partition('/?')[0]}/metrics", headers=own)
        while not over.wait(SCRAPE_S):
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=SCRAPE_S) as page:
                page.read()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measure(folder: Path, flags: tuple[str, ...], rounds: int, *, sampled: bool) -> Figures:
    """Return the figures of one run."""
    whole = ("--config-path=configs/sandbox.yaml", f"--diloco.outer-steps={rounds}", *flags)
    samples = folder / "samples"
    samples.mkdir(parents=True)
    looks = {"PYTHONPATH": str(SAMPLED), "SAMPLES_DIR": str(samples)} if sampled else {}
    with launched(folder, *whole, cold=True, environment={"WANDB_MODE": "offline", **looks}) as run:
        begun_s = _spent_at(run, 2)
        begun = _sampled_at(run, samples) if sampled else (0, 0)
        is_read = (run.require_log_dir() / "dashboard.url").exists()
        with read(run.require_log_dir()) if is_read else contextlib.nullcontext():
            ended_s = _spent_at(run, rounds - 1)
            ended = _sampled_at(run, samples) if sampled else (0, 0)
        assert run.ends(END_S) == 0, run.output
        at_s = {each["round"]: time_of(each) for each in run.events("client_0", "round.recorded")}
        summary = run.summary()
    took_s = at_s[rounds - 1] - at_s[2]
    steps = (rounds - 3) * summary["steps"] / summary["outer_rounds"]
    share = (ended_s - begun_s) / took_s
    of_node, of_all = (late - early for early, late in zip(begun, ended, strict=True))
    return Figures(steps / took_s, share, share * of_node / of_all if of_all else None)


def _sampled_at(run: Launched, samples: Path) -> tuple[int, int]:
    """Return how often the monitor was at its node until now, and how often in all."""
    found = (samples / str(run.pid_of("monitor:0"))).read_text().split()
    return int(found[0]), int(found[1])


def _spent_at(run: Launched, round: int) -> float:
    """Return what the monitor has computed when a record is written; only its file is looked for: logs are long."""
    until(lambda: run.log_dir and (run.log_dir / f"rounds/round_{round:04d}.json").exists(), START_S, f"round {round}")
    return _core_s(run.pid_of("monitor:0"))


def main() -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=4, help="runs of each kind")
    parser.add_argument("--rounds", type=int, default=8, help="of each run")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments, console = parser.parse_args(), Console()
    with_all: list[Figures] = []
    without: list[Figures] = []
    with tempfile.TemporaryDirectory(prefix="watching") as folder:
        for pair in range(arguments.pairs):
            # Which of both is first alternates: a machine gets slower as it gets warm.
            for is_all in (pair % 2 == 0, pair % 2 == 1):
                name = f"{pair}-{'all' if is_all else 'none'}"
                flags = EVERYTHING if is_all else NOTHING
                found = measure(Path(folder) / name, flags, arguments.rounds, sampled=not is_all)
                (with_all if is_all else without).append(found)
                console.print(f"{name}: {found.steps_per_s:.2f} steps/s, monitor {100 * found.monitor_share:.2f} %")
    rates = [one.steps_per_s / other.steps_per_s for one, other in zip(with_all, without, strict=True)]
    rate = statistics.median(rates)
    alone = statistics.median(each.monitor_share for each in without)
    more = statistics.median(each.monitor_share for each in with_all) - alone
    table = Table("", "found", "goal", box=None)
    table.add_row("rate of steps with everything", f"{rate:.4f}", f">= {LEAST_RATE}")
    table.add_row("monitor, of a core", f"{100 * alone:.2f} %", f"<= {100 * MOST_MONITOR:.1f} %")
    if nodes := [each.node_share for each in without if each.node_share is not None]:
        node = statistics.median(nodes)
        table.add_row("  what only a monitor does", f"{100 * (alone - node):.2f} %", "")
        table.add_row("  its host's DHT node", f"{100 * node:.2f} %", "")
    table.add_row("more with everything", f"{100 * more:.2f} %", f"<= {100 * MOST_MORE:.1f} %")
    console.print(table)
    if arguments.json is not None:
        figures = {"all": [asdict(each) for each in with_all], "none": [asdict(each) for each in without], "rate": rate}
        arguments.json.write_text(json.dumps(figures, indent=1))
    return 0 if rate >= LEAST_RATE and alone <= MOST_MONITOR and more <= MOST_MORE else 1


if __name__ == "__main__":
    ended_by_signals(main)
