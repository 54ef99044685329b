"""Small models of the families, for tests that compare bits."""

from __future__ import annotations

from torch import Tensor, nn

from shoal.model.gpt import GptFamily, Head
from shoal.model.gpt_shape import GptShape
from shoal.model.resnet import ResNetFamily
from shoal.model.resnet_shape import DEPTHS, ResNetShape
from shoal.model.stage import Family


def gpt(dropout: float = 0.1, loss_chunk: int | None = None) -> Family:
    shape = GptShape(seq_len=8, width=16, num_layers=2, num_heads=2, vocab_size=32, dropout=dropout)
    return GptFamily(shape, loss_chunk)


class _DroppingHead(Head):
    """One that draws."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, hidden_BTC: Tensor) -> Tensor:
        return super().forward(self.dropout(hidden_BTC))


class TiedGptFamily(GptFamily):
    """A GPT whose head has the embedding's parameter, as GPT-2 has."""

    def build_unit(self, index: int) -> nn.Module:
        return _DroppingHead(self.shape) if index == self.num_units - 1 else super().build_unit(index)

    @property
    def is_tied(self) -> bool:
        return True

    def tie(self, units: nn.ModuleDict) -> None:
        if "embedding" in units and "head" in units:
            logits = units["head"].get_submodule("logits")
            logits.register_parameter("weight", units["embedding"].get_parameter("token.weight"))


def tied_gpt(dropout: float = 0.1, loss_chunk: int | None = None) -> Family:
    shape = GptShape(seq_len=8, width=16, num_layers=2, num_heads=2, vocab_size=32, dropout=dropout)
    return TiedGptFamily(shape, loss_chunk)


def resnet18() -> Family:
    """A whole one, whose step takes most of a second."""
    shape = ResNetShape(
        depths=DEPTHS["resnet18"], bottleneck=False, stem="cifar", num_channels=1, img_size=8, num_classes=4
    )
    return ResNetFamily(shape)


class SmallResNetFamily(ResNetFamily):
    """A ResNet with a block of each kind: with a shortcut of its own, and without."""

    depths = (1, 1, 0, 0)
    bottleneck = False


def resnet() -> Family:
    shape = ResNetShape((1, 1, 0, 0), bottleneck=False, stem="cifar", num_channels=1, img_size=8, num_classes=4)
    return SmallResNetFamily(shape)
