"""What a process that makes tokens, a child (`runtime.child`), and the one that has started it say to each other.

starter -- MakeTokens | TrainTokenizer --> maker
        <------ MakerTells --------------- , as often as something happens
        <- TokensMade | TokenizerMade ---- , and it ends
"""

from __future__ import annotations

import msgspec

from shoal.data.token_cache import CachedTokens
from shoal.events.data import TokenizerTraining, TokensAwaited, TokensBuilt, TokensDamaged, TokensProgress

MakerEvent = TokenizerTraining | TokensAwaited | TokensBuilt | TokensDamaged | TokensProgress


class MakeTokens(msgspec.Struct, frozen=True, tag=True):
    """Make the tokens of a split, unless they are there.

    Attributes:
        config_json: With its secrets.
        split: `data.eval_split`; None: what is trained on.
    """

    config_json: bytes
    split: str | None


class TrainTokenizer(msgspec.Struct, frozen=True, tag=True):
    """Train `data.tokenizer`, unless that was done before."""

    config_json: bytes


class MakerTells(msgspec.Struct, frozen=True, tag=True):
    event: MakerEvent


class TokensMade(msgspec.Struct, frozen=True, tag=True):
    path: str
    found: CachedTokens


class TokenizerMade(msgspec.Struct, frozen=True, tag=True):
    hash: str


MakerOrder = MakeTokens | TrainTokenizer
MakerReport = MakerTells | TokensMade | TokenizerMade
