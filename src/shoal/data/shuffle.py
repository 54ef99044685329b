"""The order of the samples in each pass: a pure function of the seed and the pass number.

The order is drawn from the raw output of a counter-based generator, whose stream numpy promises to keep between
versions (it does not promise that for `Generator.permutation`), so a pass can be repeated years later elsewhere.
Every sample can move anywhere: sources that are read by index need no shuffle buffer.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

from shoal.data.source import Indices
from shoal.swarm.sample_ranges import Ranges


def permutation(seed: int, pass_number: int, num_samples: int) -> Indices:
    """Return the order (num_samples,) int64 in which pass `pass_number` visits the samples."""
    digest = hashlib.blake2b(f"shoal.pass {seed} {pass_number}".encode(), digest_size=16).digest()
    generator = np.random.Philox(key=np.frombuffer(digest, dtype="<u8"))
    # Two equal keys, once in 10^19 pairs, keep the order of their indices: still a permutation.
    return np.argsort(generator.random_raw(num_samples), kind="stable").astype(np.int64)


class PassOrder:
    """The orders of the passes that are in use, drawn when they are first needed. Usable from several threads."""

    def __init__(self, seed: int, num_samples: int) -> None:
        """Keep at most three orders: the current pass, the next one, and one with stragglers."""

        @lru_cache(maxsize=3)
        def order(pass_number: int) -> Indices:
            return permutation(seed, pass_number, num_samples)

        self._order = order

    def indices(self, ranges: Ranges) -> Indices:
        """Return the samples (n,) that lie at the positions `ranges`, in their order."""
        return np.concatenate([self._order(item.pass_number)[item.start : item.stop] for item in ranges])
