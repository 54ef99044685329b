"""Makes the windows of a stream in a process of its own, `python -m shoal.data.stream_filler`, as they are asked for.

What it reads is mostly of strangers, so its memory has a limit. It has no event loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

from shoal.config.load import config_from_json
from shoal.data.stream_filling import WindowFiller, make_facts
from shoal.data.stream_messages import (
    ExpectWindows,
    FillerEvent,
    FillerOrder,
    FillerReport,
    FillerTells,
    FillWindow,
    OpenStream,
    StreamOpened,
    WindowFilled,
    WindowsCompared,
)
from shoal.data.stream_opening import open_streams
from shoal.data.stream_store import WindowStore
from shoal.errors import InvariantViolation
from shoal.events.base import Event
from shoal.runtime.child import Parent
from shoal.runtime.own_limits import within_free_memory
from shoal.runtime.process_control import set_process_title


def serve(orders: Iterator[FillerOrder], report: Callable[[FillerReport], None]) -> None:
    """Carry out orders, the first of which has to open the stream, until there are no more.

    Raises:
        ConfigError, SampleError, StorageError: The stream cannot be read, or its windows cannot be kept.
    """

    def say(event: Event) -> None:
        report(FillerTells(cast("FillerEvent", event)))

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
            match order:
                case ExpectWindows(marks):
                    filler.expect(marks)
                    report(WindowsCompared())
                case FillWindow(number):
                    entry = filler.fill(number)
                    report(WindowFilled(entry, filler.marks))
                case OpenStream():
                    raise InvariantViolation("a filler cannot do OpenStream twice")


def main() -> None:
    """Work until the data server is through."""
    set_process_title("stream")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    with Parent[FillerOrder](FillerOrder) as data_server, within_free_memory():
        serve(data_server.orders, data_server.say)


if __name__ == "__main__":
    main()
