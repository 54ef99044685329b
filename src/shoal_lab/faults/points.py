"""The points of a step, a round and a transfer of state at which a process can be told to die, and orders to do so."""

from __future__ import annotations

import random
from collections.abc import Sequence

FIRST_STEP, STEPS_APART = 50, 37
"""Between two deaths: longer than a server needs to be back, and not a multiple of the steps of a round."""
OF_ROUND = ("ring", "staged", "record", "swapped", "lease")
"""Points whose number is that of a round."""
OF_TRANSFER = ("fetch", "donate")
"""Points in a transfer of state, which a server that was killed before asks for."""
POINTS = (
    "server@forward",
    "server@backward",
    "server@prepared",
    "server@commit",
    "server@ring",
    "server@staged",
    "server@record",
    "server@fetch",
    "server@donate",
    "trainer@forward",
    "trainer@prepared",
    "trainer@commit",
    "data_server@lease",
)
ROLES = tuple(dict.fromkeys(point.partition("@")[0] for point in POINTS))


def chosen(points: Sequence[str], times: str) -> list[str]:
    """Return the points of a run, each as many times as its role is to die there.

    Raises:
        ValueError: a point or a role is none, or a number is missing.
    """
    if unknown := sorted(set(points) - set(POINTS)):
        raise ValueError(f"no such point: {', '.join(unknown)}; there are {', '.join(POINTS)}")
    number_of: dict[str, int] = {}
    for text in filter(None, times.split(",")):
        role, _, number = text.partition("=")
        if role not in ROLES or not number.isdecimal():
            raise ValueError(f"--times {text}: expected ROLE=NUMBER, ROLE one of {', '.join(ROLES)}")
        number_of[role] = int(number)
    return [point for point in points for _ in range(number_of.get(point.partition("@")[0], 1))]


def ordered(
    points: Sequence[str], dice: random.Random, *, num_servers: int, num_slots: int, inner_steps: int
) -> list[str]:
    """Return one death for each of these points, in a random order, in steps that are far enough apart.

    Args:
        points: some of `POINTS`, each as often as wanted.
        dice: choose the order, the processes and the steps.
        num_servers: counts the spare too.

    Returns:
        Values of `emulation.deaths`, in the order in which they will happen; a death in a transfer of state comes after
        one that makes the transfer necessary.
    """
    deaths: list[str] = []
    for place, point in enumerate(dice.sample(list(points), len(points))):
        role, _, where = point.partition("@")
        # Of two servers at least one is no spare, which a step may never reach.
        servers = "/".join(map(str, sorted(dice.sample(range(num_servers), 2))))
        process = {"server": servers, "trainer": str(dice.randrange(num_slots))}.get(role, "0")
        step = FIRST_STEP + place * STEPS_APART + dice.randrange(8)
        round = step // inner_steps + 1
        if where in OF_TRANSFER:
            # Of a server that was killed before, and comes back; who gives it its state is any other one.
            deaths.append(f"server:{servers}@commit#{step}")
            process = servers if where == "fetch" else "/".join(map(str, range(num_servers)))
            number = round - 1
        else:
            number = round if where in OF_ROUND else step
        deaths.append(f"{role}:{process}@{where}#{number}")
    return deaths
