"""What a process that makes the windows of a stream, a child (`runtime.child`), and its starter say to each other.

starter -- OpenStream --> filler
        <- StreamOpened -
        -- FillWindow --> , one at a time, as often as one is needed
        <- WindowFilled -
        <- FillerTells -  , as often as something happens
"""

from __future__ import annotations

import msgspec

from shoal.data.stream_store import StreamFacts, WindowEntry
from shoal.events.data import (
    SamplesSkipped,
    StreamRepeats,
    TokenizerTraining,
    TokensAwaited,
    TokensBuilt,
    TokensDamaged,
    TokensProgress,
)

FillerEvent = (SamplesSkipped | StreamRepeats | TokenizerTraining) | (
    TokensAwaited | TokensBuilt | TokensDamaged | TokensProgress
)


class OpenStream(msgspec.Struct, frozen=True, tag=True):
    """Open the stream, and begin its manifest unless it was begun.

    Attributes:
        config_json: With its secrets.
    """

    config_json: bytes
    folder: str


class FillWindow(msgspec.Struct, frozen=True, tag=True):
    number: int


class StreamOpened(msgspec.Struct, frozen=True, tag=True):
    facts: StreamFacts


class WindowFilled(msgspec.Struct, frozen=True, tag=True):
    entry: WindowEntry


class FillerTells(msgspec.Struct, frozen=True, tag=True):
    event: FillerEvent


FillerOrder = OpenStream | FillWindow
FillerReport = StreamOpened | WindowFilled | FillerTells
