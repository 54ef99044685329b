"""A process dies where it was told to, once in a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.config.emulation import Death, EmulationConfig, parse_death
from shoal_lab.emulation.death_points import DeathPoints


class Deaths(list[str]):
    """Stands for the end of the process."""

    def points(self, directory: Path, *texts: str) -> DeathPoints:
        return DeathPoints([parse_death(text) for text in texts], directory, lambda: self.append("dead"))


def test_it_dies_at_its_point_in_its_step_or_the_first_one_after_it(tmp_path: Path) -> None:
    deaths = Deaths()
    points = deaths.points(tmp_path, "server:1@commit#7")
    points.reached("commit", 6)
    points.reached("forward", 9)
    assert deaths == []
    points.reached("commit", 9)
    assert deaths == ["dead"]


def test_it_dies_once_however_often_it_is_started(tmp_path: Path) -> None:
    deaths = Deaths()
    deaths.points(tmp_path, "server:1@commit#7").reached("commit", 7)
    again = deaths.points(tmp_path, "server:1@commit#7", "server:1@commit#20")
    again.reached("commit", 8)
    assert deaths == ["dead"]
    again.reached("commit", 20)
    assert deaths == ["dead", "dead"]
    assert not deaths.points(tmp_path, "server:1@commit#7")


def test_of_several_processes_the_first_one_there_dies(tmp_path: Path) -> None:
    deaths = Deaths()
    first, second = (deaths.points(tmp_path, "server:1/3@ring#2") for _ in range(2))
    first.reached("ring", 2)
    second.reached("ring", 2)
    assert deaths == ["dead"]


def test_each_process_has_its_own_deaths() -> None:
    config = EmulationConfig(deaths=("server:1/3@ring#2", "trainer:1@commit#5"))
    assert config.deaths_of("server", 3) == (Death("server", (1, 3), "ring", 2),)
    assert config.deaths_of("server", 2) == ()
    assert config.deaths_of("trainer", 1) == (Death("trainer", (1,), "commit", 5),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server:1", "write ROLE:INDEX@POINT"),
        ("server:1@lunch#3", "no point 'lunch'"),
        ("dog:1@commit#3", "dog"),
    ],
)
def test_what_names_no_death_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmulationConfig(deaths=(text,))
