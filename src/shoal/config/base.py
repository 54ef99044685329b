"""The base of every section of the configuration, and the number types that they share."""

import json
import re
from typing import Annotated, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from shoal.config.sizes import parse_bytes
from shoal.errors import MALFORMED

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ByteCount = Annotated[int, Field(ge=0), BeforeValidator(parse_bytes)]
ByteSize = Annotated[int, Field(ge=1), BeforeValidator(parse_bytes)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A frozen group of keys; a key that it does not declare is an error.

    Not `strict`: values from flags and from the environment arrive as text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)


def split_list(value: object) -> object:
    """Return a list from any form that users give: a list, JSON, or text with commas or spaces.

    A list may hold such texts again (a flag that is given several times). `@file` is replaced by whoever may read files
    (`shoal.config.load`). What is no text is left for the schema to refuse.

    Raises:
        ValueError: text that starts like a JSON list but is none.
    """
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("["):
            try:
                return cast(object, json.loads(text))
            except MALFORMED as error:
                raise ValueError(f"starts with '[' but is not a JSON list: {error}") from error
        return [part for part in re.split(r"[\s,]+", text) if part]
    if isinstance(value, list | tuple):
        flat: list[object] = []
        for item in cast(list[object], value):
            parts = split_list(item) if isinstance(item, str) else item
            flat.extend(cast(list[object], parts) if isinstance(parts, list) else [parts])
        return flat
    return value


Words = Annotated[tuple[str, ...], BeforeValidator(split_list)]
