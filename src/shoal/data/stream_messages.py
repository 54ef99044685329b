"""What a process that makes the windows of a stream says to the one that has started it, in `runtime.frames`.

starter -- OpenStream --> filler
        <- StreamOpened -
        -- FillWindow --> , one at a time, as often as one is needed
        <- WindowFilled - ; or StreamFailed, and it ends
        <- FillerTells -  , as often as something happens
"""

from __future__ import annotations

from typing import Literal

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


class StreamFailed(msgspec.Struct, frozen=True, tag=True):
    """It cannot do it, and ends; the message is for people."""

    message: str
    kind: Literal["config", "sample", "storage"]


FillerOrder = OpenStream | FillWindow
FillerReport = StreamOpened | WindowFilled | FillerTells | StreamFailed
