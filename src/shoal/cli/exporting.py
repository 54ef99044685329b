"""`shoal export` and `shoal import`: take a model elsewhere, and bring one from there."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from shoal.checkpoint.exporting import Format, export_model, import_model
from shoal.checkpoint.gpt2_folder import MODEL_TYPE
from shoal.checkpoint.loading import YAML, open_model
from shoal.checkpoint.model_folder import CONFIG, RECORD
from shoal.checkpoint.model_source import ModelSource
from shoal.checkpoint.whole_folder import require_place
from shoal.errors import ConfigError, StorageError

_WRITTEN = (CONFIG, YAML)


def export_folder(
    model: Path, to: Path, format: Format | None, family: str | None, *, force: bool, merge: bool = False
) -> None:
    """Export a model and say how to load it.

    Raises:
        ConfigError: one of the folders is not what it should be, or the model has no such format.
        ShoalError: the model cannot be read, or the folder cannot be written.
    """
    with opened(model, family) as source:
        to = _place(to, source, force=force)
        written = export_model(source, to, format, merge=merge)
    print(f"wrote {to}, and read it back: every tensor is equal", flush=True)
    if written == "hf":
        print(f'load it with transformers.AutoModelForCausalLM.from_pretrained("{to}")', flush=True)
    elif written == "integers":
        print(f'load it with shoal.load_model("{to}"): a weight is <name>.integers * <name>.scale', flush=True)
    elif written == "peft":
        print(f'load it with peft.PeftModel.from_pretrained(base, "{to}")', flush=True)
    else:
        print(f'load it with safetensors.torch.load_file("{to}/model.safetensors"), or shoal.load_model', flush=True)


def import_folder(model: Path, to: Path, *, force: bool) -> None:
    """Import a model of transformers.

    Raises:
        ConfigError, ShoalError: as `export_folder`.
    """
    with opened(model, None) as source:
        if source.hashes(0) is not None or not (source.folder / CONFIG).is_file():
            raise ConfigError(
                f"{model} is a model of shoal already, which every command takes as it is; import takes a "
                f"{MODEL_TYPE} of transformers"
            )
        to = _place(to, source, force=force)
        import_model(source, to)
    print(f'wrote {to}: shoal.load_model("{to}"), shoal generate, shoal evaluate and shoal export take it', flush=True)


@contextmanager
def opened(model: Path, family: str | None) -> Generator[ModelSource]:
    """Open the model that a person has named; that a file of it cannot be read is an error with its name.

    Raises:
        ConfigError: it is no folder of a model.
        StorageError: a file cannot be read.
        ShoalError: see `open_model`.
    """
    try:
        yield open_model(model, family=family)
    except OSError as error:
        if error.filename is None:
            raise
        raise StorageError(f"cannot read {error.filename}: {error.strerror}") from error


def _place(to: Path, source: ModelSource, *, force: bool) -> Path:
    """Return the absolute place of a folder that is to be written, and check that it is free."""
    place = Path(os.path.abspath(to))
    if place.resolve() == source.folder.resolve() or (place / RECORD).exists():
        raise ConfigError(f"--to {to}: that is a model as its run has left it; choose another place")
    require_place(place, force=force, known_by=_WRITTEN)
    return place
