"""The order of the samples in each pass: a pure function of the seed, the pass number and the window.

The order is drawn from the raw output of a counter-based generator, whose stream numpy promises to keep between
versions (it does not promise that for `Generator.permutation`), so a pass can be repeated years later elsewhere.

no window   every sample can move anywhere; all that there is are read at random
window      groups of neighbours in a random order, a window of them at a time -> the samples of a window shuffled
stream      a pass is a window of it, the next pass the one that follows

So every position of a pass is a number, whichever it is, and sources that are read by index need no shuffle buffer.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from dataclasses import KW_ONLY, dataclass
from typing import Final, NamedTuple, Self, TypeVar

import numpy as np

from shoal.data.source import DataSet, Indices, Source
from shoal.swarm.sample_ranges import Ranges

GROUPS_OF_WINDOW: Final = 16
"""Of as many places of a data set at a time are samples read, and mixed with each other."""

_MAX_KEPT: Final = 3

_Key = TypeVar("_Key")
_Item = TypeVar("_Item")


def permutation(seed: int, pass_number: int, num_samples: int) -> Indices:
    """Return the order (num_samples,) int64 in which pass `pass_number` visits the samples."""
    return _drawn(f"shoal.pass {seed} {pass_number}", num_samples)


def _drawn(what: str, num_samples: int) -> Indices:
    """Return an order (num_samples,) that another text makes another one."""
    digest = hashlib.blake2b(what.encode(), digest_size=16).digest()
    generator = np.random.Philox(key=np.frombuffer(digest, dtype="<u8"))
    keys = generator.random_raw(num_samples)
    order = np.argsort(keys)
    # Two equal keys, once in 10^19 pairs, keep the order of their indices, whatever this machine's fastest sort does.
    ranked = keys[order]
    if (ranked[1:] == ranked[:-1]).any():
        order = np.argsort(keys, kind="stable")
    return order.astype(np.int64, copy=False)


class _Window(NamedTuple):
    """What is read at one time.

    Attributes:
        groups: Where they lie: first sample, and the one behind the last.
        samples: (n,) In the order of the pass.
    """

    groups: tuple[tuple[int, int], ...]
    samples: Indices


class _Pass(NamedTuple):
    """How a pass is cut into windows.

    Attributes:
        groups: (G,) In the order in which they are visited.
        starts: (W + 1) The first position of each window, and their end.
    """

    groups: Indices
    starts: list[int]


@dataclass(eq=False, repr=False)
class PassOrder:
    """The orders of the passes that are in use, drawn when they are first needed. Usable from several threads.

    Drawing sorts as many numbers as a pass or a window has samples (0.1 s for a million), so it is no work for an event
    loop. Without a window three passes are kept, with one three windows: the current one, the next one, and one with
    stragglers.

    Attributes:
        window: Samples that are shuffled at one time; None, or as many as there are: all.
        source: Told what is read next, and what is not any more.
        is_stream: The samples of pass p are those from p * num_samples on.
    """

    seed: int
    num_samples: int
    _: KW_ONLY
    window: int | None = None
    source: Source | None = None
    is_stream: bool = False

    def __post_init__(self) -> None:
        self._group = (
            self.num_samples
            if self.window is None or self.window >= self.num_samples
            else -(-self.window // GROUPS_OF_WINDOW)
        )
        self._passes: dict[int, _Pass] = {}
        self._windows: dict[tuple[int, int], _Window] = {}

    @classmethod
    def of(cls, dataset: DataSet, seed: int) -> Self:
        """Return the order in which samples of a data set are trained on; its source is told what comes next."""
        train = dataset.train
        return cls(
            seed,
            train.num_samples,
            window=dataset.shuffle_window,
            source=train,
            is_stream=dataset.windows is not None,
        )

    def drawn(self, ranges: Ranges) -> bool:
        """Return whether `indices` need not draw anything for these ranges."""
        for item in ranges:
            cut = self._passes.get(item.pass_number)
            if cut is None or any(
                (item.pass_number, at) not in self._windows for at in _met(cut, item.start, item.stop)
            ):
                return False
        return True

    def indices(self, ranges: Ranges) -> Indices:
        """Return the samples (n,) that lie at the positions `ranges`, in their order."""
        found: list[Indices] = []
        for item in ranges:
            cut = self._cut(item.pass_number)
            for at in _met(cut, item.start, item.stop):
                begin = cut.starts[at]
                samples = self._window(item.pass_number, at).samples
                found.append(samples[max(0, item.start - begin) : item.stop - begin])
        return np.concatenate(found)

    def _cut(self, pass_number: int) -> _Pass:
        cut = self._passes.get(pass_number)
        if cut is None:
            num_groups = -(-self.num_samples // self._group)
            groups = _drawn(f"shoal.groups {self.seed} {pass_number}", num_groups)
            sizes = np.minimum(self.num_samples - groups * self._group, self._group)
            ends = np.cumsum(sizes)
            last = np.minimum(np.arange(GROUPS_OF_WINDOW, num_groups + GROUPS_OF_WINDOW, GROUPS_OF_WINDOW), num_groups)
            cut = _Pass(groups, [0, *ends[last - 1].tolist()])
            _keep(self._passes, pass_number, cut)
        return cut

    def _window(self, pass_number: int, at: int) -> _Window:
        window = self._windows.get((pass_number, at))
        if window is None:
            window = self._drawn_window(pass_number, at)
            for old in _keep(self._windows, (pass_number, at), window):
                self._advise(old.groups, is_needed=False)
            if at + 2 < len(self._cut(pass_number).starts):
                self._advise(self._groups(pass_number, at + 1), is_needed=True)
        return window

    def _drawn_window(self, pass_number: int, at: int) -> _Window:
        if self._group == self.num_samples:
            first = pass_number * self.num_samples if self.is_stream else 0
            order = permutation(self.seed, pass_number, self.num_samples)
            return _Window(((first, first + self.num_samples),), order + first)
        groups = self._groups(pass_number, at)
        samples = np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in groups])
        return _Window(groups, samples[_drawn(f"shoal.window {self.seed} {pass_number} {at}", len(samples))])

    def _groups(self, pass_number: int, at: int) -> tuple[tuple[int, int], ...]:
        chosen = self._cut(pass_number).groups[at * GROUPS_OF_WINDOW : (at + 1) * GROUPS_OF_WINDOW]
        starts = (chosen * self._group).tolist()
        return tuple((start, min(start + self._group, self.num_samples)) for start in starts)

    def _advise(self, groups: tuple[tuple[int, int], ...], *, is_needed: bool) -> None:
        # What is read at random all the time is left to the system.
        if self.source is None or self._group == self.num_samples:
            return
        for start, stop in groups:
            self.source.advise(start, stop, is_needed=is_needed)


def _keep(kept: dict[_Key, _Item], key: _Key, item: _Item) -> list[_Item]:
    """Add an item to those that are kept; return those that are not kept any more."""
    gone = [kept.pop(old, None) for old in list(kept)[: 1 - _MAX_KEPT]]
    kept[key] = item
    return [each for each in gone if each is not None]


def _met(cut: _Pass, start: int, stop: int) -> range:
    """Return which windows have the positions from `start` to `stop`."""
    return range(bisect_right(cut.starts, start) - 1, bisect_left(cut.starts, stop))
