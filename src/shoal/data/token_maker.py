"""Makes tokens in a process of its own, `python -m shoal.data.token_maker`: what that takes of memory ends with it.

What it reads is mostly of strangers, and a small file may unpack to a large one, so its memory has a limit. It has no
event loop, and torch only for conversations.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import cast

from shoal.config.load import config_from_json
from shoal.data.text_corpus import made_tokenizer, made_tokens
from shoal.data.token_messages import (
    MakerEvent,
    MakerOrder,
    MakerReport,
    MakerTells,
    MakeTokens,
    TokenizerMade,
    TokensMade,
)
from shoal.errors import StorageError
from shoal.events.base import Event
from shoal.runtime.child import Parent
from shoal.runtime.own_limits import within_free_memory
from shoal.runtime.process_control import set_process_title


def carry_out(order: MakerOrder, report: Callable[[MakerReport], None]) -> MakerReport:
    """Do what was ordered, and return what it has come to. Raises as `open_text`."""
    config = config_from_json(order.config_json)

    def say(event: Event) -> None:
        report(MakerTells(cast("MakerEvent", event)))

    try:
        if isinstance(order, MakeTokens):
            cache, found = made_tokens(config, order.split, say)
            return TokensMade(str(cache.path), found)
        return TokenizerMade(made_tokenizer(config, say).hash)
    except OSError as error:
        raise StorageError(f"tokens cannot be made: {error}") from error


def main() -> None:
    """Carry out one order."""
    set_process_title("tokens")
    # The library asks before it uses threads; nothing is forked here.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    with Parent[MakerOrder](MakerOrder) as starter, within_free_memory():
        for order in starter.orders:
            starter.say(carry_out(order, starter.say))


if __name__ == "__main__":
    main()
