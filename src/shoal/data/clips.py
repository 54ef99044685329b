"""Clips of audio with transcripts, before any is decoded: of a folder, or of a table with a column of audio.

metadata.csv, metadata.jsonl    file_name and a column of text, as `datasets` has it for folders of audio
*.trans.txt                     lines "id text" beside id.flac, as LibriSpeech has it
fileids, transcription          ids, and lines "<s> text </s> (id)", as CMU Sphinx has it; also *.fileids
name.wav, name.txt              a text beside each clip
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final, cast

from shoal.config.training import DataConfig
from shoal.data.builtin import BUILTINS
from shoal.data.huggingface import HubTable, load_folder, load_table, misfit, require_apart
from shoal.data.image_reader import table_places
from shoal.errors import MALFORMED, ConfigError
from shoal.runtime.inside import places_of, require_inside

_SUFFIXES: Final = (".wav", ".flac", ".ogg", ".opus", ".mp3")
_OTHER_TEXT_COLUMNS: Final = ("transcription", "sentence")
_MOST_CHARACTERS: Final = 1 << 17
"""Of a cell in a table of transcripts; `csv` has one limit for all of a process, which others set too."""
_FORMS: Final = (
    "metadata.csv or metadata.jsonl with file_name and text, *.trans.txt, fileids and transcription, or a name.txt for "
    "each name.wav"
)


class Clips(ABC):
    """Clips by index, in an order that depends on nothing but their names.

    Attributes:
        names: Of each, for people.
        texts: The transcript of each, words with one space between; empty: there is none.
    """

    names: list[str]
    texts: list[str]

    @abstractmethod
    def open(self, index: int) -> IO[bytes]:
        """Return a clip's encoded bytes.

        Raises:
            OSError: It cannot be read.
            ConfigError: It is no file of the data set.
        """

    @property
    def characters(self) -> str:
        """The characters of all transcripts, in their order."""
        return "".join(sorted(set("".join(self.texts))))


class FileClips(Clips):
    """Clips of files."""

    def __init__(self, found: dict[Path, str], root: Path) -> None:
        self._paths = sorted(found)
        self.names = [Path(os.path.relpath(path, root)).as_posix() for path in self._paths]
        self.texts = [_plain(found[path]) for path in self._paths]

    def open(self, index: int) -> IO[bytes]:
        return self._paths[index].open("rb")


class TableClips(Clips):
    """Clips of a table's column of audio.

    Args:
        places: Where files may lie that rows name.
    """

    def __init__(self, table: HubTable, audio_column: str, texts: list[str], places: Sequence[Path]) -> None:
        self._table = table
        self._places = places
        self._column = audio_column
        self.texts = [_plain(text) for text in texts]
        self.names = [f"row {index}" for index in range(len(texts))]

    def open(self, index: int) -> IO[bytes]:
        found: dict[str, Any] = self._table[index][self._column]
        if found.get("bytes") is not None:
            return io.BytesIO(found["bytes"])
        path = Path(found["path"])
        require_inside(path, self._places)
        return path.open("rb")


def open_clips(data: DataConfig, split: str | None) -> Clips:
    """Open the clips of a folder, or of a data set of the hub.

    Args:
        split: `data.eval_split`; None: what is trained on.

    Raises:
        ConfigError: There is no such folder or data set, it has no clips with transcripts, or all of them are held out.
    """
    folder = _folder(data, split)
    if folder is None:
        return _of_table(data, split)
    if found := dict(_transcripts(folder, data)):
        return FileClips(_trained_on(found, data) if split is None else found, folder)
    if not any(folder.glob("**/*.parquet")):
        raise ConfigError(
            f"{'data.dataset_name' if split is None else 'data.eval_split'} = {folder}: this folder has no "
            f"transcripts of audio: {_FORMS}"
        )
    return _of_table(data, split)


def _folder(data: DataConfig, split: str | None) -> Path | None:
    """Return the folder of a split; None: it is one of the hub."""
    if split is not None and "/" in split:
        folder = Path(split).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"data.eval_split = {split}: there is no such folder here")
        return folder
    root = Path(data.dataset_name).expanduser()
    if not root.is_dir():
        return None
    inner = root / (data.dataset_split if split is None else split)
    if split is not None and not inner.is_dir():
        raise ConfigError(f"data.eval_split = {split}: {root} has no such folder; give one, as {root}/{split}")
    return inner if inner.is_dir() else root


def _trained_on(found: dict[Path, str], data: DataConfig) -> dict[Path, str]:
    """Return the clips that are not held out; a link is the file that it leads to."""
    folder = None if data.eval_split is None else _folder(data, data.eval_split)
    if folder is None:
        return found
    place = folder.resolve()
    clips = {path.resolve() for path, _ in _transcripts(folder, data)}
    left = {
        path: text
        for path, text in found.items()
        if path.resolve() not in clips and not path.resolve().is_relative_to(place)
    }
    if not left:
        raise ConfigError(
            f"data.eval_split = {data.eval_split} holds out all clips of data.dataset_name = {data.dataset_name}, and "
            "none is left to train on; name another folder to evaluate on, or leave data.eval_split out, and some "
            "clips are held out (data.holdout_fraction)"
        )
    return left


def _transcripts(folder: Path, data: DataConfig) -> Iterator[tuple[Path, str]]:
    """Yield each clip of a folder with its transcript; of one that is there in several forms, the last one counts.

    Neither a name in its metadata nor a link leads to a file of another data set.
    """
    places = places_of(folder, Path(data.dataset_name))
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        inside = path.relative_to(folder)
        if any(part.startswith(".") for part in inside.parts):
            continue
        if path.is_symlink():
            require_inside(path, places)
        for clip, text in _of_file(path, data.text_column):
            require_inside(clip, places)
            yield clip, text


def _of_file(path: Path, column: str) -> Iterator[tuple[Path, str]]:
    """Yield the clips that a file has the transcripts of."""
    if path.name in ("metadata.csv", "metadata.jsonl"):
        yield from _of_metadata(path, column)
    elif path.name.endswith(".trans.txt"):
        for line in _lines(path):
            name, _, text = line.partition(" ")
            yield _clip(path.parent, name), text
    elif path.name == "fileids" or path.suffix == ".fileids":
        yield from _of_sphinx(path)
    elif path.suffix.lower() in _SUFFIXES and path.with_suffix(".txt").is_file():
        yield path, " ".join(_lines(path.with_suffix(".txt")))


def _of_metadata(path: Path, column: str) -> Iterator[tuple[Path, str]]:
    if path.suffix == ".csv":
        csv.field_size_limit(_MOST_CHARACTERS)
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows: list[Any] = list(csv.DictReader(file))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is no table of text in UTF-8 ({error}); mend it") from error
    else:
        try:
            rows = [json.loads(line) for line in _lines(path) if line]
        except MALFORMED as error:
            raise ConfigError(f"{path} is no JSON lines ({error}); mend it") from error
    for number, row in enumerate(rows):
        values = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
        text = next((values[name] for name in (column, *_OTHER_TEXT_COLUMNS) if name in values), None)
        name = values.get("file_name")
        if not isinstance(name, str) or not name or text is None:
            raise ConfigError(
                f"{path}: row {number + 1} has {', '.join(map(str, values))}, and needs file_name and {column} "
                "(data.text_column)"
            )
        yield path.parent / name, str(text)


def _of_sphinx(path: Path) -> Iterator[tuple[Path, str]]:
    beside = path.with_name(path.name.removesuffix("fileids") + "transcription")
    if not beside.is_file():
        raise ConfigError(f"{path} has no {beside.name} beside it with the transcripts")
    found: dict[str, str] = {}
    for line in _lines(beside):
        text, _, id = line.removesuffix(")").rpartition("(")
        found[id] = text.strip().removeprefix("<s>").removesuffix("</s>")
    for name in _lines(path):
        yield _clip(path.parent, name), found.get(name, found.get(Path(name).name, ""))


def _clip(folder: Path, name: str) -> Path:
    """The file of a clip whose suffix is not said; where there is none, what it could be called."""
    candidates = [folder / f"{name}{suffix}" for suffix in _SUFFIXES]
    return next((path for path in candidates if path.is_file()), candidates[0])


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8 ({error}); convert it") from error


def _of_table(data: DataConfig, split: str | None) -> Clips:
    if split is not None and "/" in split:
        table: Any = load_folder(data, split)
    elif data.dataset_name in BUILTINS:
        raise ConfigError(f"data.dataset_name = {data.dataset_name} has no audio; choose another data set")
    else:
        if split is None:
            require_apart(data)
        table = load_table(data, data.dataset_split if split is None else split)
    audio = [name for name, kind in table.features.items() if name == "audio" or type(kind).__name__ == "Audio"]
    texts = [name for name in (data.text_column, *_OTHER_TEXT_COLUMNS) if name in table.column_names]
    if not audio or not texts:
        raise misfit(table, data, f"a column of audio and one of text ({data.text_column}, data.text_column)")
    # Its own decoder needs a package more, and converts nothing.
    datasets: Any = importlib.import_module("datasets")
    table = table.cast_column(audio[0], datasets.Audio(decode=False)).select_columns([audio[0], texts[0]])
    return TableClips(table, audio[0], [text or "" for text in table[texts[0]]], table_places(data))


def _plain(text: str) -> str:
    return " ".join(text.split())
