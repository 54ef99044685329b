"""The batches of a run once more: the samples of a step, cut as they were cut then."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

from shoal.config.schema import Config
from shoal.data.catalog import open_source
from shoal.data.fields import Fields
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
        marks: of the windows of a stream that the run has trained on, as its newest record has them.

    Raises:
        ConfigError: there is no such data set, or it cannot be reached.
    """

    def __init__(self, config: Config, dataset: DataSet | None = None, marks: bytes = b"") -> None:
        self._dataset = dataset or open_source(config)
        if self._dataset.windows is not None:
            self._dataset.windows.expect(marks)
        self._order = PassOrder.of(self._dataset, config.run.seed)

    def close(self) -> None:
        """End what reads a stream."""
        if self._dataset.windows is not None:
            self._dataset.windows.close()

    @property
    def num_per_pass(self) -> int:
        """Samples of a pass."""
        return self._dataset.train.num_samples

    @property
    def has_context(self) -> bool:
        """Whether every stage gets something of a sample."""
        return bool(self._dataset.train.context)

    def microbatches(self, samples: Ranges, sizes: Sequence[int]) -> list[Fields[WireTensor]]:
        """Return what there is of each microbatch.

        Args:
            sizes: samples of each microbatch, in order.

        Raises:
            SampleError: a sample cannot be prepared.
            ConfigError, StorageError, RemoteError: a stream gives other samples than it gave, or cannot be read.
        """
        content = Content(samples)
        if (windows := self._dataset.windows) is not None:
            passes = {item.pass_number for item in samples}
            # Steps of one pass are computed one after the other, or nearly so.
            windows.forget_below(min(passes) - 1)
            windows.wait(passes)
        batch = self._dataset.fields.each(lambda spec: spec.empty(content.num_samples))
        prepare(self._dataset, content, indices_of(content, self._order), batch)
        whole = batch.each(wire_view)
        bounds = pairwise(accumulate(sizes, initial=0))
        return [whole.each(partial(WireTensor.rows, start=start, stop=stop)) for start, stop in bounds]
