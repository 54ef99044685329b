"""Tries a tokenizer as `shoal.inference.prompt_trial` does, with less patience; a process of its own."""

from __future__ import annotations

from shoal.inference.prompt_trial import main
from shoal.model.hf import tokenizer

if __name__ == "__main__":
    tokenizer._LEAST_S = 0.5  # pyright: ignore[reportConstantRedefinition]
    main()
