"""Tokens of pieces of text that come again and again, each made once: most words of a text have come before.

texts -> pieces -> their numbers -> the tokens of each, one piece behind the other
             '-> those that are new -> the package tokenizers -> kept

A text is cut before white space, and between an ASCII letter or digit and another ASCII character that is none. So the
patterns that are listed here, by which a tokenizer cuts a text itself, have no match that goes across, and what they
look ahead for is never across. Of a tokenizer with another pattern all is left to the package.
"""

from __future__ import annotations

import re
from array import array
from itertools import islice
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from shoal.data.source import Array


class _Characters(NamedTuple):
    """Of a class of characters in a regular expression.

    Attributes:
        spaces: White space that belongs to nothing before it.
        strange: What an engine takes for white space, or once did, and is not one of these: no text is cut behind it.
    """

    spaces: str
    strange: str


class Cuts(NamedTuple):
    """Where texts may be cut.

    Attributes:
        pieces: Finds them, and at last an empty one.
        whole: Is found in texts that may not be cut: what is one token by its name.
    """

    pieces: re.Pattern[str]
    whole: re.Pattern[str]


_STRANGE: Final = r"\x1c-\x1f\x85\xa0\u1680\u180e\u2000-\u200f\u2028\u2029\u202f\u205f-\u2064\u3000\ufeff"
_GPT2: Final = _Characters(r"\t-\r ", _STRANGE)
_LINE_ENDS_ARE_TAKEN: Final = _Characters(r"\t ", r"\n-\r" + _STRANGE)
_QWEN2: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3: Final = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_WORD: Final = "A-Za-z0-9"
_MOST_PIECES: Final = 1 << 18
_MOST_TOKENS: Final = 1 << 22


class _Numbers(dict[str, int]):
    """Of pieces, in the order in which they came first."""

    def __missing__(self, piece: str) -> int:
        number = self[piece] = len(self)
        return number


class RememberedTokens:
    """Makes tokens of texts.

    Args:
        tokenizer: A `tokenizers.Tokenizer`.
        cuts: As `cuts_of` says.
        end: The token behind each text that ends; None: there is none.
    """

    def __init__(self, tokenizer: Any, cuts: Cuts, end: int | None) -> None:
        self._tokenizer = tokenizer
        self._cuts = cuts
        self._end = [] if end is None else [end]
        self._forget()

    def tokens(self, texts: list[tuple[str, bool]], dtype: str) -> Array:
        """Return the tokens (n,) of texts, of which it is said whether they end."""
        if len(self._numbers) > _MOST_PIECES or len(self._tokens) > _MOST_TOKENS:
            self._forget()
        pieces: list[str] = []
        is_whole, find = self._cuts.whole.search, self._cuts.pieces.findall
        for text, ends in texts:
            # The last piece that is found, behind all characters, is empty: it stands for the end.
            pieces += (text, "") if is_whole(text) else find(text)
            if not ends:
                pieces.pop()
        chosen = np.fromiter(map(self._numbers.__getitem__, pieces), np.int64, len(pieces))
        new = [*islice(self._numbers, len(self._stops) - 1, None)]
        try:
            encodings = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
        except BaseException:
            self._forget()  # numbers of pieces without tokens
            raise
        for encoding in encodings:
            self._tokens.extend(encoding.ids)
            self._stops.append(len(self._tokens))
        stops = np.frombuffer(self._stops, np.int64)
        starts, lengths = stops[chosen], stops[chosen + 1] - stops[chosen]
        behind = np.cumsum(lengths)
        places = np.arange(int(lengths.sum())) + np.repeat(starts - (behind - lengths), lengths)
        return np.frombuffer(self._tokens, np.int32)[places].astype(dtype)

    def _forget(self) -> None:
        self._numbers = _Numbers({"": 0})
        self._tokens = array("i", self._end)
        # Of piece i they lie between the places i and i + 1 of this.
        self._stops = array("q", [0, len(self._end)])


def cuts_of(tokenizer: Any) -> Cuts | None:
    """Return where texts for a `tokenizers.Tokenizer` may be cut; None: nobody knows."""
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content]
    normalizer = _part(tokenizer.normalizer)
    is_plain = type(tokenizer.model).__name__ == "BPE" and not tokenizer.model.dropout
    is_found_as_written = normalizer is None or not any(token.normalized for token in added)
    found = _characters(_part(tokenizer.pre_tokenizer))
    if found is None or not is_plain or not is_found_as_written or normalizer not in (None, {"type": "NFC"}):
        return None
    spaces, strange = found
    behind_letter = rf"(?:[^\0-\x7f{strange}][^{spaces}{strange}]*+)?+"
    behind_strange = rf"(?:[{strange}]++[{spaces}]*+[^{spaces}{strange}]*+)*+"
    pieces = rf"[{spaces}]*+[^{spaces}{strange}{_WORD}]*+[{_WORD}]*+{behind_letter}{behind_strange}"
    whole = "|".join(sorted(re.escape(token.content) for token in added)) or "(?!)"
    return Cuts(re.compile(pieces), re.compile(whole))


def _characters(part: Any) -> _Characters | None:
    match part:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _GPT2
        case {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, behind]}:
            # It looks at one character at a time.
            return _characters(behind)
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if pattern in (_QWEN2, _LLAMA3):
            return _LINE_ENDS_ARE_TAKEN
        case _:
            return None


def _part(part: Any) -> Any:
    """Return what a tokenizer.json says of a part of a tokenizer."""
    return None if part is None else msgspec.json.decode(part.__getstate__())
