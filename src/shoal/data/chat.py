"""Conversations into marked tokens: a `tokenising.Encoder` by the chat template of a tokenizer."""

from __future__ import annotations

import numpy as np

from shoal.data.documents import Conversation, TextPiece, Unreadable
from shoal.data.packed_texts import MARKED_DTYPE, MOST_VOCABULARY, chat_identity, marked
from shoal.data.source import Array
from shoal.data.tokenising import EncodedTexts
from shoal.errors import ConfigError, SampleError
from shoal.model.hf.chat import ChatTemplate
from shoal.model.hf.tokenizer import KeptTokenizer


class ChatEncoder:
    """Makes one text of each conversation; those without an answer, or without places of answers, are left out.

    Args:
        name: Of the tokenizer, for messages.

    Raises:
        ConfigError: The tokenizer cannot be read, or it has no template.
    """

    dtype = MARKED_DTYPE

    def __init__(self, kept: KeptTokenizer, name: str) -> None:
        self.identity = chat_identity(kept.hash)
        self.vocabulary = kept.facts.vocabulary
        if self.vocabulary > MOST_VOCABULARY:
            raise ConfigError(f"data.tokenizer = {name} has more than {MOST_VOCABULARY} tokens")
        self._template = ChatTemplate(kept.folder, name)

    def encode(self, pieces: list[TextPiece]) -> EncodedTexts:
        texts: list[Array] = [np.empty(0, MARKED_DTYPE)]
        refused: list[Unreadable] = []
        for piece in pieces:
            conversation = piece.content
            if not isinstance(conversation, Conversation):
                continue
            try:
                found = self._template.encode(conversation.messages, conversation.tools)
            except SampleError as error:
                refused.append(Unreadable(conversation.where, str(error)))
                continue
            if found.is_target[1:].any():
                texts.append(marked(found.tokens, found.is_target))
            else:
                refused.append(Unreadable(conversation.where, "it has no answer of an assistant"))
        return EncodedTexts(np.concatenate(texts), sum(piece.size for piece in pieces), tuple(refused))
