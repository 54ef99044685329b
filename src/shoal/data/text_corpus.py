"""From the configuration to tokens of text: which documents, which tokenizer, and whether their tokens are there.

files on this host, tokens there   -> opened at once, by this process
otherwise                          -> a process is started that makes them, and that this one waits for
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

from shoal.config.dump import config_to_json
from shoal.config.load import config_from_json
from shoal.config.schema import Config
from shoal.config.training import DataConfig, trained_size
from shoal.data.builtin import BUILTINS, TEXTS
from shoal.data.documents import Documents, RowReader
from shoal.data.element_file import ElementFile
from shoal.data.file_documents import FileDocuments, local_documents
from shoal.data.hub_documents import StreamDocuments, TableDocuments, TextDocuments
from shoal.data.packed_texts import chat_identity, endless_template, packed_dataset
from shoal.data.places import place_meant
from shoal.data.source import DataSet
from shoal.data.token_cache import CachedTokens, TokenCache
from shoal.data.token_messages import (
    MakerOrder,
    MakerReport,
    MakerTells,
    MakeTokens,
    TokenizerMade,
    TokensMade,
    TrainTokenizer,
)
from shoal.data.token_windows import windows_dataset
from shoal.data.tokenising import (
    ByteEncoder,
    Encoder,
    GivenTokens,
    TokenBuilding,
    TokenizerEncoder,
    cache_of,
    require_few_skipped,
)
from shoal.data.tokenizer_training import trained_before, trained_tokenizer
from shoal.errors import ChildDied, ConfigError, RemoteError
from shoal.events.base import Event
from shoal.events.data import DocumentsSkipped, TokensStopped
from shoal.model.hf.described import FAMILY, config_values
from shoal.model.hf.tokenizer import (
    COMPUTES,
    KeptTokenizer,
    endless_tokenizer,
    kept_tokenizer,
    named_tokenizer,
    require_hash,
)
from shoal.runtime.child import Child
from shoal.runtime.own_limits import is_endless

Say = Callable[[Event], None]

_MAKER: Final = "shoal.data.token_maker"


def open_text(config: Config, say: Say) -> DataSet:
    """Open text as tokens, made first if they are not there.

    Raises:
        ConfigError: There are no such documents, too many cannot be read, or the tokenizer is not there or another one.
        StorageError: The tokens cannot be kept.
        RemoteError: Who makes them was killed.
    """
    data = config.data
    train, found = _tokens(config, None, say)
    holdout = None if data.eval_split is None else _tokens(config, data.eval_split, say)
    vocabulary = found.vocabulary if holdout is None else max(found.vocabulary, holdout[1].vocabulary)
    build = windows_dataset if data.messages_column is None else packed_dataset
    return build(
        data.dataset_name,
        train,
        None if holdout is None else holdout[0],
        seq_len=data.seq_len,
        holdout_fraction=data.holdout_fraction,
        vocabulary=vocabulary,
    )


def _tokens(config: Config, split: str | None, say: Say) -> tuple[ElementFile, CachedTokens]:
    path, found = _tokens_there(config, split, say) or _ordered_tokens(config, split, say)
    if found.skipped:
        first = "; ".join(found.first_skipped)
        say(DocumentsSkipped(config.data.dataset_name, found.skipped, found.documents, first))
        require_few_skipped(config.data, found.documents, found.skipped, found.first_skipped)
    return ElementFile(path, found.dtype), found


def _tokens_there(config: Config, split: str | None, say: Say) -> tuple[Path, CachedTokens] | None:
    """Return the tokens if they can be found without what it takes to make them."""
    documents = documents_here(config, split)
    if documents is None:
        return None
    if isinstance(documents, FileDocuments) and documents.is_tokens:
        identity = GivenTokens(model_vocabulary(config)).identity
    elif config.data.tokenizer is None:
        identity = ByteEncoder.identity
    else:
        kept = tokenizer_of(config, say)
        identity = kept.hash if config.data.messages_column is None else chat_identity(kept.hash)
    cache = cache_of(config.data, documents, identity)
    found = cache.find()
    return None if found is None else (cache.path, found)


def _ordered_tokens(config: Config, split: str | None, say: Say) -> tuple[Path, CachedTokens]:
    made = _order(MakeTokens(config_to_json(config), split), say)
    if not isinstance(made, TokensMade):
        raise RemoteError(f"the process that makes tokens has answered {type(made).__name__}")
    return Path(made.path), made.found


def made_tokens(config: Config, split: str | None, say: Say) -> tuple[TokenCache, CachedTokens]:
    """Make the tokens of a split in this process, unless they are there. Raises as `open_text`."""
    documents = documents_here(config, split) or documents_of_hub(config.data, split)
    return TokenBuilding(config, documents, say).run(encoder_of(config, documents, say))


def made_tokenizer(config: Config, say: Say) -> KeptTokenizer:
    """Train the tokenizer of a run in this process, unless that was done before. Raises as `tokenizer_of`."""
    documents = documents_here(config, None) or documents_of_hub(config.data, None)
    if isinstance(documents, FileDocuments) and documents.is_tokens:
        raise ConfigError(
            f"data.tokenizer = {config.data.tokenizer}: data.dataset_name = {config.data.dataset_name} are tokens "
            "already, of which none can be trained; name the tokenizer that has made them, or leave it out"
        )
    return trained_tokenizer(config, documents, say)


def tokenizer_of(config: Config, say: Say) -> KeptTokenizer:
    """Return the tokenizer of a configuration that has one: as this host keeps it, or found by its name.

    Raises:
        ConfigError: It is not there or cannot be read, or it is not the one that the run began with.
        StorageError: It cannot be kept.
        RemoteError: Who trains it was killed.
    """
    data = config.data
    if (kept := kept_tokenizer(data.tokenizer_hash)) is not None:
        return kept
    found = named_tokenizer(config) if trained_size(data.tokenizer) is None else _trained(config, say)
    return require_hash(found, config)


def with_tokenizer(config: Config, say: Say) -> Config:
    """Return the configuration with the hash of its tokenizer, if it has a tokenizer.

    Raises:
        ConfigError: As `tokenizer_of`, or the model knows too few tokens.
        StorageError, RemoteError: As `tokenizer_of`.
    """
    data = config.data
    if data.tokenizer is None:
        return config
    kept = tokenizer_of(config, say)
    require_vocabulary(config, kept.facts.vocabulary, f"data.tokenizer = {data.tokenizer}")
    return config.model_copy(update={"data": data.model_copy(update={"tokenizer_hash": kept.hash})})


def require_vocabulary(config: Config, tokens: int, what: str) -> None:
    """Check that the model knows as many tokens as there are.

    Raises:
        ConfigError: It knows fewer.
    """
    limit = model_vocabulary(config)
    if limit is not None and limit < tokens:
        key = "model.extra.vocab_size" if config.model.family == FAMILY else "model.vocab_size"
        raise ConfigError(
            f"{key} = {limit} is too small for {what}: it has {tokens} different tokens; set {key} to at least {tokens}"
        )


def model_vocabulary(config: Config) -> int | None:
    """Return how many tokens the model knows; None: only its family can tell."""
    if config.model.family != FAMILY:
        return config.model.vocab_size
    values = config_values(config.model)
    of_text: object = values.get("text_config")
    found: object = values.get("vocab_size")
    if found is None and isinstance(of_text, dict):
        found = cast("dict[str, object]", of_text).get("vocab_size")
    return found if isinstance(found, int) else None


def documents_here(config: Config, split: str | None) -> Documents | None:
    """Return the documents of a split if they are on this host; None: the hub has them.

    Raises:
        ConfigError: There are no such files, or they are of several kinds.
    """
    data = config.data
    if data.dataset_name in BUILTINS:
        if split is not None and "/" not in split:
            raise ConfigError(
                f"data.eval_split = {split}: {data.dataset_name} has no splits; give a file, or leave it out"
                + place_meant(split)
            )
        if split is None:
            if data.dataset_name not in TEXTS:
                raise ConfigError(f"data.dataset_name = {data.dataset_name} is no text; choose another data set")
            if data.messages_column is not None:
                raise ConfigError(
                    f"data.dataset_name = {data.dataset_name} has no conversations, and so no data.messages_column = "
                    f"{data.messages_column}; choose another data set"
                )
            return TextDocuments(TEXTS[data.dataset_name]())
    return local_documents(data, split)


def _trained(config: Config, say: Say) -> KeptTokenizer:
    documents = documents_here(config, None)
    if documents is not None and (known := trained_before(config, documents)) is not None:
        return known
    made = _order(TrainTokenizer(config_to_json(config)), say)
    kept = kept_tokenizer(made.hash) if isinstance(made, TokenizerMade) else None
    if kept is None:
        raise RemoteError("the tokenizer that was trained is not where it was put")
    return kept


def encoder_of(config: Config, documents: Documents, say: Say) -> Encoder:
    """Return what makes tokens of documents. Raises as `tokenizer_of`."""
    if isinstance(documents, FileDocuments) and documents.is_tokens:
        return GivenTokens(model_vocabulary(config))
    if config.data.tokenizer is None:
        return ByteEncoder()
    kept = tokenizer_of(config, say)
    if config.data.messages_column is None:
        return TokenizerEncoder(kept)
    from shoal.data.chat import ChatEncoder  # with transformers and torch, which plain text does without

    return ChatEncoder(kept, config.data.tokenizer)


def documents_of_hub(data: DataConfig, split: str | None) -> Documents:
    """Open a data set of the hub, or one that `datasets` reads from a folder.

    Raises:
        ConfigError: It is not there, or has not the column.
    """
    from shoal.data.huggingface import load_stream, load_table, misfit

    reader = RowReader(data)
    wanted = data.dataset_split if split is None else split
    name = f"{data.dataset_name} {data.dataset_config} {wanted}"
    if data.max_documents is not None or data.streaming:
        stream, version = load_stream(data, wanted)
        if stream.column_names is not None:  # else nothing of it is decoded
            stream = stream.select_columns(reader.columns_among(stream.column_names))
        return StreamDocuments(lambda: stream, reader, name, version)
    table = load_table(data, wanted)
    if reader.column not in (table.column_names or ()):
        raise misfit(table, data, f'a column "{reader.column}" ({reader.key})')
    return TableDocuments(table, reader, name)


def _order(order: MakerOrder, say: Say) -> MakerReport:
    """Have another process make tokens, and wait for it.

    Raises:
        ConfigError, StorageError: As it says.
        RemoteError: It ended before it had said anything.
    """
    with Child[MakerReport](_MAKER, MakerReport) as maker:
        maker.tell(order)
        try:
            while True:
                # One that stands still is not killed: another one would have to begin anew.
                match maker.hear(stands_still=lambda: say(TokensStopped(maker.pid))):
                    case MakerTells(event):
                        say(event)
                    case report:
                        return report
        except ChildDied as died:
            if is_endless(died):
                raise endless_template() from died
            if is_endless(died, COMPUTES):
                name = config_from_json(order.config_json).data.tokenizer
                raise endless_tokenizer(f"data.tokenizer = {name}", "one of the texts") from died
            raise RemoteError(
                f"the process that makes tokens has ended with {died.code} before it was done; is the memory enough?"
            ) from died
