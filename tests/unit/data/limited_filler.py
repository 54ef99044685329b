"""Makes windows of a stream as `shoal.data.stream_filler` does, with less patience; a process of its own."""

from __future__ import annotations

from shoal.data.stream_filler import main
from shoal.model.hf import tokenizer

if __name__ == "__main__":
    tokenizer._LEAST_S = 0.5  # pyright: ignore[reportConstantRedefinition]
    main()
