"""Section `lora`: which adapters are trained in place of the model's own parameters."""

from typing import Final, Literal

from pydantic import Field, field_validator

from shoal.config.base import Fraction, PositiveFloat, PositiveInt, Section, Words

ALL_LINEAR: Final = "all-linear"


class LoraConfig(Section):
    """Low-rank adapters (arXiv:2106.09685) by peft; `lora: null` trains the model itself."""

    r: PositiveInt = Field(default=16, description="Rank of each adapter.")
    alpha: PositiveFloat = Field(default=32.0, description="What an adapter puts out is multiplied by alpha / r.")
    dropout: Fraction = Field(
        default=0.0, description="Share of what an adapter takes that is set to zero while training."
    )
    targets: Words = Field(
        default=(ALL_LINEAR,),
        min_length=1,
        description="Modules of the layers that get an adapter, by the ends of their names: q_proj, v_proj; "
        '"all-linear" are all linear ones.',
    )
    base_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Type in which the frozen parameters are held and compute. Adapters are float32.",
    )

    @field_validator("targets")
    @classmethod
    def _refuse_all_and_some(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if ALL_LINEAR in value and len(value) > 1:
            raise ValueError(f"{ALL_LINEAR} are all that there are; remove the others, or it")
        return value
