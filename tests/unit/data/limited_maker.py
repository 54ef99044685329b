"""Makes tokens as `shoal.data.token_maker` does, with less memory and less patience; a process of its own."""

from __future__ import annotations

from shoal.data.token_maker import main
from shoal.model.hf import chat, tokenizer
from shoal.runtime import own_limits

if __name__ == "__main__":
    own_limits._LEAST_BYTES, own_limits._SHARE = 1 << 30, 0.0  # pyright: ignore[reportConstantRedefinition]
    chat._MOST_S = 0.2  # pyright: ignore[reportConstantRedefinition]
    tokenizer._LEAST_S = 0.5  # pyright: ignore[reportConstantRedefinition]
    main()
