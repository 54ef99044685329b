"""What is said to a chat model, and what it answers: as transformers writes the messages and computes the answer."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.unit.inference.test_generation_hf import CONTEXT, generated, loaded, model_from_elsewhere, run_model
from tests.unit.model.hf.test_chat import INST, template

from shoal.cli import main
from shoal.errors import ConfigError
from shoal.inference.conversation import OngoingConversation
from shoal.inference.text import FileTokens

SHORT = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
MANY = 4 * CONTEXT


def chat_model(folder: Path, transformers: ModuleType, text: str | None = INST) -> Path:
    """A model from elsewhere whose tokenizer puts a token before each text by itself, and so does its template."""
    made = model_from_elsewhere(folder, transformers, eos_token_id=None, max_position_embeddings=MANY)
    described = json.loads((made / "tokenizer.json").read_text())
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    (made / "tokenizer.json").write_text(json.dumps(described))
    if text is not None:
        (made / "chat_template.jinja").write_text(text)
    return made


def talked(capsys: pytest.CaptureFixture[str], folder: Path, *argv: str) -> tuple[int, str, str]:
    code = main(["chat", str(folder), *argv])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_answers_are_those_of_transformers_to_the_messages_so_far(
    tmp_path: Path, transformers: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = chat_model(tmp_path / "llama", transformers)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = loaded(transformers, folder, torch.float32)
    messages = ("swim", "東京?")
    flags = [flag for message in messages for flag in ("--message", message)]
    code, out, err = talked(capsys, folder, *flags, "--max-tokens", "5", "--json")
    assert (code, err) == (0, "")
    so_far: list[dict[str, str]] = []
    answers = list(map(json.loads, out.splitlines()))
    for message, answer in zip(messages, answers, strict=True):
        so_far.append({"role": "user", "content": message})
        written = tokenizer.apply_chat_template(so_far, tokenize=False, add_generation_prompt=True)
        ids: list[int] = tokenizer(written, add_special_tokens=False)["input_ids"]
        assert answer["prompt_tokens"] == len(ids)
        assert answer["tokens"] == generated(theirs, ids, 5)
        assert answer["finish"] == "length"
        so_far.append({"role": "assistant", "content": answer["text"]})
    assert talked(capsys, folder, *flags, "--max-tokens", "5")[1] == "".join(f"{each['text']}\n" for each in answers)


def test_without_messages_each_line_of_standard_input_is_one(
    tmp_path: Path, transformers: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = chat_model(tmp_path / "llama", transformers)
    drawn = ("--max-tokens", "4", "--temperature", "0.9", "--seed", "3")
    expected = talked(capsys, folder, "--message", "swim", "--message", "東京?", *drawn)
    assert expected[0] == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("swim\n\n  \n東京?\n"))
    assert talked(capsys, folder, *drawn) == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding="utf-8"))
    code, _, err = talked(capsys, folder, *drawn)
    assert (code, "is no text in UTF-8" in err) == (2, True)


def test_the_oldest_messages_are_forgotten_in_pairs_where_the_context_is_full(tmp_path: Path) -> None:
    written = template(tmp_path, SHORT)
    # A token is a byte: so 15 of 20 may be asked.
    conversation = OngoingConversation(written, FileTokens(tmp_path, adds_tokens=False), 20, "be")
    assert conversation.ask("123") == "sbeu123a"
    conversation.answered("45")
    assert conversation.ask("678") == "sbeu123a45u678a"
    assert conversation.num_forgotten == 0
    conversation.answered("9")
    assert conversation.ask("x") == "sbeu678a9uxa"
    assert conversation.num_forgotten == 2
    conversation.answered("y" * 30)
    # What is said last is never forgotten, however long it is.
    assert conversation.ask("z" * 30) == f"sbeu{'z' * 30}a"
    assert conversation.num_forgotten == 6
    with pytest.raises(ConfigError, match="the message is empty"):
        conversation.ask(" \n")


def test_that_messages_are_forgotten_is_said(
    tmp_path: Path, transformers: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = chat_model(tmp_path / "llama", transformers, SHORT)
    flags = ("--message", "a" * (MANY // 2), "--message", "b" * (MANY // 2), "--max-tokens", "2")
    code, out, err = talked(capsys, folder, *flags, "--json")
    assert (code, len(out.splitlines())) == (0, 2)
    assert err == f"the context of {MANY} tokens is full: the oldest messages are forgotten\n"
    code, _, err = talked(capsys, folder, "--message", "a" * (MANY + 1))
    assert (code, f"the model takes {MANY}: shorten it" in err) == (2, True)


def test_what_cannot_talk_is_told_what_to_do(
    tmp_path: Path, transformers: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    no_template = chat_model(tmp_path / "llama", transformers, None)
    of_bytes = run_model(tmp_path / "model", "llama")
    refuses = chat_model(tmp_path / "inst", transformers, INST)
    for folder, argv, code, says in (
        (no_template, (), 2, "has no chat template"),
        (of_bytes, (), 2, "it goes on from a text by `shoal generate`"),
        (refuses, ("--system", "be brief"), 1, "the chat template refuses it"),
        (refuses, ("--top-k", "0", "--temperature", "-1"), 2, "temperature -1.0: give a number of 0 or more"),
        (refuses, ("--top-k", "0", "--temperature", "-1"), 2, "top-k 0: give a number of tokens, at least 1"),
    ):
        found, out, err = talked(capsys, folder, "--message", "hi", *argv)
        assert (found, out) == (code, "")
        assert says in " ".join(err.split())
