"""What a document is, and how a row of a table becomes one: text, or a conversation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.config.training import DataConfig
from shoal.errors import MALFORMED

_ROLES: Final = {"human": "user", "gpt": "assistant", "bot": "assistant"}
"""Of ShareGPT, as chat templates have them."""


class Conversation(NamedTuple):
    """A document of messages.

    Attributes:
        messages: Each with a `role`.
        tools: That its template writes; None: none.
        where: The file and the row, for people.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    where: str


class TextPiece(NamedTuple):
    """A part of a document, or all of it.

    Attributes:
        content: Text, tokens, or messages.
    """

    content: str | NDArray[np.generic] | Conversation
    ends: bool = True

    @property
    def size(self) -> int:
        """About how many characters or tokens it has."""
        if isinstance(self.content, Conversation):
            return sum(len(str(message)) for message in self.content.messages)
        return len(self.content)


class Unreadable(NamedTuple):
    """Documents that cannot be read or are no text.

    Attributes:
        where: The file and the row, for people.
    """

    where: str
    reason: str
    documents: int = 1


class Documents(ABC):
    """The documents of one split, read in order, as often as they are asked for.

    Attributes:
        share: How much of them has been read, 0 to 1; None: nobody knows how many there are.
        identity: Another text where the documents may be others.
    """

    share: float | None = 0.0
    identity: str

    @abstractmethod
    def __iter__(self) -> Iterator[TextPiece | Unreadable]:
        """Yield what there is, from the first document on.

        Raises:
            ConfigError: There is something that cannot be read at all.
        """

    def after(self, rows: int) -> Iterator[TextPiece | Unreadable]:
        """Yield what there is without the first `rows` of it."""
        return islice(iter(self), rows, None)


class RowReader:
    """Takes the document out of a row: text, or a conversation where `data.messages_column` names one.

    Attributes:
        column: The one that has it.
        columns: All that are read, of which the others may be absent.
    """

    def __init__(self, data: DataConfig) -> None:
        is_chat = data.messages_column is not None
        self.key = "data.messages_column" if is_chat else "data.text_column"
        self.column = data.messages_column or data.text_column
        self._answer = data.answer_column
        self._tools = data.tools_column if is_chat else None
        named = (self.column, self._answer, self._tools)
        self.columns = tuple(column for column in named if column is not None)

    def columns_among(self, names: Sequence[str]) -> list[str]:
        """Return those of its columns that there are: what else is in a row, as images, need not be decoded."""
        return [column for column in self.columns if column in names]

    def take(self, row: Mapping[str, Any], where: str, *, is_table: bool = True) -> TextPiece | Unreadable:
        """Return the document of a row that has the column.

        Args:
            is_table: A row has the keys of all rows, also inside of its values; those without a value are none of it.
        """
        if self._tools is None:
            return pieces_of(row[self.column], where)
        messages: Any = row[self.column]
        if self._answer is not None:
            answer = row.get(self._answer)
            if not isinstance(messages, str) or not isinstance(answer, str):
                odd = self.column if not isinstance(messages, str) else self._answer
                return Unreadable(where, f'its "{odd}" is no text: data.answer_column wants a question and an answer')
            messages = [{"role": "user", "content": messages}, {"role": "assistant", "content": answer}]
        values = messages, row.get(self._tools)
        messages, tools = map(_without_nothing, values) if is_table else values
        return conversation_of(messages, tools, where)


def conversation_of(messages: object, tools: object, where: str) -> TextPiece | Unreadable:
    """Return a conversation: messages with `role`, or `from` and `value` as ShareGPT has them.

    Args:
        tools: A list, or JSON of one.
    """
    if not isinstance(messages, list):
        return Unreadable(where, f"it holds no messages but {type(messages).__name__}")
    if not messages:
        return Unreadable(where, "it has no messages")
    found: list[dict[str, Any]] = []
    for message in cast("list[Any]", messages):
        named = cast("dict[str, Any]", message) if isinstance(message, dict) else {}
        if "from" in named and "role" not in named:
            role = named["from"]
            named = {"role": _ROLES.get(role, role) if isinstance(role, str) else None, "content": named.get("value")}
        if not isinstance(named.get("role"), str):
            return Unreadable(where, f"message {len(found) + 1} has no role")
        # A template asks whether there is a key.
        found.append({key: value for key, value in named.items() if value is not None})
    if isinstance(tools, str) and tools:
        try:
            tools = msgspec.json.decode(tools)
        except MALFORMED as error:
            return Unreadable(where, f"its tools are no JSON ({error})")
    if tools and not isinstance(tools, list):
        return Unreadable(where, f"its tools are no list but {type(tools).__name__}")
    return TextPiece(Conversation(found, cast("list[dict[str, Any]] | None", tools or None), where))


def _without_nothing(value: Any) -> Any:
    if isinstance(value, dict):
        named = cast("dict[str, Any]", value)
        return {key: _without_nothing(each) for key, each in named.items() if each is not None}
    return [_without_nothing(each) for each in cast("list[Any]", value)] if isinstance(value, list) else value


def pieces_of(value: object, where: str) -> TextPiece | Unreadable:
    """Return the text that a row has."""
    if not isinstance(value, str):
        return Unreadable(where, f"it holds no text but {'nothing' if value is None else type(value).__name__}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return Unreadable(where, f"it is no Unicode text ({error.reason})")
    return TextPiece(value)
