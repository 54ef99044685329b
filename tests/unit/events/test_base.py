"""An event is one typed thing that has happened, and its log line has its name and its fields."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import ClassVar

import msgspec

from shoal import log
from shoal.events.base import Event, emit, kinds, name_of


class KettleBoiled(Event, frozen=True, tag="kettle.boiled"):
    """The water is hot."""

    level: ClassVar[int] = logging.WARNING
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


def test_an_event_is_the_same_after_it_was_written_as_json() -> None:
    event = KettleBoiled(2.5, (1, 2))
    written = msgspec.json.encode(event)
    assert json.loads(written)["event"] == "kettle.boiled"
    assert msgspec.json.decode(written, type=KettleBoiled) == event


def test_every_kind_is_found_by_its_name() -> None:
    assert KettleBoiled in {name_of(kind): kind for kind in kinds()}.values()
    assert name_of(KettleBoiled) == KettleBoiled(0.0).name == "kettle.boiled"
    assert KettleBoiled(1.0).say() == "the water is hot after 1.0 s"
