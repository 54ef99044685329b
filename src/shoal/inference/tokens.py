"""What the tokens of a model mean: bytes, if it was trained here, or what the files of its own tokenizer say."""

from __future__ import annotations

from shoal.checkpoint.model_folder import TOKENIZER
from shoal.checkpoint.model_source import ModelSource
from shoal.errors import ConfigError
from shoal.inference.text import ByteTokens, FileTokens, Tokens
from shoal.model.hf.cached import ends_of
from shoal.model.hf.skeleton import Part
from shoal.model.hf.tokenizer import TOKENIZER_FILE
from shoal.model.stage import StageModule


def tokens_of(source: ModelSource, model: StageModule) -> Tokens:
    """Return what the tokens of a model mean.

    Args:
        model: Of the source, in one piece.

    Raises:
        ConfigError: It has no tokenizer that can be read, or that of another model.
        OSError: A file cannot be read.
    """
    if source.tokenizer is None:
        data = source.config.data
        if data.tokenizer is not None:
            raise ConfigError(
                f"{source.folder} was trained with data.tokenizer = {data.tokenizer}, whose files are neither there "
                f"nor kept on this host: take those from the host of the run's client to {source.folder / TOKENIZER}"
            )
        if not source.is_bytes:
            raise ConfigError(
                f"{source.folder} has no {TOKENIZER_FILE}, and its tokens are no bytes: put the files of its tokenizer "
                "there, which AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers writes"
            )
        return ByteTokens()
    whole = model.assembled
    ends = ends_of(whole) if isinstance(whole, Part) and not source.has_tokenizer_of_run else ()
    # Training puts no token before a text; what is from elsewhere may.
    tokens = FileTokens(source.tokenizer, ends, adds_tokens=source.config.data.tokenizer is None)
    known = model.output_spec.shape[-1]
    if tokens.vocabulary > known:
        raise ConfigError(
            f"the tokenizer in {source.tokenizer} has {tokens.vocabulary} tokens, and the model knows {known}: it is "
            "that of another model; take the folder as it was written"
        )
    return tokens
