"""The batches of a run once more: the samples of a step, cut as they were cut then."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from shoal.config.schema import Config
from shoal.data.catalog import open_source
from shoal.data.microbatch import wire_view
from shoal.data.preparation import Content, indices_of, prepare
from shoal.data.shuffle import PassOrder
from shoal.data.source import DataSet
from shoal.swarm.sample_ranges import Ranges
from shoal.wire.tensors import WireTensor


class Samples:
    """The data set of a run.

    Args:
        dataset: replaces the one that the configuration names.

    Raises:
        ConfigError: there is no such data set, or it cannot be reached.
    """

    def __init__(self, config: Config, dataset: DataSet | None = None) -> None:
        self._dataset = dataset or open_source(config)
        self._order = PassOrder(config.run.seed, self.num_per_pass)

    @property
    def num_per_pass(self) -> int:
        """Samples of a pass."""
        return self._dataset.train.num_samples

    def microbatches(self, samples: Ranges, sizes: Sequence[int]) -> list[tuple[WireTensor, WireTensor]]:
        """Return inputs and labels of each microbatch.

        Args:
            sizes: samples of each microbatch, in order.

        Raises:
            SampleError: a sample cannot be prepared.
        """
        content = Content(samples)
        spec_in, spec_out = self._dataset.inputs, self._dataset.labels
        inputs = np.empty((content.num_samples, *spec_in.shape), dtype=spec_in.dtype)
        labels = np.empty((content.num_samples, *spec_out.shape), dtype=spec_out.dtype)
        prepare(self._dataset, indices_of(content, self._order), inputs, labels, is_holdout=False)
        bounds = pairwise(accumulate(sizes, initial=0))
        return [(wire_view(inputs[start:stop]), wire_view(labels[start:stop])) for start, stop in bounds]
