"""Decoding: a stage computes new tokens of several sequences at once and keeps keys and values of earlier ones.

    rows of sequence A (a prompt's next 256 tokens) | row of sequence B (one token) | ...   one packed batch, (N, ...)
    blocks of 64 tokens: A has 3, 0, 7   B has 5                                            keys and values, paged

A row's result does not depend on the rows beside it, nor on how a prompt was cut, bit for bit where the CPU's matrix
products do not: MKL computes the rows of a product alike from some number on (four on older CPUs, 16 on those with
AMX), so there are never fewer; and attention adds up one block of keys after the other, each always whole, with exact
zeros for keys that a row may not see.

Shapes: N rows (tokens), C width, H heads, D = C / H, K = 64 tokens of a block, B blocks.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.errors import LocalProtocolError
from shoal.model.stage import StageModule

BLOCK_TOKENS: Final = 64
_LEAST_ROWS: Final = 16


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence in a packed batch.

    Attributes:
        start: The first of them; spans follow each other without gaps.
        count: How many, at least 1.
        position: Of the first row in its sequence, counted from 0; what is before it is in the blocks.
        blocks: The sequence's blocks in order, enough for all its tokens up to the last row.
    """

    start: int
    count: int
    position: int
    blocks: tuple[int, ...]

    @property
    def rows(self) -> slice:
        """Where its rows are in the batch."""
        return slice(self.start, self.start + self.count)

    @property
    def end(self) -> int:
        """The position after its last row."""
        return self.position + self.count


class KeyValues:
    """Keys and values of one unit, in blocks that sequences own.

    Args:
        num_blocks: B.
    """

    def __init__(self, num_blocks: int, num_heads: int, head_width: int, like: Tensor) -> None:
        # Zeros: what nobody has written yet is multiplied by a weight of zero, and must be finite for that.
        shape = (num_blocks, num_heads, BLOCK_TOKENS, head_width)
        self._keys_BHKD = like.new_zeros(shape)
        self._values_BHKD = like.new_zeros(shape)

    def write(self, span: Span, keys_NHD: Tensor, values_NHD: Tensor) -> None:
        """Keep the keys and values of a span's rows."""
        done = 0
        while done < span.count:
            block, offset = divmod(span.position + done, BLOCK_TOKENS)
            count = min(BLOCK_TOKENS - offset, span.count - done)
            place = (span.blocks[block], slice(None), slice(offset, offset + count))
            self._keys_BHKD[place] = keys_NHD[done : done + count].transpose(0, 1)
            self._values_BHKD[place] = values_NHD[done : done + count].transpose(0, 1)
            done += count

    def attend(self, span: Span, queries_NHD: Tensor) -> Tensor:
        """Attention of a span's rows to all keys up to each one's own: (n, H, D)."""
        count = queries_NHD.shape[0]
        queries_HND = enough_rows(queries_NHD).transpose(0, 1).contiguous()
        last = span.position + queries_HND.shape[1]
        positions_N1 = torch.arange(span.position, last, device=queries_HND.device).unsqueeze(1)
        scale = 1.0 / math.sqrt(queries_HND.shape[2])
        blocks = span.blocks[: -(-span.end // BLOCK_TOKENS)]
        scores: list[Tensor] = []
        for number, block in enumerate(blocks):
            first = number * BLOCK_TOKENS
            keys_K = torch.arange(first, first + BLOCK_TOKENS, device=queries_HND.device)
            scores_HNK = torch.bmm(queries_HND, self._keys_BHKD[block].transpose(1, 2)) * scale
            scores.append(scores_HNK.masked_fill(keys_K > positions_N1, -math.inf))
        highest_HN1 = torch.stack([each.amax(dim=2, keepdim=True) for each in scores]).amax(dim=0)
        total_HN1 = torch.zeros_like(highest_HN1)
        mixed_HND = torch.zeros_like(queries_HND)
        for scores_HNK, block in zip(scores, blocks, strict=True):
            weights_HNK = torch.exp(scores_HNK - highest_HN1)
            total_HN1 += weights_HNK.sum(dim=2, keepdim=True)
            mixed_HND += torch.bmm(weights_HNK, self._values_BHKD[block])
        return (mixed_HND / total_HN1).transpose(0, 1)[:count]


@runtime_checkable
class DecodingUnit(Protocol):
    """A unit of a family that generates. In eval mode; see `KeyValues` for what it may keep."""

    @property
    @abstractmethod
    def heads(self) -> tuple[int, int] | None:
        """H and D of the keys that it keeps; None: it keeps none."""

    @abstractmethod
    def decode(self, rows: Tensor, spans: Sequence[Span], kept: KeyValues | None) -> Tensor:
        """Compute packed rows (N, ...), at least 16; those after the last span are there to make up the number.

        The last unit of a model gives one row for each span, that of its last token.
        """


class StageDecoder:
    """Decodes through one stage: a module whose parameters it only reads, and the blocks of keys of its units.

    Args:
        module: Of a family that generates, without autocast.
        num_blocks: The blocks that there are, for all sequences together.

    Raises:
        LocalProtocolError: The family does not generate.
    """

    def __init__(self, module: StageModule, num_blocks: int) -> None:
        like = next(module.parameters())
        self._units: list[tuple[DecodingUnit, KeyValues | None]] = []
        for name, unit in module.units.items():
            if not isinstance(unit, DecodingUnit):
                raise LocalProtocolError(f"unit {name} does not decode: its family does not generate")
            kept = None if unit.heads is None else KeyValues(num_blocks, *unit.heads, like)
            self._units.append((unit, kept))

    @torch.no_grad()
    def decode(self, rows: Tensor, spans: Sequence[Span]) -> Tensor:
        """Compute the spans' rows: tokens (N,) in the first stage, else (N, C).

        Returns:
            (N, C), or in the last stage the logits of the token after each span, (spans, V).
        """
        count = rows.shape[0]
        rows = enough_rows(rows)
        for unit, kept in self._units:
            rows = unit.decode(rows, spans, kept)
        return rows[:count]


def enough_rows(rows: Tensor) -> Tensor:
    """The rows (n, ...) with zeros after them where they are fewer than `_LEAST_ROWS`."""
    missing = _LEAST_ROWS - rows.shape[0]
    return rows if missing <= 0 else F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing))


def positions(spans: Sequence[Span], num_rows: int, device: torch.device) -> Tensor:
    """The position of each row in its sequence, (N,); 0 for rows of no span."""
    found = [position for span in spans for position in range(span.position, span.end)]
    return torch.tensor(found + [0] * (num_rows - len(found)), device=device)
