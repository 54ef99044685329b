"""Which texts share a sample: a plan made once from their lengths, the same wherever it is made.

Best fit, the longest first: each text goes where the least room is left behind it (Johnson et al. 1974, "Worst-case
performance bounds for simple one-dimensional packing algorithms"). Every text is in one sample, whole.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shoal.data.source import Indices


class Packing(NamedTuple):
    """The plan.

    Attributes:
        texts: (n,) All texts, those of the first sample first.
        starts: (samples + 1,) Where in `texts` those of each sample begin, and the end.
    """

    texts: Indices
    starts: Indices

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self.starts) - 1

    def of(self, sample: int) -> Indices:
        """Return the texts of a sample, in the order in which they stand in it."""
        return self.texts[self.starts[sample] : self.starts[sample + 1]]


def best_fit(lengths: Indices, capacity: int) -> Packing:
    """Plan samples.

    Args:
        lengths: (n,) Of each text, 1..capacity.
    """
    # Equal lengths keep the order of the texts.
    order = np.argsort(-lengths, kind="stable")
    ordered: list[int] = lengths[order].tolist()
    sample_of = np.empty(len(lengths), dtype=np.int64)
    with_room = [list[int]() for _ in range(capacity + 1)]
    # Bit r is set where a sample has room r left: the least room that is enough is the lowest bit from there on.
    rooms = num_samples = 0
    for text, length in zip(order.tolist(), ordered, strict=True):
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            sample = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, sample = capacity, num_samples
            num_samples += 1
        sample_of[text] = sample
        left = room - length
        if left:
            with_room[left].append(sample)
            rooms |= 1 << left
    texts = np.argsort(sample_of, kind="stable")
    counts = np.bincount(sample_of, minlength=num_samples)
    return Packing(texts, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
