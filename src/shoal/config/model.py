"""Sections `model` and `model_pipeline`: which network, and into how many stages it is cut."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, field_validator, model_validator

from shoal.config.base import Fraction, PositiveFloat, PositiveInt, Section, split_list
from shoal.config.own_class import is_class_name
from shoal.ids import MAX_PARTS

NATIVE_FAMILIES = ("gpt", "mlp", "resnet18", "resnet50", "resnet101", "biggan", "hf", "wav2vec2")

# Residual blocks of each ResNet (arXiv:1512.03385, table 1): a stage holds at least one.
RESNET_BLOCKS = {"resnet18": 8, "resnet50": 16, "resnet101": 33}

# Families whose depth and width the configuration says.
SIZED = ("gpt", "mlp")

_OF_OWN_FAMILIES = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "mlp_ratio",
    "activation",
    "dropout",
    "vocab_size",
    "num_classes",
    "stem",
)

_HF = ("name_or_path", "revision", "commit", "pretrained", "weights", "tie", "hf_config")


class ModelConfig(Section):
    """The uncut model."""

    family: str = Field(
        default="gpt",
        description='"gpt", "mlp", "resnet18", "resnet50", "resnet101", "biggan" (makes images; one stage), "hf" (a '
        'causal language model of transformers), "wav2vec2" (speech, also of transformers) or a family of your own as '
        '"package.module:Class".',
    )
    num_layers: PositiveInt = Field(
        default=4,
        le=MAX_PARTS,
        description="Transformer blocks (gpt); layers between the first and the last one (mlp).",
    )
    hidden_size: PositiveInt = Field(
        default=128, description="Width of the residual stream (gpt), of every layer but the last one (mlp)."
    )
    num_heads: PositiveInt = Field(default=4, description="Attention heads; divides hidden_size (gpt).")
    mlp_ratio: PositiveInt = Field(default=4, description="Width of the feed-forward part over hidden_size (gpt).")
    activation: Literal["gelu", "gelu_new"] = Field(
        default="gelu",
        description='In the feed-forward part: "gelu", or "gelu_new", its approximation by tanh, as in OpenAI\'s GPT-2 '
        "(gpt).",
    )
    dropout: Fraction = Field(default=0.0, description="Share of activations set to zero while training (gpt).")
    vocab_size: PositiveInt = Field(
        default=256, description="Distinct tokens: 256 for bytes, else at least those of data.tokenizer (gpt)."
    )
    loss_chunk_tokens: PositiveInt | None = Field(
        default=None,
        description="Tokens whose logits there are at a time in training and evaluation; with another number the sums "
        "have other bits. null: as many as have 64 MiB of logits, 256 at least, and with a vocabulary of 4096 or less "
        "those of all (gpt, hf).",
    )
    num_classes: PositiveInt = Field(default=10, description="Classes of the images (mlp, resnets, biggan).")
    stem: Literal["cifar", "imagenet"] = Field(
        default="cifar",
        description='First layers: "cifar" for small images, "imagenet" halves the size twice (resnets).',
    )
    name_or_path: str | None = Field(
        default=None,
        min_length=1,
        description="Model of Hugging Face whose config.json says kind and sizes: a folder, or a name on the hub. "
        "null: extra says them, as in {model_type: qwen3, num_hidden_layers: 4} (hf, wav2vec2).",
    )
    revision: str | None = Field(
        default=None,
        min_length=1,
        description="Branch, tag or commit of name_or_path on the hub. null: the newest (hf).",
    )
    commit: str | None = Field(
        default=None,
        description="What revision is on the hub. null: it is asked where a run begins, and others have it from the "
        "run (hf).",
    )
    pretrained: bool = Field(
        default=False,
        description="Begin from the weights of name_or_path, not from random ones. A server reads those of its stage "
        "from its host's own copy of the folder, or from the hub; where there is neither, peers give them, but not "
        "those under adapters (hf).",
    )
    extra: dict[str, Any] = Field(
        default={},
        description="Values in place of those of config.json (hf); sizes, see configs/biggan_cifar.yaml (biggan); or "
        "passed to a family of your own as it is.",
    )
    tie: bool | None = Field(
        default=None,
        description="Whether input and output embeddings are one parameter, which the first stage has. null: as in "
        "config.json (hf).",
    )
    hf_config: dict[str, Any] | None = Field(
        default=None,
        description="What the config.json of name_or_path says. null: it is read where a run begins, and others "
        "have it from the run (hf).",
    )

    weights: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")], ...] | None = Field(
        default=None,
        description="With pretrained or lora, the first 128 bits of the SHA-256 of each unit's weights, as they are "
        "before training. null: they are found where a run begins, and others have them from the run (hf).",
    )

    @field_validator("family")
    @classmethod
    def _check_family(cls, value: str) -> str:
        if value not in NATIVE_FAMILIES and not is_class_name(value):
            raise ValueError(f"not a model family; use one of {', '.join(NATIVE_FAMILIES)}, or 'package.module:Class'")
        return value

    def keys_problem(self) -> str | None:
        """Return which key means nothing to the family, or None."""
        if self.family in ("hf", "wav2vec2"):
            others, instead = _OF_OWN_FAMILIES, "name_or_path and extra say the sizes of a model of transformers"
        elif self.family in NATIVE_FAMILIES:
            others, instead = _HF, "only the family hf has it"
        else:
            return None
        given = {key: cast(object, getattr(self, key)) for key in others}
        odd = [f"model.{k} = {v!r}" for k, v in given.items() if v != type(self).model_fields[k].default]
        if not odd:
            return None
        return (
            f"{', '.join(odd)}: means nothing to model.family = {self.family}, {instead}; remove it, or give a file "
            "without it (where none is given it is configs/sandbox.yaml)"
        )

    def pretrained_problem(self) -> str | None:
        """Return why there are no weights to begin from, or None."""
        if self.pretrained and self.family == "wav2vec2":
            return "model.pretrained: a wav2vec2 begins from random weights; remove it"
        if not self.pretrained or self.name_or_path is not None:
            return None
        return "model.pretrained: give the folder of the weights, or their name on the hub, by model.name_or_path"

    def unread_weights(self) -> str | None:
        """Return what to tell who names a model that has weights, and begins from random ones, or None."""
        name = self.name_or_path
        # Where sizes are given, no weights fit.
        if self.family != "hf" or name is None or self.pretrained or self.extra:
            return None
        if Path(name).is_dir() and not any(Path(name).glob("*.safetensors")):
            return None
        return f"the model begins from random weights; --model.pretrained begins from those of {name}"

    @property
    def kind(self) -> str:
        """What people read of which model it is."""
        said = {**(self.hf_config or {}), **self.extra}
        return f"hf ({said.get('model_type', self.name_or_path)})" if self.family == "hf" else self.family

    @property
    def max_stages(self) -> int | None:
        """The most stages that the family can be cut into; None where only the family itself knows."""
        return 1 if self.family == "biggan" else self.num_blocks

    @property
    def num_blocks(self) -> int | None:
        """The blocks between the first unit and the last one; None where only the family itself knows."""
        return self.num_layers if self.family in SIZED else RESNET_BLOCKS.get(self.family)

    @property
    def num_units(self) -> int | None:
        """The units that the model consists of, as `Family.num_units`; None where only the family itself knows."""
        if self.family == "biggan":
            return 1
        return None if self.num_blocks is None else self.num_blocks + 2


def split_counts(value: object) -> object:
    """Return a list of counts from any form that users give, one number included; the schema checks what is in it."""
    return [value] if isinstance(value, int) else split_list(value)


class PipelineEntry(Section):
    """One stage in DistQat's notation; the entries together say family, size and number of stages."""

    model_name: str = Field(description='"<family>.full", or "<family>.head", "<family>.body" ..., "<family>.tail".')
    hid_dim: PositiveInt | None = Field(default=None, description="Becomes model.hidden_size.")
    n_layers: PositiveInt | None = Field(default=None, description="Blocks of this stage; together model.num_layers.")
    num_classes: PositiveInt | None = Field(default=None, description="Becomes model.num_classes.")
    extra: dict[str, Any] = Field(default={}, description="Becomes model.extra.")


class ModelPipelineConfig(Section):
    """How the model is cut and how batches flow through the stages."""

    stages: PositiveInt = Field(default=1, description="Contiguous parts into which the model is cut.")
    cut: tuple[PositiveInt, ...] | None = Field(
        default=None,
        description="Units of each stage, by hand: 3,5. Units are the smallest parts of a model, `shoal model profile` "
        "lists them: gpt has an embedding, num_layers blocks and a head. null: the client's host measures what each "
        "unit costs, and the slowest stage becomes as fast as it can be; with run.deterministic the family's own "
        "figures decide.",
    )
    pipeline: tuple[PipelineEntry, ...] | None = Field(
        default=None,
        description="The same in DistQat's notation, one entry a stage, for files that come from there: "
        "[{model_name: resnet18.head}, {model_name: resnet18.tail}]. It sets model.*, stages and, "
        "by n_layers, the cut.",
    )
    microbatches: PositiveInt = Field(default=4, description="Parts into which each batch is cut.")
    schedule: Literal["gpipe", "1f1b", "zero_bubble"] = Field(
        default="1f1b",
        description='Order of the work on a step; all train the same bits. "gpipe": all forwards, then all backwards; '
        '"1f1b": a backward as soon as there is one, which holds fewer activations; "zero_bubble": the same, with the '
        "gradients of the parameters computed when a device has nothing else to do: faster, and holds more.",
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="Keep of each forward only its input, and compute it again for the backward: less memory, a third "
        "more work.",
    )
    compile: bool = Field(
        default=False,
        description="Train a stage by code that torch.compile makes of it when a server starts, with a C++ compiler on "
        "each host of servers, for microbatches of the usual sizes; others are computed as without it. A GPU trains a "
        "language model twice as fast. Not with the schedule zero_bubble.",
    )
    compile_timeout_s: PositiveFloat = Field(
        default=600.0,
        description="With compile, how much longer than network.bootstrap_timeout_s a client waits for its servers.",
    )
    window: PositiveInt | None = Field(
        default=None,
        description="Microbatches of a trainer that are in flight at most; null: stages + 1, with zero_bubble "
        "2 * stages - 1 where that is more, and over a long line as many more as servers have memory for. With gpipe "
        "all are.",
    )
    forward_timeout_s: PositiveFloat = Field(default=40.0, description="Longest wait for a forward pass of a stage.")
    backward_timeout_s: PositiveFloat = Field(default=90.0, description="Longest wait for a backward pass of a stage.")

    @model_validator(mode="before")
    @classmethod
    def _stages_of_cut(cls, raw: object) -> object:
        if not isinstance(raw, Mapping):
            return raw
        section = cast(Mapping[str, Any], raw)
        counts = split_counts(section.get("cut"))
        if isinstance(counts, list | tuple) and counts and "stages" not in section:
            return {**section, "stages": len(cast(list[object], counts))}
        return section

    @field_validator("cut", mode="before")
    @classmethod
    def _split_cut(cls, value: object) -> object:
        return split_counts(value)

    @model_validator(mode="after")
    def _check_cut(self) -> "ModelPipelineConfig":
        if self.cut is not None and len(self.cut) != self.stages:
            raise ValueError(
                f"model_pipeline.cut = {list(self.cut)} has {len(self.cut)} numbers of units for "
                f"model_pipeline.stages = {self.stages}: give one number for each stage, or remove one of the two keys"
            )
        return self

    @field_validator("pipeline")
    @classmethod
    def _refuse_empty(cls, value: tuple[PipelineEntry, ...] | None) -> tuple[PipelineEntry, ...] | None:
        if value is not None and not value:
            raise ValueError("must name at least one stage; or leave it out and set model.family")
        return value

    @model_validator(mode="after")
    def _refuse_window_of_gpipe(self) -> Self:
        if self.schedule == "gpipe" and self.window is not None:
            raise ValueError("window: with the schedule gpipe all microbatches are in flight; leave it out")
        return self

    @model_validator(mode="after")
    def _refuse_split_of_compiled(self) -> Self:
        if self.compile and self.schedule == "zero_bubble":
            raise ValueError(
                "compile: compiled code computes all gradients at once, and the schedule zero_bubble puts some off; "
                "use the schedule 1f1b, or train without compile"
            )
        return self

    @property
    def microbatches_in_flight(self) -> int | None:
        """`window`, or the number that keeps stages without a line between them busy; None: all of a step."""
        if self.schedule == "gpipe":
            return None
        if self.window is not None:
            return self.window
        # The first stage does forwards until the first gradient has come all the way back to it.
        return max(self.stages + 1, 2 * self.stages - 1) if self.schedule == "zero_bubble" else self.stages + 1

    @property
    def evaluations_in_flight(self) -> int:
        """Batches of an evaluation that are in flight at most: it has no way back."""
        return self.window if self.window is not None else self.stages + 1
