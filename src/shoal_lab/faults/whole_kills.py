"""Where a run is killed as a whole, and what is then done to the checkpoint that it has written last.

    mirror@rename, server@commit+manifest -> WholeKill: of which process, in which step or round, with how many replicas
                                                        '-> the newest checkpoint is cut short, or a bit of it flipped

One process kills itself at the point (`runtime.death_points`); whoever sees that kills all others at once.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from shoal.checkpoint.manifest import MANIFEST
from shoal.config.emulation import POINTS
from shoal_lab.faults.points import OF_ROUND, OF_TRANSFER

WRITING: Final = tuple(f"mirror@{where}" for where in POINTS["mirror"])
"""Inside the writing of a checkpoint."""
COMMITTING: Final = "client@prepared"
"""A record is prepared and not committed."""
SWAPPED: Final = "server@swapped"
"""A server has the record, others may not."""
ANYWHERE: Final = tuple(f"{role}@{where}" for role in POINTS for where in POINTS[role] if where not in OF_TRANSFER)
"""All points but those in a transfer of state, for which somebody has to have been killed before."""
_NUM_ANYWHERE = 10
_FIRST_ROUND, _NUM_ROUNDS = 6, 3
"""Killed are runs that have two checkpoints, also where the mirror is some rounds behind."""


class WholeKill(NamedTuple):
    """One run that is killed.

    Attributes:
        point: as it was chosen.
        death: a value of `emulation.deaths`: who is the first to die.
        damage: of `DAMAGES`; empty: none.
    """

    point: str
    death: str
    num_replicas: int
    damage: str

    def __str__(self) -> str:
        return f"{self.death}{f'+{self.damage}' if self.damage else ''}, {self.num_replicas} replicas"


def _cut_short(folder: Path, _: random.Random) -> str:
    name = min(path.name for path in folder.glob("stage_*"))
    os.truncate(folder / name, (folder / name).stat().st_size // 2)
    return name


def _flip(folder: Path, name: str, dice: random.Random) -> str:
    content = bytearray((folder / name).read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    (folder / name).write_bytes(content)
    return name


def _flip_inner(folder: Path, dice: random.Random) -> str:
    """Flip a bit of an inner optimizer's file, or of a stage's where there is none: their names come later."""
    return _flip(folder, min(path.name for path in folder.glob("*.safetensors")), dice)


def _flip_manifest(folder: Path, dice: random.Random) -> str:
    return _flip(folder, MANIFEST, dice)


def _remove_manifest(folder: Path, _: random.Random) -> str:
    (folder / MANIFEST).unlink()
    return MANIFEST


DAMAGES: Final[dict[str, Callable[[Path, random.Random], str]]] = {
    "cut": _cut_short,
    "inner": _flip_inner,
    "manifest": _flip_manifest,
    "no-manifest": _remove_manifest,
}
"""What may be wrong with a checkpoint; each does it to a folder and returns the file's name."""


def all_points(dice: random.Random) -> list[str]:
    """Return twenty points: in the writing of a checkpoint, around a commit, anywhere; after four comes damage."""
    others = [point for point in ANYWHERE if point not in WRITING]
    points = [*WRITING, *[COMMITTING] * 2, *[SWAPPED] * 2, *dice.sample(others, _NUM_ANYWHERE)]
    for place, damage in zip(dice.sample(range(len(points)), len(DAMAGES)), DAMAGES, strict=True):
        points[place] += f"+{damage}"
    return points


def planned(points: Sequence[str], dice: random.Random, inner_steps: int) -> list[WholeKill]:
    """Return one kill for each point, with one replica or two.

    Args:
        points: ROLE@POINT or ROLE@POINT+DAMAGE.
        dice: choose processes, steps, rounds and replicas.

    Raises:
        ValueError: there is no such point or damage.
    """
    kills: list[WholeKill] = []
    for text in points:
        point, _, damage = text.partition("+")
        if point not in ANYWHERE:
            raise ValueError(f"no such point: {point}; there are {', '.join(ANYWHERE)}")
        if damage and damage not in DAMAGES:
            raise ValueError(f"no such damage: {damage}; there are {', '.join(DAMAGES)}")
        role, _, where = point.partition("@")
        # One replica alone has no ring.
        num_replicas = 2 if where == "ring" else dice.choice((1, 2))
        process = {"server": dice.randrange(2 * num_replicas), "trainer": dice.randrange(num_replicas)}.get(role, 0)
        round = _FIRST_ROUND + dice.randrange(_NUM_ROUNDS)
        step = (round - 1) * inner_steps + 1 + dice.randrange(inner_steps)
        number = round if role in ("client", "mirror") or where in OF_ROUND else step
        kills.append(WholeKill(point, f"{role}:{process}@{where}#{number}", num_replicas, damage))
    return kills
