"""How a whole model computes the next token of one text: by the units of a native family, or as transformers does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.model.decoding import BLOCK_TOKENS, DecodingUnit, Span, StageDecoder
from shoal.model.hf.cached import CachedModel
from shoal.model.hf.skeleton import Part
from shoal.model.stage import StageModule

_CHUNK_TOKENS: Final = 256
"""Of a prompt, computed at a time by units: their scores are as many times the tokens before."""


class Decoder(Protocol):
    """A text that grows."""

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
