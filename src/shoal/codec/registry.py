"""The codecs by name. Another one is a module beside this, a line here, and a word in `config/training.py`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from shoal.codec.base import Codec
from shoal.codec.cast import BF16, FP16
from shoal.codec.plain import PLAIN

_ALL: Final[tuple[Codec, ...]] = (PLAIN, BF16, FP16)

CODECS: Final[Mapping[str, Codec]] = MappingProxyType({codec.name: codec for codec in _ALL})
"""What `diloco.averaging_compression` may say."""
