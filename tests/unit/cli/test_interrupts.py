"""A Ctrl-C is not forgotten when what it has raised gets lost."""

from __future__ import annotations

import signal
from contextlib import suppress

import pytest

from shoal.cli.interrupts import Interrupts


def test_a_swallowed_ctrl_c_is_raised_again_at_the_next_check() -> None:
    interrupts = Interrupts()
    try:
        interrupts.check()
        with suppress(KeyboardInterrupt):  # as a finalizer or a library does
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    finally:
        interrupts.give_back()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
