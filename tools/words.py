"""Links the words of docs/understand/words.md on the pages of the site that explain: each where a page first has it.

The link says what the word means when the pointer is on it, and leads to its row.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

PLACE = PurePosixPath("understand/words.md")
EXPLAINING = ("start", "tasks", "understand")
"""The folders whose pages people read from the beginning."""
ORDINARY = frozenset(
    {"run", "host", "role", "cut", "unit", "batch", "target", "step", "hash", "chain", "left out", "split", "code"}
)
"""Words that a page also uses as everybody does."""
_ROW = re.compile(r"^\| (?!word \|)(\w[^|]+) \| ([^|]+) \|$", re.MULTILINE)
# What is no prose: code, links and pictures, headings, tables, HTML.
_APART = re.compile(r"(^```[\s\S]*?^```$|`[^`\n]*`|!?\[[^\]]*\]\([^)]*\)|^#.*$|^\|.*$|<[^>]*>)", re.MULTILINE)


class Word(NamedTuple):
    """A row of the table, by one of the words that it explains."""

    anchor: str
    meaning: str


def words_of(text: str) -> dict[str, Word]:
    """Return what the page of words explains, by word, the longest first."""
    found: dict[str, Word] = {}
    for names, meaning in _ROW.findall(text):
        for name in _names(names):
            found[name] = Word(_anchor(names), re.sub(r"[*`\"]", "", meaning))
    return dict(sorted(found.items(), key=lambda each: -len(each[0])))


def with_anchors(text: str) -> str:
    """Return the page of words with a place to jump to in each row."""
    return _ROW.sub(lambda row: f'| <span id="{_anchor(row[1])}">{row[1]}</span> | {row[2]} |', text)


def with_words(place: PurePosixPath, text: str, words: Mapping[str, Word]) -> str:
    """Return a page on which each word is a link where it is first said.

    Args:
        place: the page's place in the site; not that of the page of words.
    """
    if place.parts[0] not in EXPLAINING:
        return text
    to = os.path.relpath(PLACE, place.parent)
    left = {name: word for name, word in words.items() if name not in ORDINARY}
    parts = _APART.split(text)
    for number in range(0, len(parts), 2):
        parts[number] = _linked(parts[number], left, to)
    return "".join(parts)


def _linked(prose: str, left: dict[str, Word], to: str) -> str:
    """Link what is left of the words, and leave less."""
    if not left:
        return prose
    names = "|".join(re.escape(name).replace(r"\ ", r"\s") for name in left)

    def led(found: re.Match[str]) -> str:
        word = left.get(" ".join(found[1].lower().split()))
        if word is None:
            return found[0]
        for name in [name for name, other in left.items() if other.anchor == word.anchor]:
            del left[name]
        return f'[{found[0]}]({to}#{word.anchor} "{word.meaning}")'

    return re.sub(rf"(?<![\w/.-])({names})s?(?![\w/-]|\.\w)", led, prose, flags=re.IGNORECASE)


def _names(cell: str) -> list[str]:
    return [name.strip(" )") for name in re.split(r"[,(]", cell.lower())]


def _anchor(cell: str) -> str:
    return "word-" + re.sub(r"\W+", "-", _names(cell)[0])
