"""How a process with roles shows what goes on: one live row on a terminal, and lines that stay.

A terminal that is large enough shows, in place of the row, how the whole run is, as its client says it, and under that
what this host knows by itself.

Where standard output is no terminal (a file, a pipe, a build log) the row comes as a plain line every few seconds,
whether it has changed or not. There and here each line that stays begins with the time of day, in UTC as in the logs.

A terminal that is held (Ctrl-S, a connection that has dropped) or a pipe that nobody empties keeps no process: what is
to be shown waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, Self

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shoal.cli.output import discard_stdout, without_controls
from shoal.cli.run_row import Cell, duration
from shoal.cli.screen.layout import render
from shoal.clock import Clock, SystemClock, utc_time_of_day
from shoal.control.swarm_status import SwarmStatus
from shoal.events.base import Event
from shoal.file_thread import FileThread

PLAIN_INTERVAL_S = 5.0
LEAST_WIDTH, LEAST_HEIGHT = 60, 15
"""A smaller terminal has a row."""
_REFRESH_PER_S = 4.0
_MAX_WAITING = 10_000
"""So many lines may wait for a terminal that takes none."""
_GAP = 2


class Row(Protocol):
    """What the live row says at a monotonic time."""

    def cells(self, now_s: float) -> Sequence[Cell]:
        """Return the columns."""
        ...

    def state(self, now_s: float) -> str:
        """Return what goes on, in words."""
        ...


class _Output(Console):
    """Standard output. A run does not end because nobody reads it any more."""

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, which `Display` handles; what is inherited here ends the process."""
        raise BrokenPipeError


class Display:
    """The terminal of one process. As a context it shows the live row, if there is a terminal.

    Attributes:
        shown: the row; None until there is one.
    """

    def __init__(self, *, console: Console | None = None, clock: Clock | None = None) -> None:
        """Show nothing yet.

        Args:
            console: standard output if None.
            clock: for the time of day and the age of numbers.
        """
        self.shown: Row | None = None
        self._console = console or _Output()
        self._clock = clock or SystemClock()
        self._live: Live | None = None
        self._out = FileThread("terminal")
        self._watched: Callable[[], SwarmStatus | None] = lambda: None

    def watch(self, run: Callable[[], SwarmStatus | None]) -> None:
        """From now on fill a part of a terminal that is large enough with what this returns."""
        self._watched = run

    def __enter__(self) -> Self:
        if self.is_screen:
            self._live = Live(
                get_renderable=self._screen,
                console=self._console,
                refresh_per_second=_REFRESH_PER_S,
                transient=True,
            )
            self._out.do(partial(self._put, self._live.start))
        return self

    def __exit__(self, *_: object) -> None:
        live, self._live = self._live, None
        if live is not None:
            self._out.do(partial(self._put, live.stop))
        self._out.end()

    async def run(self) -> None:
        """Print the row every few seconds where there is no terminal that would show it, until cancelled."""
        while not self.is_screen:
            await self._clock.sleep_s(PLAIN_INTERVAL_S)
            if self.shown is not None:
                self.notice(plain_line(self.shown, self._clock.now_s()))

    def notice(self, text: str) -> None:
        """Show what has just happened: one line that stays."""
        self.say(f"{utc_time_of_day(self._clock.unix_s())}  {text}")

    def say(self, text: str) -> None:
        """Show a line that stays as it is, without the time: it may be there to be copied."""
        # Text from outside must not be read as rich's markup, nor tell the terminal what to do.
        self._print(Text(without_controls(text)))

    @property
    def is_screen(self) -> bool:
        """Whether a row can be written over."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def _print(self, what: RenderableType) -> None:
        """Print; not cut at the width of a pipe, and nothing more once nobody takes it (`| head`, a full disk)."""
        if self._out.num_waiting < _MAX_WAITING:
            self._out.do(partial(self._put, partial(self._console.print, what, highlight=False, soft_wrap=True)))

    def _put(self, show: Callable[[], None]) -> None:
        try:
            show()
        except OSError:
            # Standard output takes nothing any more; a run that was to outlive it has yet to be summed up.
            self._console.quiet = True
            discard_stdout()

    def _screen(self) -> RenderableType:
        status = self._watched()
        width, height = self._console.size
        if self.shown is None or status is None or width < LEAST_WIDTH or height < LEAST_HEIGHT:
            return self._row_screen()
        # Events are said above, and stay there.
        shown = msgspec.structs.replace(status, state=self._state_of(status), events=())
        is_ascii = not self._console.encoding.lower().startswith("utf")
        lines = render(shown, width, height // 2, is_ascii=is_ascii)
        return Group(*lines, self._beside())

    def _row_screen(self) -> RenderableType:
        return Text() if self.shown is None else screen(self.shown, self._clock.now_s(), self._console.width)

    def _state_of(self, status: SwarmStatus) -> str:
        """Return what goes on, in words."""
        return status.state

    def _beside(self) -> RenderableType:
        """Return what this host knows by itself."""
        return self._row_screen()


def plain_line(row: Row, now_s: float) -> str:
    """Return the row as one line: `round 2/12  step 40 (35 s ago)  ...  stopped: ...`."""
    return "  ".join(filter(None, (_numbers(row.cells(now_s)), row.state(now_s))))


def screen(row: Row, now_s: float, width: int) -> Group:
    """Return the numbers as a table, old ones dim, and the state under it; as wrapped text where it is too narrow."""
    cells, state = row.cells(now_s), without_controls(row.state(now_s))
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for cell in cells:
        table.add_column(cell.title, justify="right", no_wrap=True)
    table.add_row(*(Text(cell.text, style="" if cell.age_s is None else "dim") for cell in cells))
    fits = sum(max(len(cell.title), len(cell.text)) + _GAP for cell in cells) - _GAP <= width
    ages = [cell.age_s for cell in cells if cell.age_s is not None]
    if fits and ages:
        titles = [cell.title for cell in cells if cell.age_s is not None]
        state += f"  ({', '.join(titles)}: {duration(max(ages))} old)"
    return Group(table if fits else Text(_numbers(cells)), Text(state, style="dim"))


def _numbers(cells: Sequence[Cell]) -> str:
    known = (cell for cell in cells if cell.text != "-")
    ages = ((cell, "" if cell.age_s is None else f" ({duration(cell.age_s)} ago)") for cell in known)
    return "  ".join(f"{cell.title} {cell.text}{age}" for cell, age in ages)


def print_event(event: Event) -> None:
    """Print what a person is to see of an event, where there is no live row yet."""
    if text := event.say():
        print(without_controls(text), flush=True)
