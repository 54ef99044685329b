"""Where runs are killed as a whole, and what is done to a checkpoint."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from shoal.config.emulation import parse_death
from shoal_lab.faults.whole_kills import COMMITTING, DAMAGES, SWAPPED, WRITING, all_points, planned

INNER_STEPS = 12
OF_STEPS = {f"server@{point}" for point in ("forward", "backward", "prepared", "commit")}
OF_STEPS |= {f"trainer@{point}" for point in ("forward", "prepared", "commit")}


@pytest.mark.parametrize("seed", range(30))
def test_a_seed_says_where_twenty_runs_are_killed(seed: int) -> None:
    dice, again = random.Random(seed), random.Random(seed)
    kills = planned(all_points(dice), dice, INNER_STEPS)
    assert kills == planned(all_points(again), again, INNER_STEPS)
    assert len(kills) == 20
    points = Counter(kill.point for kill in kills)
    assert all(points[point] == 1 for point in WRITING)
    assert points[COMMITTING] >= 2
    assert points[SWAPPED] >= 2
    assert sorted(kill.damage for kill in kills if kill.damage) == sorted(DAMAGES)


@pytest.mark.parametrize("seed", range(30))
def test_every_kill_is_of_a_process_that_there_is_in_a_round_after_some_checkpoints(seed: int) -> None:
    dice = random.Random(seed)
    for kill in planned(all_points(dice), dice, INNER_STEPS):
        death = parse_death(kill.death)
        assert f"{death.role}@{death.point}" == kill.point
        there = {"server": 2 * kill.num_replicas, "trainer": kill.num_replicas}.get(death.role, 1)
        assert death.processes[0] in range(there)
        of_steps = kill.point in OF_STEPS
        round = (death.number - 1) // INNER_STEPS + 1 if of_steps else death.number
        assert round in (6, 7, 8), kill
        assert kill.num_replicas == 2 or death.point != "ring"


@pytest.mark.parametrize(
    ("point", "message"),
    [("mirror@lunch", "no such point: mirror@lunch; there are"), ("mirror@file+rust", "no such damage: rust; there")],
)
def test_what_is_no_point_or_damage_is_said(point: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned([point], random.Random(0), INNER_STEPS)


@pytest.mark.parametrize(
    ("damage", "inner", "name"),
    [
        ("cut", True, "stage_00.safetensors"),
        ("inner", True, "inner_00_00.safetensors"),
        ("inner", False, "stage_00.safetensors"),
        ("manifest", True, "manifest.json"),
        ("no-manifest", True, "manifest.json"),
    ],
)
def test_a_damage_changes_the_file_that_it_names_and_no_other(
    damage: str, inner: bool, name: str, tmp_path: Path
) -> None:
    names = ["stage_00.safetensors", "stage_01.safetensors", "manifest.json", "record.msgpack"]
    before = {each: each.encode() for each in [*names, *(["inner_00_00.safetensors"] if inner else [])]}
    for each, content in before.items():
        (tmp_path / each).write_bytes(content)
    assert DAMAGES[damage](tmp_path, random.Random(0)) == name
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {each for each in before if after.get(each) != before[each]} == {name}
    if damage == "cut":
        assert after[name] == before[name][: len(before[name]) // 2]
