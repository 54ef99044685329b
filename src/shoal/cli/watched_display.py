"""A terminal that shows how the whole run is, as its client says it, and under that what this host knows by itself."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from rich.console import Console, Group, RenderableType

from shoal.cli.display import Display
from shoal.cli.screen.layout import render
from shoal.clock import Clock
from shoal.control.swarm_status import SwarmStatus

LEAST_WIDTH, LEAST_HEIGHT = 60, 15
"""A smaller terminal has a row."""


class WatchedDisplay(Display):
    """Shows the row alone until `watch` is called, and where the terminal is small."""

    def __init__(self, *, console: Console | None = None, clock: Clock | None = None) -> None:
        super().__init__(console=console, clock=clock)
        self._watched: Callable[[], SwarmStatus | None] = lambda: None

    def watch(self, run: Callable[[], SwarmStatus | None]) -> None:
        """From now on fill a part of a terminal that is large enough with what this returns."""
        self._watched = run

    def _screen(self) -> RenderableType:
        status = self._watched()
        width, height = self._console.size
        if self.shown is None or status is None or width < LEAST_WIDTH or height < LEAST_HEIGHT:
            return super()._screen()
        # Events are said above, and stay there.
        shown = msgspec.structs.replace(status, state=self._state_of(status), events=())
        is_ascii = not self._console.encoding.lower().startswith("utf")
        lines = render(shown, width, height // 2, is_ascii=is_ascii)
        return Group(*lines, self._beside())

    def _state_of(self, status: SwarmStatus) -> str:
        """Return what goes on, in words."""
        return status.state

    def _beside(self) -> RenderableType:
        """Return what this host knows by itself."""
        return super()._screen()
