"""Text as bytes: sample i is a window of the text, its labels the same window one byte further on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.data.fields import Fields
from shoal.data.source import Array, ArraySpec, DataSet, Indices, KnownSamples, holdout_size
from shoal.data.token_windows import too_few

BYTE_VALUES = 256


class ByteText(KnownSamples):
    """Windows of `seq_len` bytes (T) that do not overlap; a rest shorter than a window and its label is left out.

    Inputs are (T,) uint8, and the labels for each input byte the one that follows it.
    """

    def __init__(self, text: NDArray[np.uint8], seq_len: int) -> None:
        """Take the text as a flat array of bytes, which is not copied."""
        num_windows = max(0, (len(text) - 1) // seq_len)
        window = ArraySpec("uint8", (seq_len,))
        super().__init__(Fields(window, window), num_windows, in_memory=True)
        end = num_windows * seq_len
        # A window is a row, so a batch is one gather of bytes.
        self._inputs_nT = text[:end].reshape(-1, seq_len)
        self._labels_nT = text[1 : end + 1].reshape(-1, seq_len)

    def read_into(self, indices: Indices, batch: Fields[Array]) -> None:
        batch.inputs[...] = self._inputs_nT[indices]
        batch.labels[...] = self._labels_nT[indices]


def text_dataset(name: str, text: bytes | bytearray, seq_len: int, holdout_fraction: float) -> DataSet:
    """Cut a text into a data set; its end is held out and shares no byte with what is trained on.

    Raises:
        ConfigError: the text is too short.
    """
    data = np.frombuffer(text, dtype=np.uint8)
    num_windows = max(0, (len(data) - 1) // seq_len)
    if num_windows < 3:
        raise too_few(f"data.dataset_name = {name} has {len(data)} bytes", seq_len)
    # A part of k windows needs one byte more than k * seq_len, the label of its last byte.
    tail_bytes = min(holdout_size(num_windows, holdout_fraction), num_windows - 2) * seq_len + 1
    train, holdout = ByteText(data[:-tail_bytes], seq_len), ByteText(data[-tail_bytes:], seq_len)
    return DataSet(name, train, holdout, num_classes=BYTE_VALUES)
