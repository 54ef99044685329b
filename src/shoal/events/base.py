"""What an event is: one thing that has happened, with who, where and what it cost.

    event --emit--> log line (name and fields)
      '-- say(), why, do --> terminal, events.jsonl, docs/events.md

Each kind of event is one class, whose tag is its name in logs and files and never changes its meaning. The docstring
says what has happened; it is what the generated list of events shows.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import msgspec

EVENTS_FILE = "events.jsonl"
"""What a run's client has noted, in the run's folder."""
SUMMARY_FILE = "summary.json"
"""What a run has come to, there as well: once the run has ended on its client's host."""

_LEVELS = {getattr(logging, name): name for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}


class Event(msgspec.Struct, frozen=True, tag_field="event"):
    """One thing that has happened. A kind of it is `class ServerLost(Event, frozen=True, tag="server.lost")`.

    A field that is no name in Python is renamed: `rename={"from_": "from"}`.

    Attributes:
        level: WARNING where a person may want to act.
        why: what leads to it; empty where the docstring says it.
        do: what a person can do about it; empty where there is nothing to do.
        says: one sentence for a person who watches the run, with the names of fields in braces; empty for what only
            matters to who reads the logs.
        brief: one sentence for who reads afterwards (`shoal events`), of what the screen shows anyway meanwhile.
    """

    level: ClassVar[int] = logging.INFO
    why: ClassVar[str] = ""
    do: ClassVar[str] = ""
    says: ClassVar[str] = ""
    brief: ClassVar[str] = ""

    @property
    def name(self) -> str:
        """The name of the kind, as logs have it."""
        return name_of(type(self))

    def say(self) -> str:
        """Return the sentence with the values in it; a kind whose sentence is not always the same has its own."""
        return self.says and self.says.format_map(msgspec.structs.asdict(self))

    def told(self) -> str:
        """Return what a person is told of the incident that it opens; empty where it opens none."""
        return ""

    def ways(self) -> tuple[Event, ...]:
        """Return it as it is in each of the ways in which it happens, which are told in other words."""
        return (self,)

    def brief_said(self) -> str:
        """Return `brief` with the values in it; empty where one of them is missing."""
        return brief_of(type(self), self.fields())

    def fields(self) -> dict[str, Any]:
        """The values by name, as a log line has them; a field that is None is left out."""
        values = ((name, getattr(self, field)) for field, name in field_names(type(self)).items())
        return {name: value for name, value in values if value is not None}


def level_name(level: int) -> str:
    """The name of a level as Python has it: a library that is imported may have given it another one."""
    return _LEVELS.get(level, str(level))


def name_of(kind: type[Event]) -> str:
    """The name of a kind of event."""
    return str(kind.__struct_config__.tag)


def field_names(kind: type[Event]) -> dict[str, str]:
    """The names that a kind's fields have in logs, by those that they have in Python."""
    return dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))


def brief_of(kind: type[Event], values: Mapping[str, Any]) -> str:
    """Return the `brief` of an event with these values, by their names in logs; empty where one of them is missing, as
    in a round in which nothing was trained, or in a line of another version."""
    try:
        return kind.brief.format_map(values)
    except (KeyError, ValueError, TypeError):
        return ""


def kinds(root: type[Event] = Event) -> Iterator[type[Event]]:
    """All kinds of events that are defined in modules imported so far."""
    for kind in root.__subclasses__():
        yield kind
        yield from kinds(kind)


def catalogue() -> dict[str, type[Event]]:
    """Every kind of event that this package defines, by name in alphabetical order."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")
    return {name_of(kind): kind for kind in sorted(kinds(), key=name_of) if kind.__module__.startswith(f"{package}.")}


def emit(logger: logging.Logger, event: Event, *, error: BaseException | None = None, level: int | None = None) -> None:
    """Write an event to the log.

    Args:
        error: its traceback is written too.
        level: where it is not that of the kind.
    """
    level = event.level if level is None else level
    if logger.isEnabledFor(level):
        logger.log(level, event.name, extra=event.fields(), exc_info=error)


def tell(logger: logging.Logger, event: Event, show: Callable[[str], None]) -> None:
    """Write an event to the log and show a person the same: what has happened, and below it what to do."""
    emit(logger, event)
    show(event.say())
    if event.do:
        show(f"  {event.do}")
