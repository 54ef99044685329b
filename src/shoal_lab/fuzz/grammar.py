"""Valid messages of any schema, as plain trees of lists, numbers, texts and bytes: what msgpack makes of the structs.

Values are drawn from the schema alone, so that a new message or field is fuzzed without a word about it here.
"""

from __future__ import annotations

import re
from random import Random
from typing import Any, Final

import msgspec.inspect as schema

from shoal.errors import InvariantViolation

_MAX_ITEMS: Final = 3
_MAX_INT: Final = 1 << 31
_TEXTS: Final = ("", "a", "stage.0", "tcp:127.0.0.1:5000", "0" * 64, "ä\u2028", "counters/x{y=z}", "run-1", "x{y=z}")


def tree_of(kind: schema.Type, random: Random) -> Any:
    """Return a tree that decodes to this type.

    Args:
        kind: as `msgspec.inspect.type_info` describes it; structs are arrays.
        random: decides all that the schema leaves open.

    Raises:
        InvariantViolation: the schema uses something that no message has used so far.
    """
    match kind:
        case schema.StructType():
            tag = [] if kind.tag is None else [kind.tag]
            return tag + [tree_of(field.type, random) for field in kind.fields]
        case schema.NamedTupleType():
            return [tree_of(field.type, random) for field in kind.fields]
        case schema.UnionType():
            return tree_of(random.choice(kind.types), random)
        case schema.VarTupleType() | schema.ListType():
            count = _length(kind.min_length, kind.max_length, random)
            return [tree_of(kind.item_type, random) for _ in range(count)]
        case schema.DictType():
            count = _length(kind.min_length, kind.max_length, random)
            return {tree_of(kind.key_type, random): tree_of(kind.value_type, random) for _ in range(count)}
        case _:
            return _leaf(kind, random)


def _leaf(kind: schema.Type, random: Random) -> Any:
    match kind:
        case schema.IntType():
            low = kind.ge if kind.ge is not None else 0
            high = kind.le if kind.le is not None else kind.lt - 1 if kind.lt is not None else _MAX_INT
            return random.randint(low, min(high, low + 4)) if random.random() < 0.5 else random.randint(low, high)
        case schema.FloatType():
            return random.choice((0.0, 1.0, 0.5, 1e9))
        case schema.BoolType():
            return random.random() < 0.5
        case schema.NoneType():
            return None
        case schema.StrType():
            fitting = [text for text in _TEXTS if (kind.min_length or 0) <= len(text) <= (kind.max_length or 1000)]
            return random.choice([text for text in fitting if re.search(kind.pattern or "", text)])
        case schema.BytesType():
            return random.randbytes(_length(kind.min_length, kind.max_length, random) * 16)
        case schema.EnumType():
            return random.choice(list(kind.cls)).value
        case schema.LiteralType():
            return random.choice(kind.values)
        case _:
            raise InvariantViolation(f"the grammar of messages does not know {kind}")


def _length(least: int | None, most: int | None, random: Random) -> int:
    return random.randint(least or 0, min(_MAX_ITEMS if most is None else most, (least or 0) + _MAX_ITEMS))
