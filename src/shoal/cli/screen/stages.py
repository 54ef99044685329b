"""Who is in a swarm as lines of a screen: a row a stage, then who waits for a stage, then mirrors. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.text import Text

from shoal.cli.output import on_one_line
from shoal.cli.run_row import FRESH_S, duration, rate
from shoal.control.swarm_status import MirrorStatus, ServerStatus, SwarmStatus

_GAP = 2
_WELL = 9


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
