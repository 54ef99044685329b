"""Arrow files, of which a small one may unpack to a large one: `datasets` writes none that is packed."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from shoal.errors import ConfigError

_AT_END: Final = struct.Struct("<i6s")
"""How long the footer is, and the magic."""
_BLOCK: Final = struct.Struct("<qixxxxq")
"""Where a message lies, and how long its metadata and its body are."""
_OF_MESSAGE: Final = 2
_OF_DICTIONARY: Final = 1
_PACKING: Final = 3
_BLOCKS: Final = (2, 3)
"""Fields of the tables Message (its header), DictionaryBatch (its data) and RecordBatch (its compression), by number in
Arrow's Message.fbs, and of Footer (blocks of dictionaries and of rows) in File.fbs."""


def require_unpacked(path: Path) -> None:
    """Refuse a file whose values are packed: how large they become stands nowhere but among them.

    Raises:
        ConfigError: They are, or it is no such file.
    """
    package: Any = importlib.import_module("pyarrow")
    try:
        with package.memory_map(str(path)) as file:
            packed = any(_is_packed(message) for message in _messages(package, file))
    except (package.ArrowException, OSError, EOFError, ValueError, struct.error) as error:
        raise ConfigError(f"{path} is no Arrow file ({error}); mend it or leave it out") from error
    if packed:
        raise ConfigError(f"{path} is a packed Arrow file and is not read; write it anew as parquet, or unpacked")


def _messages(package: Any, file: Any) -> Iterator[Any]:
    """Yield what `datasets` reads, which takes for a stream what can be read as one, and else what a footer names."""
    try:
        package.ipc.open_stream(file)
    except (OSError, ValueError):
        for offset in _named(package, file):
            file.seek(offset)
            yield package.ipc.read_message(file)
    else:
        file.seek(0)
        yield from package.ipc.MessageReader.open_stream(file)


def _named(package: Any, file: Any) -> list[int]:
    package.ipc.open_file(file)
    file.seek(file.size() - _AT_END.size)
    size, _ = _AT_END.unpack(file.read(_AT_END.size))
    file.seek(file.size() - _AT_END.size - size)
    footer = file.read(size)
    offsets: list[int] = []
    for field in _BLOCKS:
        blocks = _table(footer, _root(footer), field)
        if blocks is not None:
            end = blocks + 4 + _BLOCK.size * struct.unpack_from("<I", footer, blocks)[0]
            offsets += [offset for offset, _, _ in _BLOCK.iter_unpack(footer[blocks + 4 : end])]
    return offsets


def _is_packed(message: Any) -> bool:
    if message.type not in ("dictionary", "record batch"):
        return False
    metadata = message.metadata.to_pybytes()
    header = _table(metadata, _root(metadata), _OF_MESSAGE)
    if header is not None and message.type == "dictionary":
        header = _table(metadata, header, _OF_DICTIONARY)
    return header is not None and _table(metadata, header, _PACKING) is not None


def _root(flat: bytes) -> int:
    return struct.unpack_from("<I", flat)[0]


def _table(flat: bytes, table: int, field: int) -> int | None:
    """Return where a table or a vector lies that is a field of another table, and None where it is left out.

    See https://flatbuffers.dev/internals: a table begins with how far before it its list of offsets of fields lies.
    """
    offsets = table - struct.unpack_from("<i", flat, table)[0]
    size = struct.unpack_from("<H", flat, offsets)[0]
    entry = 4 + 2 * field
    offset = struct.unpack_from("<H", flat, offsets + entry)[0] if entry < size else 0
    if offset == 0:
        return None
    return table + offset + struct.unpack_from("<I", flat, table + offset)[0]
