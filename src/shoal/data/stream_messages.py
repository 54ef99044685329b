"""What a process that makes the windows of a stream, a child (`runtime.child`), and its starter say to each other.

starter -- OpenStream --> filler
        <- StreamOpened -
        -- ExpectWindows --> , where a run has trained on some before
        <- WindowsCompared -
        -- FillWindow --> , one at a time, as often as one is needed
        <- WindowFilled -
        <- FillerTells -  , as often as something happens
"""

from __future__ import annotations

import msgspec

from shoal.data.stream_store import StreamFacts, WindowEntry
from shoal.events.data import (
    SamplesSkipped,
    StreamCompared,
    StreamRepeats,
    TokenizerTraining,
    TokensAwaited,
    TokensBuilt,
    TokensDamaged,
    TokensProgress,
)

FillerEvent = (SamplesSkipped | StreamCompared | StreamRepeats | TokenizerTraining) | (
    TokensAwaited | TokensBuilt | TokensDamaged | TokensProgress
)


class OpenStream(msgspec.Struct, frozen=True, tag=True):
    """Open the stream, and begin its manifest unless it was begun.

    Attributes:
        config_json: With its secrets.
    """

    config_json: bytes
    folder: str


class ExpectWindows(msgspec.Struct, frozen=True, tag=True):
    """Compare what was made, and what will be, with these marks (`swarm.window_marks`)."""

    marks: bytes


class FillWindow(msgspec.Struct, frozen=True, tag=True):
    number: int


class StreamOpened(msgspec.Struct, frozen=True, tag=True):
    facts: StreamFacts


class WindowsCompared(msgspec.Struct, frozen=True, tag=True):
    """Those that were made before are the same."""


class WindowFilled(msgspec.Struct, frozen=True, tag=True):
    """A window is there.

    Attributes:
        marks: Of all windows that are known.
    """

    entry: WindowEntry
    marks: bytes


class FillerTells(msgspec.Struct, frozen=True, tag=True):
    event: FillerEvent


FillerOrder = OpenStream | ExpectWindows | FillWindow
FillerReport = StreamOpened | WindowsCompared | WindowFilled | FillerTells
