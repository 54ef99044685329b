"""Archives of data sets: what comes of a small one fills no disk."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.data import archives
from shoal.data.archives import unpack_few_bytes
from shoal.errors import ConfigError


def _tar(path: Path, content: bytes, mode: str = "w") -> None:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        member = tarfile.TarInfo("inside")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))


def _zip(path: Path, content: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inside", content)


_MADE_BY: dict[str, tuple[str, Callable[[Path, bytes], object]]] = {
    "zip": ("zip", _zip),
    "tar.xz": ("tar", lambda path, content: _tar(path, content, "w:xz")),
    "gz": ("gzip", lambda path, content: path.write_bytes(gzip.compress(content))),
    "xz": ("xz", lambda path, content: path.write_bytes(lzma.compress(content))),
    "bz2": ("bz2", lambda path, content: path.write_bytes(bz2.compress(content))),
}


@pytest.fixture
def extractor() -> Any:
    """As that of `datasets`, without the library."""
    unpack = staticmethod(lambda packed, to: shutil.unpack_archive(packed, to, _form(packed)))
    names = ("tar", "gzip", "zip", "xz", "rar", "zstd", "bz2", "7z", "lz4")
    found = SimpleNamespace(extractors={name: type(name, (), {"extract": unpack}) for name in names})
    for _ in range(2):  # once for each data set
        unpack_few_bytes(found)
    return found


def _form(packed: str) -> str:
    return "zip" if packed.endswith("zip") else "xztar"


def _size_of(path: Path) -> int:
    return sum(each.stat().st_size for each in (path, *path.rglob("*")) if each.is_file())


@pytest.mark.parametrize("suffix", _MADE_BY)
def test_what_is_not_much_larger_than_its_archive_is_unpacked(tmp_path: Path, extractor: Any, suffix: str) -> None:
    form, make = _MADE_BY[suffix]
    packed, to = tmp_path / f"a.{suffix}", tmp_path / "to"
    make(packed, bytes(100_000))
    extractor.extractors[form].extract(str(packed), str(to))
    assert _size_of(to) == 100_000


@pytest.mark.parametrize("suffix", _MADE_BY)
def test_an_archive_that_would_fill_the_disk_is_not_unpacked_and_leaves_nothing(
    tmp_path: Path, extractor: Any, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, make = _MADE_BY[suffix]
    packed, to = tmp_path / f"a.{suffix}", tmp_path / "to"
    make(packed, bytes(3_000_000))
    monkeypatch.setattr(archives, "_MOST_BYTES", 1_000_000)
    monkeypatch.setattr(archives, "_MOST_TIMES", 10)
    monkeypatch.setattr(archives, "_PIECE_BYTES", 1 << 16)
    with pytest.raises(ConfigError, match="unpacks to more than 1,000,000 bytes"):
        extractor.extractors[form].extract(str(packed), str(to))
    assert not to.exists()


@pytest.mark.parametrize("suffix", ["zip", "bz2"])
def test_an_archive_of_more_than_the_disk_has_room_for_is_not_unpacked(
    tmp_path: Path, extractor: Any, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, make = _MADE_BY[suffix]
    packed, to = tmp_path / f"a.{suffix}", tmp_path / "to"
    make(packed, bytes(100_000))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=50_000))
    with pytest.raises(ConfigError, match="45,000 bytes"):
        extractor.extractors[form].extract(str(packed), str(to))
    assert not to.exists()


@pytest.mark.parametrize("form", ["7z", "rar"])
def test_of_which_nobody_can_say_before_what_they_hold_is_not_unpacked(
    tmp_path: Path, extractor: Any, form: str
) -> None:
    packed = tmp_path / "a"
    packed.write_bytes(b"")
    with pytest.raises(ConfigError, match="unpack it yourself"):
        extractor.extractors[form].extract(str(packed), str(tmp_path / "to"))
