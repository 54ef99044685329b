"""The benchmark `codec`: a tensor into its form on the wire and back, in memory.

Beside hivemind's own calls where it has a compression of as many bits; of its eight bits only the way there, since
hivemind 1.1.12 cannot read them with numpy 2.4. The codecs that encode a whole vector are measured each way by itself,
by what its one thread computes, beside a copy of the vector: what there is to gain is the distance to that.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from shoal_lab.bench.case import BenchmarkOptions, Case
from shoal_lab.bench.peers import PeerProcesses

_SIZE_BYTES = 4_000_000
_REFERENCES = {"raw": "none", "fp16": "float16"}
"""Our codecs, and the compression of hivemind that gives as many bits."""
_FEEDBACK = 0.95
_VECTOR_BYTES = 32_000_000
"""More than caches hold, as the parameters of a stage are."""
_DENSITIES = {"int8": (1.0,), "int4": (1.0,), "int4_e3m0": (1.0,), "2bit": (1.0,), "sparse": (1 / 16, 1 / 64)}
"""The codecs that encode a whole vector, and how much of it they send."""


@contextmanager
def open_cases(options: BenchmarkOptions) -> Generator[Sequence[Case], None, None]:
    """Start the process that has all codecs; each case gives GB of float32 per second."""
    with PeerProcesses("shoal_lab.bench.codec_peer:main", 1) as peers:

        def rate(size_bytes: int, call: str, *args: object) -> float:
            return size_bytes / 1e9 / peers.call(call, *args, size_bytes)[0]

        both_ways = [
            Case(
                name=f"hivemind {theirs} 4 MB",
                unit="GB/s",
                ours=partial(rate, _SIZE_BYTES, "ours", codec),
                reference=partial(rate, _SIZE_BYTES, "reference", theirs),
            )
            for codec, theirs in _REFERENCES.items()
        ]
        one_way = Case(
            name="hivemind uniform_8bit, encode int8 4 MB",
            unit="GB/s",
            ours=partial(rate, _SIZE_BYTES, "encode", "int8", 0.0, 1.0),
            reference=partial(rate, _SIZE_BYTES, "reference_encode", "uniform_8bit"),
        )
        each_way = [
            Case(
                name=f"memcpy {way} {label} 32 MB",
                unit="GB/s",
                ours=partial(rate, _VECTOR_BYTES, way, codec, _FEEDBACK, density),
                reference=partial(rate, _VECTOR_BYTES, "memcpy"),
            )
            for label, codec, density in _labelled()
            for way in ("encode", "decode")
        ]
        yield [*both_ways, one_way, *each_way]


def _labelled() -> Iterator[tuple[str, str, float]]:
    for codec, densities in _DENSITIES.items():
        for density in densities:
            yield (codec if density == 1.0 else f"{codec} 1/{round(1 / density)}"), codec, density
