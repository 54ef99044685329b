"""A kind of event in words, without one that has happened: what `shoal explain` and docs/events.md say of it."""

from __future__ import annotations

import enum
import inspect
from types import NoneType, UnionType
from typing import Any, NamedTuple, cast, get_args, get_origin, get_type_hints

from shoal.events.base import Event, field_names


class Described(NamedTuple):
    """What there is to say of one kind.

    Attributes:
        happened: one sentence, what has happened.
        parts: each with its title: what a person who watches is shown, why it happens, what to do.
    """

    happened: str
    parts: tuple[tuple[str, str], ...]
    fields: tuple[str, ...]


def described(kind: type[Event]) -> Described:
    """Return what there is to say of a kind; where a sentence has a value, it has the value's name in braces."""
    happened = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
    parts = (("Said", texts(kind)[0]), ("Brief", kind.brief), ("Why", kind.why), ("Do", kind.do))
    return Described(happened, tuple(part for part in parts if part[1]), tuple(field_names(kind).values()))


def texts(kind: type[Event]) -> tuple[str, ...]:
    """Return what a person may be shown of a kind, with names of values in braces; empty where that is nothing.

    What an incident says comes from the event that opens it (`told`), once for each of the ways in which it happens.
    """
    event = _sample(kind)
    return (event.say(),) if event.say() else tuple(dict.fromkeys(way.told() for way in event.ways()))


class _Number(int):
    """A number that shows the name of its field, however it is formatted."""

    field = ""

    def __str__(self) -> str:
        return f"{{{self.field}}}"

    def __format__(self, spec: str) -> str:
        return str(self)

    def __add__(self, other: int) -> _Number:
        return self._after(f" + {other}", int(self) + other)

    def __sub__(self, other: int) -> _Number:
        return self._after(f" - {other}", int(self) - other)

    def _after(self, done: str, value: int) -> _Number:
        number = _Number(value)
        number.field = f"{self.field}{done}"
        return number


class _Text(str):
    """The name of a field, of which each part shows the whole."""

    def __getitem__(self, key: Any) -> str:
        return self


def _sample(kind: type[Event]) -> Event:
    """Return an event whose values are the names of its fields."""
    hints = get_type_hints(kind)
    return kind(**{field: _value(name, hints[field]) for field, name in field_names(kind).items()})


def _value(name: str, hint: Any) -> Any:
    hint = next((each for each in get_args(hint) if each is not NoneType), hint) if _is_optional(hint) else hint
    origin = get_origin(hint) or hint
    if origin in (tuple, list, set, frozenset):
        return cast(Any, origin)([_value(name, get_args(hint)[0])])
    if isinstance(origin, type) and issubclass(origin, dict):
        of_key, of_value = get_args(hint)
        return {_value(name, of_key): _value(name, of_value)}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return next(iter(hint))
    if hint in (int, float):
        number = _Number(1)
        number.field = name
        return number
    return hint is bool or _Text(f"{{{name}}}")


def _is_optional(hint: Any) -> bool:
    return isinstance(hint, UnionType) and NoneType in get_args(hint)
