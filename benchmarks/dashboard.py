#!/usr/bin/env python3
"""Measure the dashboard in a real browser: how long an update takes, and how long from the server to the screen.

    python benchmarks/dashboard.py                         a run of 100,000 points and 200 peers, each part of the page
    python benchmarks/dashboard.py --rows 60 --json dashboard.json
    python benchmarks/dashboard.py --soak 3600             no browser: an hour's rows to 8 readers, one of whom stalls
    python benchmarks/dashboard.py --screenshots pictures  no figures but pictures: dark, light, of a phone, a report

The run is made up (tests/browser/made_runs.py); the monitor's dashboard serves it from this process to Chromium, a row
every half a second. The page itself says how long an update takes, and which row is the first that it shows
(`performance.measure`). That row is on the screen when the browser has painted the frame, and tells of the measure.

Exit code: 0 if 95 of 100 updates take at most 33 ms, and at most 250 ms pass from the server to the screen, and the
report has at most 1.5 MB; else 1. Meant for a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.browser.browsers import PHONE, SCREEN, TABS, browser, opened, why_impossible
from tests.browser.made_runs import CONFIG, RUN_ID, going_on, make_run

from shoal.clock import SystemClock
from shoal.monitor.http.access import Access
from shoal.monitor.http.browsers import MAX_BROWSERS
from shoal.report.page import write_page

TICKS, PEERS = 25_000, 200
"""Four curves of so many points are 100,000; the fifth one is beside them."""
MAX_UPDATE_MS, MAX_SCREEN_MS, MAX_REPORT_BYTES = 33.0, 250.0, 1_500_000
MAX_GROWTH_MB = 5.0
ROW_S = 0.5
WATCH = """
window.updates = [];
new PerformanceObserver((list) => {
  // An observer is told after the frame in which the page was drawn, so that its layout and paint are counted.
  const shownMs = performance.timeOrigin + performance.now();
  for (const each of list.getEntries()) {
    const made = each.detail?.made;
    window.updates.push([each.duration, made ? shownMs - 1000 * made : null]);
  }
}).observe({ type: "measure" });
"""


@dataclass(frozen=True)
class Figures:
    """Of one part of the page: updates in ms, and from the server to the screen in ms."""

    part: str
    updates: int
    update_p50_ms: float
    update_p95_ms: float
    screen_p95_ms: float


def p95(values: list[float]) -> float:
    """The value that 95 of 100 do not exceed."""
    return statistics.quantiles(values, n=20)[-1] if len(values) > 1 else values[0]


async def measure(folder: Path, rows: int) -> list[Figures]:
    """Show each part of the page for so many rows."""
    figures: list[Figures] = []
    async with going_on(folder, TICKS, PEERS) as run, browser() as found:
        seen = await opened(found, run.url, viewport=SCREEN)
        await seen.says(".tiles", f"{run.row_step:,}")
        await seen.page.evaluate(WATCH)
        for tab in TABS:
            await seen.show(tab)
            await seen.page.evaluate("window.updates.length = 0")
            for _ in range(rows):
                run.step()
                await SystemClock().sleep_s(ROW_S)
            updates: list[list[float | None]] = await seen.page.evaluate("window.updates")
            took = [update for update, _ in updates if update is not None]
            screen = [late for _, late in updates if late is not None]
            figures.append(Figures(tab, len(took), statistics.median(took), p95(took), p95(screen)))
        if seen.complaints:
            raise SystemExit(f"the page complains: {seen.complaints}")
    return figures


async def soak(folder: Path, rows: int) -> tuple[int, int]:
    """Send so many rows to 8 readers; return the memory of this process in bytes, after a sixth of them and after all.

    Each reader comes back when it is dropped; the first one reads nothing.
    """
    async with going_on(folder, 600, PEERS) as run:
        access = Access(folder, RUN_ID)
        cookie = f"{access.cookie_name}={access.cookie}"
        asked = f"GET /events HTTP/1.1\r\nHost: localhost\r\nCookie: {cookie}\r\n\r\n".encode()

        async def read(*, stalls: bool) -> None:
            while True:
                async with await anyio.connect_tcp("127.0.0.1", access.earlier_port) as stream:
                    await stream.send(asked)
                    if stalls:
                        await anyio.Event().wait()
                    with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                        while True:
                            await stream.receive()

        early_bytes = 0
        async with anyio.create_task_group() as tasks:
            for number in range(MAX_BROWSERS):
                tasks.start_soon(partial(read, stalls=not number))
            for number in range(rows):
                run.step()
                await SystemClock().sleep_s(ROW_S / 25)
                if number == rows // 6:
                    early_bytes = resident_bytes()
            tasks.cancel_scope.cancel()
        return early_bytes, resident_bytes()


def resident_bytes() -> int:
    """The memory of this process that is in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def photograph(folder: Path, pictures: Path) -> None:
    """Take a picture of each part of the page, live and of the report."""
    await anyio.to_thread.run_sync(lambda: pictures.mkdir(parents=True, exist_ok=True))
    kinds: dict[str, dict[str, Any]] = {
        "light": {"color_scheme": "light", "viewport": SCREEN},
        "dark": {"color_scheme": "dark", "viewport": SCREEN},
        "phone": {"color_scheme": "dark", "viewport": PHONE},
    }
    async with going_on(folder, 600, 16) as run, browser() as found:
        report = write_page(folder, CONFIG, RUN_ID)
        assert report is not None
        for kind, options in kinds.items():
            for name, url in ((kind, run.url), (f"report-{kind}", report.as_uri())):
                seen = await opened(found, url, **options)
                await seen.says(".tiles", "loss")
                for tab in TABS:
                    await seen.show(tab)
                    run.step()
                    await SystemClock().sleep_s(ROW_S)
                    await seen.page.screenshot(path=pictures / f"{name}-{tab}.png", full_page=True)


def main() -> int:
    """Measure, or take pictures; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=40, help="rows for each part of the page")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--soak", type=int, help="rows to send to 8 readers, and look at the memory")
    parser.add_argument("--screenshots", type=Path, help="take pictures, into this folder")
    arguments = parser.parse_args()
    if (reason := why_impossible()) is not None:
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.screenshots is not None:
            anyio.run(photograph, folder, arguments.screenshots)
            Console().print(f"{len(list(arguments.screenshots.glob('*.png')))} pictures in {arguments.screenshots}")
            return 0
        if arguments.soak is not None:
            early_bytes, late_bytes = anyio.run(soak, folder, arguments.soak)
            grown = (late_bytes - early_bytes) / 1e6
            Console().print(
                f"{late_bytes / 1e6:.1f} MB after {arguments.soak} rows, {grown:+.1f} MB in the last five sixths"
            )
            return int(grown > MAX_GROWTH_MB)
        make_run(folder, TICKS, PEERS)
        began_s = SystemClock().now_s()
        report = write_page(folder, CONFIG, RUN_ID)
        report_s = SystemClock().now_s() - began_s
        assert report is not None
        report_bytes = report.stat().st_size
        figures = anyio.run(measure, folder, arguments.rows)
    table = Table("part", "updates", "update p50 ms", "p95 ms", "server to screen p95 ms")
    for each in figures:
        values = (each.update_p50_ms, each.update_p95_ms, each.screen_p95_ms)
        table.add_row(each.part, str(each.updates), *(f"{value:.1f}" for value in values))
    Console().print(table)
    Console().print(
        f"report of {4 * TICKS:,} points and {PEERS} peers: {report_bytes:,} bytes, written in {report_s:.1f} s"
    )
    if arguments.json is not None:
        told = {"parts": [vars(each) for each in figures], "report_bytes": report_bytes, "report_s": report_s}
        arguments.json.write_text(json.dumps(told, indent=2) + "\n")
    is_fast = all(each.update_p95_ms <= MAX_UPDATE_MS and each.screen_p95_ms <= MAX_SCREEN_MS for each in figures)
    return 0 if is_fast and report_bytes <= MAX_REPORT_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
