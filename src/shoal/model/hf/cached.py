"""A whole model of transformers, one token after the other: its own forward, and its own cache of what came before.

Which cache a model keeps (keys and values, of a window alone, states of a convolution) is its own choice. The tests
compare every known kind with transformers' own `generate`.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from shoal.model.hf.skeleton import Part


class CachedModel:
    """A text that grows.

    Args:
        part: The whole model, in eval mode.
    """

    def __init__(self, part: Part) -> None:
        self._model = part.model
        self._cache: Any = None

    @torch.no_grad()
    def logits(self, tokens_T: Tensor) -> Tensor:
        """Take the next tokens; return the logits (V,) of the one that follows them."""
        output = self._model(input_ids=tokens_T[None], past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = output.past_key_values
        return output.logits[0, -1]


def ends_of(part: Part) -> tuple[int, ...]:
    """Return the tokens that end a text, as the config of a whole model says."""
    said: object = part.model.config.eos_token_id
    found = cast("list[object]", said) if isinstance(said, list) else [said]
    return tuple(token for token in found if isinstance(token, int))
