"""A data set of the user's own: `data.dataset_name: package.module:Class`.

The class, or a function, is called with `data.arguments`, in the data server and in each of its workers. It returns a

    DataSet            with its own held-out samples
    Source             samples by index, written into given memory
    map-style          `__len__` and `__getitem__`, as torch.utils.data.Dataset: (input, label), or a mapping of both
    iterable           with data.streaming, see `stream_opening`: of such samples, or of texts

Of the middle two `data.holdout_fraction` is held out. A class that takes an argument `split` gets `data.dataset_split`,
and `data.eval_split` for the samples that are held out, where that is set.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, cast

import numpy as np

from shoal.config.model import NATIVE_FAMILIES
from shoal.config.own_class import kind_of, own_class, raised
from shoal.config.schema import Config
from shoal.config.training import DataConfig
from shoal.data.fields import Fields
from shoal.data.passing_errors import read_patiently
from shoal.data.source import Array, ArraySpec, DataSet, Indices, KnownSamples, Source, split
from shoal.data.text_corpus import model_vocabulary
from shoal.errors import BadSamples, ConfigError, SampleError, ShoalError, StorageError
from shoal.wire.tensors import ITEM_BYTES

_SPLIT: Final = "split"
_INPUTS: Final = ("inputs", "input_ids", "pixel_values", "image", "img")
_LABELS: Final = ("labels", "label")
_MOST_TOKENS: Final = int(np.iinfo(np.int32).max)
_LOOKED_AT: Final = 5
"""Samples that are read when a data set is opened, to see what all of them are like."""


def open_own(config: Config) -> DataSet:
    """Open the data set of a class of the user's own. Unless it says otherwise, its labels are all that the model has.

    Raises:
        ConfigError: There is no such class, it raises, or what it gives is no data set or does not fit the model.
    """
    data = config.data
    own = OwnClass(data)
    found = own.called(data.dataset_split)
    if isinstance(found, DataSet):
        if data.eval_split is not None:
            raise own.refused(f"says itself what is held out: leave out data.eval_split = {data.eval_split}")
        dataset = replace(found, name=data.dataset_name)
    else:
        train = own.source(found)
        if data.eval_split is None:
            train, holdout = split(train, data.holdout_fraction, data.holdout_fold)
        else:
            holdout = own.source(own.called(data.eval_split))
        num_classes = model_vocabulary(config) if data.task_type == "llm" else config.model.num_classes
        dataset = DataSet(data.dataset_name, train, holdout, num_classes or _MOST_TOKENS)
    for source in (dataset.train, dataset.holdout):
        if not source.num_samples:
            raise own.refused("has no samples, to train on or to hold out")
    if dataset.holdout.fields != dataset.fields:
        raise own.refused(
            f"has other samples to hold out ({_described(dataset.holdout.fields)}) than to train on "
            f"({_described(dataset.fields)}): all need the same shape and type"
        )
    require_form(config, dataset.fields, own)
    return dataset


class OwnClass:
    """What `data.dataset_name` names.

    Raises:
        ConfigError: There is no such class or function, it is defined in another module than the one that is named, or
            it does not take what the configuration says.
    """

    def __init__(self, data: DataConfig) -> None:
        self._name = data.dataset_name
        self._data = data
        found = own_class(self._name, "data.dataset_name")
        if not (inspect.isclass(found) or inspect.isfunction(found)):
            raise self.refused(f"is no class but {kind_of(found)}")
        if found.__module__ != self._name.partition(":")[0]:
            raise self.refused(
                f"is not defined there: name it as {found.__module__}:{found.__qualname__}, or derive a class of your "
                "own from it"
            )
        self._make: Callable[..., object] = found
        self._takes_split = _takes(found, _SPLIT)
        if _SPLIT in data.arguments and self._takes_split:
            raise ConfigError(
                f"data.arguments has {_SPLIT!r}, which data.dataset_split and data.eval_split say; leave it out there"
            )
        if data.eval_split is not None and not self._takes_split:
            raise self.refused(
                f"takes no argument {_SPLIT!r}, and so cannot give data.eval_split = {data.eval_split}; add the "
                "argument, return a DataSet, or leave the key out: data.holdout_fraction is held out"
            )

    def refused(self, why: str) -> ConfigError:
        """The error that says what is wrong with it."""
        return ConfigError(f"data.dataset_name = {self._name} {why}")

    def called(self, split_name: str) -> object:
        """Return what it makes of a split."""
        arguments = {**self._data.arguments, **({_SPLIT: split_name} if self._takes_split else {})}
        try:
            return self._make(**arguments)
        except ShoalError:
            raise
        except Exception as error:
            given = ", ".join(f"{name}={value!r}" for name, value in arguments.items()) or "no arguments"
            raise self.refused(
                f"raises {raised(error, self._name)} when it is called with {given} (data.arguments)"
            ) from error

    def source(self, found: object) -> Source:
        """Return what it has made as samples by index."""
        if isinstance(found, Source):
            return found
        loaded = sys.modules.get("torch.utils.data")
        is_stream = loaded is not None and isinstance(found, loaded.IterableDataset)
        if is_stream or (hasattr(found, "__iter__") and not hasattr(found, "__len__")):
            raise self.refused(
                "is a stream of samples without a length: give it __len__ and __getitem__, so that any sample can be "
                "read at any time, or set data.streaming = true, by which it is read from its beginning on"
            )
        if not (hasattr(found, "__len__") and hasattr(found, "__getitem__")):
            raise self.refused(
                f"gives {kind_of(found)}: it has to be a data set with __len__ and __getitem__, or a Source or a "
                "DataSet of shoal.data.source"
            )
        return MapSamples(cast("Sequence[object]", found), self._name)


def _takes(function: Callable[..., object], argument: str) -> bool:
    try:
        return argument in inspect.signature(function).parameters
    except (TypeError, ValueError):
        # Of some classes in C nobody says what they take.
        return False


class Sample(NamedTuple):
    """What a data set of the user's own has given."""

    inputs: Array
    labels: Array


class MapSamples(KnownSamples):
    """The samples of a map-style data set; the first readable one says of which type and shape all are.

    Floating numbers become float32. One sample is read at a time: what is made for a DataLoader may not bear threads.

    Args:
        name: Of its class.

    Raises:
        StorageError: The system does not give one of those that are looked at.
        ConfigError: It has no samples or no length, none of those looked at can be read, or one is another when it is
            read again.
        SampleError: One of them is no sample.
    """

    def __init__(self, samples: Sequence[object], name: str) -> None:
        self._samples = samples
        self._name = name
        self._reading = threading.Lock()
        try:
            num_samples = len(samples)
        except Exception as error:
            raise ConfigError(f"data.dataset_name = {name}: its length raises {raised(error, name)}") from error
        if not num_samples:
            raise ConfigError(f"data.dataset_name = {name} has no samples: its length is 0")
        first = self._look(num_samples)
        super().__init__(Fields(spec_of(first.inputs), spec_of(first.labels)), num_samples)

    def name_of(self, index: int) -> str:
        return f"{self._name}[{index}]"

    def read_into(self, indices: Indices, batch: Fields[Array]) -> None:
        """See `Source.read_into`.

        Raises:
            SampleError: A sample has another type or shape than the others.
        """
        for place, index in enumerate(indices.tolist()):
            sample = self._sample(index)
            require_alike(sample, self._fields, self.name_of(index))
            batch.inputs[place], batch.labels[place] = sample

    def _look(self, num_samples: int) -> Sample:
        """Return the first sample that can be read, of some from everywhere."""
        indices = sorted({int(index) for index in np.linspace(0, num_samples - 1, _LOOKED_AT)})
        found: list[Sample] = []
        failed = Exception()
        for index in indices:
            try:
                sample, again = self._looked_at(index), self._looked_at(index)
            except SampleError as error:
                raise ConfigError(str(error)) from error
            except StorageError:
                raise
            except Exception as error:  # noqa: BLE001 - what the user's code raises is its own business
                failed = error
                continue
            if any(one.tobytes() != other.tobytes() for one, other in zip(sample, again, strict=True)):
                raise ConfigError(
                    f"{self.name_of(index)} gives another sample when it is read again: batches are prepared anew when "
                    "a process dies, and in a replay, so it has to be the same each time; draw nothing at random there "
                    "(data.augment changes images, by seed, pass and sample)"
                )
            found.append(sample)
        if not found:
            raise ConfigError(
                f"data.dataset_name = {self._name}: of its {num_samples} samples none of {indices} can be read; "
                f"the last one raises {raised(failed, self._name)}"
            ) from failed
        return found[0]

    def _looked_at(self, index: int) -> Sample:
        return read_patiently(lambda: self._sample(index), lambda: f"sample {self.name_of(index)}")

    def _sample(self, index: int) -> Sample:
        with self._reading:
            item = self._samples[index]
        return sample_of(item, self.name_of(index))


def sample_of(item: object, where: str) -> Sample:
    """Return what a data set has given, as arrays of types that travel.

    Args:
        where: It is, for people.

    Raises:
        SampleError: It is no sample.
    """
    inputs, labels = _parts(item, where)
    return Sample(_array(inputs, "inputs", where), _array(labels, "labels", where))


def require_alike(sample: Sample, fields: Fields[ArraySpec], where: str) -> None:
    """Check that a sample is as the others are.

    Args:
        where: It is, for people.

    Raises:
        SampleError: It has another type or shape.
    """
    for part, array, spec in zip(Sample._fields, sample, fields.everything, strict=True):
        if array.shape != spec.shape or not np.can_cast(array.dtype, spec.dtype):
            raise BadSamples(
                f"{where}: its {part} are {array.dtype}{list(array.shape)}, and those of other samples "
                f"{spec.dtype}{list(spec.shape)}: all samples need the same shape and type"
            )


def _parts(item: object, where: str) -> tuple[object, object]:
    if isinstance(item, Mapping):
        named = cast("Mapping[str, object]", item)
        inputs = [name for name in _INPUTS if name in named]
        labels = [name for name in _LABELS if name in named]
        if len(inputs) != 1 or len(labels) != 1 or len(named) != 2:
            raise BadSamples(
                f"{where} has {', '.join(map(str, named))}: a mapping has one of {', '.join(_INPUTS)} and one of "
                f"{', '.join(_LABELS)}, and nothing else"
            )
        return named[inputs[0]], named[labels[0]]
    if isinstance(item, tuple | list):
        pair = cast("Sequence[object]", item)
        if len(pair) == 2:
            return pair[0], pair[1]
        raise BadSamples(f"{where} has {len(pair)} parts: a sample is a pair (input, label), or a mapping")
    raise BadSamples(f"{where} is {kind_of(item)}: a sample is a pair (input, label), or a mapping")


def _array(value: object, part: str, where: str) -> Array:
    """Return a part of a sample as an array of a type that travels."""
    array = np.asarray(cast("Any", value))
    if np.issubdtype(array.dtype, np.floating):
        return array.astype(np.float32, copy=False)
    if array.dtype.name in ITEM_BYTES and array.dtype.name != "bool":
        return array
    if np.issubdtype(array.dtype, np.integer) and array.dtype != np.uint64:
        return array.astype(np.int64)
    raise BadSamples(
        f"{where}: its {part} are {kind_of(value)}, as an array of {array.dtype}: give numbers, as an array of numpy "
        "or a tensor"
    )


def require_form(config: Config, fields: Fields[ArraySpec], own: OwnClass) -> None:
    """Check that samples are what the model takes: of its own families shoal knows that before there is a model.

    Raises:
        ConfigError: They are not.
    """
    data = config.data
    if set(fields.context) != set(data.context):
        raise own.refused(
            f"gives {', '.join(fields.context) or 'no context'} beside inputs and labels, and the stages take "
            f"{', '.join(data.context) or 'nothing'} (data.messages_column)"
        )
    if config.model.family not in NATIVE_FAMILIES:
        return
    is_text = data.task_type == "llm"
    shape = (data.seq_len,) if is_text else (data.num_channels, data.img_size, data.img_size)
    wanted = Fields(ArraySpec("int64" if is_text else "float32", shape), ArraySpec("int64", shape if is_text else ()))
    for given, needed in zip(fields.everything, wanted.everything, strict=False):
        fits = np.issubdtype(given.dtype, np.integer) if needed.dtype == "int64" else given.dtype == needed.dtype
        if given.shape != needed.shape or not fits:
            keys = "data.seq_len" if is_text else "data.num_channels and data.img_size"
            raise own.refused(
                f"has samples of {_described(fields)}, and model.family = {config.model.family} takes "
                f"{_described(wanted)} ({keys}); change one of them"
            )


def _described(fields: Fields[ArraySpec]) -> str:
    inputs, labels = (f"{spec.dtype}{list(spec.shape)}" for spec in (fields.inputs, fields.labels))
    return f"inputs {inputs} and labels {labels}"


def spec_of(array: Array) -> ArraySpec:
    """Return what samples are like of which this is a part."""
    return ArraySpec(array.dtype.name, array.shape)
