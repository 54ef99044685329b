"""A small causal transformer over bytes, in the shape of GPT-2: pre-norm blocks, learned positions, untied head.

Source: GPT-2 (Radford et al. 2019), initialisation included: normal(0, 0.02), the projections that write to the
residual stream scaled by 1/sqrt(2 * layers). Dropout acts on the embedding and on what each branch adds to the
residual stream, not on attention weights, so that attention stays one fused kernel.

Shapes: B samples, T tokens, C width, H heads, D = C / H, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import LocalProtocolError
from shoal.model.chunked_loss import chunk_tokens
from shoal.model.decoding import KeyValues, Span, enough_rows, positions
from shoal.model.gpt_shape import GptShape
from shoal.model.layered import LayeredFamily
from shoal.model.stage import TensorSpec

if TYPE_CHECKING:
    from shoal.config.model import ModelConfig
    from shoal.config.training import DataConfig

_INIT_STD = 0.02


class Embedding(nn.Module):
    """Token plus position embedding: (B, T) int64 -> (B, T, C)."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocab_size, shape.width)
        self.position = nn.Embedding(shape.seq_len, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        nn.init.normal_(self.token.weight, std=_INIT_STD)
        nn.init.normal_(self.position.weight, std=_INIT_STD)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        hidden_BTC = self.token(tokens_BT) + self.position.weight[: tokens_BT.shape[1]]
        return self.dropout(hidden_BTC)

    @property
    def heads(self) -> None:
        """See `DecodingUnit`."""

    def decode(self, rows: Tensor, spans: Sequence[Span], kept: KeyValues | None) -> Tensor:
        """See `DecodingUnit`: tokens (N,) -> (N, C)."""
        return self.token(rows) + self.position(positions(spans, rows.shape[0], rows.device))


class Attention(nn.Module):
    """Causal self-attention: (B, T, C) -> (B, T, C)."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.qkv = _linear(shape.width, 3 * shape.width, _INIT_STD)
        self.out = _linear(shape.width, shape.width, _INIT_STD / math.sqrt(2 * shape.num_layers))

    def forward(self, hidden_BTC: Tensor) -> Tensor:
        samples, tokens, width = hidden_BTC.shape
        qkv_BTC3 = cast("Tensor", self.qkv(hidden_BTC))
        # The outermost dimension of the three is the slowest within a token: q, k and v are each one run of C.
        q_BHTD, k_BHTD, v_BHTD = qkv_BTC3.view(samples, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        return self.out(mixed_BHTD.transpose(1, 2).reshape(samples, tokens, width))

    def decode(self, hidden_NC: Tensor, spans: Sequence[Span], kept: KeyValues) -> Tensor:
        """As `forward` of packed rows, with the keys and values that are kept: (N, C) -> (N, C)."""
        qkv_N3HD = cast("Tensor", self.qkv(hidden_NC)).view(hidden_NC.shape[0], 3, self.num_heads, -1)
        q_NHD, k_NHD, v_NHD = qkv_N3HD.unbind(1)
        mixed_NC = torch.zeros_like(hidden_NC)
        for span in spans:
            kept.write(span, k_NHD[span.rows], v_NHD[span.rows])
            mixed_NC[span.rows] = kept.attend(span, q_NHD[span.rows]).flatten(1)
        return self.out(mixed_NC)


class Mlp(nn.Module):
    """Two layers with a GELU: (B, T, C) -> (B, T, C)."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.approximate = "tanh" if shape.activation == "gelu_new" else "none"
        self.up = _linear(shape.width, shape.mlp_ratio * shape.width, _INIT_STD)
        self.down = _linear(shape.mlp_ratio * shape.width, shape.width, _INIT_STD / math.sqrt(2 * shape.num_layers))

    def forward(self, hidden_BTC: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(hidden_BTC), approximate=self.approximate))


class Block(nn.Module):
    """Pre-norm attention and MLP around the residual stream: (B, T, C) -> (B, T, C)."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp = Mlp(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, hidden_BTC: Tensor) -> Tensor:
        hidden_BTC = hidden_BTC + self.dropout(self.attention(self.attention_norm(hidden_BTC)))
        return hidden_BTC + self.dropout(self.mlp(self.mlp_norm(hidden_BTC)))

    @property
    def heads(self) -> tuple[int, int]:
        return self.attention.num_heads, self.attention.qkv.in_features // self.attention.num_heads

    def decode(self, rows: Tensor, spans: Sequence[Span], kept: KeyValues | None) -> Tensor:
        """See `DecodingUnit`: (N, C) -> (N, C)."""
        if kept is None:
            raise LocalProtocolError("a block decodes with the keys that it keeps")
        hidden_NC = rows + self.attention.decode(self.attention_norm(rows), spans, kept)
        return hidden_NC + self.mlp(self.mlp_norm(hidden_NC))


class Head(nn.Module):
    """Final norm and logits: (B, T, C) -> (B, T, V)."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.logits = nn.Linear(shape.width, shape.vocab_size, bias=False)
        nn.init.normal_(self.logits.weight, std=_INIT_STD)

    def forward(self, hidden_BTC: Tensor) -> Tensor:
        return self.logits(self.norm(hidden_BTC))

    @property
    def heads(self) -> None:
        """See `DecodingUnit`."""

    def decode(self, rows: Tensor, spans: Sequence[Span], kept: KeyValues | None) -> Tensor:
        """See `DecodingUnit`: (N, C) -> (spans, V)."""
        last = [span.start + span.count - 1 for span in spans]
        return self.forward(enough_rows(rows[last]))[: len(last)]


class GptFamily(LayeredFamily):
    """Units: the embedding, each block, the head.

    Args:
        loss_chunk: `model.loss_chunk_tokens`.
    """

    first_units = ("embedding",)

    def __init__(self, shape: GptShape, loss_chunk: int | None = None) -> None:
        self.shape = shape
        self._loss_chunk = loss_chunk

    @classmethod
    def from_config(cls, model: ModelConfig, data: DataConfig) -> Self:
        return cls(GptShape.from_config(model, data), model.loss_chunk_tokens)

    @property
    def num_units(self) -> int:
        return self.shape.num_layers + 2

    def build_unit(self, index: int) -> nn.Module:
        if index == 0:
            return Embedding(self.shape)
        return Head(self.shape) if index == self.num_units - 1 else Block(self.shape)

    def input_spec(self) -> TensorSpec:
        return TensorSpec("int64", (self.shape.seq_len,))

    def label_spec(self) -> TensorSpec:
        return TensorSpec("int64", (self.shape.seq_len,))

    def boundary_spec(self, index: int) -> TensorSpec:
        last = self.shape.vocab_size if index == self.num_units - 1 else self.shape.width
        return TensorSpec("float32", (self.shape.seq_len, last))

    @property
    def loss_chunk_tokens(self) -> int | None:
        return chunk_tokens(self.shape.vocab_size, self._loss_chunk)

    def activation_bytes(self, index: int) -> int:
        shape = self.shape
        hidden, masks = shape.width * shape.seq_len, 2 * (shape.dropout > 0)
        if index == 0:
            return 4 * hidden * (1 + masks // 2)
        if index == self.num_units - 1:
            # What the norm puts out, the logits, their log-softmax.
            return 4 * (hidden + 2 * shape.vocab_size * shape.seq_len)
        # Two norms, q, k, v, what attention and its projection take, one residual sum, the output; the MLP twice.
        return 4 * (8 + 2 * shape.mlp_ratio + masks) * hidden

    def unit_costs(self) -> list[float]:
        return self.shape.unit_costs()


def _linear(inputs: int, outputs: int, std: float) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.normal_(linear.weight, std=std)
    nn.init.zeros_(linear.bias)
    return linear
