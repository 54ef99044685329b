"""The command line: arguments become a `Config`, which goes to a service. The only package that prints.

`main` imports no more than it needs: `shoal --help` loads neither torch nor hivemind nor pydantic.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments without the program's name; None takes those of the process. Without any it is --help.

    Returns:
        The exit code: 0 done, 1 the run failed, 2 the user's input is wrong, 3 too busy to measure, 130 interrupted.
    """
    try:
        from shoal.cli.output import lenient_stdout, open_closed_streams

        open_closed_streams()
        lenient_stdout()
        from shoal.cli.app import run
    except KeyboardInterrupt:
        return 130  # `shoal.cli.exits` is not there yet

    return run((sys.argv[1:] if argv is None else argv) or ["--help"])
