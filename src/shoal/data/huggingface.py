"""Data sets of the Hugging Face hub: tables of text, images decoded when they are read.

`datasets` is an optional dependency and slow to import, so it is imported when a hub data set is opened. A data set
that was downloaded before opens from its cache.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, cast

import numpy as np

from shoal.config.training import DataConfig
from shoal.data.archives import require_small_zip, unpack_few_bytes
from shoal.data.fields import Fields
from shoal.data.image_reader import BUILTIN_NAMES, ImageReader, hub_package, pixels_of, token_of
from shoal.data.own_files import OwnFiles, decode_few, only, require_form
from shoal.data.places import require_here
from shoal.data.source import Array, ArraySpec, DataSet, Indices, KnownSamples, Source, split
from shoal.errors import ConfigError, ShoalError
from shoal.model.hf.described import is_before

_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "labels", "fine_label")
_LEAST_DATASETS: Final = (4, 0)


class HubTable(Protocol):
    """What is used of `datasets.Dataset`."""

    @property
    def column_names(self) -> list[str] | None:
        """None: of a stream nobody knows."""
        ...

    @property
    def features(self) -> Mapping[str, Any]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any) -> Any: ...

    def cast_column(self, column: str, feature: Any) -> HubTable: ...

    def flatten(self) -> HubTable: ...

    def select_columns(self, column_names: Sequence[str]) -> HubTable: ...

    def select(self, indices: Sequence[int], keep_in_memory: bool) -> HubTable: ...


class HubImages(KnownSamples):
    """Images of a hub data set: (C, H, W) float32, `(pixel / 255 - 0.5) / 0.5`; labels are classes, int64."""

    def __init__(
        self,
        table: HubTable,
        image_column: str,
        label_column: str,
        *,
        reader: ImageReader,
        img_size: int,
        channels: int,
        is_cropped: bool = False,
    ) -> None:
        """Read from two columns of `table`; one channel is grey, three are RGB.

        Args:
            is_cropped: Of an image that is no square the middle is taken; else all of it is, and stretched.
        """
        fields = Fields(ArraySpec("float32", (channels, img_size, img_size)), ArraySpec("int64", ()))
        super().__init__(fields, len(table))
        self._is_cropped = is_cropped
        # Whatever else there is in a row would be decoded with it.
        self._stored = _stored(table, image_column).select_columns([image_column, label_column])
        self._reader = reader
        self._image_column = image_column
        self._label_column = label_column
        self._size = img_size
        self._channels = channels

    def name_of(self, index: int) -> str:
        """Return the number of the row, and the file that the image is in, where it is known."""
        path = self._stored[index][self._image_column].get("path")
        return f"{index} ({path})" if path else str(index)

    def read_into(self, indices: Indices, batch: Fields[Array]) -> None:
        rows: dict[str, Sequence[Any]] = self._stored[indices.tolist()]
        # One after the other: a small file may be a large image, and so may all of a batch.
        for place, found in enumerate(rows[self._image_column]):
            batch.inputs[place] = pixels_of(
                self._reader.read(found), self._size, self._channels, is_cropped=self._is_cropped
            )
        batch.labels[...] = np.asarray(rows[self._label_column], dtype=np.int64)


def open_images(data: DataConfig) -> DataSet:
    """Open images of the hub, downloading what is not in its cache.

    Raises:
        ConfigError: `datasets` is not installed, the data set cannot be reached or does not exist, it has no columns of
            images and their classes, what is evaluated on has other classes, or nothing else is there to train on.
    """
    table = load_table(data, data.dataset_split)
    if data.eval_split is None:
        source, classes = _images(table, data)
        require_classes(classes, data)
        train, holdout = split(source, data.holdout_fraction, data.holdout_fold)
        return DataSet(data.dataset_name, train, holdout, num_classes=len(classes))
    is_folder = "/" in data.eval_split
    held_out = load_folder(data, data.eval_split) if is_folder else load_table(data, data.eval_split)
    holdout, held_out_classes = _images(held_out, data)
    source, classes = _images(_trained_on(table, held_out, data), data)
    require_classes(classes, data)
    if held_out_classes != classes:
        raise ConfigError(
            f"data.eval_split = {data.eval_split} has the classes {_listed(held_out_classes)}, and what is trained on "
            f"{_listed(classes)}: they have to be the same"
        )
    return DataSet(data.dataset_name, source, holdout, num_classes=len(classes))


def require_classes(classes: Sequence[str], data: DataConfig) -> None:
    """Check that the classes of a data set are those of the run: else its labels mean something else to the model.

    Raises:
        ConfigError: They are others.
    """
    if data.classes is not None and tuple(classes) != data.classes:
        raise ConfigError(
            f"data.dataset_name = {data.dataset_name} has the classes {_listed(classes)}, and data.classes, which the "
            f"run has from where it began, are {_listed(data.classes)}: bring back the data as it was; a new run takes "
            "them as they are"
        )


def class_names(data: DataConfig) -> tuple[str, ...]:
    """Return what the classes of images are called, in the order of their numbers.

    Raises:
        ConfigError: As `open_images`.
    """
    if data.streaming:
        table = cast("HubTable", load_stream(data, data.dataset_split)[0])
    else:
        table = load_table(data, data.dataset_split)
    return tuple(image_columns(table, data).classes)


def load_folder(data: DataConfig, name: str) -> HubTable:
    """Return the table of a folder that `data.eval_split` names.

    Raises:
        ConfigError: As `load_table`.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"data.eval_split = {name}: there is no such folder here")
    return load_table(data.model_copy(update={"dataset_name": str(folder), "dataset_config": None}), "train")


def _trained_on(table: HubTable, held_out: HubTable, data: DataConfig) -> HubTable:
    """Return the images of a folder that are not held out; a link is the file that it leads to."""
    if not Path(data.dataset_name).is_dir():
        return table
    files = _files_of(table, data)
    if None in files:
        require_apart(data)
    places = set(_files_of(held_out, data)) - {None}
    left = [index for index, file in enumerate(files) if file not in places]
    if not left:
        raise ConfigError(
            f"data.eval_split = {data.eval_split} holds out all images of data.dataset_name = {data.dataset_name}, and "
            "none is left to train on; name another folder to evaluate on, or leave data.eval_split out, and some "
            "images are held out (data.holdout_fraction)"
        )
    return table if len(left) == len(files) else table.select(left, keep_in_memory=True)


def _files_of(table: HubTable, data: DataConfig) -> list[Path | None]:
    """Return the file of each image; None: it is within another one, as parquet."""
    column = image_columns(table, data).image
    paths: list[str | None] = _stored(table, column).flatten()[f"{column}.path"][:]
    return [Path(path).resolve() if path and Path(path).is_absolute() else None for path in paths]


def _stored(table: HubTable, column: str) -> HubTable:
    """The table with its images as they are stored, `bytes` and `path`."""
    return table.cast_column(column, type(table.features[column])(decode=False))


def require_apart(data: DataConfig, builder: Any = None) -> None:
    """Refuse a folder to evaluate on whose files are trained on too: their rows do not say of which file they are.

    Args:
        builder: Of what is trained on, by `datasets`; None: it is made.

    Raises:
        ConfigError: There are such files, or as `load_table`.
    """
    name = data.eval_split
    if name is None or "/" not in name or not Path(data.dataset_name).is_dir():
        return
    trained: Mapping[str, Sequence[str]] = (builder or _builder(data)).config.data_files or {}
    places = {path.resolve() for path in Path(name).expanduser().rglob("*")}
    everything = [file for files in trained.values() for file in files]
    files = trained.get(data.dataset_split.partition("[")[0], everything)
    both = [file for file in files if Path(file).resolve() in places]
    if both:
        raise ConfigError(
            f"data.eval_split = {name} holds out {len(both)} of the files that data.dataset_name = {data.dataset_name} "
            f"trains on, as {both[0]}; move what is held out to a folder elsewhere"
        )


def _listed(classes: Sequence[str]) -> str:
    shown = ", ".join(classes[:10])
    return shown if len(classes) <= 10 else f"{shown} ... ({len(classes)} of them)"


def load_table(data: DataConfig, split: str) -> HubTable:
    """Return a split of a data set, all of it on this host.

    Raises:
        ConfigError: `datasets` is not installed, or the data set cannot be reached or does not exist.
    """
    _require_two_splits(data)
    builder = _builder(data, split)
    with _told(data, split):
        builder.download_and_prepare()
        return cast("HubTable", builder.as_dataset(split=split))


def load_stream(data: DataConfig, split: str) -> tuple[Any, str]:
    """Return a split of a data set, fetched as it is read, and a text that is another one when the hub has another.

    Raises:
        ConfigError: As `load_table`.
    """
    _require_two_splits(data)
    builder = _builder(data, split)
    if data.dataset_name != data.eval_split:
        require_apart(data, builder)
    with _told(data, split):
        return builder.as_streaming_dataset(split=split), str(builder.hash)


def _builder(data: DataConfig, split: str | None = None) -> Any:
    """Return what reads a data set, before it reads it."""
    datasets = _datasets(data)
    own = OwnFiles(data, datasets.config.HF_ENDPOINT)
    with _told(data, split or data.dataset_split), only(own, hub_package("datasets.data_files", data)):
        builder = datasets.load_dataset_builder(data.dataset_name, data.dataset_config, token=token_of(data))
    require_form(builder, data)
    return builder


def _datasets(data: DataConfig) -> Any:
    """Return the package that reads a data set, after the files of a folder were looked at."""
    require_here(data)
    package = hub_package("datasets", data)
    found = version("datasets")
    if is_before(found, _LEAST_DATASETS):
        least = ".".join(map(str, _LEAST_DATASETS))
        raise ConfigError(
            f"data.dataset_name = {data.dataset_name}: datasets {found} is installed, which runs a script that a data "
            f"set brings; {least} and newer do not: pip install 'shoal[hf]'"
        )
    unpack_few_bytes(hub_package("datasets.utils.extract", data).Extractor)
    decode_few(hub_package("datasets.packaged_modules.webdataset.webdataset", data))
    folder = Path(data.dataset_name).expanduser()
    for path in sorted(folder.rglob("*.zip")) if folder.is_dir() else ():
        require_small_zip(path, folder)
    return package


def _require_two_splits(data: DataConfig) -> None:
    if data.eval_split == data.dataset_split:
        raise ConfigError(
            f"data.eval_split = {data.eval_split} is data.dataset_split, and so nothing is left to train on; name "
            "another split to evaluate on, or leave data.eval_split out (data.holdout_fraction)"
        )


@contextmanager
def _told(data: DataConfig, split: str) -> Generator[None]:
    """Make one error of whatever the library says: of files that are not what they are called it may be anything."""
    try:
        yield
    except (MemoryError, ShoalError):
        raise
    except Exception as error:
        raise _not_loaded(data, split, error) from error


def _not_loaded(data: DataConfig, split: str, error: Exception) -> ConfigError:
    is_local = Path(data.dataset_name).is_dir()
    hub = "the Hugging Face hub, which needs a network (no folder here is called so)"
    tried = "this folder" if is_local else hub
    check = "its files" if is_local else "the name and the connection"
    said = str(error.__cause__ or error).rstrip(".")
    return ConfigError(
        f"data.dataset_name = {data.dataset_name} (dataset_config {data.dataset_config}, dataset_split "
        f"{split}) could not be loaded from {tried}: {said}. "
        f"Check {check}, or use a data set that needs no network: {BUILTIN_NAMES}"
    )


class ImageColumns(NamedTuple):
    """Which columns have images and their classes, and what these are called."""

    image: str
    label: str
    classes: Sequence[str]


def image_columns(table: HubTable, data: DataConfig) -> ImageColumns:
    """Find the images of a table or a stream.

    Raises:
        ConfigError: There are none, or their classes have no names; the package for images is not installed.
    """
    image_column = next((name for name in _IMAGE_COLUMNS if name in (table.column_names or ())), None)
    label_column = next((name for name in _LABEL_COLUMNS if name in (table.column_names or ())), None)
    if image_column is None or label_column is None:
        needed = f"one of the columns {_IMAGE_COLUMNS} and one of {_LABEL_COLUMNS}"
        is_folder = Path(data.dataset_name).is_dir()
        raise misfit(table, data, f"{needed} (or a folder for each class, all at one depth)" if is_folder else needed)
    if not hasattr(table.features[image_column], "decode_example"):
        raise misfit(table, data, f'images in its column "{image_column}"')
    classes: Sequence[str] | None = getattr(table.features[label_column], "names", None)
    if classes is None:
        raise misfit(table, data, f'class labels in its column "{label_column}"')
    if data.num_channels not in (1, 3):
        raise ConfigError(f"data.num_channels = {data.num_channels}: images of the hub have 1 (grey) or 3 (colour)")
    return ImageColumns(image_column, label_column, classes)


def _images(table: HubTable, data: DataConfig) -> tuple[Source, Sequence[str]]:
    """Return the images of a table, and what their classes are called."""
    columns = image_columns(table, data)
    source = HubImages(
        table,
        columns.image,
        columns.label,
        reader=ImageReader(table.features[columns.image], data),
        img_size=data.img_size,
        channels=data.num_channels,
        # What makes images would learn to make stretched ones.
        is_cropped=data.task_type == "image_gen",
    )
    return source, columns.classes


def misfit(table: HubTable, data: DataConfig, needed: str) -> ConfigError:
    """The error of a table that lacks a column."""
    return ConfigError(
        f"data.task_type = {data.task_type} needs {needed}; data.dataset_name = {data.dataset_name} has "
        f"{table.column_names}: choose another data set or task"
    )
