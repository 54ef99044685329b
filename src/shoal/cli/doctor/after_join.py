"""What a command says that could not join a swarm: why, and below it what the doctor finds on this host."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from shoal.cli.exits import USER_ERROR, say_error
from shoal.errors import BootstrapError

if TYPE_CHECKING:
    from shoal.config import Config


def explaining(call: Callable[[], int], load: Callable[[], tuple[Config, Mapping[str, str]]]) -> int:
    """Return what a command returns; where it cannot join the swarm, say why, and examine this host.

    Args:
        load: gives the configuration by which it has tried, and what sets each key; called only then.
    """
    try:
        return call()
    except BootstrapError as error:
        # At once: the examination takes seconds, and may be interrupted.
        say_error(str(error))
        sys.stderr.flush()
    from shoal.cli.doctor.printing import print_findings

    print_findings(load)
    return USER_ERROR
