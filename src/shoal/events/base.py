"""What an event is: one thing that has happened, with who, where and what it cost.

    event --emit--> log line (name and fields)
      '-- say(), why, do --> terminal, events.jsonl, docs/events.md

Each kind of event is one class, whose tag is its name in logs and files and never changes its meaning. The docstring
says what has happened; it is what the generated list of events shows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec


class Event(msgspec.Struct, frozen=True, tag_field="event"):
    """One thing that has happened. A kind of it is `class ServerLost(Event, frozen=True, tag="server.lost")`.

    Attributes:
        level: WARNING where a person may want to act.
        why: what leads to it, in a sentence; empty where the docstring says it.
        do: what a person can do about it, in a sentence; empty where there is nothing to do.
    """

    level: ClassVar[int] = logging.INFO
    why: ClassVar[str] = ""
    do: ClassVar[str] = ""

    @property
    def name(self) -> str:
        """The name of the kind, as logs have it."""
        return name_of(type(self))

    def say(self) -> str:
        """One sentence for a person who watches the run; empty for what only matters to who reads the logs."""
        return ""

    def fields(self) -> dict[str, Any]:
        """The values by name, as a log line has them."""
        return {field: getattr(self, field) for field in self.__struct_fields__}


def name_of(kind: type[Event]) -> str:
    """The name of a kind of event."""
    return str(kind.__struct_config__.tag)


def kinds(root: type[Event] = Event) -> Iterator[type[Event]]:
    """All kinds of events that are defined in modules imported so far."""
    for kind in root.__subclasses__():
        yield kind
        yield from kinds(kind)


def emit(logger: logging.Logger, event: Event) -> None:
    """Write an event to the log."""
    logger.log(event.level, event.name, extra=event.fields())
