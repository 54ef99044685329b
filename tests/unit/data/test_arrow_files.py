"""Arrow files that are packed are refused, wherever in them a packed part lies."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from shoal.data.arrow_files import require_unpacked
from shoal.errors import ConfigError

_TABLE = pa.table({"a": list(range(300)), "b": pa.array(["x", "y", "x"] * 100).dictionary_encode()})
_FORMS = pytest.mark.parametrize("opened", [pa.ipc.new_file, pa.ipc.new_stream])


def _write(path: Path, opened: Callable[..., Any], packing: str | None) -> Path:
    with opened(str(path), _TABLE.schema, options=pa.ipc.IpcWriteOptions(compression=packing)) as writer:
        writer.write_table(_TABLE)
    return path


@_FORMS
def test_a_file_whose_values_lie_as_they_are_is_read(tmp_path: Path, opened: Callable[..., Any]) -> None:
    require_unpacked(_write(tmp_path / "train.arrow", opened, None))


@_FORMS
@pytest.mark.parametrize("packing", ["lz4", "zstd"])
def test_a_packed_file_is_refused(tmp_path: Path, opened: Callable[..., Any], packing: str) -> None:
    with pytest.raises(ConfigError, match="is a packed Arrow file and is not read; write it anew as parquet"):
        require_unpacked(_write(tmp_path / "train.arrow", opened, packing))


def test_a_packed_part_is_found_that_the_footer_alone_names(tmp_path: Path) -> None:
    path = _write(tmp_path / "train.arrow", pa.ipc.new_file, "zstd")
    content = bytearray(path.read_bytes())
    # Whoever reads from the beginning finds no message, as after the end of a stream.
    after_magic = slice(8, content.index(b"\xff\xff\xff\xff", 12))
    content[after_magic] = b"\xff\xff\xff\xff".ljust(after_magic.stop - after_magic.start, b"\0")
    path.write_bytes(content)
    assert pa.ipc.open_file(str(path)).read_all() == _TABLE
    with pytest.raises(ConfigError, match="is a packed Arrow file"):
        require_unpacked(path)


@_FORMS
def test_what_is_no_arrow_file_is_one_error(tmp_path: Path, opened: Callable[..., Any]) -> None:
    content = _write(tmp_path / "train.arrow", opened, "zstd").read_bytes()
    chance = random.Random(5)
    path = tmp_path / "broken.arrow"
    for _ in range(300):
        broken = bytearray(content[: chance.randrange(1, len(content))])
        for _ in range(4):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        path.write_bytes(broken)
        with suppress(ConfigError):
            require_unpacked(path)
