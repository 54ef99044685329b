"""A run on a screen of a given size.

    sandbox-20261125-214801                          12 s old    who and how old
    training round 7 of 9                                        what it does
    round 7/9  ━━━━━━━━━━━━━━━━━━━─────────  67 %  4 min left    run_line
    loss 2.500 █▆▅▄▃▂▁▁▁  eval loss 2.250 █▅▃▁
    step 1,234  samples/s 60.0  trainers 2

    stage 0  server 0@a  30.0/s   server 1@b  silent 4 s         stages
    stage 1  server 2@a  joining  and 12 more

    21:48:01  server 1@b is silent                               the newest events

What finds no room is left out and, where it is a peer, counted. Numbers that are old are dim and say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.cells import cell_len
from rich.text import Text

from shoal.cli.output import on_one_line
from shoal.cli.run_row import FRESH_S, duration
from shoal.cli.screen.run_line import run_lines
from shoal.cli.screen.stages import PeerRow, fitted, peer_rows
from shoal.control.swarm_status import EventStatus, SwarmStatus

_ROOMY = 20
"""A screen of so many lines has empty ones between its parts."""
_EVENTS, _FEW_EVENTS = 5, 2
"""So many events are shown before peers take the room, on a roomy screen and on another one."""
_MAX_STATE_LINES = 2
_GAP = 2


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
