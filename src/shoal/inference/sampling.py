"""Which token comes next, of a model's logits. Pure: what is drawn at random follows from the seed and the position.

    logits / temperature -> top_k -> top_p -> min_p -> what is left, as probabilities -> one draw      as transformers'

So a text does not depend on what else is generated beside it, and can go on elsewhere. Shapes: V tokens of the
vocabulary.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass

from torch import Tensor

from shoal.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: 0: the likeliest one; higher ones flatten the distribution.
        top_k: Only this many of the likeliest; None: all.
        top_p: Only the likeliest ones that together have this probability; None: all.
        min_p: Only those that have this share of the likeliest one's probability; None: all.

    Raises:
        ConfigError: Values make no sense; all of them are named.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        problems: list[str] = []
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            problems.append(f"temperature {self.temperature}: give a number of 0 or more")
        if self.top_k is not None and self.top_k < 1:
            problems.append(f"top-k {self.top_k}: give a number of tokens, at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            problems.append(f"top-p {self.top_p}: give a probability above 0, at most 1")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            problems.append(f"min-p {self.min_p}: give a share from 0 to 1")
        if not 0 <= self.seed < 1 << 63:
            problems.append(f"seed {self.seed}: give a number from 0 to 2**63 - 1")
        limits = {"top-k": self.top_k, "top-p": self.top_p, "min-p": self.min_p}
        given = [name for name, value in limits.items() if value is not None]
        if self.temperature == 0 and given:
            problems.append(f"{' and '.join(given)}: with temperature 0 it is always the likeliest token; give another")
        if problems:
            raise ConfigError("\n".join(problems))


def next_token(logits_V: Tensor, sampling: Sampling, position: int) -> int:
    """Choose the token at a position.

    Args:
        position: Counted from the beginning of the text, the prompt included.
    """
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    probabilities_V = distribution(logits_V, sampling)
    # Likeliest first, so that rounding far down the tail moves no draw.
    ordered_V, tokens_V = probabilities_V.sort(descending=True, stable=True)
    reached_V = ordered_V.cumsum(0)
    drawn = _uniform(sampling.seed, position) * reached_V[-1].item()
    index = int((reached_V <= drawn).sum())
    return int(tokens_V[min(index, int((ordered_V > 0).sum()) - 1)])


def distribution(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """The probabilities from which a token is drawn: float64 (V,), 0 for those that are left out."""
    scores_V = logits_V.double().cpu() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(scores_V):
        least = scores_V.topk(sampling.top_k).values[-1]
        scores_V = scores_V.masked_fill(scores_V < least, -math.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        ascending_V, tokens_V = scores_V.sort()
        is_out_V = ascending_V.softmax(0).cumsum(0) <= 1 - sampling.top_p
        is_out_V[-1] = False
        scores_V = scores_V.masked_fill(is_out_V.scatter(0, tokens_V, is_out_V), -math.inf)
    if sampling.min_p is not None:
        probabilities_V = scores_V.softmax(0)
        scores_V = scores_V.masked_fill(probabilities_V < sampling.min_p * probabilities_V.max(), -math.inf)
    return scores_V.softmax(0)


def _uniform(seed: int, position: int) -> float:
    """A number from 0 to below 1, with 53 random bits: a pure function of both."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8, person=b"shoal.sampling").digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)
