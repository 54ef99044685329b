"""Makes the windows of a stream in a process of its own, `python -m shoal.data.stream_filler`, as they are asked for.

It has no event loop. It ends when the data server closes the socket, and by the lifeline in the middle of a window.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

from shoal.config.load import config_from_json
from shoal.data.failures import kind_of
from shoal.data.stream_filling import WindowFiller, make_facts
from shoal.data.stream_messages import (
    FillerEvent,
    FillerOrder,
    FillerReport,
    FillerTells,
    FillWindow,
    OpenStream,
    StreamFailed,
    StreamOpened,
    WindowFilled,
)
from shoal.data.stream_opening import open_streams
from shoal.data.stream_store import WindowStore
from shoal.errors import InvariantViolation, ShoalError
from shoal.events.base import Event
from shoal.runtime.frames import framed, received
from shoal.runtime.lifeline import watch_in_thread
from shoal.runtime.process_control import set_process_title


def serve(orders: Iterator[FillerOrder], report: Callable[[FillerReport], None]) -> None:
    """Carry out orders, the first of which has to open the stream, until there are no more or one cannot be."""

    def say(event: Event) -> None:
        report(FillerTells(cast("FillerEvent", event)))

    try:
        first = next(orders, None)
        if first is None:
            return
        if not isinstance(first, OpenStream):
            raise InvariantViolation(f"the first order to a filler is {type(first).__name__}, not OpenStream")
        config, store = config_from_json(first.config_json), WindowStore(Path(first.folder))
        with store.locked():
            name, window = config.data.dataset_name, config.data.stream_window
            opened = open_streams(config, say)
            facts = store.whole_facts() or make_facts(
                opened.train,
                opened.held_out,
                store,
                window=window,
                num_holdout=max(1, round(window * config.data.holdout_fraction)),
                name=name,
            )
            filler = WindowFiller(
                opened.train, store, facts, name=name, max_bad_fraction=config.data.max_bad_fraction, say=say
            )
            report(StreamOpened(facts))
            for order in orders:
                if not isinstance(order, FillWindow):
                    raise InvariantViolation(f"a filler cannot do {type(order).__name__} twice")
                report(WindowFilled(filler.fill(order.number)))
    except ShoalError as error:
        report(StreamFailed(str(error), kind_of(error)))


def main() -> None:
    """Work until the data server is through. The arguments: descriptors of socket and lifeline."""
    control_fd, lifeline_fd = (int(argument) for argument in sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    set_process_title("stream")
    watch_in_thread(lifeline_fd, "")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    with socket.socket(fileno=control_fd) as control, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        serve(received(control, FillerOrder), lambda said: control.sendall(framed(said)))


if __name__ == "__main__":
    main()
