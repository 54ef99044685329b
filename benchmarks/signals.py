"""A benchmark that is ended by a signal ends what it has started, by way of everybody who has something to clean up."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(BaseException):
    """A signal has ended the measurement; no error, so that only those who clean up take notice."""

    def __init__(self, number: int) -> None:
        """Remember the signal's number."""
        super().__init__(number)
        self.number = number


def ended_by_signals(main: Callable[[], int]) -> NoReturn:
    """Exit with what a program returns; with 128 and its number after a signal, once everything is cleaned up."""
    for each in ENDING:
        signal.signal(each, _end_by)
    try:
        sys.exit(main())
    except Ended as ended:
        sys.exit(128 + ended.number)


def _end_by(number: int, frame: FrameType | None) -> None:
    """Leave by way of everybody who has something to end; signals that follow do not disturb them."""
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    raise Ended(number)
