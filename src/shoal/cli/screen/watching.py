"""`shoal status --watch`: the whole screen on a terminal, a line every interval elsewhere, or JSON."""

from __future__ import annotations

import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import anyio
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from shoal.cli.exits import DONE
from shoal.cli.output import on_one_line, plain_json, without_controls
from shoal.cli.run_row import FRESH_S, duration, rate, whole
from shoal.cli.screen.layout import render, time_of_day
from shoal.cli.watching import Finder, WatchedRun
from shoal.clock import SystemClock, utc_time_of_day
from shoal.control.swarm_status import EventStatus, SwarmStatus, lines_of
from shoal.errors import ShoalError

_REFRESH_PER_S = 4.0
_UNBROKEN = "ignore"


async def watch(finder: Finder, interval_s: float, as_json: bool) -> int:
    """Show a run until it has ended or the user ends it (Ctrl-C, SIGTERM); return the exit code.

    Raises:
        BootstrapError: the run was not found.
        OSError: standard output takes no more.
    """
    console, clock = Console(), SystemClock()
    shown = WatchedRun(finder, clock, interval_s)
    is_screen = console.is_terminal and not console.is_dumb_terminal and not as_json
    lines = _JsonLines(shown) if as_json else _PlainLines(shown, lambda: utc_time_of_day(clock.unix_s()))
    failures: list[OSError | ShoalError] = []  # raised where no group of errors is made of them

    async def print_lines() -> None:
        try:
            while True:
                lines.print_new()
                await clock.sleep_s(interval_s)
        except OSError as error:
            failures.append(error)
            tasks.cancel_scope.cancel()

    async def follow() -> None:
        try:
            await shown.run()
        except ShoalError as error:
            failures.append(error)

    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with anyio.create_task_group() as tasks:

            async def end_when_told() -> None:
                async for _ in signals:
                    tasks.cancel_scope.cancel()
                    return

            tasks.start_soon(end_when_told)
            if is_screen:
                with Live(
                    get_renderable=lambda: screen(shown.status, console),
                    console=console,
                    screen=True,
                    refresh_per_second=_REFRESH_PER_S,
                ):
                    await follow()
            else:
                tasks.start_soon(print_lines)
                await follow()
            tasks.cancel_scope.cancel()
    if failures:
        raise failures[0]
    if shown.ended and not as_json:
        last = list(lines_of(shown.status)) if is_screen and shown.status is not None else []
        print("\n".join(map(without_controls, (*last, shown.ended))), flush=True)
    return DONE


def screen(status: SwarmStatus | None, console: Console) -> RenderableType:
    """Return what fills a terminal now."""
    if status is None:
        return Text("looking for the run ...", "dim")
    width, height = console.size
    lines = render(status, width, height, is_ascii=not console.encoding.lower().startswith("utf"))
    for line in lines:
        line.no_wrap, line.overflow = True, _UNBROKEN
    return Group(*lines)


class _Lines(ABC):
    """What is printed each time, with the events that were not printed before."""

    def __init__(self, watch: WatchedRun) -> None:
        self._watch = watch
        self._newest: int | None = None

    def print_new(self) -> None:
        """Raises OSError: standard output takes no more."""
        status = self._watch.status
        if status is None:
            return
        is_first, newest = self._newest is None, self._newest or 0
        new = tuple(event for event in status.events if event.number > newest)
        self._newest = max([newest, *(event.number for event in new)])
        self._print(status, new, is_first=is_first)

    @abstractmethod
    def _print(self, status: SwarmStatus, new: Sequence[EventStatus], *, is_first: bool) -> None: ...


class _PlainLines(_Lines):
    """A line of numbers each time, and one for each event."""

    def __init__(self, watch: WatchedRun, time_of_day: Callable[[], str]) -> None:
        super().__init__(watch)
        self._time_of_day = time_of_day

    def _print(self, status: SwarmStatus, new: Sequence[EventStatus], *, is_first: bool) -> None:
        for event in () if is_first else new:  # what was before is in `shoal events`
            print(without_controls(f"{time_of_day(event.unix_s)}Z  {event.says}"))
        print(f"{self._time_of_day()}  {plain_line(status)}", flush=True)


class _JsonLines(_Lines):
    """An object each time."""

    def _print(self, status: SwarmStatus, new: Sequence[EventStatus], *, is_first: bool) -> None:
        line = msgspec.json.encode(msgspec.structs.replace(status, events=tuple(new)))
        sys.stdout.write(f"{plain_json(line.decode())}\n")
        sys.stdout.flush()


def plain_line(status: SwarmStatus) -> str:
    """Return `round 7/9  step 1,234  loss 2.500  ...  training round 7 of 9  (5 s old)`."""
    return "  ".join(map(on_one_line, _parts(status)))


def _parts(status: SwarmStatus) -> Iterator[str]:
    if status.round is not None and status.rounds is not None:
        yield f"round {status.round}/{status.rounds}"
    if status.steps is not None:
        yield f"step {whole(status.steps)}"
    if status.loss is not None:
        yield f"loss {status.loss:.3f}"
    if status.eval_loss is not None:
        yield f"eval loss {status.eval_loss:.3f}"
    if status.samples_per_s is not None:
        yield f"samples/s {rate(status.samples_per_s)}"
    if status.left_s is not None:
        yield f"{duration(status.left_s)} left"
    servers = [server for stage in status.stages for server in stage.replicas]
    yield f"servers {sum(server.state == 'serving' for server in servers)}/{len(servers)}"
    yield status.state
    if status.age_s >= FRESH_S:
        yield f"({duration(status.age_s)} old)"
