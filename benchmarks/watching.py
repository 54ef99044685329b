#!/usr/bin/env python3
"""Measure what watching a run costs it: the rate of its steps, and the processor time of its monitor.

    python benchmarks/watching.py                               about ten minutes, on an idle machine
    python benchmarks/watching.py --call-s 0.012                at some 5 steps a second
    python benchmarks/watching.py --pairs 4 --seconds 30 --json watching.json

One run of configs/sandbox.yaml with all that there is to watch by (W&B offline, the dashboard, a program for warnings)
is watched in turns: for a phase a browser listens to the dashboard's stream and the page for Prometheus is read every
5 s, for the next one nobody looks. Two runs differ by a tenth in their rates, whatever watches; a phase and the next
of the same run by less, and what slows a machine down slowly has both phases of a pair. So the rate is the median of
the pairs, and where the middle half of them lies is told beside it: a difference of less says nothing.

W&B and the files cannot be switched on and off in a run. What they cost is seen in processor time, which, other than a
rate, does not depend on what else a run of the same kind has to wait for: that of the monitor of a second run with
nothing but files is compared with it, and W&B's own process is told by itself. A monitor's processor time is without
that of its p2pd. Of the run with nothing but files it is also told how much of that is what only a monitor does, and
how much the DHT node of its host, through which all roles of the host read and store: by samples of where the process
is (benchmarks/sampled).

Exit code: 0 if the rate of steps in watched phases is at least 0.995 of that in the others, and the monitor alone takes
at most 0.5 % of a core, and 0.3 % more with everything; else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import http.cookiejar
import json
import statistics
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.idle import roles_of, used
from benchmarks.signals import ended_by_signals
from tests.e2e.launched import END_S, START_S, Launched, launched, until

from shoal.clock import SystemClock
from shoal_lab.event_log import time_of

SAMPLED = Path(__file__).parent / "sampled"
WHOLE = ("--config-path=configs/sandbox.yaml", "--diloco.outer-steps=100000")
EVERYTHING = ("--dashboard.port=0", "--notify.command=/bin/true")
NOTHING = ("--no-wandb", "--dashboard.enable=false")
LEAST_RATE, MOST_MONITOR, MOST_MORE = 0.995, 0.005, 0.003
SCRAPE_S = 5.0
ROUND_S = 120.0
"""Far more than a round takes; it judges nothing."""


@dataclass(frozen=True)
class Phase:
    """Some rounds of one run.

    Attributes:
        rounds_per_s: each of the same number of steps.
        monitor, wandb: the share of a core that the monitor takes, and the processes that it has started but p2pd.
        woken_per_s: how often the monitor's threads were.
    """

    rounds_per_s: float
    monitor: float
    wandb: float
    woken_per_s: float


@dataclass(frozen=True)
class Alone:
    """A monitor that nobody watches by: the share of a core that it takes, what its DHT node takes of that (None: it
    was not seen at work), and how often it was woken."""

    monitor: float
    node: float | None
    woken_per_s: float


@dataclass(frozen=True)
class Mark:
    """The end of a round, and what has been used until then."""

    at_s: float
    monitor_s: float
    wandb_s: float
    wakeups: int


def mark_of(run: Launched) -> Mark:
    """Wait for the end of the round under way."""
    rounds = run.require_log_dir() / "rounds"
    # Only its file is looked for: logs are long. There is one of round 0, which nobody has trained.
    next_round = len(list(rounds.glob("round_*.json")))
    until((rounds / f"round_{next_round:04d}.json").exists, ROUND_S, "the next record")
    pid = run.pid_of("monitor:0")
    spent = used(pid)
    assert spent is not None, "the monitor has ended"
    others = [used(each) for each, name in roles_of([pid]).items() if each != pid and "p2pd" not in _program(each)]
    at_s = time_of(run.saw("client_0", "round.recorded", round=next_round))
    return Mark(at_s, spent.core_s, sum(each.core_s for each in others if each is not None), spent.wakeups)


def _program(pid: int) -> str:
    """Return the name of what a process runs; that of p2pd if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return "p2pd"


def phase_of(run: Launched, rounds: int) -> Phase:
    """Measure so many rounds."""
    begun = ended = mark_of(run)
    for _ in range(rounds):
        ended = mark_of(run)
    took_s = ended.at_s - begun.at_s
    return Phase(
        rounds / took_s,
        (ended.monitor_s - begun.monitor_s) / took_s,
        (ended.wandb_s - begun.wandb_s) / took_s,
        (ended.wakeups - begun.wakeups) / took_s,
    )


class Reader:
    """A browser that listens to the dashboard, and a Prometheus."""

    def __init__(self, folder: Path) -> None:
        """Read where they are let in, from the run's folder."""
        address, token = (folder / "dashboard.url").read_text().strip(), (folder / "metrics.token").read_text().strip()
        self._url = address.partition("/?")[0]
        self._own = {"Authorization": f"Bearer {token}"}
        cookies = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), cookies)
        with self._opener.open(address, timeout=START_S) as page:
            page.read()

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Look as long as the context is open."""
        over = threading.Event()
        threads = [threading.Thread(target=each, args=(over,)) for each in (self._scrape, self._listen)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def _scrape(self, over: threading.Event) -> None:
        request = urllib.request.Request(f"{self._url}/metrics", headers=self._own)
        while not over.wait(SCRAPE_S):
            with contextlib.suppress(OSError), self._opener.open(request, timeout=SCRAPE_S) as page:
                page.read()

    def _listen(self, over: threading.Event) -> None:
        # A message comes every two seconds at least.
        with contextlib.suppress(OSError), self._opener.open(f"{self._url}/events", timeout=START_S) as stream:
            while not over.is_set() and stream.readline():
                pass


def watched_in_turns(folder: Path, flags: Sequence[str], pairs: int, rounds: int) -> tuple[list[Phase], list[Phase]]:
    """Return the phases of one run that is watched in turns: the watched ones, and the others."""
    watched: list[Phase] = []
    others: list[Phase] = []
    with launched(folder, *WHOLE, *flags, *EVERYTHING, cold=True, environment={"WANDB_MODE": "offline"}) as run:
        run.saw("client_0", "round.recorded", START_S)
        until((run.require_log_dir() / "dashboard.url").exists, START_S, "the dashboard")
        reader = Reader(run.require_log_dir())
        for pair in range(pairs):
            # Which of both is first alternates: a run gets slower or faster as it goes on.
            for is_watched in (pair % 2 == 0, pair % 2 == 1):
                with reader.looking() if is_watched else contextlib.nullcontext():
                    (watched if is_watched else others).append(phase_of(run, rounds))
        run.interrupt()
        run.ends(END_S)
    return watched, others


def alone(folder: Path, flags: Sequence[str], seconds: float) -> Alone:
    """Return what the monitor of a run with nothing but files takes in about so many seconds."""
    samples = folder / "samples"
    samples.mkdir(parents=True)
    looks = {"PYTHONPATH": str(SAMPLED), "SAMPLES_DIR": str(samples)}
    with launched(folder, *WHOLE, *flags, *NOTHING, cold=True, environment=looks) as run:
        run.saw("client_0", "round.recorded", START_S)
        begun = ended = mark_of(run)
        begun_at, clock = _sampled_at(run, samples), SystemClock()
        begun_s = clock.now_s()
        while clock.now_s() < begun_s + seconds:
            ended = mark_of(run)
        of_node, of_all = (late - early for early, late in zip(begun_at, _sampled_at(run, samples), strict=True))
        run.interrupt()
        run.ends(END_S)
    took_s = ended.at_s - begun.at_s
    share = (ended.monitor_s - begun.monitor_s) / took_s
    return Alone(share, share * of_node / of_all if of_all else None, (ended.wakeups - begun.wakeups) / took_s)


def _sampled_at(run: Launched, samples: Path) -> tuple[int, int]:
    """Return how often the monitor was at its node until now, and how often in all."""
    file = samples / str(run.pid_of("monitor:0"))
    until(file.exists, START_S, "a sample of the monitor")
    of_node, of_all = file.read_text().split()
    return int(of_node), int(of_all)


def main() -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=12, help="of phases, watched and not")
    parser.add_argument("--rounds", type=int, default=2, help="of each phase")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the run with nothing but files")
    parser.add_argument("--call-s", type=float, default=0.0, help="that a call of a stage takes at least")
    parser.add_argument("--inner-steps", type=int, default=60, help="of a round")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments, console = parser.parse_args(), Console()
    flags = (f"--emulation.call-s={arguments.call_s}", f"--diloco.inner-steps={arguments.inner_steps}")
    with tempfile.TemporaryDirectory(prefix="watching") as folder:
        by_itself = alone(Path(folder) / "alone", flags, arguments.seconds)
        watched, others = watched_in_turns(Path(folder) / "turns", flags, arguments.pairs, arguments.rounds)
    rates = [one.rounds_per_s / other.rounds_per_s for one, other in zip(watched, others, strict=True)]
    rate = statistics.median(rates)
    with_all, unwatched, wandb = (
        statistics.fmean(shares)
        for shares in ([e.monitor for e in watched], [e.monitor for e in others], [e.wandb for e in watched + others])
    )
    more = with_all - by_itself.monitor
    table = Table("", "found", "goal", box=None)
    table.add_row("rate of steps while somebody looks", f"{rate:.4f}", f">= {LEAST_RATE}")
    if len(rates) > 1:
        low, _, high = statistics.quantiles(rates, n=4)
        table.add_row("  of the middle half of the pairs", f"{low:.4f} to {high:.4f}", "")
    table.add_row("monitor, of a core", f"{100 * by_itself.monitor:.2f} %", f"<= {100 * MOST_MONITOR:.1f} %")
    if by_itself.node is not None:
        table.add_row("  what only a monitor does", f"{100 * (by_itself.monitor - by_itself.node):.2f} %", "")
        table.add_row("  its host's DHT node", f"{100 * by_itself.node:.2f} %", "")
    table.add_row("  woken a second", f"{by_itself.woken_per_s:.0f}", "")
    table.add_row("more with everything", f"{100 * more:.2f} %", f"<= {100 * MOST_MORE:.1f} %")
    table.add_row("  of that, while nobody looks", f"{100 * (unwatched - by_itself.monitor):.2f} %", "")
    table.add_row("W&B's own process", f"{100 * wandb:.2f} %", "")
    console.print(table)
    if arguments.json is not None:
        figures = {"watched": [*map(asdict, watched)], "others": [*map(asdict, others)], "alone": asdict(by_itself)}
        arguments.json.write_text(json.dumps(figures, indent=1))
    return 0 if rate >= LEAST_RATE and by_itself.monitor <= MOST_MONITOR and more <= MOST_MORE else 1


if __name__ == "__main__":
    ended_by_signals(main)
