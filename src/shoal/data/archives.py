"""Archives of a data set, which `datasets` unpacks into its cache: a small one may fill the disk.

zip, tar                   what it says of its files is looked at before it is unpacked, or read
gzip, xz, bz2, zstd, lz4   the bytes are counted while they are written
7z, rar                    are not unpacked

Which of them it unpacks, and which it reads as they are, depends on its version.
"""

from __future__ import annotations

import importlib
import shutil
import tarfile
import zipfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final

from shoal.errors import MALFORMED, ConfigError

_MOST_BYTES: Final = 1 << 30
"""Of what comes of an archive; more from one that has bytes to show for it, as long as the disk has room."""
_MOST_TIMES: Final = 1000
_LEFT_SHARE: Final = 0.1
"""Of what is free on the disk."""
_PIECE_BYTES: Final = 1 << 20
_OPENED_BY: Final = {"gzip": "gzip", "xz": "lzma", "bz2": "bz2", "zstd": "zstandard", "lz4": "lz4.frame"}


def unpack_few_bytes(extractor: Any) -> None:
    """Have `datasets` unpack no archive that fills the disk.

    Args:
        extractor: `datasets.utils.extract.Extractor`.
    """
    for name, kind in extractor.extractors.items():
        if name in _OPENED_BY:
            kind.extract = staticmethod(partial(_unpack_stream, _OPENED_BY[name]))
        elif not isinstance(kind.extract, partial):
            kind.extract = staticmethod(partial(_unpack_listed, name, kind.extract))


def _unpack_stream(module: str, packed: str, to: str) -> None:
    """Write what a file holds, and leave nothing of it if that is too much; raises ConfigError then."""
    most, found = _most(packed, to), 0
    with importlib.import_module(module).open(packed, "rb") as source, open(to, "wb") as target:
        while piece := source.read(_PIECE_BYTES):
            found += len(piece)
            if found > most:
                target.close()
                Path(to).unlink()
                raise _too_large(packed, most)
            target.write(piece)


def _unpack_listed(form: str, unpack: Any, packed: str, to: str) -> None:
    """Unpack an archive of files if these are not too large together; raises ConfigError if they are."""
    match form:
        case "zip":
            require_small_zip(Path(packed), Path(to).parent)
        case "tar":
            with tarfile.open(packed) as archive:
                # As it is read: the next one of a packed archive may be behind gigabytes.
                _require_few(packed, (each.size for each in archive), _most(packed, to))
        case _:
            raise ConfigError(
                f"{packed} is an archive of a kind that is not unpacked here ({form}); unpack it yourself"
            )
    unpack(packed, to)


def require_small_zip(path: Path, to: Path) -> None:
    """Refuse a zip of which too much comes.

    Args:
        to: where it would be.

    Raises:
        ConfigError: it is one, or none.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = [each.file_size for each in archive.infolist()]
    except (zipfile.BadZipFile, NotImplementedError, *MALFORMED) as error:
        raise ConfigError(f"{path} is no zip ({error}); mend it or leave it out") from error
    _require_few(str(path), sizes, _most(str(path), str(to / path.name)))


def _require_few(packed: str, sizes: Iterable[int], most: int) -> None:
    found = 0
    for size in sizes:
        found += size
        if found > most:
            raise _too_large(packed, most)


def _most(packed: str, to: str) -> int:
    free = shutil.disk_usage(Path(to).parent).free
    return min(max(_MOST_BYTES, _MOST_TIMES * Path(packed).stat().st_size), int(free * (1 - _LEFT_SHARE)))


def _too_large(packed: str, most: int) -> ConfigError:
    return ConfigError(
        f"{packed} unpacks to more than {most:,} bytes, which is {_MOST_TIMES} times its own size, or what the disk of "
        "the cache has room for, and is not read; leave it out, or unpack it yourself if it is yours"
    )
