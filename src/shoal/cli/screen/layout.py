"""A run on a screen of a given size.

    sandbox-20261125-214801                          12 s old    who and how old
    training round 7 of 9                                        what it does
    round 7/9  ━━━━━━━━━━━━━━━━━━━─────────  67 %  4 min left    run_lines
    loss 2.500 █▆▅▄▃▂▁▁▁  eval loss 2.250 █▅▃▁
    step 1,234  samples/s 60.0  trainers 2

    stage 0  server 0@a  30.0/s   server 1@b  silent 4 s         peer_rows
    stage 1  server 2@a  joining  and 12 more

    21:48:01  server 1@b is silent                               the newest events

What finds no room is left out and, where it is a peer, counted. Numbers that are old are dim and say so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from shoal.cli.output import on_one_line
from shoal.cli.run_row import FRESH_S, duration, rate, whole
from shoal.control.swarm_status import EventStatus, MirrorStatus, ServerStatus, SwarmStatus

_ROOMY = 20
"""A screen of so many lines has empty ones between its parts."""
_EVENTS, _FEW_EVENTS = 5, 2
"""So many events are shown before peers take the room, on a roomy screen and on another one."""
_MAX_STATE_LINES = 2
_GAP = 2
LEVELS, ASCII_LEVELS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
_BAR, _ASCII_BAR = "━─", "#-"
_MIN_BAR, _MIN_SPARKS, _MAX_SPARKS = 6, 4, 32
_BETWEEN = "  "
_WELL = 9


def render(status: SwarmStatus, width: int, height: int, *, is_ascii: bool = False) -> list[Text]:
    """Return at most `height` lines of at most `width` cells each.

    Args:
        status: with the age that it has now.
        is_ascii: the terminal shows no other characters.
    """
    if width < 1 or height < 1:
        return []
    gap = [Text()] if height >= _ROOMY else []
    head = [*_title(status, width), *run_lines(status, width, is_ascii=is_ascii)]
    rows = peer_rows(status)
    body = max(0, height - len(head) - 2 * len(gap))
    peers = _peer_lines(rows, len(status.events), body, width, is_roomy=bool(gap))
    told = [_event_line(event) for event in _newest(status.events, body - len(peers))]
    lines = [*head, *gap, *peers, *(gap if told else []), *told]
    return [_cut(line, width, is_ascii=is_ascii) for line in lines[:height]]


def _title(status: SwarmStatus, width: int) -> list[Text]:
    age = f"{duration(status.age_s)} old" if status.age_s >= FRESH_S else ""
    run = Text(on_one_line(status.run), style="bold")
    room = width - len(age) - _GAP * bool(age)
    if room > 0:
        run.truncate(room, overflow="ellipsis")
    title = Text.assemble(run, " " * (width - run.cell_len - len(age)), (age, "yellow")) if age else run
    said = on_one_line(status.state)
    lines = [Text(line, _style_of(said)) for line in _wrapped(said, width)]
    problem = "" if status.client is None else on_one_line(status.client.problem)
    return [
        title,
        *lines,
        *([Text(f"{on_one_line(status.client.name)}: {problem}", "red")] if problem and status.client else []),
    ]


def _style_of(state: str) -> str:
    if state.startswith("training"):
        return "green"
    return "bold red" if state.startswith(("stopped", "no client", "the client")) else "yellow"


def _peer_lines(rows: Sequence[PeerRow], num_events: int, body: int, width: int, *, is_roomy: bool) -> list[Text]:
    events = min(num_events, _EVENTS if is_roomy else _FEW_EVENTS)
    # Each stage has a line before events have any.
    room = max(body - events, min(len(rows), body))
    return fitted(rows, room, width)


def _newest(events: Sequence[EventStatus], room: int) -> list[EventStatus]:
    """Return as many events as there is room for, in order; before routine, what somebody should see."""
    first = sorted(events, key=lambda event: (event.routine, -event.number))
    return sorted(first[:room], key=lambda event: event.number)


def _event_line(event: EventStatus) -> Text:
    style = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}.get(event.level, "")
    return Text.assemble((time_of_day(event.unix_s), "dim"), " " * _GAP, (on_one_line(event.says), style))


def _wrapped(text: str, width: int) -> list[str]:
    """Return a text in a few lines between whose words it is broken; the last one may be too wide."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(longer) > width and lines[-1] and len(lines) < _MAX_STATE_LINES:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _cut(line: Text, width: int, *, is_ascii: bool) -> Text:
    if is_ascii:
        line.plain = "".join(letter if letter.isascii() else "?" for letter in line.plain)
    line.truncate(width, overflow="crop" if is_ascii else "ellipsis")
    return line


def time_of_day(unix_s: float) -> str:
    """Return it in UTC."""
    try:
        return f"{datetime.fromtimestamp(unix_s, UTC):%H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "--:--:--"  # a peer may say anything


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
        after += f"{_BETWEEN}{duration(status.left_s)} left"
    room = width - len(title) - len(after) - 2 * len(_BETWEEN)
    if room < _MIN_BAR:
        return Text(f"{title}{_BETWEEN}{after.strip()}")
    full = round(done * room)
    return Text.assemble(title, _BETWEEN, (bar[0] * full, "green"), (bar[1] * (room - full), "dim"), _BETWEEN, after)


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
    taken = sum(map(len, titles)) + len(_BETWEEN) * len(parts)
    room = min(_MAX_SPARKS, (width - taken) // max(1, len(parts)) - 1)
    line = Text()
    for title, (_, _, course) in zip(titles, parts, strict=True):
        line.append(f"{_BETWEEN if line.plain else ''}{title}")
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
    return Text(_BETWEEN.join(filter(None, said)))


class PeerCell(NamedTuple):
    """One peer; `rank` is lower where somebody should see it, and those come first where not all find room."""

    text: Text
    rank: int = _WELL


class PeerRow(NamedTuple):
    """A title and the peers under it."""

    title: str
    cells: Sequence[PeerCell]


def peer_rows(status: SwarmStatus) -> list[PeerRow]:
    """Return all rows."""
    is_old = status.age_s >= FRESH_S
    rows = [
        PeerRow(
            f"stage {stage.stage}",
            [_server(each, is_old=is_old) for each in stage.replicas] or [PeerCell(Text("no server", "bold red"))],
        )
        for stage in status.stages
    ]
    if status.waiting_servers:
        rows.append(PeerRow("waiting", [PeerCell(_name(each.name)) for each in status.waiting_servers]))
    if status.mirrors:
        rows.append(PeerRow("mirrors", [_mirror(each) for each in status.mirrors]))
    return rows


def fitted(rows: Sequence[PeerRow], room: int, width: int) -> list[Text]:
    """Return at most so many lines with these rows; who finds no room is counted."""
    if room < 1 or not rows:
        return []
    if len(rows) > room:
        shown = fitted(rows[: room - 1], room - 1, width)
        return [*shown, Text(f"and {len(rows) - room + 1} more rows", "dim")]
    title_width = max(len(row.title) for row in rows) + _GAP
    widest = max(cell.text.cell_len for row in rows for cell in row.cells)
    num_columns = max(1, (width - title_width + _GAP) // (widest + _GAP))
    needed = [-(-len(row.cells) // num_columns) for row in rows]
    given = [1] * len(rows)
    spare = room - len(rows)
    for place, wanted in enumerate(needed):
        more = min(spare, wanted - 1)
        given[place] += more
        spare -= more
    lines: list[Text] = []
    for row, num_lines in zip(rows, given, strict=True):
        cells = _shown(row.cells, num_lines * num_columns)
        for start in range(0, len(cells), num_columns):
            title = "" if start else row.title
            lines.append(_line(title.ljust(title_width), cells[start : start + num_columns], widest))
    return lines


def _shown(cells: Sequence[PeerCell], room: int) -> list[Text]:
    """Return what stands in so many cells."""
    if len(cells) <= room:
        return [cell.text for cell in cells]
    if room == 1:
        troubled = sum(cell.rank < _WELL for cell in cells)
        return [Text(f"{len(cells)} peers{f', {troubled} of them not serving' * bool(troubled)}")]
    first = sorted(cells, key=lambda cell: cell.rank)[: room - 1]
    return [*(cell.text for cell in first), Text(f"and {len(cells) - room + 1} more", "dim")]


def _line(title: str, cells: Sequence[Text], cell_width: int) -> Text:
    line = Text(title)
    for place, cell in enumerate(cells):
        line.append_text(cell)
        if place < len(cells) - 1:
            line.append(" " * (cell_width + _GAP - cell.cell_len))
    return line


def _server(server: ServerStatus, *, is_old: bool) -> PeerCell:
    name = _name(server.name)
    if server.problem or server.state not in ("serving", "joining"):
        return PeerCell(name.append(f"  {on_one_line(server.state)}", "bold red"), 0)
    if server.age_s is not None and server.age_s >= FRESH_S:
        name.stylize("dim")
        return PeerCell(name.append(f"  silent {duration(server.age_s)}", "yellow"), 1)
    if server.state == "joining":
        return PeerCell(name.append("  joining", "yellow"), 2)
    speed = "ok" if server.samples_per_s is None else f"{rate(server.samples_per_s)}/s"
    return PeerCell(name.append(f"  {speed}", "dim" if is_old else "green"))


def _mirror(mirror: MirrorStatus) -> PeerCell:
    holds = f"round {mirror.held_round}" if mirror.held_round >= 0 else "fetching"
    return PeerCell(_name(mirror.name).append(f"  {holds}"))


def _name(name: str) -> Text:
    return Text(on_one_line(name))
