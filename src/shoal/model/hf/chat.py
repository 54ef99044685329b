"""Conversations as a tokenizer's chat template writes them, and which of their tokens are an assistant's answers.

    messages, tools -> template -> text, and where in it answers are -> tokens, of which each answer's are targets
                                           by tokenizer.json, as everywhere: transformers may read more into a folder

A template may mark answers by `{% generation %}`. Where it does not, an answer is what the template adds to the
messages before it and the prompt for an answer. That holds only if it writes the same again when other messages follow,
which is checked for each conversation: a template that takes the thoughts out of earlier answers has no such places.

A template is a program, of whoever has made the tokenizer. It reads and calls nothing but the messages (transformers
runs it in jinja's sandbox), and the process that runs it ends where it computes without end.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.errors import ConfigError, SampleError
from shoal.model.hf.library import transformers_package
from shoal.model.hf.tokenizer import TOKENIZER_FILE, makes_tokens, read_tokenizer
from shoal.runtime.own_limits import ends_after

_MARKS: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ASSISTANT: Final = "assistant"
_MOST_S: Final = 10.0
"""Of computing for one text, which takes milliseconds, and a tenth of a second with thousands of messages."""
_DAY: Final = {"%d": "26", "%b": "Jul", "%B": "July", "%m": "07", "%y": "24", "%Y": "2024", "%a": "Fri", "%A": "Friday"}
"""Tokens of a text are the same on any day: that of Llama 3's template where there is no clock."""
_CLOCK: Final = "".join(
    [
        "{% macro strftime_now(format) %}{{ format",
        *(f" | replace('{code}', '{value}')" for code, value in _DAY.items()),
        " }}{% endmacro %}\n",
    ]
)

Message = dict[str, Any]


class ChatTokens(NamedTuple):
    """A conversation.

    Attributes:
        tokens: (n,) int64.
        is_target: (n,) bool: the token has a character of an answer.
    """

    tokens: NDArray[np.int64]
    is_target: NDArray[np.bool_]


class ChatTemplate:
    """The template of a tokenizer.

    Args:
        name: For messages.

    Raises:
        ConfigError: transformers or tokenizers is not installed, or the tokenizer has no template or is none that they
            read.
        OSError: The tokenizer cannot be read.
    """

    def __init__(self, folder: Path, name: str) -> None:
        package = transformers_package()
        self._name = name
        self._tokenizer: Any = read_tokenizer((folder / TOKENIZER_FILE).read_bytes(), f"data.tokenizer = {name}")
        try:
            theirs: Any = package.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise ConfigError(f"data.tokenizer = {name}: transformers cannot read it ({error})") from error
        try:
            # Of templates by name, one may be for conversations with tools.
            self._text: str = _CLOCK + theirs.get_chat_template()
            self._text_of_tools: str = _CLOCK + theirs.get_chat_template(tools=[])
        except ValueError as error:
            raise ConfigError(
                f"data.tokenizer = {name} has no chat template, by which conversations become text ({error}); put a "
                "chat_template.jinja into its folder"
            ) from error
        self._special: dict[str, Any] = theirs.special_tokens_map
        # They have no number that the model and everybody else knows.
        self._added: set[str] = theirs.get_vocab().keys() - self._tokenizer.get_vocab(with_added_tokens=True).keys()
        self._templates: Any = importlib.import_module("transformers.utils.chat_template_utils")

    def encode(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> ChatTokens:
        """Return the tokens of a conversation.

        Args:
            messages: Each with a `role`, and most with a `content`.
            tools: JSON schemas of functions that the assistant may call.

        Raises:
            SampleError: The template refuses the messages, does not tell where the answers are, or writes a token that
                tokenizer.json lacks.
            ConfigError: The package tokenizers gives up on the text.
        """
        has_marks = _MARKS.search(self._text_for(tools)) is not None
        text, answers = self._marked(messages, tools) if has_marks else self._compared(messages, tools)
        if lacking := sorted(token for token in self._added if token in text):
            raise SampleError(
                f"the chat template writes {', '.join(lacking[:3])}, a token of tokenizer_config.json that "
                "tokenizer.json lacks: save the tokenizer anew by save_pretrained of transformers"
            )
        with makes_tokens(f"data.tokenizer = {self._name} makes no tokens of a conversation", len(text)):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        tokens = np.array(encoding.ids, dtype=np.int64)
        places = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        is_target = np.zeros(len(tokens), dtype=np.bool_)
        for start, stop in answers:
            is_target |= (places[:, 0] < stop) & (places[:, 1] > start)
        return ChatTokens(tokens, is_target)

    def asked(self, messages: Sequence[Message]) -> str:
        """Return the text of a conversation up to where the assistant's next answer begins.

        Raises:
            SampleError: The template refuses the messages.
        """
        return self._written(messages, None, add_generation_prompt=True)

    def _marked(
        self, messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and where answers are in it, as the template marks them."""
        texts, places = self._rendered(messages, tools, return_assistant_tokens_mask=True)
        return texts[0], list(places[0])

    def _compared(
        self, messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and where answers are in it, as the template writes fewer messages."""
        whole = self._written(messages, tools)
        answers: list[tuple[int, int]] = []
        for number, message in enumerate(messages):
            if message["role"] != _ASSISTANT:
                continue
            asked = self._written(messages[:number], tools, add_generation_prompt=True)
            answered = self._written(messages[: number + 1], tools)
            if not answered.startswith(asked) or not whole.startswith(answered):
                raise SampleError(
                    f"the chat template writes message {number + 1}, an answer, otherwise when it is the last one or "
                    "when it is asked for, so nothing tells which tokens are its: give a template that marks answers "
                    "by {% generation %}"
                )
            answers.append((len(asked), len(answered)))
        return whole, answers

    def _written(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, *, add_generation_prompt: bool = False
    ) -> str:
        texts, _ = self._rendered(messages, tools, add_generation_prompt=add_generation_prompt)
        return texts[0]

    def _text_for(self, tools: Sequence[Message] | None) -> str:
        return self._text if tools is None else self._text_of_tools

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Message] | None, **options: bool) -> Any:
        """Return the text of one conversation and the places of answers, each in a list."""
        try:
            with ends_after(_MOST_S):
                return self._templates.render_jinja_template(
                    conversations=[list(messages)],
                    tools=None if tools is None else list(tools),
                    chat_template=self._text_for(tools),
                    **options,
                    **self._special,
                )
        except MemoryError:
            raise  # another time there may be enough
        except Exception as error:
            raise SampleError(f"the chat template refuses it: {type(error).__name__}: {error}") from error
