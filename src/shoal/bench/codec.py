"""The benchmark `codec`: a tensor into its form on the wire and back, in memory, beside hivemind's own calls."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial

from shoal.bench.case import BenchmarkOptions, Case
from shoal.bench.peers import PeerProcesses

_SIZE_BYTES = 4_000_000
_REFERENCES = {"raw": "none", "fp16": "float16"}
"""Our codecs, and the compression of hivemind that gives as many bits."""


@contextmanager
def open_cases(options: BenchmarkOptions) -> Generator[Sequence[Case], None, None]:
    """Start the process that has both codecs; each case gives GB of float32 encoded and decoded per second."""
    with PeerProcesses("shoal.bench.codec_peer:main", 1) as peers:

        def rate(side: str, codec: str) -> float:
            return _SIZE_BYTES / 1e9 / peers.call(side, codec, _SIZE_BYTES)[0]

        yield [
            Case(
                name=f"hivemind {theirs} 4 MB",
                unit="GB/s",
                ours=partial(rate, "ours", codec),
                reference=partial(rate, "reference", theirs),
                larger_is_better=True,
            )
            for codec, theirs in _REFERENCES.items()
        ]
