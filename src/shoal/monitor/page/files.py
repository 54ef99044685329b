"""The files of the page: as the dashboard serves them, and in the order in which a report contains them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

STATIC: Final = Path(__file__).parent / "static"
PAGE: Final = STATIC / "index.html"
STYLES: Final = (STATIC / "uplot" / "uPlot.min.css", STATIC / "page.css")
PLOT: Final = STATIC / "uplot" / "uPlot.iife.min.js"
_MODULES = "text curve store charts now learning traffic rounds incidents peer feed main"
MODULES: Final = tuple(STATIC / f"{name}.js" for name in _MODULES.split())
"""Each after those that it imports."""
OF_OPERATORS: Final = (STATIC / "hosts.css", STATIC / "hosts.js")
"""Of the page that `shoal up --ui` serves; neither a run's dashboard nor a report has them."""


def static_files() -> tuple[Path, ...]:
    """Return all files that the page loads, and no other."""
    return (*STYLES, PLOT, *MODULES)
