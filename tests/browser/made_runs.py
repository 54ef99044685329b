"""Runs that are made up, of any size, and the dashboard that shows them, in the process of a test."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from shoal.clock import SystemClock
from shoal.config import Config
from shoal.config.dump import dump_config
from shoal.events.base import EVENTS_FILE
from shoal.monitor.exporters.base import noted_event
from shoal.monitor.exporters.metrics_file import MetricsFile
from shoal.monitor.http.access import URL_FILE
from shoal.monitor.http.dashboard import Dashboard, DashboardSettings
from shoal.monitor.page.chronicle import info_of
from shoal.telemetry.rows import METRICS_FILE, PEERS_FILE, MetricRow

CONFIG = Config.model_validate({"model_pipeline": {"stages": 4}, "diloco": {"outer_steps": 40}})
RUN_ID = "made-run"
SAMPLES_A_ROW = 64
MARKUP = "server <img src=x onerror=alert(1)>@<b>box</b>"
"""What a peer might call itself."""


def peers(number: int) -> list[str]:
    """Names of servers."""
    return [f"server {index}@box{index // 8}" for index in range(number)]


def measured(name: str, index: int, tick: int) -> dict[str, float]:
    """What a server says."""
    wave = math.sin(tick / 7 + index)
    return {
        "stage": float(index % 4),
        "held_round": float(tick // 60),
        "samples_per_s": 40 + 8 * wave + index % 5,
        "busy": 0.6 + 0.3 * wave,
        "step.committed": float(5 * tick),
        "transport.sent_bytes": 1e6 * tick + 1e5 * index,
        "transport.received_bytes": 9e5 * tick + 1e5 * index,
        "process.memory_bytes": 2.5e8 + 1e6 * index,
        "process.start_time_seconds": 1_796_000_000.25,
        "device.busy_us": 2_500_000.0,
    }


def row(tick: int, unix_s: float, names: list[str]) -> MetricRow:
    """The numbers of a second of a run; each server speaks in each second one."""
    wave = math.sin(tick * 12.9898) * 0.5
    run = {
        "step": 2.0 * tick + 1,
        "samples": float(SAMPLES_A_ROW * (tick + 1)),
        "round": float(tick // 60 + 1),
        "loss/train": 2 + 4 * math.exp(-tick / 900) + 0.1 * wave,
        "grad_norm": 0.4 + 0.1 * abs(wave),
        "lr": 0.001 * (1 + math.cos(tick / 8000)),
        "samples_per_s": 64 + 4 * wave,
        "targets_per_s": 8192 + 512 * wave,
        "pipelines": float(len(names) // 4),
        "alive_peers": float(len(names) + 6),
    }
    run |= {f"replicas/{stage}": float(len(names) // 4) for stage in range(4)}
    if tick % 60 == 0:
        run["loss/eval"] = 2.1 + 4 * math.exp(-tick / 900)
    speaking = {name: measured(name, index, tick) for index, name in enumerate(names) if index % 2 == tick % 2}
    return MetricRow(datetime.fromtimestamp(unix_s, UTC), run, speaking)


def event(name: str, unix_s: float, level: str = "INFO", **fields: Any) -> bytes:
    """A line of events.jsonl."""
    time = datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")
    return msgspec.json.encode({"time": time, "level": level, "event": name, **fields})


def course(ticks: int, end_s: float) -> Iterator[bytes]:
    """What the client has noted of the rounds, and of a loss."""
    for number in range(1, ticks // 60 + 1):
        begun_s = end_s - ticks + 60 * (number - 1)
        yield event("round.begun", begun_s, round=number, steps=60, pipelines=4, trainers=4, replicas=16)
        curve = [[SAMPLES_A_ROW * 60, 2.0, 2.2, 2.5]]
        recorded = {"loss": 2.2, "hashes": {}, "trained": True, "sent_bytes": {"ring": 10**8}, "curve": curve}
        yield event("round.recorded", begun_s + 58, round=number, duration_s=58.0 + number % 3, **recorded)
        yield event("evaluation.done", begun_s + 59, base_round=number, loss=2.3)
    yield event("server.lost", end_s - 5, "WARNING", says=f"{MARKUP} (stage 1) is gone: its connection has closed")
    yield event("mirrors.behind", end_s - 4, "WARNING", says="the mirrors are behind")


def make_run(folder: Path, ticks: int, num_peers: int, *, end_s: float | None = None) -> None:
    """Leave a run of so many seconds in a folder, as its processes would."""
    end_s = SystemClock().unix_s() if end_s is None else end_s
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(CONFIG))
    names = [*peers(num_peers - 1), MARKUP]
    # As `MetricsFile` writes it, without looking at the file's size for each line.
    told: dict[str, dict[str, float]] = {}
    with (folder / METRICS_FILE).open("wb") as of_run, (folder / PEERS_FILE).open("wb") as of_peers:
        for tick in range(ticks):
            each = row(tick, end_s - ticks + tick, names if tick % 10 > 7 else [])
            told |= each.peers
            of_run.write(msgspec.json.encode(MetricRow(each.time, each.run)) + b"\n")
            if tick % 10 == 9:
                of_peers.write(msgspec.json.encode(MetricRow(each.time, {}, told)) + b"\n")
                told = {}
    (folder / EVENTS_FILE).write_bytes(b"".join(line + b"\n" for line in course(ticks, end_s)))


@dataclass
class MadeRun:
    """A run that goes on: what it says is in its files, as the monitor's exporters have it, and at the dashboard."""

    folder: Path
    names: list[str]
    tick: int
    dashboard: Dashboard
    notices: list[str]

    @property
    def url(self) -> str:
        """The address that lets the next browser in."""
        return (self.folder / URL_FILE).read_text().strip()

    @property
    def row_step(self) -> int:
        """The newest number of steps."""
        return 2 * (self.tick - 1) + 1

    def step(self) -> MetricRow:
        """A second of the run."""
        each = row(self.tick, SystemClock().unix_s(), self.names)
        self.tick += 1
        file = MetricsFile(self.folder)
        file.row(each)
        file.close(1.0)
        self.dashboard.row(each)
        return each

    def happens(self, line: bytes) -> None:
        """Something happens, as the client notes it."""
        with (self.folder / EVENTS_FILE).open("ab") as file:
            file.write(line + b"\n")
        self.dashboard.event(noted_event(line))


@asynccontextmanager
async def going_on(folder: Path, ticks: int, num_peers: int) -> AsyncGenerator[MadeRun]:
    """The dashboard of such a run, with its next second; leave it as the monitor does when it is told to stop."""
    if not (folder / METRICS_FILE).exists():
        await anyio.to_thread.run_sync(make_run, folder, ticks, num_peers)
    async with serving(folder, ticks, [*peers(num_peers - 1), MARKUP]) as run:
        yield run
        await anyio.to_thread.run_sync(run.dashboard.close, 1.0)


@asynccontextmanager
async def serving(folder: Path, tick: int, names: list[str]) -> AsyncGenerator[MadeRun]:
    """A process of the monitor, so to speak: its first row is that of this second."""
    notices: list[str] = []
    settings = DashboardSettings(folder, RUN_ID, 0, info_of(CONFIG, RUN_ID))
    run = MadeRun(folder, names, tick, Dashboard(settings, SystemClock(), notices.append), notices)
    run.step()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run.dashboard.run)
        await run.dashboard.opened.wait()
        yield run
        tasks.cancel_scope.cancel()
