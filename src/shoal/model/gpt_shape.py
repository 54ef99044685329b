"""The sizes of a gpt and what they cost. No torch: the launcher cuts models as well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.config.model import ModelConfig
    from shoal.config.training import DataConfig


@dataclass(frozen=True, slots=True)
class GptShape:
    """The sizes of a model.

    Attributes:
        seq_len: T, the tokens of a sample.
        width: C, the residual stream; divisible by `num_heads`.
        num_heads: H.
        mlp_ratio: Hidden width of the MLP over C.
        vocab_size: V; 256 for bytes.
        activation: Of the MLP: "gelu", or "gelu_new", which approximates it by tanh.
        dropout: The probability that an element is dropped in training.
    """

    seq_len: int
    width: int
    num_layers: int
    num_heads: int
    mlp_ratio: int = 4
    vocab_size: int = 256
    dropout: float = 0.0
    activation: str = "gelu"

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ConfigError(
                f"a width of {self.width} cannot be split into {self.num_heads} heads; choose a multiple of the heads"
            )

    @classmethod
    def from_config(cls, model: ModelConfig, data: DataConfig) -> Self:
        """The sizes that the configuration describes.

        Raises:
            ConfigError: The width does not fit the heads.
        """
        return cls(
            seq_len=data.seq_len,
            width=model.hidden_size,
            num_layers=model.num_layers,
            num_heads=model.num_heads,
            mlp_ratio=model.mlp_ratio,
            vocab_size=model.vocab_size,
            dropout=model.dropout,
            activation=model.activation,
        )

    def unit_costs(self) -> list[float]:
        """Relative cost of forward and backward of the embedding, each block, the head with the loss."""
        # Multiply-adds per token; memory-bound work (embedding, norms, softmax of the loss) counts as the multiply-adds
        # that take as long on a CPU, some 10 a value touched.
        width = self.width
        block = (4 + 2 * self.mlp_ratio) * width * width + self.seq_len * width + 10 * (6 + 2 * self.mlp_ratio) * width
        head = self.vocab_size * width + 10 * (4 * self.vocab_size + 2 * width)
        return [10.0 * 4 * width, *[float(block)] * self.num_layers, float(head)]
