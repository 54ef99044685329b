"""Sections `model` and `model_pipeline`: which network, and into how many stages it is cut."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from shoal.config.base import Fraction, PositiveFloat, PositiveInt, Section

NATIVE_FAMILIES = ("gpt", "resnet18", "resnet50", "resnet101")

# Residual blocks of each ResNet (arXiv:1512.03385, table 1): a stage holds at least one.
RESNET_BLOCKS = {"resnet18": 8, "resnet50": 16, "resnet101": 33}


class ModelConfig(Section):
    """The uncut model."""

    family: str = Field(
        default="gpt",
        description='"gpt", "resnet18", "resnet50", "resnet101", or a family of your own as "package.module:Class".',
    )
    num_layers: PositiveInt = Field(default=4, description="Transformer blocks (gpt).")
    hidden_size: PositiveInt = Field(default=128, description="Width of the residual stream (gpt).")
    num_heads: PositiveInt = Field(default=4, description="Attention heads; divides hidden_size (gpt).")
    mlp_ratio: PositiveInt = Field(default=4, description="Width of the feed-forward part over hidden_size (gpt).")
    dropout: Fraction = Field(default=0.0, description="Share of activations set to zero while training (gpt).")
    vocab_size: PositiveInt = Field(default=256, description="Distinct tokens; text is bytes (gpt).")
    num_classes: PositiveInt = Field(default=10, description="Classes of the images (resnets).")
    stem: Literal["cifar", "imagenet"] = Field(
        default="cifar",
        description='First layers: "cifar" for small images, "imagenet" halves the size twice (resnets).',
    )
    extra: dict[str, Any] = Field(default={}, description="Passed to a family of your own as it is.")

    @field_validator("family")
    @classmethod
    def _check_family(cls, value: str) -> str:
        module, separator, name = value.partition(":")
        is_path = bool(separator) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))
        if value not in NATIVE_FAMILIES and not is_path:
            raise ValueError(f"not a model family; use one of {', '.join(NATIVE_FAMILIES)}, or 'package.module:Class'")
        return value

    @property
    def max_stages(self) -> int | None:
        """The most stages that the family can be cut into; None where only the family itself knows."""
        return self.num_layers if self.family == "gpt" else RESNET_BLOCKS.get(self.family)


class PipelineEntry(Section):
    """One stage in DistQat's notation; the entries together say family, size and number of stages."""

    model_name: str = Field(description='"<family>.full", or "<family>.head", "<family>.body" ..., "<family>.tail".')
    hid_dim: PositiveInt | None = Field(default=None, description="Becomes model.hidden_size.")
    n_layers: PositiveInt | None = Field(default=None, description="Added up over the entries: model.num_layers.")
    num_classes: PositiveInt | None = Field(default=None, description="Becomes model.num_classes.")
    extra: dict[str, Any] = Field(default={}, description="Becomes model.extra.")


class ModelPipelineConfig(Section):
    """How the model is cut and how batches flow through the stages."""

    stages: PositiveInt = Field(default=1, description="Contiguous parts into which the model is cut.")
    pipeline: tuple[PipelineEntry, ...] | None = Field(
        default=None,
        description="The same in DistQat's notation, one entry a stage, for files that come from there: "
        "[{model_name: resnet18.head}, {model_name: resnet18.tail}]. It sets model.* and stages.",
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
    window: PositiveInt | None = Field(
        default=None,
        description="Microbatches of a trainer that are in flight at most; null: stages + 1, with zero_bubble "
        "2 * stages - 1 where that is more. With gpipe all are.",
    )
    forward_timeout_s: PositiveFloat = Field(default=40.0, description="Longest wait for a forward pass of a stage.")
    backward_timeout_s: PositiveFloat = Field(default=90.0, description="Longest wait for a backward pass of a stage.")

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

    @property
    def microbatches_in_flight(self) -> int | None:
        """`window`, or the number that keeps every stage busy while one microbatch travels; None: all of a step."""
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
