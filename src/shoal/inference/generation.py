"""One text after a prompt, in one process.

prompt -> tokens -> whole model -> logits -> next token -> text
                        ^------------------------'
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.inference.sampling import Sampling, next_token
from shoal.inference.text import Tokens, UntilStop
from shoal.model.decoding import BLOCK_TOKENS, DecodingUnit, Span, StageDecoder
from shoal.model.hf.cached import CachedModel
from shoal.model.hf.skeleton import Part
from shoal.model.stage import StageModule

Finish = Literal["stop", "length", "context"]


@dataclass(frozen=True, slots=True)
class TextRequest:
    """What is wanted.

    Attributes:
        prompt: Not empty.
        max_tokens: None: until the model's context is full.
        stops: Strings that end the text, and are no part of it.

    Raises:
        ConfigError: Values make no sense; all of them are named.
    """

    prompt: str
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems: list[str] = []
        if not self.prompt:
            problems.append("the prompt is empty: give at least a character to go on from")
        if self.max_tokens is not None and self.max_tokens < 1:
            problems.append(f"max-tokens {self.max_tokens}: give a number of tokens, at least 1")
        if "" in self.stops:
            problems.append("stop: an empty text stops before it begins; leave it out")
        if problems:
            raise ConfigError("\n".join(problems))


class Continuation:
    """One sequence; iterate over it for its text, piece by piece.

    Attributes:
        tokens: What has been generated so far.
        finish: Why it has ended: a stop string or the model's own end, `max_tokens`, or a full context; None: not yet.
    """

    def __init__(self, model: StageModule, tokens: Tokens, request: TextRequest, *, context: int | None = None) -> None:
        """Compute nothing yet.

        Args:
            model: In one piece, in eval mode, see `require_generates`.
            context: Tokens of prompt and text together; None: as many as a sample has.

        Raises:
            ConfigError: The prompt does not fit the model.
        """
        self.tokens: list[int] = []
        self.finish: Finish | None = None
        self._request = request
        self._meaning = tokens
        self._prompt = tokens.encode(request.prompt)
        self._context = model.input_spec.shape[0] if context is None else context
        vocabulary = model.output_spec.shape[-1]
        if odd := [token for token in self._prompt if token >= vocabulary]:
            raise ConfigError(f"the prompt has token {odd[0]}, the model knows {vocabulary}: it has another tokenizer")
        if len(self._prompt) > self._context:
            raise ConfigError(f"the prompt has {len(self._prompt)} tokens, the model takes {self._context}: shorten it")
        if not self._prompt:
            raise ConfigError("the prompt has no token: give another one")
        self._decoder = decoder_of(model, self._context)

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has."""
        return len(self._prompt)

    def __iter__(self) -> Generator[str]:
        """Generate; gives text as soon as it is complete."""
        stream, until = self._meaning.stream(self._prompt), UntilStop(self._request.stops)
        for token in self._generated():
            if text := until.push(stream.push(token)):
                yield text
            if until.is_over:
                self.finish = "stop"
                return
        if text := until.push(stream.flush()) + until.flush():
            yield text

    def _generated(self) -> Generator[int]:
        request = self._request
        logits_V = self._decoder.logits(self._prompt)
        while True:
            # A text of the whole context has one token more: what follows its last one.
            position = len(self._prompt) + len(self.tokens)
            token = next_token(logits_V, request.sampling, position)
            if token in self._meaning.ends:
                self.finish = "stop"
                return
            self.tokens.append(token)
            yield token
            if request.max_tokens is not None and len(self.tokens) >= request.max_tokens:
                self.finish = "length"
                return
            if position >= self._context:
                self.finish = "context"
                return
            logits_V = self._decoder.logits([token])


_CHUNK_TOKENS: Final = 256
"""Of a prompt, computed at a time by units: their scores are as many times the tokens before."""


class Decoder(Protocol):
    """A text that grows, by the units of a native family, or as transformers does."""

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Take the next tokens, at least one; return the logits (V,) of the one that follows them."""
        ...


def require_generates(model: StageModule, name: str) -> None:
    """Check that a model generates text.

    Raises:
        ConfigError: Its family does not.
    """
    if not isinstance(model.assembled, Part) and not _decodes(model):
        raise ConfigError(f"{name} is of a family that generates no text; gpt and hf do, and families that decode")


def decoder_of(model: StageModule, context: int) -> Decoder:
    """Return what computes a text of up to `context` tokens.

    Args:
        model: In one piece, in eval mode, see `require_generates`.
    """
    if isinstance(model.assembled, Part):
        return _OfTransformers(model, model.assembled)
    return _OfUnits(model, context)


class _OfUnits:
    def __init__(self, model: StageModule, context: int) -> None:
        num_blocks = -(-context // BLOCK_TOKENS)
        self._blocks = tuple(range(num_blocks))
        self._units = StageDecoder(model, num_blocks)
        self._device = next(model.parameters()).device
        self._position = 0

    def logits(self, tokens: Sequence[int]) -> Tensor:
        logits: list[Tensor] = []
        for start in range(0, len(tokens), _CHUNK_TOKENS):
            part = tokens[start : start + _CHUNK_TOKENS]
            span = Span(0, len(part), self._position, self._blocks)
            logits = [*self._units.decode(torch.tensor(part, device=self._device), (span,))]
            self._position += len(part)
        return logits[0]


class _OfTransformers:
    def __init__(self, model: StageModule, part: Part) -> None:
        self._cached = CachedModel(part)
        self._device = next(model.parameters()).device

    def logits(self, tokens: Sequence[int]) -> Tensor:
        return self._cached.logits(torch.tensor(tokens, device=self._device))


def _decodes(model: StageModule) -> bool:
    return all(isinstance(unit, DecodingUnit) for unit in model.units.values())
