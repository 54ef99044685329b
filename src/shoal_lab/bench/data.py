"""The benchmark `data`: batches of samples in memory, shuffled, from a data server beside torch's DataLoader.

Ours: a process with a data server, a process that leases, touches and acknowledges. The reference: a process with a
DataLoader and its one worker. Both have the same samples and batch sizes, and touch the same bytes of each batch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial

from shoal_lab.bench.case import BenchmarkOptions, Case
from shoal_lab.bench.data_samples import BATCHES
from shoal_lab.bench.peers import PeerProcesses


@contextmanager
def open_cases(options: BenchmarkOptions) -> Generator[Sequence[Case], None, None]:
    """Start the three processes; each case gives GB of samples per second."""
    with (
        # The data servers' sockets are in there.
        tempfile.TemporaryDirectory(prefix="shoal-bench-") as directory,
        PeerProcesses("shoal_lab.bench.data_peer:main", 2, {"directory": directory}) as ours,
        PeerProcesses("shoal_lab.bench.data_reference:main", 1) as reference,
    ):

        def our_rate(batch_samples: int) -> float:
            return sum(ours.call("consume", batch_samples))

        def reference_rate(batch_samples: int) -> float:
            return reference.call("consume", batch_samples)[0]

        yield [
            Case(
                name=f"dataloader {size}",
                unit="GB/s",
                ours=partial(our_rate, batch_samples),
                reference=partial(reference_rate, batch_samples),
            )
            for size, batch_samples in BATCHES.items()
        ]
