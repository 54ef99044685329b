"""An event is one typed thing that has happened, and its log line has its name and its fields."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from shoal import log
from shoal.events.base import Event, catalogue, emit, kinds, name_of, tell


class KettleBoiled(Event, frozen=True, tag="kettle.boiled"):
    """The water is hot."""

    level: ClassVar[int] = logging.WARNING
    do: ClassVar[str] = "pour it"
    after_s: float
    cups: tuple[int, ...] = ()

    def say(self) -> str:
        return f"the water is hot after {self.after_s:.1f} s"


def test_an_event_is_logged_with_its_name_its_level_and_its_fields(tmp_path: Path) -> None:
    log.configure("kitchen_0", tmp_path)
    emit(logging.getLogger("shoal.kitchen"), KettleBoiled(2.5, (1, 2)))
    log.configure("kitchen_0", None)
    [line] = map(json.loads, (tmp_path / "kitchen_0.log").read_text().splitlines())
    assert (line["event"], line["level"]) == ("kettle.boiled", "WARNING")
    assert (line["after_s"], line["cups"]) == (2.5, [1, 2])


class KettleMoved(Event, frozen=True, tag="kettle.moved", rename={"from_": "from"}):
    """It stands elsewhere."""

    from_: str
    to: str | None = None


def test_a_field_has_its_name_in_logs_and_is_left_out_without_a_value() -> None:
    assert KettleMoved("stove").fields() == {"from": "stove"}
    assert KettleMoved("stove", to="table").fields() == {"from": "stove", "to": "table"}


def test_the_traceback_of_an_error_is_written_beside_the_event(tmp_path: Path) -> None:
    log.configure("kitchen_0", tmp_path)
    try:
        raise OSError("the plug is out")
    except OSError as error:
        emit(logging.getLogger("shoal.kitchen"), KettleMoved("stove"), error=error, level=logging.ERROR)
    log.configure("kitchen_0", None)
    [line] = map(json.loads, (tmp_path / "kitchen_0.log").read_text().splitlines())
    assert line["level"] == "ERROR"
    assert line["error"].splitlines()[0].startswith("Traceback")
    assert line["error"].endswith("OSError: the plug is out")


def test_a_person_is_told_the_event_that_is_logged_and_below_it_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    shown: list[str] = []
    tell(logging.getLogger("shoal.kitchen"), KettleBoiled(2.5), shown.append)
    assert shown == ["the water is hot after 2.5 s", "  pour it"]
    assert [(record.getMessage(), record.levelno) for record in caplog.records] == [("kettle.boiled", logging.WARNING)]


def test_the_catalogue_has_the_kinds_of_its_own_package_alone() -> None:
    assert "kettle.boiled" not in catalogue()


def test_an_event_is_the_same_after_it_was_written_as_json() -> None:
    event = KettleBoiled(2.5, (1, 2))
    written = msgspec.json.encode(event)
    assert json.loads(written)["event"] == "kettle.boiled"
    assert msgspec.json.decode(written, type=KettleBoiled) == event


def test_every_kind_is_found_by_its_name() -> None:
    assert KettleBoiled in {name_of(kind): kind for kind in kinds()}.values()
    assert name_of(KettleBoiled) == KettleBoiled(0.0).name == "kettle.boiled"
    assert KettleBoiled(1.0).say() == "the water is hot after 1.0 s"
