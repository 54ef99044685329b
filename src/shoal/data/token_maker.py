"""Makes tokens in a process of its own, `python -m shoal.data.token_maker`: what that takes of memory ends with it.

It has no event loop, and torch only for conversations. It ends by the lifeline when who has started it is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import cast

from shoal.config.load import config_from_json
from shoal.data.text_corpus import made_tokenizer, made_tokens
from shoal.data.token_messages import (
    MakerEvent,
    MakerFailed,
    MakerOrder,
    MakerReport,
    MakerTells,
    MakeTokens,
    TokenizerMade,
    TokensMade,
)
from shoal.errors import ConfigError, ShoalError
from shoal.events.base import Event
from shoal.runtime.frames import framed, received
from shoal.runtime.lifeline import watch_in_thread
from shoal.runtime.process_control import set_process_title


def carry_out(order: MakerOrder, report: Callable[[MakerReport], None]) -> MakerReport:
    """Do what was ordered, and return what it has come to."""
    config = config_from_json(order.config_json)

    def say(event: Event) -> None:
        report(MakerTells(cast("MakerEvent", event)))

    try:
        if isinstance(order, MakeTokens):
            cache, found = made_tokens(config, order.split, say)
            return TokensMade(str(cache.path), found)
        return TokenizerMade(made_tokenizer(config, say).hash)
    except ShoalError as error:
        return MakerFailed(str(error), is_config=isinstance(error, ConfigError))
    except OSError as error:
        return MakerFailed(f"tokens cannot be made: {error}", is_config=False)


def main() -> None:
    """Carry out one order. The arguments: descriptors of socket and lifeline."""
    control_fd, lifeline_fd = (int(argument) for argument in sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    set_process_title("tokens")
    watch_in_thread(lifeline_fd, "")
    # The library asks before it uses threads; nothing is forked here.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    with socket.socket(fileno=control_fd) as control, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        orders: Iterator[MakerOrder] = received(control, MakerOrder)
        order = next(orders, None)
        if order is not None:
            control.sendall(framed(carry_out(order, lambda said: control.sendall(framed(said)))))


if __name__ == "__main__":
    main()
