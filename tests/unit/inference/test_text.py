"""Text comes whole, character by character, and ends before a stop string however it is cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.inference.trained_tokenizer import trained_tokenizer
from tokenizers.processors import TemplateProcessing

from shoal.checkpoint.byte_tokenizer import byte_tokenizer_files
from shoal.errors import ConfigError
from shoal.inference import prompt_trial
from shoal.inference.text import ByteTokens, FileTokens, Tokens, UntilStop

TEXT = "naïve 東京 🦈!"


@pytest.fixture
def from_files(tmp_path: Path) -> FileTokens:
    for name, content in byte_tokenizer_files(32).items():
        (tmp_path / name).write_bytes(content)
    return FileTokens(tmp_path)


def pieces(tokens: Tokens, ids: list[int]) -> list[str]:
    stream = tokens.stream()
    return [*(stream.push(token) for token in ids), stream.flush()]


def test_a_character_comes_when_its_last_byte_has(from_files: FileTokens) -> None:
    for tokens in (ByteTokens(), from_files):
        ids = tokens.encode(TEXT)
        assert ids == list(TEXT.encode())
        assert [piece for piece in pieces(tokens, ids) if piece] == list(TEXT)
        assert "".join(pieces(tokens, ids[:-3])).endswith("\N{REPLACEMENT CHARACTER}"), "half a character at the end"


def test_a_token_of_a_long_text_is_decoded_behind_a_few_others(
    from_files: FileTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, decoded = from_files._tokenizer, list[int]()

    class Watched:
        def decode(self, ids: list[int]) -> str:
            decoded.append(len(ids))
            return whole.decode(ids)

    monkeypatch.setattr(from_files, "_tokenizer", Watched())
    text = TEXT * 20
    assert "".join(pieces(from_files, list(text.encode()))) == text
    assert max(decoded) <= len("🦈".encode()) * 2


def test_bytes_that_are_no_text_are_shown_as_such_and_what_follows_is_read() -> None:
    assert "".join(pieces(ByteTokens(), [0x61, 0xFF, 0x62, 300, 0x63])) == "a\ufffdb\ufffdc"
    assert ByteTokens().encode("\udcff") == [0xFF], "a byte of the command line that is no text"


def test_a_stop_string_that_comes_in_pieces_is_not_passed_on() -> None:
    for size in (1, 2, 3, 50):
        text, until = "to be\n\n or not", UntilStop(("\n\nor", "\n\n o", "zzz"))
        passed = ""
        for start in range(0, len(text), size):
            if not until.is_over:
                passed += until.push(text[start : start + size])
        assert (passed, until.is_over) == ("to be", True)
    until = UntilStop(("abcd",))
    assert [until.push("xab"), until.push("cx"), until.push("ab"), until.flush()] == ["x", "abcx", "", "ab"]
    assert not until.is_over


def test_files_that_are_no_tokenizer_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is no tokenizer"):
        FileTokens(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "//////8AAAAAAAAA"}}, "cannot be read"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "no tokens of the prompt"),
        ({"decoder": {"type": "Strip", "content": "a", "start": 5, "stop": 99}}, "no text of its tokens"),
    ],
    ids=["read", "prompt", "answer"],
)
def test_a_panic_of_the_package_tokenizers_is_an_error_like_any_other(
    from_files: FileTokens, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ConfigError, match=f"tokenizer.*{message}.*give another one"):
        pieces(tokens := FileTokens(tmp_path), tokens.encode("ab"))


def test_a_tokenizer_that_computes_without_end_on_a_prompt_is_one_error_that_names_it(
    from_files: FileTokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_trial, "_TRIAL", "tests.unit.inference.limited_trial")
    path = tmp_path / "tokenizer.json"
    split = {"type": "Split", "pattern": {"Regex": "a*a*$"}, "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps({**json.loads(path.read_text()), "pre_tokenizer": split}))
    tokens = FileTokens(tmp_path)
    assert tokens.encode("ab"), "a short one ends"
    with pytest.raises(ConfigError, match=r"tokenizer\.json computes without end on the prompt.*name another"):
        tokens.encode("a" * 4_000 + "!")


def test_the_end_of_a_text_is_the_token_that_the_files_name(from_files: FileTokens, tmp_path: Path) -> None:
    assert not from_files.ends
    for written in ('{"eos_token": "!"}', '{"eos_token": {"content": "!"}}'):
        (tmp_path / "tokenizer_config.json").write_text(written)
        assert FileTokens(tmp_path).ends == {ord("!")}


def test_the_end_is_that_of_documents_where_no_file_names_another(tmp_path: Path) -> None:
    trained_tokenizer(of_words=False).save(str(tmp_path / "tokenizer.json"))
    assert FileTokens(tmp_path).ends == {2}, "which is </s>"
    assert FileTokens(tmp_path, (7,)).ends == {7}


def test_nothing_is_put_before_a_text_where_training_has_put_nothing(tmp_path: Path) -> None:
    tokenizer = trained_tokenizer(of_words=False)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    plain = FileTokens(tmp_path, adds_tokens=False).encode("<s>A shoal")
    assert plain.count(1) == 1
    assert FileTokens(tmp_path).encode("<s>A shoal") == [1, *plain], "as transformers does"


@pytest.mark.parametrize("of_words", [False, True], ids=["bytes", "words"])
def test_a_text_goes_on_behind_its_prompt_as_if_both_were_one(of_words: bool, tmp_path: Path) -> None:
    trained_tokenizer(of_words=of_words).save(str(tmp_path / "tokenizer.json"))
    tokens = FileTokens(tmp_path)
    prompt = tokens.encode("A shoal 東京")
    # "q" and the shark are single bytes to the one of words.
    text = "fish swims 🦈q 東京! naïve"
    stream, ids = tokens.stream(prompt), tokens.encode(text)
    said = "".join([*(stream.push(token) for token in ids), stream.flush()])
    assert said == (f" {text}" if of_words else text)


def test_a_prompt_is_neither_cut_nor_filled_up_as_samples_may_have_been(tmp_path: Path) -> None:
    tokenizer = trained_tokenizer(of_words=False)
    text = 3 * TEXT
    expected = tokenizer.encode(text).ids
    assert 3 < len(expected) < 100
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=100)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert FileTokens(tmp_path).encode(text) == expected
