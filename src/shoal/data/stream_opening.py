"""From the configuration to streams of samples: of files, of the Hugging Face hub, or of a class of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from shoal.config.own_class import kind_of
from shoal.config.schema import Config
from shoal.data.documents import Documents, RowReader
from shoal.data.fields import Fields
from shoal.data.hub_documents import StreamDocuments
from shoal.data.huggingface import image_columns, load_stream, require_classes
from shoal.data.image_reader import ImageReader, pixels_of
from shoal.data.own_data import OwnClass, Sample, require_alike, require_form, sample_of, spec_of
from shoal.data.rows import rows_after
from shoal.data.source import Array, ArraySpec, DataSet, Source
from shoal.data.streams import RowStream, SampleStream, TokenStream
from shoal.data.targets import require_labels
from shoal.data.text_corpus import Say, documents_here, documents_of_hub, encoder_of, model_vocabulary
from shoal.errors import ConfigError, SampleError

_MOST_TOKENS: Final = int(np.iinfo(np.int32).max)


class OpenedStreams(NamedTuple):
    """What is trained on, and what is held out; None: the first samples of what is trained on."""

    train: SampleStream
    held_out: SampleStream | None


def open_streams(config: Config, say: Say) -> OpenedStreams:
    """Open the streams that the configuration names; little is read of them.

    Raises:
        ConfigError: There is no such data set, it is no stream, or it does not fit the model or what is held out.
        SampleError: Its first row cannot be read.
    """
    data = config.data
    opened = _of_own_class if data.is_own else _of_text if data.task_type == "llm" else _of_images
    train = opened(config, None, say)
    held_out = None if data.eval_split is None else opened(config, data.eval_split, say)
    if held_out is not None and _kind(held_out) != _kind(train):
        raise ConfigError(
            f"data.eval_split = {data.eval_split} has samples of {_kind(held_out)}, and what is trained on of "
            f"{_kind(train)}: they have to be the same"
        )
    return OpenedStreams(train, held_out)


def _kind(stream: SampleStream) -> str:
    shapes = " and ".join(f"{spec.dtype}{list(spec.shape)}" for spec in stream.fields.everything)
    return f"{shapes} with {stream.num_classes} classes {', '.join(stream.classes)}".rstrip()


def _of_text(config: Config, split: str | None, say: Say) -> SampleStream:
    documents = documents_here(config, split) or documents_of_hub(config.data, split)
    return _text(config, documents, say)


def _text(config: Config, documents: Documents, say: Say) -> SampleStream:
    return TokenStream(documents, encoder_of(config, documents, say), config.data.seq_len)


def _of_images(config: Config, split: str | None, say: Say) -> SampleStream:
    data, wanted = config.data, config.data.dataset_split if split is None else split
    if split is not None and "/" in split:
        data, wanted = data.model_copy(update={"dataset_name": split, "dataset_config": None}), "train"
    stream, _ = load_stream(data, wanted)
    columns = image_columns(stream, data)
    require_classes(columns.classes, data)
    # Decoded here: a stream of `datasets` ends where an image cannot be.
    feature = stream.features[columns.image]
    reader = ImageReader(feature, data)
    rows = stream.cast_column(columns.image, type(feature)(decode=False)).select_columns([columns.image, columns.label])
    channels, size = data.num_channels, data.img_size

    def convert(row: object, where: str) -> Fields[Array]:
        named = cast("Mapping[str, Any]", row)
        image = reader.read(named[columns.image])
        pixels = pixels_of(image, size, channels, is_cropped=data.task_type == "image_gen")
        return Fields(pixels, np.asarray(named[columns.label], dtype=np.int64))

    fields = Fields(ArraySpec("float32", (channels, size, size)), ArraySpec("int64", ()))
    classes = tuple(columns.classes)
    return RowStream(lambda: rows, convert, fields, len(classes), data.dataset_name, classes)


def _of_own_class(config: Config, split: str | None, say: Say) -> SampleStream:
    data = config.data
    own, name = OwnClass(data), data.dataset_name
    called = data.dataset_split if split is None else split

    def rows() -> Iterable[object]:
        return _rows_of(own, own.called(called))

    first = next(rows_after(rows(), name, 0), None)
    if first is None:
        raise own.refused("is a stream without a sample")
    reader = RowReader(data)
    if isinstance(first, str) or isinstance(_value(first, reader.column), str):
        if data.task_type != "llm":
            raise own.refused(f"gives text, and data.task_type is {data.task_type}")
        return _text(config, StreamDocuments(rows, reader, name), say)
    where = f"{name}:0"
    sample = _first_sample(rows, first, where)
    fields = Fields(spec_of(sample.inputs), spec_of(sample.labels))
    require_form(config, fields, own)
    of_model = model_vocabulary(config) if data.task_type == "llm" else config.model.num_classes
    num_classes = of_model or _MOST_TOKENS

    def convert(row: object, where: str) -> Fields[Array]:
        return _fitting(sample_of(row, where), fields, num_classes, where)

    return RowStream(rows, convert, fields, num_classes, name)


def _value(row: object, column: str) -> object:
    """Return what a row has in a column; None also where it is no row of a table."""
    return cast("Mapping[str, object]", row).get(column) if isinstance(row, Mapping) else None


def _rows_of(own: OwnClass, found: object) -> Iterable[object]:
    if isinstance(found, Source | DataSet) or (hasattr(found, "__len__") and hasattr(found, "__getitem__")):
        raise own.refused("can be read by index, and so is no stream: leave out data.streaming")
    if not hasattr(found, "__iter__"):
        raise own.refused(f"gives {kind_of(found)}, which is no iterable")
    return cast("Iterable[object]", found)


def _first_sample(rows: Callable[[], Iterable[object]], first: object, where: str) -> Sample:
    """Return the first sample of a stream, after it was read twice."""
    try:
        sample = sample_of(first, where)
        again: Iterator[object] = islice(iter(rows()), 1)
        same = next(again, None)
        if same is None or any(
            one.tobytes() != other.tobytes() for one, other in zip(sample, sample_of(same, where), strict=True)
        ):
            raise ConfigError(
                f"{where} gives another sample when it is read again: what was read is read anew when a process dies "
                "and in a replay, so it has to be the same each time, in the same order; shoal shuffles it "
                "(data.shuffle_window)"
            )
    except SampleError as error:
        raise ConfigError(str(error)) from error
    return sample


def _fitting(sample: Sample, fields: Fields[ArraySpec], num_classes: int, where: str) -> Fields[Array]:
    require_alike(sample, fields, where)
    if np.issubdtype(sample.labels.dtype, np.integer):
        labels = cast("NDArray[np.integer[Any]]", sample.labels)
        require_labels(labels[np.newaxis], num_classes, lambda _place: where)
    return Fields(sample.inputs, sample.labels)
