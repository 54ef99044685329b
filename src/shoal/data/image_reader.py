"""Images of data sets as arrays: decoded from what a column of a table or a file holds, and refused if they are none.

bytes, or a place --is it inside?--> size --decoder of `datasets`--> `PilImage` --> cropped, resized --> (C, H, W)
"""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from shoal.config.training import DataConfig
from shoal.data.builtin import BUILTINS
from shoal.data.own_files import OwnFiles
from shoal.errors import ConfigError, SampleError
from shoal.runtime.inside import places_of, require_inside

_LONGEST_SIDE: Final = 65_535
"""The most that JPEG has; of a PNG of a few kilobytes it may be a thousand million."""
_MOST_SCANNED: Final = 1 << 31
"""Pixels of all scans of a JPEG: twelve times those that the largest image may have, some seconds of work."""
_MOST_BYTES: Final = 1 << 29
"""Of a file, which may be a hole, or come of a small one in a zip."""
_OF_ZIP: Final = "zip://"
_OF_SCANS: Final = ("JPEG", "MPO")
_MARKER: Final = re.compile(rb"\xff+([^\x00\x01\xff\xd0-\xd7])")
"""Of a part of a JPEG, which says how long it is, or of the end."""
_BEGIN, _END, _SCAN = b"\xff\xd8", b"\xd9", b"\xda"
BUILTIN_NAMES = " and ".join(f'"{name}"' for name in BUILTINS)


class PilImage(Protocol):
    """What is used of `PIL.Image.Image`, as the hub's image columns are decoded."""

    def convert(self, mode: str) -> PilImage: ...

    def resize(self, size: tuple[int, int]) -> PilImage: ...

    def crop(self, box: tuple[int, int, int, int]) -> PilImage: ...

    @property
    def size(self) -> tuple[int, int]: ...


class ImageReader:
    """Decodes images as a column holds them, with their bytes or the place of their file.

    Args:
        feature: Of the column, by `datasets`.
        data: Whose files may be read: no others, whatever a row, a link or metadata say.
    """

    def __init__(self, feature: Any, data: DataConfig) -> None:
        self._feature = feature
        self._places = table_places(data)
        self._data = data
        self._own = OwnFiles(data, hub_package("datasets", data).config.HF_ENDPOINT)
        self._images = hub_package("PIL.Image", data)
        _without_postscript(self._images)

    def read(self, found: Mapping[str, Any]) -> PilImage:
        """Return an image, after what it says of its size was looked at.

        Raises:
            ConfigError: Its file is none of the data set.
            ValueError: It has a side that no photo has, or no content.
            Exception: As its decoder says.
        """
        content, path = found["bytes"], found["path"]
        if content is None:
            content = self._content(path)
        _require_fast(self._images, content)
        return cast("PilImage", self._feature.decode_example({"bytes": content, "path": path}))

    def _content(self, path: str | None) -> bytes:
        """Return what a file holds: one of this host or of the hub, or of a zip there. Raises as `read`."""
        if path is None:
            raise ValueError("it has neither bytes nor a file")
        *inside, place = path.split("::")
        if not self._own.require_address(place):
            require_inside(Path(place), self._places)
        if len(inside) > 1 or not all(each.startswith(_OF_ZIP) for each in inside):
            raise ConfigError(f"{path!r} is a file in an archive that is not read; unpack it")
        files, told = hub_package("datasets.utils.file_utils", self._data), hub_package("datasets", self._data)
        with files.xopen(path, "rb", download_config=told.DownloadConfig(token=token_of(self._data))) as file:
            content: bytes = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        return content


def _require_fast(images: Any, content: bytes) -> None:
    """Refuse an image that is not decoded in seconds, or not made small in little memory, by what it says of itself.

    Raises:
        ValueError: It is such an image.
        Exception: As its decoder says.
    """
    unknown: type[Exception] = images.UnidentifiedImageError
    try:
        with images.open(io.BytesIO(content)) as header:
            (width, height), form = header.size, header.format
    except unknown as error:
        # Pillow names the buffer's address in memory.
        raise unknown("it is no image of a kind that Pillow reads") from error
    # What makes it small has a table of 32 bytes for each pixel of a side.
    if max(width, height) > _LONGEST_SIDE:
        raise ValueError(f"it has {width} x {height} pixels, and at most {_LONGEST_SIDE} of a side are read")
    # Each scan goes over all pixels, and one that adds nothing to them takes some bytes.
    if form in _OF_SCANS and (scans := _num_scans(content)) * width * height > _MOST_SCANNED:
        raise ValueError(f"it has {scans} scans of {width} x {height} pixels, more than any photo")


def _num_scans(content: bytes) -> int:
    """Count the scans of a JPEG up to its end, behind which cameras put other things."""
    found, at = 0, len(_BEGIN)
    while (marker := _MARKER.search(content, at)) and marker[1] != _END:
        found += marker[1] == _SCAN
        at = marker.end() + int.from_bytes(content[marker.end() : marker.end() + 2], "big")
    return found


def table_places(data: DataConfig) -> list[Path]:
    """Return where files may lie that the rows of a table name: in its folder, or where `datasets` and the hub's client
    keep what they have fetched."""
    datasets, hub = hub_package("datasets", data), hub_package("huggingface_hub.constants", data)
    name = Path(data.dataset_name).expanduser()
    own = name if name.is_dir() else Path(hub.HF_HUB_CACHE) / f"datasets--{data.dataset_name.replace('/', '--')}"
    held_out = [Path(data.eval_split)] if data.eval_split is not None and "/" in data.eval_split else []
    kept = [Path(datasets.config.DOWNLOADED_DATASETS_PATH), Path(datasets.config.EXTRACTED_DATASETS_PATH)]
    return places_of(own, *held_out, *kept)


def pixels_of(image: PilImage, size: int, channels: int, *, is_cropped: bool) -> NDArray[np.float32]:
    """Return an image as (C, H, W); see `HubImages`."""
    mode = "L" if channels == 1 else "RGB"
    whole = image.convert(mode)
    fitted = (_middle(whole) if is_cropped else whole).resize((size, size))
    pixels_HWC = np.asarray(fitted, dtype=np.float32).reshape(size, size, channels)
    return (pixels_HWC.transpose(2, 0, 1) / 255.0 - 0.5) / 0.5


def _middle(image: PilImage) -> PilImage:
    """The largest square around the middle."""
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return image.crop((left, top, left + side, top + side))


def image_in(content: bytes, data: DataConfig) -> NDArray[np.float32]:
    """Return the image in a file, decoded as those that are trained on; (C, H, W), see `HubImages`.

    Raises:
        ConfigError: A package is not installed.
        SampleError: It is no image.
    """
    images = hub_package("PIL.Image", data)
    _without_postscript(images)
    unknown: type[Exception] = hub_package("PIL", data).UnidentifiedImageError
    feature = hub_package("datasets", data).Image()
    try:
        _require_fast(images, content)
        image = feature.decode_example({"bytes": content, "path": None})
        return pixels_of(image, data.img_size, data.num_channels, is_cropped=data.task_type == "image_gen")
    except MemoryError:
        raise  # another time there may be enough
    except unknown as error:
        raise SampleError(str(error)) from error
    except Exception as error:
        raise SampleError(f"{type(error).__name__}: {error}") from error


def token_of(data: DataConfig) -> str | None:
    """Return what the hub knows the user by."""
    return data.hf_token.get_secret_value() if data.hf_token else None


def hub_package(package: str, data: DataConfig) -> Any:
    """Import a package that reads data sets of the hub.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"data.dataset_name = {data.dataset_name} is not built in ({BUILTIN_NAMES} are) and the package "
            f"{package}, which is needed to load it, is not installed: pip install 'shoal[hf]'"
        ) from error


def _without_postscript(images: Any) -> None:
    """Have Pillow read no EPS, whatever a file is called: that is a program, which it has Ghostscript carry out."""
    images.init()
    if "EPS" in images.ID:
        images.ID.remove("EPS")
