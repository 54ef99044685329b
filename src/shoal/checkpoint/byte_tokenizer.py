"""The tokenizer of a model over bytes, as files that transformers and tokenizers load: token i is the byte i.

A byte-level BPE without merges. Its vocabulary names bytes by printable characters, as GPT-2's does (Radford et al.
2019): those that are printable by themselves, the others by the characters from U+0100 on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from shoal.model.hf.tokenizer import SETTINGS, TOKENIZER_FILE

NUM_BYTES: Final = 256


def byte_tokenizer_files(context: int) -> dict[str, bytes]:
    """The files of the tokenizer of a model that takes `context` tokens, by name."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    return {TOKENIZER_FILE: _encoded(_tokenizer()), SETTINGS: _encoded(settings)}


def is_byte_tokenizer(folder: Path) -> bool:
    """Whether a folder's tokenizer is the one of this module.

    Raises:
        OSError: It cannot be read.
    """
    return (folder / TOKENIZER_FILE).read_bytes() == _encoded(_tokenizer())


def own_tokenizer(folder: Path) -> Path | None:
    """Return the folder of a model if it has a tokenizer of its own; None: its tokens are bytes."""
    return folder if (folder / TOKENIZER_FILE).is_file() and not is_byte_tokenizer(folder) else None


def tokens_are_bytes(folder: Path, vocabulary: int) -> bool:
    """Whether the tokens of a model from elsewhere are bytes, if it has no tokenizer of its own."""
    return vocabulary == NUM_BYTES or (folder / TOKENIZER_FILE).is_file()


def _tokenizer() -> dict[str, Any]:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(_characters())},
            "merges": [],
        },
    }


def _characters() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(NUM_BYTES)]


def _encoded(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, indent=2).encode() + b"\n"
