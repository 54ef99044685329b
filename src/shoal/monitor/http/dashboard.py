"""The dashboard of a run: an exporter, and from the first step on a web server in the monitor's own event loop.

    rows, events --> (until the first step: the last few are kept) --> Chronicle --> Browsers --> every page

Launching is not delayed: until then nothing is imported, and the past is read from the run's folder, in a thread. So a
monitor that is started again goes on just so, under the same address.
"""

from __future__ import annotations

import importlib
import logging
import socket
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread
import msgspec

from shoal.clock import Clock, wait_for_tick
from shoal.events.base import emit, tell
from shoal.events.monitor import DashboardAway, DashboardMissing, DashboardOpen, DashboardStopped
from shoal.monitor.exporters.base import Newest, NotedEvent
from shoal.monitor.http.access import URL_FILE, Access
from shoal.monitor.http.browsers import Browsers
from shoal.monitor.page.chronicle import Chronicle, read_chronicle
from shoal.telemetry.rows import MetricRow

logger = logging.getLogger(__name__)

TICK_S: Final = 2.0
_LAST_NUMBERS_S: Final = 3.0
_MAX_EARLY: Final = 100
_HOST: Final = "127.0.0.1"


_Result = TypeVar("_Result")


def _nothing() -> Newest:
    return Newest({}, ())


async def _asked_of_disk(question: Callable[[], _Result]) -> _Result:
    """Ask in a thread, which a disk that does not answer keeps to the end of the process: the loop serves the DHT."""
    return await anyio.to_thread.run_sync(question, abandon_on_cancel=True)


class DashboardSettings(NamedTuple):
    """Which run it shows, and the port that it would like; 0: any."""

    log_dir: Path
    run_id: str
    port: int
    info: Mapping[str, Any]


@dataclass(eq=False, repr=False)
class Dashboard:
    """An exporter for browsers; `run` serves them.

    Attributes:
        notice: is told a line for the user.
        newest: returns the newest numbers, for Prometheus.
        is_over: whether the run ends, if this is cancelled: otherwise the monitor has failed and is started again.
    """

    settings: DashboardSettings
    clock: Clock
    notice: Callable[[str], None]
    newest: Callable[[], Newest] = _nothing
    is_over: Callable[[], bool] = lambda: True
    _early_rows: deque[MetricRow] = field(default_factory=lambda: deque(maxlen=_MAX_EARLY))
    _early_events: deque[NotedEvent] = field(default_factory=lambda: deque(maxlen=_MAX_EARLY))
    opened: anyio.Event = field(default_factory=anyio.Event, init=False)
    _stepped: anyio.Event = field(default_factory=anyio.Event)
    _closed: anyio.Event = field(default_factory=anyio.Event)
    _shown: tuple[Chronicle, Browsers] | None = None

    def row(self, row: MetricRow) -> None:
        """Show the numbers of a second."""
        if self._shown is None:
            self._early_rows.append(row)
        else:
            chronicle, browsers = self._shown
            browsers.tell("row", chronicle.row(row))
        if "step" in row.run:
            self._stepped.set()

    def event(self, event: NotedEvent) -> None:
        """Show an event."""
        if self._shown is None:
            self._early_events.append(event)
            return
        chronicle, browsers = self._shown
        if (news := chronicle.event(event)) is not None:
            browsers.tell("event", news)

    def close(self, timeout_s: float) -> bool:
        """Nothing more comes: browsers are told by `run`, which has been cancelled."""
        anyio.from_thread.run_sync(self._closed.set)
        return True

    async def run(self) -> None:
        """Serve from the first step on, until cancelled; then tell the browsers that the run is over."""
        # A monitor that is started again shows also a run that stands still.
        if not await _asked_of_disk((self.settings.log_dir / URL_FILE).exists):
            await self._stepped.wait()
        try:
            # It takes a moment, and may not be installed.
            server = await anyio.to_thread.run_sync(importlib.import_module, "shoal.monitor.http.server")
        except ImportError:
            tell(logger, DashboardMissing(), self.notice)
            return
        try:
            access = await _asked_of_disk(partial(Access, self.settings.log_dir, self.settings.run_id))
            with self._open(access) as listener:
                browsers = await self._begin()
                async with server.serving(listener, access, browsers, self.newest):
                    # Outside the task group, which would wrap an OSError of it.
                    self._say_where(access, listener.getsockname()[1])
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(self._tick, browsers)
                        await self._until_ended(browsers)
        except OSError as error:
            where = error.filename or f"{_HOST}:{self.settings.port}"
            tell(logger, DashboardStopped(f"{where}: {error.strerror or error}"), self.notice)

    async def _until_ended(self, browsers: Browsers) -> None:
        """Wait to be cancelled, and then for the last numbers."""
        try:
            await self._closed.wait()
        finally:
            with anyio.move_on_after(_LAST_NUMBERS_S, shield=True):
                await self._closed.wait()
            if self.is_over():
                browsers.end()

    async def _begin(self) -> Browsers:
        """Take over the past and what has come meanwhile; from now on what comes goes to the browsers."""
        log_dir, info = self.settings.log_dir, self.settings.info
        chronicle, told = await _asked_of_disk(partial(read_chronicle, log_dir, info))
        last_s = chronicle.last_s
        for row in self._early_rows:
            # `metrics.jsonl` has those of the run already, and those of peers later.
            is_known = row.time.timestamp() <= last_s
            news = MetricRow(row.time, {}, row.peers) if is_known else row
            if news.run or news.peers:
                chronicle.row(news)
        for event in self._early_events:
            if event.line not in told:
                chronicle.event(event)
        browsers = Browsers(lambda: msgspec.json.encode(chronicle.past(self.clock.unix_s())), self.clock.unix_s)
        self._shown = chronicle, browsers
        return browsers

    def _open(self, access: Access) -> socket.socket:
        """Listen at the port of an earlier start, or the one that is wanted, or any."""
        wanted = self.settings.port
        for port in dict.fromkeys((access.earlier_port or wanted, wanted)):
            try:
                return socket.create_server((_HOST, port))
            except OSError as error:
                emit(logger, DashboardAway(port, error.strerror or str(error)))
        return socket.create_server((_HOST, 0))

    def _say_where(self, access: Access, port: int) -> None:
        """Say where it is, unless that was said at an earlier start."""
        is_known = port == access.earlier_port
        access.serves(port)
        emit(logger, DashboardOpen(f"http://{_HOST}:{port}/"))
        if not is_known:
            # The token is for the user's eyes and in no log.
            self.notice(f"dashboard: {access.url}")
        self.opened.set()

    async def _tick(self, browsers: Browsers) -> None:
        while True:
            await wait_for_tick(self.clock, TICK_S)
            browsers.tick()
