"""Wrong inputs made of valid ones: of their bytes, and of the trees that they say.

A changed byte mostly breaks the form at its first field. A changed tree keeps the form and says something else, which
reaches the checks that lie behind.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any, Final, cast

import msgspec

_NUMBERS: Final = (0, 1, -1, 127, 128, 255, 256, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 40) + 1)
_EXTREMES: Final = ((1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63))
_FLOATS: Final = (math.nan, math.inf, -math.inf, 1e308, -1.0, 5e-324)
_NESTED: Final = (2, 50, 600, 5000)
_LONG: Final = (1, 60, 600, 5000)
_MAX_ITEMS: Final = 1000


def changed_bytes(data: bytes, random: Random, other: bytes = b"") -> bytes:
    """Return bytes that differ from `data` in one to four places; some end early.

    Args:
        other: another valid input, whose parts may be used.
    """
    content = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        _change(content, random, other)
    return bytes(content)


def _change(content: bytearray, random: Random, other: bytes) -> None:
    if not content:
        content += random.randbytes(random.randint(1, 64))
        return
    start = random.randrange(len(content))
    stop = min(len(content), start + random.choice((1, 2, 4, 8, 64)))
    match random.randrange(8):
        case 0:
            content[start] ^= 1 << random.randrange(8)
        case 1:
            content[start] = random.choice((0, 1, 0x7F, 0x80, 0xC1, 0xFF, random.randrange(256)))
        case 2:
            # Lengths and sizes, in either order of bytes.
            number = random.choice(_NUMBERS + _EXTREMES) & ((1 << 64) - 1)
            width = random.choice((2, 4, 8))
            order = cast("Any", random.choice(("little", "big")))
            content[start : start + width] = (number & ((1 << 8 * width) - 1)).to_bytes(width, order)
        case 3:
            del content[start:]
        case 4:
            del content[start:stop]
        case 5:
            content[start:start] = content[start:stop] * random.choice((1, 2, 30))
        case 6:
            content[start:start] = random.randbytes(random.choice((1, 3, 40)))
        case _:
            cut = random.randrange(len(other)) if other else 0
            content[start:] = other[cut:]


def changed_tree(tree: Any, random: Random, other: Any = None) -> Any:
    """Return a tree with one to three wrong places; `tree` stays as it is.

    Args:
        other: another tree, whose parts may be used.
    """
    changed = _copied(tree)
    for _ in range(random.choice((1, 1, 2, 3))):
        changed = _changed_place(changed, random, other)
    return changed


def _copied(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_copied(item) for item in cast("list[Any]", tree)]
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in cast("dict[Any, Any]", tree).items()}
    return tree


def _changed_place(tree: Any, random: Random, other: Any) -> Any:
    """Go down at random, and change what is there; returns what stands in the tree's place."""
    if isinstance(tree, list) and tree and random.random() < 0.8:
        items = cast("list[Any]", tree)
        index = random.randrange(len(items))
        if random.random() < 0.25:
            _change_list(items, index, random, other)
        else:
            items[index] = _changed_place(items[index], random, other)
        return items
    if isinstance(tree, dict) and tree and random.random() < 0.8:
        values = cast("dict[Any, Any]", tree)
        key = random.choice(list(values))
        values[key] = _changed_place(values[key], random, other)
        return values
    return _scalar(tree, random, other)


def _change_list(items: list[Any], index: int, random: Random, other: Any) -> None:
    match random.randrange(5):
        case 0:
            del items[index]
        case 1:
            items.insert(index, _copied(items[index]))
        case 2:
            items.append(_scalar(None, random, other))
        case 3:
            second = random.randrange(len(items))
            items[index], items[second] = items[second], items[index]
        case _:
            # Repeated again and again it would fill this process's memory, not the parser's.
            repeated = items[index:] * random.choice((2, 8, 60))
            items[index:] = repeated[:_MAX_ITEMS]


def _scalar(value: Any, random: Random, other: Any) -> Any:
    """Something that a peer might put where `value` was."""
    match random.randrange(9):
        case 0:
            return random.choice(_NUMBERS)
        case 1:
            return random.choice(_EXTREMES)
        case 2:
            return random.choice(_FLOATS)
        case 3:
            # The third is no text at all: three bytes that are not UTF-8.
            return random.choice(("", "\x00", msgspec.Raw(b"\xa3\xff\xfe\xff"), "y" * random.choice(_LONG)))
        case 4:
            return random.randbytes(random.choice(_LONG))
        case 5:
            return random.choice(cast("tuple[Any, ...]", (None, True, False, [], {}, {"": []})))
        case 6:
            return msgspec.Raw(b"\x91" * random.choice(_NESTED) + b"\x90")
        case 7:
            return _copied(other)
        case _:
            if isinstance(value, int):
                return (value + random.choice((-1, 1, 1 << 20))) % (1 << 64)
            return value[: len(value) // 2] if isinstance(value, (str, bytes)) else value
