"""Conversations in a folder become samples: every answer is a target once, and texts keep apart."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tests.unit.data.corpora import make_tokens_here

from shoal.checkpoint.byte_tokenizer import byte_tokenizer_files
from shoal.config import Config
from shoal.data import text_corpus
from shoal.data.catalog import open_source
from shoal.data.packed_texts import PackedTexts
from shoal.data.source import Source
from shoal.data.targets import IGNORED
from shoal.data.text_corpus import with_tokenizer
from shoal.errors import ConfigError
from shoal.events.base import Event
from shoal.events.data import DocumentsSkipped

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\x03{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HF = {"family": "hf", "extra": {"model_type": "qwen3", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 1}}
NUM = 60


def turns(number: int) -> list[dict[str, str]]:
    """A conversation that no other one is like."""
    asked = {"role": "user", "content": f"what is {number}?"}
    return [asked, {"role": "assistant", "content": f"[{number}" + "." * (number % 9) + "]"}] * (1 + number % 2)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    make_tokens_here(monkeypatch)


def tokenizer(folder: Path, template: str | None = TEMPLATE) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in byte_tokenizer_files(1024).items():
        (folder / name).write_bytes(content)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def config(tmp_path: Path, rows: list[Any], template: str | None = TEMPLATE, **data: Any) -> Config:
    corpus = tmp_path / "corpus"
    corpus.mkdir(exist_ok=True)
    (corpus / "a.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    values = {
        "dataset_name": str(corpus),
        "cache_dir": str(tmp_path / "kept"),
        "tokenizer": str(tokenizer(tmp_path / "tokenizer", template)),
        "messages_column": "messages",
        "seq_len": 96,
        **data,
    }
    return Config.model_validate({"data": values, "model": HF})


def opened(found: Config, said: list[Event] | None = None) -> Any:
    say = (said if said is not None else []).append
    return open_source(with_tokenizer(found, say), say)


def texts_of(source: Source) -> list[tuple[str, str]]:
    """Of each text in the samples: what it says, and what of it is a target."""
    batch = source.read(np.arange(source.num_samples))
    found: list[tuple[str, str]] = []
    for inputs, labels, positions in zip(batch.inputs, batch.labels, batch.context["positions"], strict=True):
        starts = [*np.flatnonzero(positions == 0).tolist(), len(inputs)]
        for start, stop in pairwise(starts):
            assert positions[start:stop].tolist() == list(range(stop - start))
            tokens, wanted = inputs[start:stop], labels[start:stop]
            assert np.array_equal(wanted[:-1][wanted[:-1] != IGNORED], tokens[1:][wanted[:-1] != IGNORED])
            if (wanted != IGNORED).any():
                found.append((bytes(tokens.tolist()).decode(), bytes(wanted[wanted != IGNORED].tolist()).decode()))
            else:
                assert not tokens.any(), "what fills up a sample"
    return found


def said_and_answered(number: int) -> tuple[str, str]:
    text, answers = "", ""
    for message in turns(number):
        text += f"<{message['role']}>{message['content']}\x03"
        answers += f"{message['content']}\x03" if message["role"] == "assistant" else ""
    # The last token is nobody's input.
    return text[:-1], answers


@pytest.mark.parametrize(
    "endless",
    [
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{{ (9 ** messages | length * 9) ** 99999999 }}",
    ],
)
def test_a_template_that_computes_without_end_is_given_up(
    endless: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(text_corpus, "_MAKER", "tests.unit.data.limited_maker")
    made = config(tmp_path, [turns(number) for number in range(NUM)], endless + TEMPLATE)
    with pytest.raises(ConfigError, match=r"the chat template of data\.tokenizer computes without end"):
        opened(made)


def test_a_template_that_computes_little_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(text_corpus, "_MAKER", "tests.unit.data.limited_maker")
    dataset = opened(config(tmp_path, [turns(number) for number in range(NUM)]))
    assert len(texts_of(dataset.train) + texts_of(dataset.holdout)) == NUM


def test_every_answer_is_a_target_once_and_nothing_else_is(tmp_path: Path) -> None:
    dataset = opened(config(tmp_path, [turns(number) for number in range(NUM)]))
    assert isinstance(dataset.train, PackedTexts)
    assert dataset.train.inputs.dtype == "uint8"
    found = texts_of(dataset.train) + texts_of(dataset.holdout)
    assert sorted(found) == sorted(said_and_answered(number) for number in range(NUM))
    assert len(texts_of(dataset.holdout)) == round(NUM * 0.05)
    labels = dataset.train.read(np.arange(dataset.train.num_samples)).labels
    assert sum(len(text) for text, _ in texts_of(dataset.train)) / labels.size > 0.75


def test_rows_of_parquet_have_keys_of_other_rows(tmp_path: Path) -> None:
    found = config(tmp_path, [])
    corpus = tmp_path / "corpus"
    (corpus / "a.jsonl").unlink()
    rows = [turns(number) for number in range(NUM)]
    rows[0] = [{**rows[0][0], "name": "Ann"}, *rows[0][1:]]
    pyarrow.parquet.write_table(pyarrow.table({"messages": rows, "n": range(NUM)}), corpus / "a.parquet")
    dataset = opened(found)
    everything = texts_of(dataset.train) + texts_of(dataset.holdout)
    assert sorted(everything) == sorted(said_and_answered(number) for number in range(NUM))


def test_a_table_gives_a_call_no_arguments_and_a_tool_no_keys_of_other_rows(tmp_path: Path) -> None:
    template = (
        "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content or m.calls | tojson }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    asked = {"role": "user", "content": "?"}
    rows = [
        {
            "messages": [asked, {"role": "assistant", "calls": [{"name": "f", "arguments": {name: 1}}]}],
            "tools": [{"parameters": {name: {"type": "integer"}}}],
        }
        for name in "ab"
    ]
    wanted = [
        f'[{{"parameters": {{"{name}": {{"type": "integer"}}}}}}]<user>?<assistant>'
        f'[{{"name": "f", "arguments": {{"{name}": 1}}}}'
        for name in "ab"
    ]
    found = config(tmp_path, [], template, holdout_fraction=0.5, seq_len=200)
    (tmp_path / "corpus" / "a.jsonl").unlink()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "corpus" / "a.parquet")
    dataset = opened(found)
    assert sorted(text for part in (dataset.train, dataset.holdout) for text, _ in texts_of(part)) == wanted


def test_a_value_that_lines_of_json_call_nothing_stays(tmp_path: Path) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson }}{% endfor %}"
    row = [{"role": "user", "content": "?"}, {"role": "assistant", "content": {"limit": None}}]
    dataset = opened(config(tmp_path, [row, row], template, holdout_fraction=0.5))
    assert texts_of(dataset.train) == [('<user>"?"<assistant>{"limit": null', '<assistant>{"limit": null}')]


def test_tools_may_be_json_and_what_is_none_is_named(tmp_path: Path) -> None:
    template = "{% if tools %}[{{ tools[0].name }}]{% endif %}" + TEMPLATE
    found = config(tmp_path, [], template, max_bad_fraction=1.0)
    tools = ['[{"name": "add"}]', "", "[" * 3000, {"name": "add"}, '[{"name": "sub"}]']
    rows = [{"messages": turns(0), "tools": each} for each in tools]
    (tmp_path / "corpus" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said: list[Event] = []
    dataset = opened(found, said)
    text = said_and_answered(0)[0]
    texts = [each for part in (dataset.train, dataset.holdout) for each, _ in texts_of(part)]
    assert sorted(texts) == sorted([f"[add]{text}", text, f"[sub]{text}"])
    (skipped,) = (event for event in said if isinstance(event, DocumentsSkipped))
    assert "a.jsonl:3: its tools are no JSON" in skipped.first
    assert "a.jsonl:4: its tools are no list but dict" in skipped.first


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_tools_of_a_column_are_written_by_the_template(tmp_path: Path, suffix: str) -> None:
    template = "{% if tools %}[{{ tools[0].name }}]{% endif %}" + TEMPLATE
    found = config(tmp_path, [], template, tools_column="functions", holdout_fraction=0.5)
    rows = [{"messages": turns(0), "functions": [{"name": "add"}]}, {"messages": turns(2), "functions": None}]
    (tmp_path / "corpus" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if suffix == "parquet":
        (tmp_path / "corpus" / "a.jsonl").unlink()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "corpus" / "a.parquet")
    dataset = opened(found)
    texts = sorted(text for part in (dataset.train, dataset.holdout) for text, _ in texts_of(part))
    assert texts == [said_and_answered(2)[0], f"[add]{said_and_answered(0)[0]}"]


def test_messages_as_sharegpt_has_them_are_the_same(tmp_path: Path) -> None:
    names = {"user": "human", "assistant": "gpt"}
    rows = [[{"from": names[m["role"]], "value": m["content"]} for m in turns(number)] for number in range(NUM)]
    dataset = opened(config(tmp_path, rows))
    assert said_and_answered(3) in texts_of(dataset.train) + texts_of(dataset.holdout)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_a_column_of_questions_and_one_of_answers_are_conversations(tmp_path: Path, suffix: str) -> None:
    rows = [{"prompt": f"what is {number}?", "completion": f"[{number}]", "more": "x"} for number in range(NUM)]
    found = config(tmp_path, [], messages_column="prompt", answer_column="completion")
    (tmp_path / "corpus" / "a.jsonl").unlink()
    place = tmp_path / "corpus" / f"a.{suffix}"
    match suffix:
        case "jsonl":
            place.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), place)
        case _:
            place.write_text("prompt,completion\n" + "".join(f"{r['prompt']},{r['completion']}\n" for r in rows))
    dataset = opened(found)
    texts = texts_of(dataset.train) + texts_of(dataset.holdout)
    assert sorted(texts) == sorted((f"<user>what is {n}?\x03<assistant>[{n}]", f"[{n}]\x03") for n in range(NUM))


def test_a_question_without_an_answer_is_named(tmp_path: Path) -> None:
    found = config(tmp_path, [], messages_column="prompt", answer_column="completion", max_bad_fraction=0.5)
    good = [{"prompt": f"{number}", "completion": "yes"} for number in range(8)]
    bad = [{"prompt": "what?"}, {"prompt": [{"role": "user"}], "completion": "yes"}]
    (tmp_path / "corpus" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in good + bad))
    said: list[Event] = []
    opened(found, said)
    (skipped,) = (event for event in said if isinstance(event, DocumentsSkipped))
    assert 'a.jsonl:9: its "completion" is no text' in skipped.first
    assert 'a.jsonl:10: its "prompt" is no text' in skipped.first


def test_what_is_too_long_is_cut_and_left_out_if_its_answer_is_gone(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "?" * 200}, {"role": "assistant", "content": "!"}]
    answer = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!" * 200}]
    dataset = opened(config(tmp_path, [long, answer, *map(turns, range(20))], seq_len=48))
    found = texts_of(dataset.train) + texts_of(dataset.holdout)
    assert len(found) == 21
    assert ("<user>?\x03<assistant>" + "!" * 29, "!" * 30) in found


def test_conversations_that_cannot_be_taken_are_left_out_counted_and_named(tmp_path: Path) -> None:
    odd = [{"from": ["human"], "value": "no role"}]
    bad = [[], "text", odd, [{"role": "user", "content": "no answer"}]]
    said: list[Event] = []
    opened(config(tmp_path, [*map(turns, range(NUM)), *bad], max_bad_fraction=0.1), said)
    (skipped,) = (event for event in said if isinstance(event, DocumentsSkipped))
    assert (skipped.skipped, skipped.documents) == (4, NUM + 4)
    for part in (
        "a.jsonl:61: it has no messages",
        "a.jsonl:62: it holds no messages but str",
        "message 1 has no role",
        "it has no answer",
    ):
        assert part in skipped.first
    with pytest.raises(ConfigError, match=r"4 of 64 documents .*more than data.max_bad_fraction = 0\.01"):
        opened(config(tmp_path, [*map(turns, range(NUM)), *bad]))


def test_another_template_gives_other_tokens_and_another_hash(tmp_path: Path) -> None:
    rows = [turns(number) for number in range(NUM)]
    first = with_tokenizer(config(tmp_path, rows), print)
    other = with_tokenizer(config(tmp_path, rows, TEMPLATE.replace("<", "(")), print)
    assert first.data.tokenizer_hash != other.data.tokenizer_hash
    assert texts_of(open_source(first).train)[0][0].startswith("<")
    assert texts_of(open_source(other).train)[0][0].startswith("(")


def test_another_token_that_a_template_names_gives_another_hash(tmp_path: Path) -> None:
    rows = [turns(number) for number in range(NUM)]
    found = config(tmp_path, rows, "{{ bos_token }}" + TEMPLATE)
    settings = tmp_path / "tokenizer" / "tokenizer_config.json"
    hashes: set[str | None] = set()
    for token in "AB":
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "bos_token": token}))
        known = with_tokenizer(found, print)
        hashes.add(known.data.tokenizer_hash)
        assert texts_of(open_source(known).train)[0][0].startswith(f"{token}<user>")
    assert len(hashes) == 2


def test_what_has_no_conversations_is_refused(tmp_path: Path) -> None:
    found = config(tmp_path, [turns(1), turns(2)])
    (tmp_path / "corpus" / "b.txt").write_text("text\n")
    with pytest.raises(ConfigError, match=r"b\.txt has no rows with data\.messages_column = messages"):
        opened(found)
    for name in ("a.jsonl", "b.txt"):
        (tmp_path / "corpus" / name).unlink()
    (tmp_path / "corpus" / "c.bin").write_bytes(bytes(1000))
    values = found.data.model_dump() | {"token_dtype": "uint16"}
    with pytest.raises(ConfigError, match=r"c\.bin has no rows"):
        opened(Config.model_validate({"data": values, "model": HF}))
    values |= {"dataset_name": "pydoc-topics", "token_dtype": None}
    with pytest.raises(ConfigError, match="pydoc-topics has no conversations"):
        opened(Config.model_validate({"data": values, "model": HF}))


@pytest.mark.parametrize(
    ("data", "model", "says"),
    [
        ({"tokenizer": None}, HF, "needs a tokenizer with a chat template, and data.tokenizer is None"),
        ({"tokenizer": "train:300"}, HF, "needs a tokenizer with a chat template, and data.tokenizer is train:300"),
        ({"shuffle_window": 64}, HF, r"data\.shuffle_window = 64: conversations .* have no neighbours; remove it"),
        ({"tokenizer": "x"}, {"family": "gpt"}, "model.family = gpt does not see apart; use hf"),
        ({"messages_column": None, "answer_column": "a"}, HF, "name the column of questions by data.messages_column"),
        ({"tokenizer": None, "task_type": "cv"}, {"family": "resnet18"}, "means nothing to data.task_type = cv"),
    ],
)
def test_what_conversations_need_is_said_before_a_run(data: Any, model: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Config.model_validate({"data": {"messages_column": "messages", **data}, "model": model})


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no chat template"):
        opened(config(tmp_path, [turns(1), turns(2)], template=None))
