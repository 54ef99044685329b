"""Documents of files, one after the other: what is read of a corpus that may be larger than the memory.

    folder | pattern | file  -> the files of a split, in the order of their names
    *.txt                     a document each, in pieces of whole lines; what is named itself may be called otherwise
    *.jsonl *.parquet *.csv   a document in each row, in the column `data.text_column`; JSON may be one list as well.
                              The mark that Windows puts before UTF-8 (BOM) is no part of them
    *.bin *.npy               tokens, one after the other

Only the libraries that a file needs are imported, when it is read.
"""

from __future__ import annotations

import codecs
import csv
import glob
import hashlib
import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any, Final, cast

import msgspec
import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from shoal.config.training import DataConfig
from shoal.data.documents import Documents, RowReader, TextPiece, Unreadable
from shoal.data.parquet_files import open_parquet
from shoal.data.passing_errors import of_the_system
from shoal.data.places import place_meant
from shoal.errors import MALFORMED, ConfigError
from shoal.runtime.inside import places_of, require_inside

_PIECE_CHARACTERS: Final = 1 << 20
_PIECE_TOKENS: Final = 1 << 20
_ROWS: Final = 1024
_BEGIN_BYTES: Final = 64
_ROWS_OF: Final = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".csv": "csv"}
_TEXT: Final = (".txt", ".text")
_TOKENS: Final = (".bin", ".npy")
SUFFIXES: Final = (*_TEXT, *_ROWS_OF, *_TOKENS)
_OTHER_SIGNS: Final = (";", "\t", "|")
"""What some programs write between the columns of a CSV file."""
_SPLITS: Final = {
    "train": r"train|training",
    "validation": r"validation|valid|val|dev",
    "test": r"test|testing|eval|evaluation",
}
"""Words in the names of files and folders that say of which split they are, as `datasets` has them.

In the name of a file of rows or tokens they count anywhere. The name of a text file is a document's title, as
how-training-works.txt, where they count at the end alone, as in wiki.train.txt.
"""


def local_documents(data: DataConfig, split: str | None) -> FileDocuments | None:
    """Return the documents of files on this host; None: `data.dataset_name` names none that are read here.

    Args:
        split: `data.eval_split`; None: what is trained on.

    Raises:
        ConfigError: There are no such files, or several kinds of them.
    """
    if split is not None and "/" in split:
        return FileDocuments(data, _files_at(split), "data.eval_split")
    files = _files(data.dataset_name)
    if not files:
        return None
    chosen = _chosen(data, files, split)
    if split is None and data.eval_split is not None:
        chosen = _trained_on(data, chosen, _held_out(data, files, data.eval_split))
    return FileDocuments(data, chosen, "data.dataset_name")


def _held_out(data: DataConfig, files: Sequence[Path], split: str) -> list[Path]:
    """Return the files of `data.eval_split`, a split of these files or a place of its own."""
    return _files_at(split) if "/" in split else _chosen(data, files, split)


def _files_at(place: str) -> list[Path]:
    files = _files(place)
    if not files:
        raise ConfigError(f"data.eval_split = {place}: there is no such file here; {_what_is_read()}")
    return files


def _chosen(data: DataConfig, files: Sequence[Path], split: str | None) -> list[Path]:
    """Return the files of a split, of which there is one at least."""
    wanted = data.dataset_split if split is None else split
    chosen = _of_split(data.dataset_name, files, wanted, is_eval=split is not None)
    if not chosen:
        key = "dataset_split" if split is None else "eval_split"
        raise ConfigError(
            f"data.{key} = {wanted}: no file of {data.dataset_name} has the name of this split, as "
            f"{wanted}{files[0].suffix}; there are {', '.join(path.name for path in files[:5])}{place_meant(wanted)}"
        )
    return chosen


def _trained_on(data: DataConfig, files: Sequence[Path], held_out: Sequence[Path]) -> list[Path]:
    """Return the files that are not held out; a link is the file that it leads to."""
    places = {path.resolve() for path in held_out}
    left = [path for path in files if path.resolve() not in places]
    if not left:
        raise ConfigError(
            f"data.eval_split = {data.eval_split} holds out all files of data.dataset_name = {data.dataset_name}, and "
            "none is left to train on; name other files to evaluate on, or leave data.eval_split out, and the end of "
            "the text is held out (data.holdout_fraction)"
        )
    return left


def _files(name: str) -> list[Path]:
    """Return the files that a name stands for, in their order.

    Raises:
        ConfigError: A link in a folder leads out of it.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        found = [each for each in path.rglob("*") if not any(p.startswith(".") for p in each.relative_to(path).parts)]
    elif path.is_file():
        found = [path]
    elif glob.has_magic(name):
        found = [Path(each) for each in glob.glob(str(path), recursive=True)]
    else:
        return []
    found = sorted(each for each in found if each.is_file())
    files = [each for each in found if each.suffix in SUFFIXES]
    if not files and not path.is_dir():
        # A folder may hold anything. What is named here is text, whatever it is called: notes.md, a program.
        return found
    if path.is_dir():
        # What is trained on is seen by other hosts: a folder from elsewhere may read no file but its own.
        places = places_of(path)
        for each in files:
            require_inside(each, places)
    return files


def _is_text(path: Path) -> bool:
    return path.suffix not in _ROWS_OF and path.suffix not in _TOKENS


def _what_is_read() -> str:
    return f"files of text are {', '.join(SUFFIXES)}"


def _of_split(root: str, files: Sequence[Path], split: str, *, is_eval: bool) -> list[Path]:
    """Return those of a split; without a word of any split in their names, files are of `train`."""
    base = Path(root).expanduser()
    if not base.is_dir() and not is_eval and split == "train":
        return list(files)
    chosen = _named(files, base, split)
    if not chosen and split == "train":
        of_others = {path for other in _SPLITS for path in _named(files, base, other)}
        return [path for path in files if path not in of_others]
    return chosen


def _named(files: Sequence[Path], base: Path, split: str) -> list[Path]:
    words = _SPLITS.get(split, re.escape(split))
    anywhere = re.compile(rf"(^|[^a-z0-9])({words})([^a-z0-9]|$)", re.IGNORECASE)
    last = re.compile(rf"(^|[._])({words})([-._]?\d+(-of-\d+)?)?$", re.IGNORECASE)

    def is_named(path: Path) -> bool:
        inner = path.relative_to(base) if path.is_relative_to(base) else Path(path.name)
        in_file = last if _is_text(path) else anywhere
        return bool(anywhere.search(inner.parent.as_posix()) or in_file.search(path.stem))

    return [path for path in files if is_named(path)]


class FileDocuments(Documents):
    """The documents of files.

    Args:
        key: Of the configuration, which names them.

    Raises:
        ConfigError: Some are of text and some of tokens, or are to hold conversations and have no rows.
    """

    def __init__(self, data: DataConfig, files: Sequence[Path], key: str) -> None:
        self._data = data
        self._files = files
        tokens = [path for path in files if path.suffix in _TOKENS]
        if tokens and len(tokens) < len(files):
            raise ConfigError(
                f"{key}: {tokens[0].name} holds tokens and {next(p.name for p in files if p not in tokens)} text; give "
                "a pattern that names one kind, as ./corpus/*.jsonl"
            )
        self.is_tokens = bool(tokens)
        no_rows = [path for path in files if path.suffix not in _ROWS_OF]
        if no_rows and data.messages_column is not None:
            raise ConfigError(
                f"{key}: {no_rows[0].name} has no rows with data.messages_column = {data.messages_column}; give a "
                "pattern that names JSON lines or parquet alone, as ./corpus/*.jsonl"
            )
        stats = [path.stat() for path in files]
        self._sizes = [stat.st_size for stat in stats]
        told = [f"{p.absolute()} {s.st_size} {s.st_mtime_ns}" for p, s in zip(files, stats, strict=True)]
        self._reader = reader = RowReader(data)
        self.identity = hashlib.sha256("\n".join((*reader.columns, str(data.token_dtype), *told)).encode()).hexdigest()

    def __iter__(self) -> Iterator[TextPiece | Unreadable]:
        total, before = max(1, sum(self._sizes)), 0
        for path, size in zip(self._files, self._sizes, strict=True):
            try:
                for within, item in self._of_file(path, size):
                    self.share = (before + within) / total
                    yield item
            except OSError as error:
                reason = error.strerror or error
                raise ConfigError(f"{path} cannot be read ({reason}); mend it or leave it out") from error
            before += size
        self.share = 1.0

    def _of_file(self, path: Path, size: int) -> Iterator[tuple[float, TextPiece | Unreadable]]:
        """Yield what a file holds, and how many of its bytes have been read."""
        if path.suffix in _TOKENS:
            return _tokens(path, self._data)
        if _is_text(path):
            return _text(path)
        match _ROWS_OF[path.suffix]:
            case "parquet":
                return _parquet(path, self._reader, size)
            case "csv":
                return _csv(path, self._reader)
            case _:
                return _json_lines(path, self._reader)


def _text(path: Path) -> Iterator[tuple[float, TextPiece | Unreadable]]:
    """Whole lines at a time, without the end of the last one."""
    held = ""
    with path.open("rb") as raw, open(raw.fileno(), encoding="utf-8", errors="strict", closefd=False) as file:
        try:
            while lines := "".join(file.readlines(_PIECE_CHARACTERS)):
                if held:
                    yield raw.tell(), TextPiece(held, ends=False)
                held = lines
        except UnicodeDecodeError as error:
            yield raw.tell(), Unreadable(path.name, f"it is no text in UTF-8 ({error.reason})")
            if not held:
                return
        if held:
            yield raw.tell(), TextPiece(held.removesuffix("\n"))


def _json_lines(path: Path, reader: RowReader) -> Iterator[tuple[float, TextPiece | Unreadable]]:
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    read = 0
    with path.open("rb") as file:
        begin = file.read(_BEGIN_BYTES)
        if begin.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
            yield from _json_list(path, reader)
            return
        file.seek(len(codecs.BOM_UTF8) if begin.startswith(codecs.BOM_UTF8) else 0)
        for number, line in enumerate(file, 1):
            read += len(line)
            if not line.strip():
                continue
            where = f"{path.name}:{number}"
            try:
                row = decode(line)
            except MALFORMED as error:
                yield read, Unreadable(where, f"it is no JSON object ({error})")
                continue
            yield read, _cell(row, reader, where)


def _json_list(path: Path, reader: RowReader) -> Iterator[tuple[float, TextPiece | Unreadable]]:
    """The rows of a file that is one list, as many tools write it: it is in memory as a whole."""
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        rows = msgspec.json.decode(content, type=list[Any])
    except MALFORMED as error:
        raise ConfigError(
            f"{path} begins as a JSON list of rows and is none ({error}); mend it, or write a JSON object a line"
        ) from error
    for number, row in enumerate(rows, 1):
        where, read = f"{path.name}:{number}", len(content) * number / len(rows)
        if isinstance(row, dict):
            yield read, _cell(cast("dict[str, Any]", row), reader, where)
        else:
            yield read, Unreadable(where, "it is no JSON object")


def _cell(row: dict[str, Any], reader: RowReader, where: str) -> TextPiece | Unreadable:
    if reader.column not in row:
        said = f'it has no "{reader.column}" ({reader.key}) but {", ".join(map(str, list(row)[:8]))}'
        is_chat = reader.key == "data.text_column" and any(isinstance(value, list) for value in row.values())
        return Unreadable(where, f"{said}; data.messages_column names conversations" if is_chat else said)
    return reader.take(row, where, is_table=False)


def _csv(path: Path, reader: RowReader) -> Iterator[tuple[float, TextPiece | Unreadable]]:
    csv.field_size_limit(min(sys.maxsize, 1 << 31))
    with path.open("rb") as raw, open(raw.fileno(), encoding="utf-8-sig", newline="", closefd=False) as file:
        rows = csv.DictReader(file)
        number = 1
        try:
            if reader.column not in (rows.fieldnames or ()):
                raise _no_column(path, reader, list(rows.fieldnames or ()))
            for row in rows:
                number += 1
                yield raw.tell(), reader.take(row, f"{path.name}:{number}")
        except (csv.Error, UnicodeDecodeError) as error:
            # What follows it in the file cannot be told from it.
            where = f"row {number + 1}" if number > 1 else "its first row"
            remedy = "save it as UTF-8" if isinstance(error, UnicodeDecodeError) else "mend the file"
            raise ConfigError(f"{path}, {where}, cannot be read ({error}); {remedy}") from error


def _parquet(path: Path, reader: RowReader, size: int) -> Iterator[tuple[float, TextPiece | Unreadable]]:
    with open_parquet(path, reader.columns) as file:
        names: list[str] = file.schema_arrow.names
        if reader.column not in names:
            raise _no_column(path, reader, names)
        columns = [column for column in reader.columns if column in names]
        groups: int = file.metadata.num_row_groups
        row = 0
        for group in range(groups):
            end: int = row + file.metadata.row_group(group).num_rows
            read = size * (group + 1) / groups
            try:
                for batch in file.iter_batches(_ROWS, row_groups=[group], columns=columns):
                    for found in batch.to_pylist():
                        row += 1
                        yield read, reader.take(found, f"{path.name}:{row}")
            except MemoryError:
                raise  # of pyarrow as well; what is left out is the same wherever it is read
            except (OSError, ValueError, _arrow_exception()) as error:
                if (reason := of_the_system(error)) is not None:
                    raise reason from None  # another time it gives them
                yield read, Unreadable(f"{path.name}:{row + 1}", f"its pages cannot be read ({error})", end - row)
            row = end


def _arrow_exception() -> type[Exception]:
    """What pyarrow also raises, as for a form of pages that it does not know."""
    return importlib.import_module("pyarrow").ArrowException


def _no_column(path: Path, reader: RowReader, names: Sequence[str]) -> ConfigError:
    said = f'{reader.key}: {path} has no column "{reader.column}"'
    if not names:
        return ConfigError(f"{said}, and no other one: it is empty; leave it out")
    if len(names) == 1 and (sign := next((sign for sign in _OTHER_SIGNS if sign in names[0]), None)) is not None:
        return ConfigError(
            f"{said} but {names[0]!r}: its columns have to be told apart by commas, not by {sign!r}; save it so"
        )
    return ConfigError(f"{said} but {', '.join(names)}; say which one it is")


def _tokens(path: Path, data: DataConfig) -> Iterator[tuple[float, TextPiece | Unreadable]]:
    if data.token_dtype is None:
        raise ConfigError(f"{path}: data.token_dtype has to say of which type its tokens are, as uint16")
    if path.suffix == ".npy":
        try:
            array = cast("NDArray[np.generic]", open_memmap(path, mode="r"))
        except (TypeError, OverflowError, MemoryError, TokenError, *MALFORMED) as error:
            # Its header is parsed as an expression of Python, and says how large it is.
            raise ConfigError(f"{path} is no array of numpy ({error}); give token files, or leave it out") from error
        if array.ndim != 1 or array.dtype != data.token_dtype:
            raise ConfigError(
                f"{path} holds {array.dtype} of shape {array.shape}, not a row of data.token_dtype = {data.token_dtype}"
            )
    elif path.stat().st_size % np.dtype(data.token_dtype).itemsize:
        raise ConfigError(
            f"{path} ends within a token of data.token_dtype = {data.token_dtype}; mend it, or leave it out"
        )
    else:
        array = np.memmap(path, dtype=data.token_dtype, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
    for start in range(0, len(array), _PIECE_TOKENS):
        piece = np.array(array[start : start + _PIECE_TOKENS])
        yield start * array.itemsize, TextPiece(piece, ends=start + len(piece) == len(array))
