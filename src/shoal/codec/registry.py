"""The codecs by name. Another one is a module beside this, a line here, and a word in `config/diloco.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from shoal.codec.auto import AutoCodec
from shoal.codec.base import Codec
from shoal.codec.blockwise import E3M0Int4Form, Int8Form, LinearInt4Form
from shoal.codec.cast import BF16, FP16
from shoal.codec.gathered import GatheredCodec
from shoal.codec.levels import TwoBitForm
from shoal.codec.payload import PayloadForm
from shoal.codec.plain import PLAIN
from shoal.codec.sparse import SparseForm
from shoal.errors import ConfigError

_ALL: Final[tuple[Codec, ...]] = (PLAIN, BF16, FP16)

CODECS: Final[Mapping[str, Codec]] = MappingProxyType({codec.name: codec for codec in _ALL})
"""The element-wise ones."""


@dataclass(frozen=True, slots=True)
class CodecSettings:
    """Which codec, and how it is set.

    Attributes:
        name: One of `CODEC_NAMES`.
        feedback: What was left out before comes again, times this, with the next values; 0 to 1. Element-wise codecs
            have none.
        density: The share of values that `sparse` sends, more than 0, up to 1; the other codecs have no use for it.
    """

    name: str
    feedback: float = 0.0
    density: float = 0.0625


def _sparse(settings: CodecSettings) -> PayloadForm:
    if not 0.0 < settings.density <= 1.0:
        raise ConfigError(f"density {settings.density}: more than 0 and at most 1")
    return SparseForm(max(1, round(SparseForm.row_elements * settings.density)))


_FORMS: Final[Mapping[str, Callable[[CodecSettings], PayloadForm]]] = MappingProxyType(
    {
        "int8": lambda _: Int8Form(),
        "int4": lambda _: LinearInt4Form(),
        "int4_e3m0": lambda _: E3M0Int4Form(),
        "2bit": lambda _: TwoBitForm(),
        "sparse": _sparse,
    }
)

GATHERED_NAMES: Final[tuple[str, ...]] = tuple(_FORMS)
"""Those that encode a whole vector at once."""

CODEC_NAMES: Final[tuple[str, ...]] = (*CODECS, *GATHERED_NAMES)


def codec_of(settings: CodecSettings) -> Codec:
    """Return the codec that settings describe.

    Raises:
        ConfigError: There is no such codec, or a setting is out of its range.
    """
    name, feedback = settings.name, settings.feedback
    if not 0.0 <= feedback <= 1.0:
        raise ConfigError(f"feedback {feedback} of the codec {name}: from 0 to 1")
    if name in CODECS:
        if feedback:
            raise ConfigError(f"feedback {feedback} of the codec {name}: an element-wise codec has none, set it to 0")
        return CODECS[name]
    if name not in _FORMS:
        raise ConfigError(f"there is no codec {name!r}; use one of {', '.join(CODEC_NAMES)}")
    return GatheredCodec(_FORMS[name](settings), feedback)


def auto_codec(names: Iterable[str], feedback: float) -> AutoCodec:
    """Return one of several of `GATHERED_NAMES`, another one in every round; the first one where none is named."""
    return AutoCodec(tuple(GatheredCodec(_FORMS[name](CodecSettings(name)), feedback) for name in names))
