"""The benchmark `ring`: an all-reduce of float32 on one host, beside gloo's and hivemind's averager.

Each case gives GB of the vector per second, by the slowest of the peers. One repetition is several reductions in a row.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from shoal_lab.bench.case import BenchmarkOptions, Case
from shoal_lab.bench.peers import PeerProcesses

_MB = 1_000_000
_GLOO = [(size_mb, num_peers) for num_peers in (2, 3, 4) for size_mb in (16, 64)]
_HIVEMIND_MB = 16
_REDUCED_MB = 128
"""How much a repetition reduces, in as many reductions as that takes."""


@contextmanager
def open_cases(options: BenchmarkOptions) -> Generator[Sequence[Case], None, None]:
    """Start the members of all rings; those that have no turn wait."""
    with ExitStack() as stack:
        rings: dict[int, PeerProcesses] = {}
        for num_peers in (2, 3, 4):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-ring-"))
            peers = PeerProcesses("shoal_lab.bench.ring_peer:main", num_peers, {"folder": folder})
            rings[num_peers] = stack.enter_context(peers)
            rings[num_peers].call("meet")
        averagers = stack.enter_context(PeerProcesses("shoal_lab.bench.averager_peer:main", 2))
        [address, _] = averagers.call("address")
        averagers.call("meet", address, _HIVEMIND_MB * _MB // 4)
        yield [
            *(
                Case(
                    name=f"gloo {size_mb} MB {num_peers} peers",
                    unit="GB/s",
                    ours=partial(_rate, rings[num_peers], "ours", size_mb),
                    reference=partial(_rate, rings[num_peers], "gloo", size_mb),
                )
                for size_mb, num_peers in _GLOO
            ),
            Case(
                name=f"hivemind {_HIVEMIND_MB} MB 2 peers",
                unit="GB/s",
                ours=partial(_rate, rings[2], "ours", _HIVEMIND_MB),
                reference=partial(_average, averagers),
            ),
        ]


def _average(averagers: PeerProcesses) -> float:
    averagers.call("form")
    return _HIVEMIND_MB / 1e3 / max(averagers.call("step"))


def _rate(peers: PeerProcesses, side: str, size_mb: int) -> float:
    repeat = max(1, _REDUCED_MB // size_mb)
    return size_mb / 1e3 / max(peers.call(side, size_mb * _MB // 4, repeat))
