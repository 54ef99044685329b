"""`shoal events` of a run whose client is on another host: what that client tells of the last that has happened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime

import anyio
import msgspec

from shoal import log
from shoal.cli.event_lines import Line, told_to_people
from shoal.cli.exits import DONE
from shoal.cli.output import without_controls
from shoal.cli.status import finder_of
from shoal.cli.watching import Finder, WatchedRun, look_once
from shoal.clock import SystemClock
from shoal.config import Config
from shoal.control.swarm_status import EventStatus

_INTERVAL_S = 1.0


def print_told_events(config: Config, origins: Mapping[str, str], *, follow: bool, as_json: bool) -> int:
    """Print what has happened to a run of a swarm; return the exit code.

    Args:
        config: gives initial peers, swarm key and prefix.
        origins: names the keys that are set.
        follow: go on until the run has ended, or the user ends it.

    Raises:
        ConfigError: there is no swarm key.
        BootstrapError: the swarm cannot be joined, or announces no run; says why.
    """
    log.configure("events", None)
    printed = _Printed(as_json=as_json)
    finder = finder_of(config, origins)
    with suppress(KeyboardInterrupt):  # the reader has seen enough
        anyio.run(_follow if follow else _look, finder, printed, backend_options={"use_uvloop": True})
    return DONE


class _Printed:
    """What has been printed: each event once, also where another client tells it again."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._seen: set[tuple[float, str]] = set()

    def print_new(self, events: Iterable[EventStatus]) -> None:
        events = list(events)
        for event in events:
            if (event.unix_s, event.says) not in self._seen:
                self._print(event)
        self._seen = {(event.unix_s, event.says) for event in events}

    def _print(self, event: EventStatus) -> None:
        text = msgspec.json.encode(event).decode()
        at = datetime.fromtimestamp(event.unix_s, UTC).astimezone()
        line = Line(at, event.level, event.event, {"says": event.says}, text)
        for told in [text] if self._as_json else told_to_people(line):
            print(without_controls(told), flush=True)


async def _look(finder: Finder, printed: _Printed) -> None:
    printed.print_new((await look_once(finder)).events)


async def _follow(finder: Finder, printed: _Printed) -> None:
    watched = WatchedRun(finder, SystemClock(), _INTERVAL_S)

    def print_new() -> None:
        if watched.status is not None:
            printed.print_new(watched.status.events)

    watched.on_news = print_new
    await watched.run()
