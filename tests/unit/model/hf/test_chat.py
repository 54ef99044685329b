"""Which tokens of a conversation are answers: token by token, as people have marked them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from shoal.checkpoint.byte_tokenizer import byte_tokenizer_files
from shoal.errors import ConfigError, SampleError
from shoal.model.hf.chat import ChatTemplate

CHATML = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = (
    "{% if tools %}<|tools|>{{ tools | tojson }}<|end|>{{ '\n' }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "<|call|>{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}<|end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
THOUGHTS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DROPS_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

S, U, A = "system", "user", "assistant"
CALL = {
    "role": A,
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
TOOL = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TOOLS_TEXT = '<|tools|>[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]<|end|>\n'

SPECIAL = {"<s>": 256, "</s>": 257}

# Answers stand between ⟦ and ⟧.
SHAPES: dict[str, tuple[str, list[Any], list[Any] | None, str]] = {
    "one turn": (CHATML, [(U, "hi"), (A, "yo")], None, "<|user|>hi<|end|>\n<|assistant|>⟦yo<|end|>\n⟧"),
    "system": (
        CHATML,
        [(S, "be brief"), (U, "hi"), (A, "yo")],
        None,
        "<|system|>be brief<|end|>\n<|user|>hi<|end|>\n<|assistant|>⟦yo<|end|>\n⟧",
    ),
    "two turns": (
        CHATML,
        [(U, "a"), (A, "b"), (U, "c"), (A, "d")],
        None,
        "<|user|>a<|end|>\n<|assistant|>⟦b<|end|>\n⟧<|user|>c<|end|>\n<|assistant|>⟦d<|end|>\n⟧",
    ),
    "ends with a question": (
        CHATML,
        [(U, "a"), (A, "b"), (U, "c")],
        None,
        "<|user|>a<|end|>\n<|assistant|>⟦b<|end|>\n⟧<|user|>c<|end|>\n",
    ),
    "answer first": (
        CHATML,
        [(A, "welcome"), (U, "a"), (A, "b")],
        None,
        "<|assistant|>⟦welcome<|end|>\n⟧<|user|>a<|end|>\n<|assistant|>⟦b<|end|>\n⟧",
    ),
    "two answers in a row": (
        CHATML,
        [(U, "a"), (A, "b"), (A, "c")],
        None,
        "<|user|>a<|end|>\n<|assistant|>⟦b<|end|>\n⟧<|assistant|>⟦c<|end|>\n⟧",
    ),
    "empty answer": (CHATML, [(U, "a"), (A, "")], None, "<|user|>a<|end|>\n<|assistant|>⟦<|end|>\n⟧"),
    "no answer": (CHATML, [(U, "a")], None, "<|user|>a<|end|>\n"),
    "no message": (CHATML, [], None, ""),
    "not ASCII": (CHATML, [(U, "déjà"), (A, "vu €")], None, "<|user|>déjà<|end|>\n<|assistant|>⟦vu €<|end|>\n⟧"),
    "answer with the words of a turn": (
        CHATML,
        [(U, "x"), (A, "<|user|>x<|end|>")],
        None,
        "<|user|>x<|end|>\n<|assistant|>⟦<|user|>x<|end|><|end|>\n⟧",
    ),
    "white space": (CHATML, [(U, " a "), (A, "\n b \n")], None, "<|user|> a <|end|>\n<|assistant|>⟦\n b \n<|end|>\n⟧"),
    "marked, one turn": (MARKED, [(U, "hi"), (A, "yo")], None, "<|user|>hi<|end|>\n<|assistant|>⟦yo<|end|>⟧\n"),
    "marked, two turns": (
        MARKED,
        [(U, "a"), (A, "b"), (U, "c"), (A, "d")],
        None,
        "<|user|>a<|end|>\n<|assistant|>⟦b<|end|>⟧\n<|user|>c<|end|>\n<|assistant|>⟦d<|end|>⟧\n",
    ),
    "marked, system": (
        MARKED,
        [(S, "s"), (U, "a"), (A, "b")],
        None,
        "<|system|>s<|end|>\n<|user|>a<|end|>\n<|assistant|>⟦b<|end|>⟧\n",
    ),
    "marked, no answer": (MARKED, [(U, "a")], None, "<|user|>a<|end|>\n"),
    "marked, not ASCII": (MARKED, [(U, "é"), (A, "€")], None, "<|user|>é<|end|>\n<|assistant|>⟦€<|end|>⟧\n"),
    "a tool is called": (
        TOOLS,
        [(U, "1+1"), CALL, ("tool", "2"), (A, "two")],
        TOOL,
        TOOLS_TEXT + '<|user|>1+1<|end|>\n<|assistant|>⟦<|call|>add{"a": 1}<|end|>\n⟧'
        "<|tool|>2<|end|>\n<|assistant|>⟦two<|end|>\n⟧",
    ),
    "tools that nobody calls": (
        TOOLS,
        [(U, "a"), (A, "b")],
        TOOL,
        TOOLS_TEXT + "<|user|>a<|end|>\n<|assistant|>⟦b<|end|>\n⟧",
    ),
    "tools are absent": (TOOLS, [(U, "a"), (A, "b")], None, "<|user|>a<|end|>\n<|assistant|>⟦b<|end|>\n⟧"),
    "two calls at once": (
        TOOLS,
        [(U, "a"), {**CALL, "tool_calls": CALL["tool_calls"] * 2}],
        None,
        '<|user|>a<|end|>\n<|assistant|>⟦<|call|>add{"a": 1}<|call|>add{"a": 1}<|end|>\n⟧',
    ),
    "no prompt for an answer": (INST, [(U, "a"), (A, "b")], None, "<s>[INST] a [/INST]⟦ b</s>⟧"),
    "no prompt, two turns": (
        INST,
        [(U, "a"), (A, "b"), (U, "c"), (A, "d")],
        None,
        "<s>[INST] a [/INST]⟦ b</s>⟧[INST] c [/INST]⟦ d</s>⟧",
    ),
    "thoughts of the last answer": (
        THOUGHTS,
        [(U, "a"), (A, "<think>hm</think>b")],
        None,
        "<|user|>a<|end|>\n<|assistant|>⟦<think>hm</think>b<|end|>\n⟧",
    ),
    "a role that is left out": (DROPS_SYSTEM, [(S, "s"), (U, "a"), (A, "b")], None, "user: a\nassistant: ⟦b\n⟧"),
}


def conversation(turns: list[Any]) -> list[dict[str, Any]]:
    return [{"role": turn[0], "content": turn[1]} if isinstance(turn, tuple) else turn for turn in turns]


def template(folder: Path, text: str | None, **said: Any) -> ChatTemplate:
    """A tokenizer over bytes, and two tokens that stand for no text, with a chat template."""
    for name, content in byte_tokenizer_files(1024).items():
        (folder / name).write_bytes(content)
    made: Any = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens(list(SPECIAL))
    made.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    settings |= {"bos_token": "<s>", "eos_token": "</s>", **said}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if text is not None:
        (folder / "chat_template.jinja").write_text(text)
    return ChatTemplate(folder, "mine")


def marked_tokens(expected: str) -> list[tuple[int, bool]]:
    """Every byte, or token that stands for no text, and whether it is a target."""
    found: list[tuple[int, bool]] = []
    is_target = False
    for part in re.split("([⟦⟧]|</?s>)", expected):
        if part in ("⟦", "⟧"):
            is_target = part == "⟦"
        elif part in SPECIAL:
            found.append((SPECIAL[part], is_target))
        else:
            found += [(byte, is_target) for byte in part.encode()]
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_answers_are_marked_token_by_token_as_made_by_hand(shape: str, tmp_path: Path) -> None:
    text, turns, tools, expected = SHAPES[shape]
    found = template(tmp_path, text).encode(conversation(turns), tools)
    assert list(zip(found.tokens.tolist(), found.is_target.tolist(), strict=True)) == marked_tokens(expected)


def test_there_are_25_shapes() -> None:
    assert len(SHAPES) == 25


def test_a_template_that_writes_an_earlier_answer_otherwise_is_refused(tmp_path: Path) -> None:
    turns = conversation([(U, "a"), (A, "<think>hm</think>b"), (U, "c"), (A, "d")])
    with pytest.raises(SampleError, match=r"message 2, an answer, otherwise .* give a template that marks answers"):
        template(tmp_path, THOUGHTS).encode(turns)


def test_what_a_template_refuses_is_said(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match=r"refuses it: .*only user and assistant"):
        template(tmp_path, INST).encode(conversation([(S, "s"), (U, "a"), (A, "b")]))


def test_a_lack_of_memory_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise MemoryError

    found = template(tmp_path, MARKED)
    monkeypatch.setattr(found._templates, "render_jinja_template", refuse)
    with pytest.raises(MemoryError):
        found.encode(conversation([(U, "a"), (A, "b")]))


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no chat template"):
        template(tmp_path, None)


def test_of_templates_by_name_conversations_with_tools_have_their_own(tmp_path: Path) -> None:
    named = [{"name": "default", "template": MARKED}, {"name": "tool_use", "template": TOOLS}]
    found = template(tmp_path, None, chat_template=named)
    turns = conversation([(U, "a"), (A, "b")])
    texts = [bytes(found.encode(turns, tools).tokens.tolist()).decode() for tools in (None, TOOL)]
    assert texts[1] == TOOLS_TEXT + texts[0]


def test_a_token_that_tokenizer_json_lacks_is_no_other_token(tmp_path: Path) -> None:
    found = template(tmp_path, CHATML, extra_special_tokens={"end": "<|end|>", "other": "<|other|>"})
    with pytest.raises(SampleError, match=r"writes <\|end\|>, a token of .* that tokenizer.json lacks"):
        found.encode(conversation([(U, "a"), (A, "b")]))


def test_tokens_are_those_of_tokenizer_json_whatever_transformers_makes_of_the_folder(tmp_path: Path) -> None:
    found = template(tmp_path, CHATML, tokenizer_class="GPT2Tokenizer", add_prefix_space=True)
    tokens = found.encode(conversation([(U, "a"), (A, "b")])).tokens
    assert bytes(tokens.tolist()) == b"<|user|>a<|end|>\n<|assistant|>b<|end|>\n"


@pytest.mark.parametrize(
    ("asked", "written"), [("%d %b %Y", "26 Jul 2024"), ("%Y-%m-%d", "2024-07-26"), ("%A, %B %d", "Friday, July 26")]
)
def test_what_a_template_writes_does_not_hang_on_the_day(asked: str, written: str, tmp_path: Path) -> None:
    today = "\n{% if strftime_now is defined %}{{ strftime_now('" + asked + "') }}{% endif %}"
    found = template(tmp_path, today + CHATML).encode(conversation([(U, "a"), (A, "b")]))
    assert bytes(found.tokens.tolist()).startswith(f"\n{written}<|user|>a".encode())


def test_a_tokenizer_that_gives_up_on_a_conversation_is_one_error(tmp_path: Path) -> None:
    template(tmp_path, CHATML)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pre_tokenizer": {"type": "FixedLength", "length": 0}}))
    with pytest.raises(ConfigError, match="mine makes no tokens of a conversation"):
        ChatTemplate(tmp_path, "mine").encode([{"role": U, "content": "hi"}, {"role": A, "content": "yo"}])
