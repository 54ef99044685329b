"""Tokens that are remembered are those of the package tokenizers, whatever the text, and however much was forgotten."""

from __future__ import annotations

import itertools
import json
import random
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shoal.data import remembered_tokens, tokenising
from shoal.data.builtin import pydoc_topics
from shoal.data.documents import TextPiece
from shoal.data.remembered_tokens import RememberedTokens, cuts_of
from shoal.data.tokenising import TokenizerEncoder
from shoal.model.hf.tokenizer import TOKENIZER_FILE, keep_tokenizer

END = "<|endoftext|>"
HOSTILE = [
    *"aZ9 ,'._(<\t\n\r\v\0\x1c\x7f",
    *"\x85\xa0\u2003\u2028\u200b\u3000\ufeff",
    *"éßſ١五д\u0301\u0338👍🏽",
    *("'s", "'RE", "don't", "  ", "\n\n", "123456", END, "<|end", "hello", "déjà"),
]
"""White space and what some take for it, letters and digits that are none to others, marks, added tokens."""
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
WORDS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}


def splitting(pattern: str, **other: Any) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False, **other}
    return {"type": "Sequence", "pretokenizers": [split, {**WORDS, "use_regex": False}]}


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "gpt2": (WORDS, None),
    "smollm": ({"type": "Sequence", "pretokenizers": [DIGITS, WORDS]}, None),
    "qwen2": (splitting(QWEN2), {"type": "NFC"}),
    "llama3": (splitting(LLAMA3), None),
}


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """A tokenizer.json with tokens across most places between hostile characters: a wrong cut gives other ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=4000, special_tokens=[END], initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    spaces = [each for each in HOSTILE if not each.strip("\x1c\u200b\ufeff" + string.whitespace) or each.isspace()]
    texts = ["".join(some) for each, n in ((HOSTILE, 2), (spaces, 3)) for some in itertools.product(each, repeat=n)]
    tokenizer.train_from_iterator([*texts, *pydoc_topics()[:20]], trainer)
    found: dict[str, Any] = json.loads(tokenizer.to_str())
    return found


def tokenizer_with(trained: dict[str, Any], kind: str) -> Any:
    pre_tokenizer, normalizer = KINDS[kind]
    return Tokenizer.from_str(json.dumps({**trained, "pre_tokenizer": pre_tokenizer, "normalizer": normalizer}))


def hostile_texts() -> list[str]:
    dice = random.Random(0)
    long = ["".join(dice.choices(HOSTILE, k=dice.randrange(3, 16))) for _ in range(3000)]
    return ["", *("".join(some) for n in (1, 2) for some in itertools.product(HOSTILE, repeat=n)), *long]


def remembered(tokenizer: Any, end: int | None = None) -> RememberedTokens:
    cuts = cuts_of(tokenizer)
    assert cuts is not None
    return RememberedTokens(tokenizer, cuts, end)


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_text_is_its_tokens_are_those_that_the_package_gives(
    trained: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered_tokens, "_MOST_PIECES", 2000)  # much is forgotten, and made again
    tokenizer = tokenizer_with(trained, kind)
    texts = [*hostile_texts(), *pydoc_topics()[:100]]
    random.Random(1).shuffle(texts)
    tokens = remembered(tokenizer)
    for start in range(0, len(texts), 100):
        some = texts[start : start + 100]
        expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in some]
        found = tokens.tokens([(text, True) for text in some], "uint16").tolist()
        if found != list(itertools.chain(*expected)):
            for text, each in zip(some, expected, strict=True):
                assert tokens.tokens([(text, True)], "uint16").tolist() == each, repr(text)


def test_an_end_is_behind_each_text_that_ends_also_where_the_text_has_one_itself(trained: dict[str, Any]) -> None:
    tokenizer = tokenizer_with(trained, "gpt2")
    texts = [("one ", False), ("", True), ("", False), (f"two{END}", True), ("", True)]
    expected = [*tokenizer.encode("one ").ids, 0, *tokenizer.encode("two").ids, 0, 0, 0]
    assert remembered(tokenizer, 0).tokens(texts, "uint16").tolist() == expected
    without = [*tokenizer.encode("one ").ids, *tokenizer.encode(f"two{END}").ids]
    assert remembered(tokenizer).tokens(texts, "uint16").tolist() == without
    assert remembered(tokenizer).tokens([], "uint16").tolist() == []


class Counting:
    """A tokenizer that notes what it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.given: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: list[str], **options: bool) -> Any:
        self.given += texts
        return self._tokenizer.encode_batch_fast(texts, **options)


def test_the_package_is_given_each_piece_once(trained: dict[str, Any]) -> None:
    counting: Any = Counting(tokenizer_with(trained, "gpt2"))
    tokens = remembered(counting)
    first = tokens.tokens([("one two(one, two)\n  two", True)], "uint16")
    assert counting.given == ["one", " two", "(one", ",", ")", "\n  two"]
    again = tokens.tokens([("one two(one, two)\n  two", True)], "uint16")
    assert len(counting.given) == 6
    assert np.array_equal(first, again)


def test_no_more_is_kept_than_there_is_room_for(trained: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered_tokens, "_MOST_PIECES", 2)
    counting: Any = Counting(tokenizer_with(trained, "gpt2"))
    tokens = remembered(counting)
    for _ in range(3):
        tokens.tokens([("one two three", True)], "uint16")
    assert len(counting.given) == 9
    monkeypatch.setattr(remembered_tokens, "_MOST_PIECES", 4)
    monkeypatch.setattr(remembered_tokens, "_MOST_TOKENS", 1)
    tokens.tokens([("one two three", True)], "uint16")
    assert len(counting.given) == 12


def test_after_a_text_that_the_package_refuses_the_tokens_of_others_are_right(trained: dict[str, Any]) -> None:
    tokenizer = tokenizer_with(trained, "gpt2")
    tokens = remembered(tokenizer)
    with pytest.raises(Exception, match=r"TextInputSequence|TextEncodeInput|surrogate"):
        tokens.tokens([("one two \ud800", True)], "uint16")
    assert tokens.tokens([("three one", True)], "uint16").tolist() == tokenizer.encode("three one").ids


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
WITH_ADDED = {"id": 4000, "single_word": False, "lstrip": False, "rstrip": False, "special": False}


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": METASPACE},
        {"pre_tokenizer": {**WORDS, "add_prefix_space": True}},
        {"pre_tokenizer": {**WORDS, "use_regex": False}},
        {"pre_tokenizer": splitting(r"\s+|\S+")},
        {"pre_tokenizer": splitting(QWEN2, behavior="MergedWithNext")},
        {"pre_tokenizer": splitting(QWEN2, invert=True)},
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "NFC"}, "added_tokens": [{**WITH_ADDED, "content": ";a|b", "normalized": True}]},
    ],
)
def test_a_tokenizer_of_another_kind_is_left_to_the_package(trained: dict[str, Any], change: dict[str, Any]) -> None:
    assert cuts_of(Tokenizer.from_str(json.dumps({**trained, **change}))) is None


def test_a_tokenizer_that_draws_its_tokens_at_random_is_left_to_the_package(trained: dict[str, Any]) -> None:
    drawing = {**trained, "model": {**trained["model"], "dropout": 0.5}}
    assert cuts_of(Tokenizer.from_str(json.dumps(drawing))) is None


@pytest.mark.parametrize("form", [{"lstrip": True}, {"rstrip": True}, {"single_word": True}, {"normalized": True}])
def test_tokens_that_have_names_are_found_also_where_a_text_would_be_cut(
    trained: dict[str, Any], form: dict[str, Any]
) -> None:
    added = {**WITH_ADDED, "content": "a (b", "normalized": False, **form}
    tokenizer = Tokenizer.from_str(json.dumps({**trained, "added_tokens": [*trained["added_tokens"], added]}))
    texts = ["x a (b y", "xa (b y", " a (b ", "a (by", "a  (b a (b"]
    for text in texts:
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        assert remembered(tokenizer).tokens([(text, True)], "uint16").tolist() == expected


@pytest.mark.parametrize(("cores", "is_remembering"), [(6, True), (7, False)])
def test_on_few_cores_tokens_are_remembered_and_on_many_they_are_the_same(
    trained: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cores: int, is_remembering: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tokenising, "num_usable_cores", lambda: cores)
    made: list[object] = []

    class Noted(RememberedTokens):
        def __init__(self, *arguments: Any) -> None:
            made.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr(tokenising, "RememberedTokens", Noted)
    kept = keep_tokenizer({TOKENIZER_FILE: json.dumps(trained).encode()}, "it")
    pieces = [TextPiece("déjà vu, ", ends=False), TextPiece("or not"), TextPiece(""), TextPiece(END)]
    found = TokenizerEncoder(kept).encode(pieces)
    tokenizer = tokenizer_with(trained, "gpt2")
    ids = [tokenizer.encode(str(piece.content)).ids for piece in pieces]
    assert found.tokens.tolist() == [*ids[0], *ids[1], 0, 0, 0, 0]
    assert found.text_bytes == sum(len(str(piece.content).encode()) for piece in pieces)
    assert bool(made) == is_remembering
