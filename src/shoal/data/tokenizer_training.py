"""A tokenizer of a run's own: a BPE over bytes (Sennrich et al. 2016; GPT-2), trained on the beginning of the text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, Final

from shoal.config.schema import Config
from shoal.config.training import trained_size
from shoal.data.documents import Documents
from shoal.data.tokenising import first_text
from shoal.errors import MALFORMED, ConfigError
from shoal.events.base import Event
from shoal.events.data import TokenizerTraining
from shoal.model.hf.tokenizer import (
    SETTINGS,
    TOKENIZER_FILE,
    KeptTokenizer,
    keep_tokenizer,
    kept_tokenizer,
    tokenizers_package,
)
from shoal.runtime.user_cache import cached_file, keep, user_cache

END: Final = "<|endoftext|>"
_MOST_BYTES: Final = 16 << 20
_FORMAT: Final = 1


def trained_before(config: Config, documents: Documents) -> KeptTokenizer | None:
    """Return the tokenizer that was trained on these documents, if it is on this host."""
    try:
        hash: object = json.loads(cached_file(user_cache("tokenizers"), _key(config, documents)).read_bytes())
    except (OSError, *MALFORMED):
        return None
    return kept_tokenizer(hash) if isinstance(hash, str) else None


def trained_tokenizer(config: Config, documents: Documents, say: Callable[[Event], None]) -> KeptTokenizer:
    """Return a tokenizer that is trained on the first documents; the same documents give the same one.

    Raises:
        ConfigError: The package tokenizers is not installed, or there is no text.
        StorageError: It cannot be kept.
    """
    known = trained_before(config, documents)
    if known is not None:
        return known
    data = config.data
    size = trained_size(data.tokenizer)
    if size is None:
        raise ConfigError(f"data.tokenizer = {data.tokenizer} is not to be trained")
    say(TokenizerTraining(data.dataset_name, size))
    package = tokenizers_package(f"data.tokenizer = {data.tokenizer}")
    level: Any = package.pre_tokenizers.ByteLevel
    tokenizer: Any = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = level(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=sorted(level.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(first_text(documents, _MOST_BYTES, data.max_documents), trainer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "model_max_length": data.seq_len,
        "clean_up_tokenization_spaces": False,
    }
    files = {TOKENIZER_FILE: tokenizer.to_str(pretty=True).encode(), SETTINGS: json.dumps(settings, indent=2).encode()}
    kept = keep_tokenizer(files, data.tokenizer or "")
    keep(cached_file(user_cache("tokenizers"), _key(config, documents)), json.dumps(kept.hash).encode())
    return kept


def _key(config: Config, documents: Documents) -> str:
    data = config.data
    told = hashlib.sha256(documents.identity.encode()).hexdigest()
    return f"trained {_FORMAT} {data.tokenizer} {data.max_documents} {told}"
