"""The order of the samples in each pass: a pure function of the seed and the pass number.

The order is drawn from the raw output of a counter-based generator, whose stream numpy promises to keep between
versions (it does not promise that for `Generator.permutation`), so a pass can be repeated years later elsewhere.
Every sample can move anywhere: sources that are read by index need no shuffle buffer.
"""

from __future__ import annotations

import hashlib

import numpy as np

from shoal.data.source import Indices
from shoal.swarm.sample_ranges import Ranges

_MAX_ORDERS = 3


def permutation(seed: int, pass_number: int, num_samples: int) -> Indices:
    """Return the order (num_samples,) int64 in which pass `pass_number` visits the samples."""
    digest = hashlib.blake2b(f"shoal.pass {seed} {pass_number}".encode(), digest_size=16).digest()
    generator = np.random.Philox(key=np.frombuffer(digest, dtype="<u8"))
    keys = generator.random_raw(num_samples)
    order = np.argsort(keys)
    # Two equal keys, once in 10^19 pairs, keep the order of their indices, whatever this machine's fastest sort does.
    ranked = keys[order]
    if (ranked[1:] == ranked[:-1]).any():
        order = np.argsort(keys, kind="stable")
    return order.astype(np.int64, copy=False)


class PassOrder:
    """The orders of the passes that are in use, drawn when they are first needed. Usable from several threads.

    Drawing sorts as many numbers as there are samples (0.1 s for a million), so it is no work for an event loop.
    """

    def __init__(self, seed: int, num_samples: int) -> None:
        """Keep at most three orders: the current pass, the next one, and one with stragglers."""
        self._seed = seed
        self._num_samples = num_samples
        self._orders: dict[int, Indices] = {}

    def drawn(self, ranges: Ranges) -> bool:
        """Return whether `indices` need not draw anything for these ranges."""
        return all(item.pass_number in self._orders for item in ranges)

    def indices(self, ranges: Ranges) -> Indices:
        """Return the samples (n,) that lie at the positions `ranges`, in their order."""
        return np.concatenate([self._order(item.pass_number)[item.start : item.stop] for item in ranges])

    def _order(self, pass_number: int) -> Indices:
        order = self._orders.get(pass_number)
        if order is None:
            order = permutation(self._seed, pass_number, self._num_samples)
            for old in list(self._orders)[: 1 - _MAX_ORDERS]:
                self._orders.pop(old, None)
            self._orders[pass_number] = order
        return order
