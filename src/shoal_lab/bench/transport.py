"""The benchmark `transport`: tensors and small messages between two processes of this host.

`plain` is our path between peers of one host (a Unix socket), `tls` the one between hosts (TCP under TLS, here over
loopback). The reference `raw tcp` is always blocking unencrypted TCP over loopback into a buffer that is there already;
`hivemind` is hivemind's own streaming call over its daemons.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial

from shoal_lab.bench.case import BenchmarkOptions, Case
from shoal_lab.bench.peers import PeerProcesses

_PEERS = "shoal_lab.bench.transport_peer:main"
_MEGABYTE = 1_000_000
_BYTES_OF_FAST = 800 * _MEGABYTE
_BYTES_OF_HIVEMIND = 40 * _MEGABYTE
_ROUND_TRIPS = 2000
_LARGE_TENSORS = 24
_LINK_TENSORS = 4
_LINK_ROUND_TRIPS = 8
_MBIT_PER_GB = 8000.0


@contextmanager
def open_cases(options: BenchmarkOptions) -> Generator[Sequence[Case], None, None]:
    """Start a sender and a receiver; rates are goodput, acknowledged by the receiver.

    With a link between them there is only what goes between hosts, in smaller amounts.
    """
    with (
        tempfile.TemporaryDirectory(prefix="shoal") as folder,
        PeerProcesses(_PEERS, 2, {"folder": folder, "link": options.link}) as peers,
    ):

        def value(name: str, *args: object) -> float:
            return next(result for result in peers.call(name, *args) if result is not None)

        if options.link is not None:
            yield _over(options.link, value)
            return
        yield [
            *_throughput("raw tcp", partial(value, "raw_rate"), _BYTES_OF_FAST, value),
            *_throughput("hivemind", partial(value, "hivemind_rate"), _BYTES_OF_HIVEMIND, value),
            *(
                Case(
                    name=f"raw tcp 64 B round trip {path}",
                    unit="us",
                    ours=partial(value, "round_trip", path, _ROUND_TRIPS),
                    reference=partial(value, "raw_round_trip", _ROUND_TRIPS),
                )
                for path in ("plain", "tls")
            ),
            Case(
                name="64 B during 64 MB plain p99",
                unit="ms",
                ours=partial(value, "overtaking", "plain", 64 * _MEGABYTE, _LARGE_TENSORS),
                reference=partial(value, "raw_waiting", 64 * _MEGABYTE, _LARGE_TENSORS),
            ),
        ]


def _over(link: str, value: Callable[..., float]) -> list[Case]:
    return [
        Case(
            name=f"raw tcp 1 MB tls {link}",
            unit="Mbit/s",
            ours=lambda: value("rate", "tls", _MEGABYTE, _LINK_TENSORS) * _MBIT_PER_GB,
            reference=lambda: value("raw_rate", _MEGABYTE, _LINK_TENSORS) * _MBIT_PER_GB,
        ),
        Case(
            name=f"raw tcp 64 B round trip tls {link}",
            unit="us",
            ours=partial(value, "round_trip", "tls", _LINK_ROUND_TRIPS),
            reference=partial(value, "raw_round_trip", _LINK_ROUND_TRIPS),
        ),
        Case(
            name=f"64 B during 1 MB tls p99 {link}",
            unit="ms",
            ours=partial(value, "overtaking", "tls", _MEGABYTE, _LINK_TENSORS),
            reference=partial(value, "raw_waiting", _MEGABYTE, _LINK_TENSORS),
        ),
    ]


def _throughput(
    name: str, reference: Callable[[int, int], float], reference_bytes: int, value: Callable[..., float]
) -> list[Case]:
    size_bytes = 4 * _MEGABYTE
    return [
        Case(
            name=f"{name} 4 MB {path}",
            unit="GB/s",
            ours=partial(value, "rate", path, size_bytes, _BYTES_OF_FAST // size_bytes),
            reference=partial(reference, size_bytes, reference_bytes // size_bytes),
        )
        for path in ("plain", "tls")
    ]
