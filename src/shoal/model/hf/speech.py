"""The family `wav2vec2`: transformers' Wav2Vec2ForCTC from random weights, cut (arXiv:2006.11477, with CTC).

    unit        of transformers
    features    wav2vec2.feature_extractor: convolutions, 320 samples of audio become a frame
    projection  wav2vec2.feature_projection, and the convolution over positions of wav2vec2.encoder
    block_0 ... wav2vec2.encoder.layers
    head        lm_head

Every stage gets how many samples of audio are no padding, and makes the mask of attention of it. Its layers drop
activations as their config says; SpecAugment and LayerDrop draw from generators that no stage seeds, so there is none.

Shapes: B clips, T samples of audio, L frames, K channels of the features, C width, V vocabulary, S characters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.config.training import LENGTHS
from shoal.errors import ConfigError
from shoal.model.hf.described import SPEECH, config_values, transformers_version
from shoal.model.hf.library import give_initial_values, model_config, speech_modules
from shoal.model.hf.twin import SEED, run_stages
from shoal.model.hf.verdicts import Verdicts, exactness_problem, twin_key
from shoal.model.layered import LayeredFamily
from shoal.model.seeding import seeded
from shoal.model.stage import StageModule, TensorSpec, build_stage

if TYPE_CHECKING:
    from shoal.config.model import ModelConfig
    from shoal.config.training import DataConfig

BLANK: Final = 0
"""What CTC puts between characters."""

_IGNORED: Final = -100
# A logit of a frame of padding: no other one is so low, and float16 holds it.
_PADDING: Final = -30_000.0
_FLOAT_BYTES: Final = 4
_KEPT_OF_CONVOLUTION: Final = 2
_KEPT_OF_SCORES: Final = 3
_TOUCHED: Final = 10
_TWIN: Final[dict[str, Any]] = {
    "vocab_size": 12,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}
_DROPOUTS: Final = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout")
_TWIN_CHANNELS: Final = 16
_TWIN_FRAMES: Final = (14, 9)
_TWIN_LABELS: Final = ((3, 5, 5, 1), (2, 7, _IGNORED, _IGNORED))


class Wav2Vec2Family(LayeredFamily):
    """Units: the features, their projection, each layer, the head.

    Args:
        values: What transformers is told, with `model_type`.
        audio_samples: T.
        max_characters: S.
        named: Those of the values that a person has given.
        verdicts: What earlier starts have found out; None: that is not asked, and nothing is kept.

    Raises:
        ConfigError: The values describe no wav2vec2, or one that is not trained here.
    """

    first_units = ("features", "projection")

    def __init__(
        self,
        values: dict[str, Any],
        audio_samples: int,
        max_characters: int,
        *,
        named: dict[str, Any] | None = None,
        verdicts: Verdicts | None = None,
    ) -> None:
        if values["model_type"] != SPEECH:
            raise ConfigError(
                f"model.family = {SPEECH} is for the model_type {SPEECH}, and this one is {values['model_type']}"
            )
        self.values = {**values, "apply_spec_augment": False, "mask_time_prob": 0.0, "mask_feature_prob": 0.0}
        self.config = model_config({**self.values, "layerdrop": 0.0}, named or {})
        self._audio_samples = audio_samples
        self._max_characters = max_characters
        self._verdicts = verdicts
        odd = [name for name in ("add_adapter", "adapter_attn_dim") if getattr(self.config, name, None)]
        if odd:
            raise ConfigError(f"model.extra.{odd[0]}: a wav2vec2 with adapter layers is not trained here; remove it")
        if self.config.pad_token_id != BLANK:
            raise ConfigError(
                f"model.extra.pad_token_id = {self.config.pad_token_id}: the blank of CTC is {BLANK}, and characters "
                "count from 1; remove it"
            )
        if self._num_frames < 1:
            raise ConfigError(
                f"data.max_audio_s: {audio_samples} samples of audio make no frame of this wav2vec2, which takes "
                f"{self._stride} for one; raise it"
            )

    @classmethod
    def from_config(cls, model: ModelConfig, data: DataConfig) -> Self:
        return cls(
            config_values(model),
            data.audio_samples,
            data.max_characters,
            named=model.extra,
            verdicts=Verdicts.of_user(),
        )

    @property
    def num_units(self) -> int:
        return self.config.num_hidden_layers + 3

    @cached_property
    def _modules(self) -> Any:
        return speech_modules()

    def build_unit(self, index: int) -> nn.Module:
        unit = self._built(index)
        give_initial_values(self._modules.Wav2Vec2ForCTC, self.config, unit)
        return unit

    def _built(self, index: int) -> nn.Module:
        of, config = self._modules, self.config
        if index == 0:
            return of.Wav2Vec2FeatureEncoder(config)
        if index == 1:
            projection: dict[str, nn.Module] = {
                "feature_projection": of.Wav2Vec2FeatureProjection(config),
                "pos_conv_embed": of.Wav2Vec2PositionalConvEmbedding(config),
            }
            if not config.do_stable_layer_norm:
                projection["layer_norm"] = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
            return nn.ModuleDict({**projection, "dropout": nn.Dropout(config.hidden_dropout)})
        if index < self.num_units - 1:
            is_stable = config.do_stable_layer_norm
            return (of.Wav2Vec2EncoderLayerStableLayerNorm if is_stable else of.Wav2Vec2EncoderLayer)(config)
        head: dict[str, nn.Module] = {}
        if config.do_stable_layer_norm:
            head["layer_norm"] = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        head["dropout"] = nn.Dropout(config.final_dropout)
        return nn.ModuleDict({**head, "lm_head": nn.Linear(config.hidden_size, config.vocab_size)})

    def whole_name(self, index: int) -> str:
        """Return what stands before the names of a unit's parts in the whole model; of the head, nothing."""
        if index < 2:
            return ("wav2vec2.feature_extractor.", "wav2vec2.")[index]
        return "" if index == self.num_units - 1 else f"wav2vec2.encoder.layers.{index - 2}."

    def whole_names(self, index: int, inner: list[str]) -> list[str]:
        """Return the names in the whole model of what has these names in a unit."""
        of_encoder = ("pos_conv_embed.", "layer_norm.")
        encoder = "wav2vec2.encoder."
        is_end = index in (1, self.num_units - 1)
        return [
            f"{encoder}{name}" if is_end and name.startswith(of_encoder) else f"{self.whole_name(index)}{name}"
            for name in inner
        ]

    def assemble(self, indices: range, units: nn.ModuleDict) -> Callable[..., Tensor]:
        """As transformers' own forward, over the units of a stage."""
        return _Part(self, indices, units)

    def frames(self, lengths_B: Tensor) -> Tensor:
        """Return how many frames are of clips of so many samples of audio: one at least."""
        for kernel, stride in self._convolutions:
            lengths_B = (lengths_B - kernel).div(stride, rounding_mode="floor") + 1
        return lengths_B.clamp(min=1)

    @property
    def _convolutions(self) -> Iterator[tuple[int, int]]:
        return zip(self.config.conv_kernel, self.config.conv_stride, strict=True)

    @property
    def _frames_of_convolutions(self) -> list[int]:
        found: list[int] = []
        length = self._audio_samples
        for kernel, stride in self._convolutions:
            length = max(0, (length - kernel) // stride + 1)
            found.append(length)
        return found

    @property
    def _num_frames(self) -> int:
        return self._frames_of_convolutions[-1]

    @property
    def _stride(self) -> int:
        return math.prod(self.config.conv_stride)

    def exactness_problem(self) -> str | None:
        """As a small twin shows that is cut; what was found before is not found again."""
        return exactness_problem(twin_key(self.values), self._verdicts, self.twin().difference)

    def twin(self, dropout: float = 0.0) -> Wav2Vec2Family:
        """Return the family of a small model of the same kind.

        Args:
            dropout: Everywhere. Earlier versions of transformers draw a number for each layer that LayerDrop could
                leave out, here or not, so that what is dropped is something else.
        """
        channels = [_TWIN_CHANNELS] * len(self.config.conv_dim)
        values = {**self.values, **_TWIN, **dict.fromkeys(_DROPOUTS, dropout), "conv_dim": channels}
        return Wav2Vec2Family(values, _TWIN_FRAMES[0] * self._stride + 200, len(_TWIN_LABELS[0]))

    def difference(self, dtype: torch.dtype = torch.float32) -> str:
        """Return what stages of this model, a small one, compute otherwise than transformers' own class; or nothing."""
        name = f"{SPEECH} of transformers {transformers_version()}"
        stages = [build_stage(self, 0, 1, seed=SEED, dtype=dtype)]
        labels_BS = torch.tensor(_TWIN_LABELS)
        generator = torch.Generator().manual_seed(SEED)
        lengths_B = torch.tensor(_TWIN_FRAMES) * self._stride + 100
        audio_BT = torch.randn((len(_TWIN_FRAMES), self._audio_samples), generator=generator, dtype=dtype)
        is_audio_BT = torch.arange(self._audio_samples) < lengths_B[:, None]
        audio_BT = audio_BT * is_audio_BT
        theirs = self._modules.Wav2Vec2ForCTC(self.config).to(dtype).train()
        theirs.load_state_dict(self.whole_state(stages[0]))
        with seeded(SEED):
            logits_BLV = theirs(audio_BT, attention_mask=is_audio_BT.long()).logits
        is_frame_BL = self.is_frame(lengths_B, logits_BLV.shape[1])
        expected = logits_BLV.masked_fill(~is_frame_BL[..., None], _PADDING)
        torch.autograd.backward(self.loss(expected, labels_BS))
        gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
        for cut in ([self.num_units], [1] * self.num_units, [2, self.num_units - 2], [2, 2, self.num_units - 4]):
            stages = [build_stage(self, s, len(cut), seed=SEED, cut=cut, dtype=dtype) for s in range(len(cut))]
            output = run_stages(stages, audio_BT, labels_BS, lengths_B)
            if not torch.equal(output, expected):
                gap = (output - expected).abs().max().item()
                return f"{name} cannot be cut exactly: in {len(cut)} stages the output is another one, by {gap:.1e}"
            for stage in stages:
                for key, gradient in self._named(stage, lambda parameter: parameter.grad):
                    wanted = gradients[key]
                    if gradient is None or wanted is None or not torch.equal(gradient, wanted):
                        return f"{name} cannot be cut exactly: in {len(cut)} stages {key} has another gradient"
        return ""

    def whole_state(self, stage: StageModule) -> dict[str, Tensor]:
        """Return the state of an uncut model, as transformers' own class has it."""
        return dict(self._named(stage, lambda parameter: parameter.detach()))

    def _named(self, stage: StageModule, of: Callable[[nn.Parameter], Any]) -> Iterator[tuple[str, Any]]:
        for unit_name, unit in stage.units.items():
            inner = dict(unit.named_parameters())
            names = self.whole_names(self.unit_numbers[unit_name], list(inner))
            yield from zip(names, map(of, inner.values()), strict=True)

    def is_frame(self, lengths_B: Tensor, num_frames: int) -> Tensor:
        """Return which frames (B, L) are no padding."""
        return torch.arange(num_frames, device=lengths_B.device) < self.frames(lengths_B)[:, None]

    def input_spec(self) -> TensorSpec:
        return TensorSpec("float32", (self._audio_samples,))

    def label_spec(self) -> TensorSpec:
        return TensorSpec("int64", (self._max_characters,))

    def context_specs(self) -> Mapping[str, TensorSpec]:
        """How many samples of audio are no padding."""
        return {LENGTHS: TensorSpec("int64", ())}

    def boundary_spec(self, index: int) -> TensorSpec:
        width: int = self.config.hidden_size
        if index == 0:
            width = self.config.conv_dim[-1]
        elif index == self.num_units - 1:
            width = self.config.vocab_size
        return TensorSpec("float32", (self._num_frames, width))

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """CTC in nats per character (Graves et al., 2006) of logits (B, L, V) and characters (B, S), -100 behind them.

        A transcript that has more characters than its clip has frames counts for nothing.
        """
        logits_BLV = output if output.dtype == torch.float64 else output.float()
        is_target_BS = labels != _IGNORED
        nats = F.ctc_loss(
            F.log_softmax(logits_BLV, dim=-1).transpose(0, 1),
            labels[is_target_BS],
            (logits_BLV[..., 0] > _PADDING / 2).sum(dim=-1),
            is_target_BS.sum(dim=-1),
            blank=BLANK,
            reduction="sum",
            zero_infinity=True,
        )
        return nats / is_target_BS.sum()

    def activation_bytes(self, index: int) -> int:
        """As measured: of convolutions what they and their activations put out, and their norms; of layers what each
        matrix takes and puts out, and the scores of attention if some are dropped."""
        config, frames = self.config, self._num_frames
        if index == 0:
            each = [n * dim for n, dim in zip(self._frames_of_convolutions, config.conv_dim, strict=True)]
            normed = each[:1] if config.feat_extract_norm == "group" else each
            return _FLOAT_BYTES * (_KEPT_OF_CONVOLUTION * sum(each) + sum(normed))
        if index == 1:
            return super().activation_bytes(index)
        if index == self.num_units - 1:
            return _FLOAT_BYTES * frames * 3 * (config.hidden_size + config.vocab_size)
        kept = 8 * config.hidden_size + 3 * config.intermediate_size
        kept += 2 * config.hidden_size if config.hidden_dropout else 0
        kept += _KEPT_OF_SCORES * config.num_attention_heads * frames if config.attention_dropout else 0
        return _FLOAT_BYTES * frames * kept

    def unit_costs(self) -> list[float]:
        config, frames = self.config, self._num_frames
        taken = [1, *config.conv_dim[:-1]]
        sizes = zip(self._frames_of_convolutions, taken, config.conv_dim, config.conv_kernel, strict=True)
        features = sum(n * dim * (before * kernel + _TOUCHED) for n, before, dim, kernel in sizes)
        width, heads = config.hidden_size, config.num_conv_pos_embedding_groups
        projection = config.conv_dim[-1] * width + config.num_conv_pos_embeddings * width * width // heads
        block = 4 * width * width + 2 * width * config.intermediate_size + frames * width
        head = width * config.vocab_size + _TOUCHED * config.vocab_size
        per_frame = [projection, *[block] * config.num_hidden_layers, head]
        return [float(features), *(float(frames * cost) for cost in per_frame)]


class _Part:
    """Audio (B, T), features (B, L, K) or hidden (B, L, C) to features, hidden or logits (B, L, V)."""

    def __init__(self, family: Wav2Vec2Family, indices: range, units: nn.ModuleDict) -> None:
        self._family = family
        self._indices = indices
        self._units = units
        self._mask_of = speech_modules().create_bidirectional_mask

    def __call__(self, x: Tensor, lengths_B: Tensor) -> Tensor:
        last = self._family.num_units - 1
        mask: Tensor | None = None
        has_mask = False
        for index, unit in zip(self._indices, self._units.values(), strict=True):
            if index == 0:
                x = _features(unit, x)
            elif index == 1:
                x = self._projected(cast("nn.ModuleDict", unit), x, lengths_B)
            elif index == last:
                x = self._logits(cast("nn.ModuleDict", unit), x, lengths_B)
            else:
                if not has_mask:
                    mask, has_mask = self._mask(x, lengths_B), True
                found: Any = unit(x, attention_mask=mask)
                # Earlier versions of transformers return a tuple.
                x = cast("Tensor", found[0] if isinstance(found, tuple) else found)
        return x

    def _projected(self, unit: nn.ModuleDict, features_BLK: Tensor, lengths_B: Tensor) -> Tensor:
        hidden_BLC, _ = unit["feature_projection"](features_BLK)
        is_frame_BL = self._family.is_frame(lengths_B, hidden_BLC.shape[1])
        hidden_BLC = hidden_BLC.masked_fill(~is_frame_BL[..., None], 0)
        hidden_BLC = hidden_BLC + unit["pos_conv_embed"](hidden_BLC)
        if "layer_norm" in unit:
            hidden_BLC = unit["layer_norm"](hidden_BLC)
        return unit["dropout"](hidden_BLC)

    def _mask(self, hidden_BLC: Tensor, lengths_B: Tensor) -> Tensor | None:
        is_frame_BL = self._family.is_frame(lengths_B, hidden_BLC.shape[1])
        config = self._family.config
        return self._mask_of(config=config, inputs_embeds=hidden_BLC, attention_mask=is_frame_BL)

    def _logits(self, unit: nn.ModuleDict, hidden_BLC: Tensor, lengths_B: Tensor) -> Tensor:
        """Logits; those of padding are lower than any other, so that loss and decoding see where a clip ends."""
        if "layer_norm" in unit:
            hidden_BLC = unit["layer_norm"](hidden_BLC)
        logits_BLV = unit["lm_head"](unit["dropout"](hidden_BLC))
        is_frame_BL = self._family.is_frame(lengths_B, hidden_BLC.shape[1])
        return logits_BLV.masked_fill(~is_frame_BL[..., None], _PADDING)


def _features(unit: nn.Module, audio_BT: Tensor) -> Tensor:
    x = audio_BT[:, None]
    for layer in cast("nn.ModuleList", unit.conv_layers):
        x = layer(x)
    # As it travels: from another layout in memory a convolution's gradient has other bits.
    return x.transpose(1, 2).contiguous()


def small_speech_values(values: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return the values of a small wav2vec2 with the same convolutions, narrow."""
    return {
        **values,
        **_TWIN,
        "vocab_size": 32,
        "num_hidden_layers": min(4, config.num_hidden_layers),
        "hidden_size": 64,
        "intermediate_size": 128,
        "conv_dim": [32] * len(config.conv_dim),
    }
