"""How a page of help is drawn: as plain text, since to draw it as Markdown takes a third more of a core each time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions


class PlainPage:
    """Draws help as cyclopts does, but that the lines of a paragraph are filled anew (`help_formatter` of an App)."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Draw a box of commands or flags."""
        _default()(console, options, panel)

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        """Draw the line that says how a command is called."""
        _default().render_usage(console, options, usage)

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        """Draw what a command does, from its docstring."""
        text = getattr(description, "primary_renderable", None)
        if text is None:
            return  # it says nothing
        for paragraph in text.plain.split("\n\n"):
            console.print(" ".join(paragraph.split()), markup=False, highlight=False)
            console.print()


def _default() -> Any:
    # Who asks for no help does not load what draws it.
    from cyclopts.help import DefaultFormatter

    return DefaultFormatter()
