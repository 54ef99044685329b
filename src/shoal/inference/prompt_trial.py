"""Tries a tokenizer on a prompt in a process of its own, `python -m shoal.inference.prompt_trial`, before it is used.

    require_ends -- TryPrompt --> process
                 <- Tried ------, or it has computed for too long and is gone

A tokenizer.json may cut a text by a regular expression of anybody's, which takes hours on a short text. Nothing ends a
library that computes, but the end of its process: that is to be this one, and not the user's command.
"""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Final

import msgspec

from shoal.errors import ChildDied
from shoal.model.hf.tokenizer import COMPUTES, endless_tokenizer, makes_tokens, read_tokenizer
from shoal.runtime.child import Parent, ask
from shoal.runtime.own_limits import is_endless, within_free_memory
from shoal.runtime.process_control import set_process_title

_TRIAL: Final = "shoal.inference.prompt_trial"


class TryPrompt(msgspec.Struct, frozen=True):
    """Make tokens of this, with the tokenizer in a file."""

    tokenizer: str
    prompt: str


class Tried(msgspec.Struct, frozen=True, tag=True):
    """It has ended."""


def require_ends(tokenizer: Path, prompt: str) -> None:
    """Check that a tokenizer makes its tokens of a prompt in a bounded time.

    Args:
        tokenizer: a tokenizer.json.

    Raises:
        ConfigError: it does not, or cannot be used.
        ChildDied: it has ended its process in another way.
    """
    try:
        ask(_TRIAL, TryPrompt(str(tokenizer), prompt), Tried, within_s=inf)
    except ChildDied as died:
        if is_endless(died, COMPUTES):
            raise endless_tokenizer(str(tokenizer), "the prompt") from died
        raise


def main() -> None:
    """Try one prompt."""
    set_process_title("prompt")
    with Parent[TryPrompt](TryPrompt) as command, within_free_memory():
        for order in command.orders:
            tokenizer = read_tokenizer(Path(order.tokenizer).read_bytes(), order.tokenizer)
            with makes_tokens("the model's tokenizer makes no tokens of the prompt", len(order.prompt)):
                tokenizer.encode(order.prompt)
            command.say(Tried())


if __name__ == "__main__":
    main()
