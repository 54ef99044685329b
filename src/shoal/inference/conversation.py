"""What a person and a model have said to each other, as the text that the model's next answer follows.

messages -> chat template -> text -> `Continuation` -> answer -> messages
"""

from __future__ import annotations

from typing import Final

from shoal.errors import ConfigError
from shoal.inference.text import Tokens
from shoal.model.hf.chat import ChatTemplate, Message

_ANSWER_SHARE: Final = 0.25
"""Of the context: so much is left for an answer, where earlier messages can make room."""


class OngoingConversation:
    """Messages of both sides, of which the oldest are forgotten when the model's context is full.

    Args:
        tokens: What the tokens of the text are.
        context: So many tokens the model takes, of messages and answer together.
        system: What is said to the model before everything else, and never forgotten; empty: nothing.

    Attributes:
        num_forgotten: So many messages were forgotten.
    """

    def __init__(self, template: ChatTemplate, tokens: Tokens, context: int, system: str) -> None:
        self.num_forgotten = 0
        self._template = template
        self._tokens = tokens
        self._context = context
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self._messages: list[Message] = []

    def ask(self, text: str) -> str:
        """Add what a person says; return the text that the answer follows.

        Raises:
            ConfigError: The message is empty, or no text in UTF-8.
            SampleError: The template refuses the messages.
        """
        if not text.strip():
            raise ConfigError("the message is empty: say something")
        self._messages.append({"role": "user", "content": text})
        written = self._written()
        # A question and its answer go together: templates want both sides in turn.
        while len(self._messages) > 2 and self._is_long(written):
            del self._messages[:2]
            self.num_forgotten += 2
            written = self._written()
        return written

    def answered(self, text: str) -> None:
        """Add what the model has said."""
        self._messages.append({"role": "assistant", "content": text})

    def _written(self) -> str:
        return self._template.asked([*self._system, *self._messages])

    def _is_long(self, written: str) -> bool:
        return len(self._tokens.encode(written)) > (1 - _ANSWER_SHARE) * self._context
