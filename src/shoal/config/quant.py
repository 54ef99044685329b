"""Section `quant`: which weights and activations are trained with fake quantisation, and how."""

from typing import Literal

from pydantic import Field, field_validator

from shoal.config.base import Section


class QuantScheme(Section):
    """How one tensor is quantised (learned step size, arXiv:1902.08153)."""

    algo: Literal["LearnedStepQuantizer"] = Field(default="LearnedStepQuantizer", description="Quantiser.")
    num_bits: int = Field(default=8, ge=2, le=16, description="Bits of a quantised value.")
    per_channel: bool = Field(
        default=False,
        description="One step size per output channel, of an Embedding per row, of experts per expert and channel "
        "(weights only).",
    )
    signed: bool = Field(default=True, description="Whether values below zero are representable.")


class _QuantSection(Section):
    """What is true of the schemes wherever they are given."""

    @field_validator("weight_quant", "activation_quant", mode="before", check_fields=False)
    @classmethod
    def _accept_yaml_off(cls, value: object) -> object:
        # YAML reads the word `off` as false.
        return "off" if value is False else value

    @field_validator("activation_quant", check_fields=False)
    @classmethod
    def _refuse_channels(cls, value: QuantScheme | Literal["off"] | None) -> QuantScheme | Literal["off"] | None:
        if isinstance(value, QuantScheme) and value.per_channel:
            raise ValueError("per_channel is for weights only; remove it from activation_quant")
        return value


class QuantBase(_QuantSection):
    """What holds for every module that no rule says otherwise about."""

    weight_quant: QuantScheme | Literal["off"] = Field(default=QuantScheme(), description='Weights; "off": not at all.')
    activation_quant: QuantScheme | Literal["off"] = Field(
        default=QuantScheme(), description='Inputs of a module; "off": not at all.'
    )


class QuantRule(_QuantSection):
    """An exception for some modules: all conditions that are given must hold, and it must match a module.

    Of several that match, the more specific one wins: a longer path pattern before a shorter one, a path before a type,
    a type before a stage; of equally specific ones the last. An Embedding is quantised by rules alone, and its input,
    which is no number, never.
    """

    name_patterns: tuple[str, ...] = Field(
        default=(), description='Globs for module paths in the uncut model, e.g. "blocks.*.mlp.*"; empty: any.'
    )
    class_names: tuple[str, ...] = Field(default=(), description='Module types, e.g. "Conv2d"; empty: any.')
    stages: tuple[int, ...] = Field(default=(), description="Stages; empty: any.")
    weight_quant: QuantScheme | Literal["off"] | None = Field(default=None, description="null: as in base.")
    activation_quant: QuantScheme | Literal["off"] | None = Field(default=None, description="null: as in base.")


class QuantConfig(Section):
    """Quantisation-aware training; `quant: null` trains without."""

    base: QuantBase = Field(
        default=QuantBase(), description="For every Linear, Conv2d and Conv1D (of a GPT-2) module and for experts."
    )
    rules: tuple[QuantRule, ...] = Field(
        default=(), description="Exceptions by module path, type and stage; alone for Embeddings."
    )
