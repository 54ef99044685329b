"""Which files a data set of `datasets` consists of: those of its own folder or repository, whatever it says itself.

    README.md   names files by patterns   --> looked at before and after `datasets` looks for them
    a table     names files in its rows   --> looked at by who opens them

`datasets` would take both from anywhere: from other folders of this host, whose content the swarm would then see, and
from addresses that only this host can reach.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, Final

from shoal.config.training import DataConfig
from shoal.data.arrow_files import require_unpacked
from shoal.data.parquet_files import open_parquet
from shoal.errors import ConfigError
from shoal.runtime.inside import places_of, require_inside

_FORMS: Final = frozenset({"arrow", "audiofolder", "csv", "imagefolder", "json", "parquet", "text", "webdataset"})
_CACHED: Final = "cache"
"""What was made of one of them before, and is all that there is without a network."""
_DECODED: Final = frozenset({"txt", "text", "transcript", "cls", "cls2", "index", "inx", "id", "json", "jsn"})
"""Members of a tar that are read as text or a number. The others, as arrays or tensors of torch, stay bytes."""
_OUTSIDE: Final = "is outside of its data set"


class OwnFiles:
    """The files of one data set.

    Args:
        endpoint: Address of the hub.
    """

    def __init__(self, data: DataConfig, endpoint: str) -> None:
        self._name = data.dataset_name
        folder = Path(data.dataset_name).expanduser()
        self._places = places_of(folder) if folder.is_dir() else []
        of_hub = self._name if self._name.startswith("buckets/") else f"datasets/{self._name}"
        starts = (f"hf://{of_hub}@", f"hf://{of_hub}/", f"{endpoint}/{of_hub}/")
        self._addresses = () if self._places else starts

    def require_address(self, text: str) -> bool:
        """Return whether a pattern or a place is an address rather than a path.

        Raises:
            ConfigError: It is one of another repository, or host.
        """
        is_address = "://" in text
        is_own = text.startswith(self._addresses) and ".." not in text.split("/")
        if is_address and not is_own:
            raise ConfigError(f"{text!r} {_OUTSIDE}, {self._name}, and is not read; copy it into there")
        return is_address

    def require(self, file: str) -> None:
        """Check a file that a pattern has led to.

        Raises:
            ConfigError: It is none of the data set.
        """
        if self.require_address(file):
            return
        if not self._places:
            raise ConfigError(f"{file!r} {_OUTSIDE}, {self._name}, and is not read")
        require_inside(Path(file), self._places)


_OWN: Final = ContextVar[OwnFiles | None]("own files", default=None)


@contextmanager
def only(own: OwnFiles, data_files: Any) -> Generator[None]:
    """Have `datasets` find no file but those of a data set as long as this lasts; raises ConfigError where it would.

    Args:
        data_files: `datasets.data_files`.
    """
    if not isinstance(data_files.resolve_pattern, partial):
        data_files.resolve_pattern = partial(_resolved, data_files.resolve_pattern)
    before = _OWN.set(own)
    try:
        yield
    finally:
        _OWN.reset(before)


def _resolved(resolve: Callable[..., list[str]], pattern: str, *more: Any, **named: Any) -> list[str]:
    own = _OWN.get()
    if own is None:
        return resolve(pattern, *more, **named)
    for part in pattern.split("::"):
        own.require_address(part)
    found = resolve(pattern, *more, **named)
    for file in found:
        own.require(file)
    return found


def require_form(builder: Any, data: DataConfig) -> None:
    """Refuse what `datasets` reads by other libraries: HDF5 or Lance name further files of the host. Each file of Arrow
    or parquet is looked at before it is read, whatever it is called and wherever it comes from; of those that are
    streamed from the hub only parquet, as it is said at its end how large it becomes.

    Args:
        builder: Of a data set, by `datasets`.

    Raises:
        ConfigError: It is of such a form.
    """
    form = type(builder).__module__.rpartition(".")[2]
    if form not in _FORMS and form != _CACHED:
        raise ConfigError(
            f"data.dataset_name = {data.dataset_name} has files of a form that is not read here ({form}): parquet, "
            "JSON lines, CSV, text, images, audio and tar are; convert it"
        )
    if form in _LOOKED_AT:
        # In it `datasets` has put what opens files of the hub, in place of Python's own, if it streams.
        module = sys.modules.get(type(builder).__module__)
        look_at = partial(_LOOKED_AT[form], lambda: getattr(module, "open", open))
        builder._generate_tables = partial(_tables, look_at, builder._generate_tables)


def _tables(
    look_at: Callable[[str], None],
    generate: Callable[..., Iterable[Any]],
    files: Iterable[str],
    *more: Any,
    **named: Any,
) -> Iterator[Any]:
    """Yield what `datasets` makes of files."""
    yield from generate(_FilesInTurn(look_at, files), *more, **named)


class _FilesInTurn(list[str]):
    """Each is looked at when its turn comes: of a stream of thousands the first one is not to wait for all."""

    def __init__(self, look_at: Callable[[str], None], files: Iterable[str]) -> None:
        super().__init__(files)
        self._look_at = look_at

    def __iter__(self) -> Iterator[str]:
        for file in super().__iter__():
            self._look_at(file)
            yield file


def _require_unpacked(opened: Callable[[], Callable[..., Any]], file: str) -> None:
    if "://" not in file:
        require_unpacked(Path(file))


def _require_small(opened: Callable[[], Callable[..., Any]], file: str) -> None:
    if "://" not in file:
        open_parquet(Path(file)).close()
        return
    with opened()(file, "rb") as content:
        open_parquet(file, content=content).close()


_LOOKED_AT: Final = {"arrow": _require_unpacked, "parquet": _require_small}


def decode_few(webdataset: Any) -> None:
    """Have members of a tar neither unpacked, where a small one fills the memory, nor given to torch or numpy.

    Args:
        webdataset: `datasets.packaged_modules.webdataset.webdataset`.
    """
    kind = webdataset.WebDataset
    kind.DECODERS = {name: decoder for name, decoder in kind.DECODERS.items() if name in _DECODED}
    webdataset.EXTENSION_TO_COMPRESSION_FS_FILE_CLS = {}
