"""The base of every section of the configuration, and the number types that they share."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from shoal.config.sizes import parse_bytes

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ByteSize = Annotated[int, Field(ge=1), BeforeValidator(parse_bytes)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A frozen group of keys; a key that it does not declare is an error.

    Not `strict`: values from flags and from the environment arrive as text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)
