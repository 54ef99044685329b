"""`shoal events` of a run whose client is on another host: what that client tells of the last that has happened."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

import anyio
import msgspec

from shoal import log
from shoal.cli.event_lines import Line, told_to_people
from shoal.cli.exits import DONE, FAILED
from shoal.cli.output import plain_json, without_controls
from shoal.cli.status import finder_of
from shoal.cli.watching import Finder, WatchedRun, look_once
from shoal.clock import SystemClock
from shoal.config import Config
from shoal.control.swarm_status import EventStatus

_INTERVAL_S = 1.0


def print_told_events(config: Config, origins: Mapping[str, str], *, follow: bool, as_json: bool) -> int:
    """Print what has happened to a run of a swarm; return the exit code: 1 if its client does not answer.

    Args:
        config: gives initial peers, swarm key and prefix.
        origins: names the keys that are set.
        follow: go on until the run has ended, or the user ends it.

    Raises:
        ConfigError: there is no swarm key.
        BootstrapError: the swarm cannot be joined, or announces no run; says why.
        OSError: standard output takes no more.
    """
    log.configure("events", None)
    printed = _Printed(as_json=as_json)
    finder = finder_of(config, origins)
    try:
        return anyio.run(_follow if follow else _look, finder, printed, backend_options={"use_uvloop": True})
    except KeyboardInterrupt:
        return DONE  # the reader has seen enough


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
        shown = [plain_json(text)] if self._as_json else map(without_controls, told_to_people(line))
        for each in shown:
            print(each, flush=True)


async def _look(finder: Finder, printed: _Printed) -> int:
    status = await look_once(finder)
    if status.client is None or not status.client.answers:
        problem = "there is none" if status.client is None else status.client.problem
        said = f"the client of the run, which tells what has happened, does not answer: {problem}"
        print(without_controls(said), file=sys.stderr)
        return FAILED
    printed.print_new(status.events)
    return DONE


async def _follow(finder: Finder, printed: _Printed) -> int:
    watched, failures = WatchedRun(finder, SystemClock(), _INTERVAL_S), list[OSError]()

    def print_new() -> None:
        try:
            printed.print_new(() if watched.status is None else watched.status.events)
        except OSError as error:  # raised where no group of errors is made of it
            failures.append(error)
            following.cancel()

    watched.on_news = print_new
    with anyio.CancelScope() as following:
        await watched.run()
    if failures:
        raise failures[0]
    if watched.ended:
        print(without_controls(watched.ended), file=sys.stderr)
    return DONE
