"""Samples of a file of tokens: windows that are read when they are asked for, so that none of it stays in memory.

They are read by `pread`: pages of a mapping would count as memory of the process, once random windows have touched all
of them. What the system keeps of the file belongs to nobody, and is given up where memory is short.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Final

import numpy as np

from shoal.data.fields import Fields
from shoal.data.source import Array, ArraySpec, DataSet, Indices, KnownSamples, holdout_size
from shoal.errors import ConfigError, StorageError
from shoal.runtime.linux_calls import LinuxCall, has

_SMALL: Final = ("uint8", "uint16", "int32")


def token_dtype(vocabulary: int) -> str:
    """Return the smallest element type that holds tokens 0..vocabulary-1."""
    return next(name for name in _SMALL if np.iinfo(name).max >= vocabulary - 1)


class TokenFile:
    """An open file of tokens, one after the other. Usable from several threads.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        self.num_tokens = os.fstat(self._fd).st_size // self.dtype.itemsize

    def read(self, starts: list[int], num_tokens: int) -> Array:
        """Return the tokens (n, num_tokens) that begin at each of n places.

        Raises:
            StorageError: The file is shorter than it was.
        """
        size_bytes, num_bytes = self.dtype.itemsize, num_tokens * self.dtype.itemsize
        content = b"".join([os.pread(self._fd, num_bytes, start * size_bytes) for start in starts])
        if len(content) != len(starts) * num_bytes:
            raise StorageError(f"{self.path} is shorter than when it was opened: start the run again")
        return np.frombuffer(content, self.dtype).reshape(len(starts), num_tokens)

    def advise(self, start: int, num_tokens: int, *, is_needed: bool) -> None:
        """Have the system read tokens before they are asked for, or (`is_needed` false) give up its copy of them."""
        if has(LinuxCall.CACHE_ADVICE):
            advice = os.POSIX_FADV_WILLNEED if is_needed else os.POSIX_FADV_DONTNEED
            size_bytes = self.dtype.itemsize
            os.posix_fadvise(self._fd, start * size_bytes, num_tokens * size_bytes, advice)


class TokenWindows(KnownSamples):
    """Windows of `seq_len` tokens (T) that do not overlap; a rest shorter than a window and its label is left out.

    Inputs are (T,), of the element type of the file, and the labels for each token the one that follows it.
    """

    def __init__(self, file: TokenFile, seq_len: int, start: int, num_tokens: int) -> None:
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
        windows = self._file.read(starts, self._seq_len + 1)
        batch.inputs[...] = windows[:, :-1]
        batch.labels[...] = windows[:, 1:]


def windows_dataset(
    name: str,
    train: TokenFile,
    holdout: TokenFile | None,
    *,
    seq_len: int,
    holdout_fraction: float,
    vocabulary: int,
) -> DataSet:
    """Cut tokens into a data set. Without tokens of their own, those held out are the end of the others.

    Raises:
        ConfigError: There are too few.
    """
    num_tokens = train.num_tokens
    num_windows = max(0, (num_tokens - 1) // seq_len)
    if num_windows < (3 if holdout is None else 1):
        raise ConfigError(
            f"data.dataset_name = {name} has {num_tokens} tokens: too few for data.seq_len = {seq_len}; use a shorter "
            "one"
        )
    if holdout is not None:
        held_out = TokenWindows(holdout, seq_len, 0, holdout.num_tokens)
        if not held_out.num_samples:
            raise ConfigError(
                f"data.eval_split has {holdout.num_tokens} tokens: too few for data.seq_len = {seq_len}; use a shorter "
                "one"
            )
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
