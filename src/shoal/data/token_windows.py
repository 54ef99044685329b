"""Samples of a file of tokens: windows that are read when they are asked for."""

from __future__ import annotations

from typing import Final

import numpy as np

from shoal.data.element_file import ElementFile
from shoal.data.fields import Fields
from shoal.data.source import Array, ArraySpec, DataSet, Indices, KnownSamples, holdout_size
from shoal.errors import ConfigError

_MOST_AT_ONCE: Final = 128
"""Each is a call of 1 us and more."""
_SMALL: Final = ("uint8", "uint16", "int32")


def token_dtype(vocabulary: int) -> str:
    """Return the smallest element type that holds tokens 0..vocabulary-1."""
    return next(name for name in _SMALL if np.iinfo(name).max >= vocabulary - 1)


class TokenWindows(KnownSamples):
    """Windows of `seq_len` tokens (T) that do not overlap; a rest shorter than a window and its label is left out.

    Inputs are (T,), of the element type of the file, and the labels for each token the one that follows it.
    """

    def __init__(self, file: ElementFile, seq_len: int, start: int, num_tokens: int) -> None:
        """Take so many tokens of a file, from one of them on."""
        window = ArraySpec(file.dtype.name, (seq_len,))
        super().__init__(Fields(window, window), max(0, (num_tokens - 1) // seq_len))
        self._file = file
        self._seq_len = seq_len
        self._start = start

    def advise(self, start: int, stop: int, *, is_needed: bool) -> None:
        num_tokens = (stop - start) * self._seq_len + 1
        self._file.advise(self._start + start * self._seq_len, num_tokens, is_needed=is_needed)

    def read_into(self, indices: Indices, batch: Fields[Array]) -> None:
        starts = (self._start + indices * self._seq_len).tolist()
        _put(self._file.read(starts, self._seq_len + 1), batch)

    def read_at_once(self, indices: Indices, batch: Fields[Array]) -> bool:
        if len(indices) > _MOST_AT_ONCE:
            return False
        starts = (self._start + indices * self._seq_len).tolist()
        windows = self._file.read_cached(starts, self._seq_len + 1)
        if windows is not None:
            _put(windows, batch)
        return windows is not None


def _put(windows: Array, batch: Fields[Array]) -> None:
    batch.inputs[...] = windows[:, :-1]
    batch.labels[...] = windows[:, 1:]


def windows_dataset(
    name: str,
    train: ElementFile,
    holdout: ElementFile | None,
    *,
    seq_len: int,
    holdout_fraction: float,
    vocabulary: int,
) -> DataSet:
    """Cut tokens into a data set. Without tokens of their own, those held out are the end of the others.

    Raises:
        ConfigError: There are too few.
    """
    num_tokens = train.num_elements
    num_windows = max(0, (num_tokens - 1) // seq_len)
    if num_windows < (3 if holdout is None else 1):
        raise too_few(f"data.dataset_name = {name} has {num_tokens} tokens", seq_len)
    if holdout is not None:
        held_out = TokenWindows(holdout, seq_len, 0, holdout.num_elements)
        if not held_out.num_samples:
            raise too_few(f"data.eval_split has {holdout.num_elements} tokens", seq_len)
        return DataSet(name, TokenWindows(train, seq_len, 0, num_tokens), held_out, num_classes=vocabulary)
    # A part of k windows needs one token more than k * seq_len, the label of its last one.
    tail = min(holdout_size(num_windows, holdout_fraction), num_windows - 2) * seq_len + 1
    cut = num_tokens - tail
    return DataSet(
        name,
        TokenWindows(train, seq_len, 0, cut),
        TokenWindows(train, seq_len, cut, tail),
        num_classes=vocabulary,
    )


def too_few(said: str, seq_len: int) -> ConfigError:
    """Return the error of text that makes no samples.

    Args:
        said: How much of it there is.
    """
    return ConfigError(f"{said}: too few for data.seq_len = {seq_len}; give more text, or a shorter data.seq_len")
