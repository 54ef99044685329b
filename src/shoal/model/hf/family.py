"""The family `hf`: a causal language model of transformers, from random weights, which is imported when it is used.

Shapes: B samples, T tokens, C width, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self, cast

from torch import Tensor, nn

from shoal.config.training import POSITIONS
from shoal.errors import ConfigError
from shoal.model.chunked_loss import chunk_tokens
from shoal.model.hf.described import config_values, is_before, transformers_version
from shoal.model.hf.library import model_config
from shoal.model.hf.skeleton import Skeleton
from shoal.model.hf.stored import StoredUnits
from shoal.model.hf.twin import CHUNK_TOKENS, TOKENS, difference
from shoal.model.hf.verdicts import Verdicts, exactness_problem, twin_key
from shoal.model.layered import LayeredFamily
from shoal.model.stage import TensorSpec

if TYPE_CHECKING:
    from shoal.config.model import ModelConfig
    from shoal.config.training import DataConfig

_NUM_BYTES: Final = 256
_FLOAT_BYTES: Final = 4
_KEPT_OF_NORM: Final = 3
# What goes into the softmax, what comes out of it, and what dropout leaves of that.
_KEPT_OF_SCORES: Final = 3
# Tokens that gated delta networks take at a time, and what each keeps for every other one. Before transformers 5.23 a
# loop over a chunk copied its rows.
_DELTA_CHUNK: Final = 64
_DELTA_KEPT, _DELTA_KEPT_BEFORE = 5, 27
_DELTA_VERSION: Final = (5, 23)
# Values that touching costs as much as a multiply-add each, as in `GptShape.unit_costs`.
_TOUCHED: Final = 10


class HfFamily(LayeredFamily):
    """Units: the embedding, each layer, the head.

    Args:
        values: What transformers is told, with `model_type`.
        named: Those of them that a person has given.
        seq_len: T.
        verdicts: What earlier starts have found out; None: that is not asked, and nothing is kept.
        parts: Tied embeddings in files become two parameters that begin alike.
        loss_chunk: `model.loss_chunk_tokens`.
        packs: A sample has several texts, and every stage gets the positions of its tokens in them.

    Raises:
        ConfigError: The values describe no model.
    """

    first_units = ("embedding",)

    def __init__(
        self,
        values: dict[str, Any],
        seq_len: int,
        *,
        named: dict[str, Any] | None = None,
        verdicts: Verdicts | None = None,
        parts: bool = False,
        loss_chunk: int | None = None,
        packs: bool = False,
    ) -> None:
        self._packs = packs
        self._loss_chunk = loss_chunk
        self._parts = parts
        self.values = values
        self.config = model_config(values, named or {})
        self._seq_len = seq_len
        self._verdicts = verdicts

    @classmethod
    def from_config(cls, model: ModelConfig, data: DataConfig) -> Self:
        family = cls(
            config_values(model),
            data.seq_len,
            named=model.extra,
            verdicts=Verdicts.of_user(),
            parts=model.tie is False,
            loss_chunk=model.loss_chunk_tokens,
            packs=POSITIONS in data.context,
        )
        config = family.config
        if config.vocab_size < _NUM_BYTES:
            raise ConfigError(
                f"the vocabulary of {config.model_type} has {config.vocab_size} tokens, and text is bytes, which are "
                f"{_NUM_BYTES}: set model.extra.vocab_size to {_NUM_BYTES} or more"
            )
        most = family.positions
        if most is not None and most < data.seq_len:
            raise ConfigError(
                f"data.seq_len = {data.seq_len} is more than the {most} positions of {config.model_type}: lower it, or "
                f"set model.extra.max_position_embeddings to {data.seq_len}"
            )
        return family

    @property
    def positions(self) -> int | None:
        """Tokens of the longest text; None: the model names no limit."""
        most = self._value("max_position_embeddings")
        return most if most is not None and most > 0 else None

    @cached_property
    def _skeleton(self) -> Skeleton:
        return Skeleton(self.config)

    @cached_property
    def stored(self) -> StoredUnits:
        """How the units stand in the files of transformers."""
        return StoredUnits(self._skeleton, parts=self._parts)

    @property
    def file_config(self) -> dict[str, Any]:
        """The content of a config.json, for transformers' own class."""
        of_class = {"architectures": [type(self._skeleton.model).__name__], "dtype": "float32"}
        return {**json.loads(self._skeleton.model.config.to_json_string()), **of_class}

    def stored_state(self, index: int, unit: nn.Module) -> dict[str, Tensor]:
        """Return a unit's tensors as files have them, by their names there. Tied embeddings are the first unit's."""
        return self.stored.stored(index, self.own_state(index, unit.state_dict()))

    def own_state(self, index: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what of a unit's tensors, by their names in it, no other unit has: tied embeddings are the first's."""
        names = self._skeleton.whole_names(index, state)
        tied = self._skeleton.embedding_names[1] if self.is_tied and index == self.num_units - 1 else None
        return {inner: state[inner] for whole, inner in names.items() if whole != tied}

    @property
    def layers(self) -> list[nn.Module]:
        """The layers without memory, which are units 1 and up; not to be changed."""
        return self._skeleton.layers

    def whole_names(self, index: int, inner: Iterable[str]) -> list[str]:
        """Return the names in the whole model of what has these names in a unit."""
        return list(self._skeleton.whole_names(index, inner))

    @property
    def outer_modules(self) -> list[str]:
        """The names in the whole model of all modules that are not in its layers."""
        named = cast("Iterator[tuple[str, nn.Module]]", self._skeleton.model.named_modules())
        return [name for name, _ in named]

    @property
    def num_units(self) -> int:
        return self.config.num_hidden_layers + 2

    def build_unit(self, index: int) -> nn.Module:
        return self._skeleton.unit(index)

    def assemble(self, indices: range, units: nn.ModuleDict) -> Callable[..., Tensor]:
        """The model's own forward, see `Part`: the units are the modules in it."""
        return self._skeleton.part(indices, units)

    @property
    def is_tied(self) -> bool:
        """Whether input and output embeddings are one parameter."""
        return self._skeleton.is_tied

    def tie(self, units: nn.ModuleDict) -> None:
        first, last = (self.unit_name(index) for index in (0, self.num_units - 1))
        if self.is_tied and first in units and last in units:
            self._skeleton.tie(units[first], units[last])

    def exactness_problem(self) -> str | None:
        """As a small twin shows that is cut; what was found before is not found again."""
        key = twin_key({"packs": True, **self.values} if self._packs else self.values)
        return exactness_problem(key, self._verdicts, lambda: difference(self.values, self._twin))

    def _twin(self, values: dict[str, Any]) -> HfFamily:
        return HfFamily(values, TOKENS, loss_chunk=CHUNK_TOKENS, packs=self._packs)

    def context_specs(self) -> Mapping[str, TensorSpec]:
        """Positions (T,) of tokens in their texts, where a sample has several."""
        return {POSITIONS: TensorSpec("int64", (self._seq_len,))} if self._packs else {}

    def input_spec(self) -> TensorSpec:
        return TensorSpec("int64", (self._seq_len,))

    def label_spec(self) -> TensorSpec:
        return TensorSpec("int64", (self._seq_len,))

    def boundary_spec(self, index: int) -> TensorSpec:
        last = self.config.vocab_size if index == self.num_units - 1 else self.config.hidden_size
        return TensorSpec("float32", (self._seq_len, last))

    @property
    def loss_chunk_tokens(self) -> int | None:
        return chunk_tokens(self.config.vocab_size, self._loss_chunk)

    def activation_bytes(self, index: int) -> int:
        """As transformers' own code keeps it: kernels of other packages for layers with a state keep less."""
        hidden = self.boundary_spec(0).num_bytes
        if index == 0:
            return hidden
        if index == self.num_units - 1:
            # What the norm puts out, the logits, their log-softmax.
            return hidden + 2 * self.boundary_spec(index).num_bytes
        layer = self._skeleton.layers[index - 1]
        kept = sum(self._kept(p) for name, p in layer.named_parameters() if not name.endswith("bias"))
        return int(_FLOAT_BYTES * self._seq_len * (kept + self._kept_of_attention() + self._kept_of_state(layer)))

    def _kept(self, parameter: nn.Parameter) -> float:
        """Values of a token that are kept for a parameter: what a matrix takes and puts out, three times a norm."""
        if parameter.dim() == 1:
            return _KEPT_OF_NORM * parameter.numel()
        if self._is_of_experts(parameter):
            return self._share_taken * self._num_experts * sum(parameter.shape[1:])
        return sum(parameter.shape)

    def _kept_of_attention(self) -> int:
        """Values of a token that attention keeps: where one kernel does all of it none for each other token, but the
        mask of a sample with several texts, of which each layer makes floats."""
        dropout = self._value("attention_dropout") or self._value("attn_pdrop")
        is_fused = self._skeleton.model.config._attn_implementation != "eager" and not dropout
        if is_fused:
            return self._seq_len if self._packs else 0
        return _KEPT_OF_SCORES * self.config.num_attention_heads * self._seq_len

    def _kept_of_state(self, layer: nn.Module) -> float:
        """Values of a token that a layer keeps for a state beside attention, as measured: of each head some for every
        other token of a chunk, and for every value of a key and of what is read."""
        if getattr(layer, "linear_attn", None) is not None:
            heads, chunk = self._value("linear_num_value_heads"), _DELTA_CHUNK
            is_loop = is_before(transformers_version(), _DELTA_VERSION)
            of_head = (_DELTA_KEPT_BEFORE if is_loop else _DELTA_KEPT) * chunk
            of_head += 12 * self._value("linear_key_head_dim") + 7 * self._value("linear_value_head_dim")
        elif getattr(layer, "mamba", None) is not None and (chunk := self._value("mamba_chunk_size")):
            heads = self._value("mamba_n_heads")
            of_head = 3 * chunk + 7 * self._value("mamba_d_head") + 5 * self._value("mamba_d_state")
        else:
            return 0.0
        # The last chunk is filled up.
        return -(-self._seq_len // chunk) * chunk / self._seq_len * heads * of_head

    def unit_costs(self) -> list[float]:
        width, vocabulary = self.config.hidden_size, self.config.vocab_size
        blocks = [self._multiply_adds(layer) + self._seq_len * width for layer in self._skeleton.layers]
        head = vocabulary * width + _TOUCHED * (4 * vocabulary + 2 * width)
        return [4.0 * _TOUCHED * width, *blocks, float(head)]

    def _multiply_adds(self, layer: nn.Module) -> float:
        """Of a token: one for each element of a matrix, of experts for as many as a token takes."""
        return sum(p.numel() * (self._share_taken if self._is_of_experts(p) else 1.0) for p in layer.parameters())

    def _is_of_experts(self, parameter: nn.Parameter) -> bool:
        return parameter.dim() > 2 and parameter.shape[0] == self._num_experts

    @property
    def _num_experts(self) -> int:
        return next((n for n in map(self._value, ("num_local_experts", "num_experts", "n_routed_experts")) if n), 1)

    @property
    def _share_taken(self) -> float:
        """The share of the experts that a token takes."""
        return (self._value("num_experts_per_tok") or self._num_experts) / self._num_experts

    def _value(self, name: str) -> Any:
        return getattr(self.config, name, None)
