"""The numbers of a run as lines of a screen: rounds with what is left, losses with their course, speed. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from rich.text import Text

from shoal.cli.run_row import FRESH_S, duration, rate, whole
from shoal.control.swarm_status import SwarmStatus

LEVELS, ASCII_LEVELS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
_BAR, _ASCII_BAR = "━─", "#-"
_MIN_BAR, _MIN_SPARKS, _MAX_SPARKS = 6, 4, 32
_GAP = "  "


def run_lines(status: SwarmStatus, width: int, *, is_ascii: bool = False) -> list[Text]:
    """Return the lines, none where no client has said any number; they may be too wide."""
    if status.round is None or status.rounds is None:
        return []
    is_old = status.age_s >= FRESH_S
    step_age_s = None if status.last_step_s is None else status.last_step_s + status.age_s
    is_quiet = step_age_s is not None and step_age_s >= FRESH_S
    lines = [
        _progress(status, width, _ASCII_BAR if is_ascii else _BAR),
        _losses(status, width, ASCII_LEVELS if is_ascii else LEVELS),
        _numbers(status, step_age_s if is_quiet else None),
    ]
    for line, dim in zip(lines, (is_old, is_old or is_quiet, is_old or is_quiet), strict=True):
        if dim:
            line.stylize("dim")
    return [line for line in lines if line.plain]


def sparkline(values: Sequence[float], width: int, levels: str = LEVELS) -> str:
    """Return the course of finite values in at most `width` characters, the least one at the lowest level; each
    character is a mean where there are more values than characters."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    width = min(width, len(finite))
    edges = [len(finite) * place // width for place in range(width + 1)]
    parts = [finite[start:stop] for start, stop in pairwise(edges)]
    means = [sum(value / len(part) for value in part) for part in parts]
    least, most = min(means), max(means)
    # Halves, because the difference of two finite numbers need not be one.
    span = most / 2 - least / 2
    places = [0.0 if span <= 0 else (mean / 2 - least / 2) / span for mean in means]
    return "".join(levels[round(place * (len(levels) - 1))] for place in places)


def _progress(status: SwarmStatus, width: int, bar: str) -> Text:
    rounds = status.rounds or 0
    current = min(status.round or 0, rounds)
    done = max(0, current - 1) / rounds if rounds else 0.0
    title = f"round {whole(current)}/{whole(rounds)}"
    after = f"{done:4.0%}"
    if status.left_s is not None:
        after += f"{_GAP}{duration(status.left_s)} left"
    room = width - len(title) - len(after) - 2 * len(_GAP)
    if room < _MIN_BAR:
        return Text(f"{title}{_GAP}{after.strip()}")
    full = round(done * room)
    return Text.assemble(title, _GAP, (bar[0] * full, "green"), (bar[1] * (room - full), "dim"), _GAP, after)


def _losses(status: SwarmStatus, width: int, levels: str) -> Text:
    parts = [
        (title, value, course)
        for title, value, course in (
            ("loss", status.loss, status.losses),
            ("eval loss", status.eval_loss, status.eval_losses),
        )
        if value is not None
    ]
    titles = [f"{title} {value:.3f}" for title, value, _ in parts]
    taken = sum(map(len, titles)) + len(_GAP) * len(parts)
    room = min(_MAX_SPARKS, (width - taken) // max(1, len(parts)) - 1)
    line = Text()
    for title, (_, _, course) in zip(titles, parts, strict=True):
        line.append(f"{_GAP if line.plain else ''}{title}")
        if room >= _MIN_SPARKS and len(course) > 1:
            line.append(f" {sparkline(course, room, levels)}", style="cyan")
    return line


def _numbers(status: SwarmStatus, step_age_s: float | None) -> Text:
    age = "" if step_age_s is None else f" ({duration(step_age_s)} ago)"
    said = [
        "" if status.steps is None else f"step {whole(status.steps)}{age}",
        "" if status.samples_per_s is None else f"samples/s {rate(status.samples_per_s)}",
        "" if status.trainers is None else f"trainers {len(status.trainers)}",
    ]
    return Text(_GAP.join(filter(None, said)))
