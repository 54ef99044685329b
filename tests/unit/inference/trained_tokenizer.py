"""Tokenizers of the two kinds that most models have, trained on a little text."""

from __future__ import annotations

import json

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

_TEXT = ["naïve 東京 🦈! A shoal of fish swims. ", "def swim(fish): return fish + 1 ", "東京 東京 is a town "] * 3


def trained_tokenizer(*, of_words: bool) -> tokenizers.Tokenizer:
    """Trained on `_TEXT`: of bytes as GPT-2's, or of words with bytes for what is none, as Llama's."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=of_words, unk_token="<unk>" if of_words else None))
    if of_words:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        unmarked = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(unmarked)
        named, alphabet = [f"<0x{byte:02X}>" for byte in range(256)], list[str]()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        named, alphabet = [], pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special + named, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    described = json.loads(tokenizer.to_str())
    # Bytes are text, which a special token is not.
    described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] in special]
    return tokenizers.Tokenizer.from_str(json.dumps(described))
