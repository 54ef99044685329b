"""What Prometheus reads when it looks: the newest numbers of the run and of each peer, in its text form.

Names and units are those of the catalogue as Prometheus wants them: `device.busy_us` of a server is
`shoal_device_busy_seconds_total{role="server",...,who="server 1@box2"}`, `loss/train` is `shoal_run_loss{of="train"}`.

It looks every few seconds, at hundreds of lines of a peer: what they begin with is made once.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

from shoal.monitor.exporters.base import Newest, PeerReport
from shoal.telemetry.catalogue import (
    CATALOGUE,
    RUN,
    MetricKind,
    outside_name,
    outside_run_name,
    outside_scale,
    run_number,
)
from shoal.telemetry.registry import BUCKETS_A_DOUBLING, FIRST_BUCKET, LAST_BUCKET, base_name, labels_of, upper_bound

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_BOUNDS: Final = [
    f"{upper_bound(b):.6g}" for b in range(FIRST_BUCKET, LAST_BUCKET) if (b + 1) % BUCKETS_A_DOUBLING == 0
]
"""Always the same: Prometheus adds up peers, and looks back, bound by bound."""
_MAX_KNOWN: Final = 1 << 14

_Value = float | Mapping[int, int]


def exposition(newest: Newest) -> bytes:
    """Return the text, without what the catalogue does not have; of two peers with one name the later one counts."""
    lines = (*_of_run(newest.run), *_of_peers(newest.peers))
    return "".join(f"{line}\n" for line in lines).encode()


def _of_run(values: Mapping[str, float]) -> Iterator[str]:
    found = defaultdict[str, dict[str, float]](dict)
    for name, value in values.items():
        base, _, rest = name.partition("/")
        if (number := run_number(name)) is not None:
            found[base][_written({number.label: rest} if number.label else {})] = value
    for base in filter(found.__contains__, RUN):
        outside = outside_run_name(base)
        yield from _head(outside, RUN[base].help, MetricKind.GAUGE)
        for labels, value in found[base].items():
            yield f"{outside}{{{labels}}} {float(value)}" if labels else f"{outside} {float(value)}"


def _of_peers(peers: tuple[PeerReport, ...]) -> Iterator[str]:
    """Yield each kind of number of all peers, if any has it."""
    found = defaultdict[str, dict[str, _Value]](dict)
    for who, report in peers:
        kinds: tuple[tuple[MetricKind, Mapping[str, _Value]], ...] = (
            (MetricKind.COUNTER, report.counters),
            (MetricKind.GAUGE, report.gauges),
            (MetricKind.HISTOGRAM, report.histograms),
        )
        for kind, values in kinds:
            for full_name, value in values.items():
                if (labels := _labels(full_name, kind, who, report.role)) is not None:
                    found[base_name(full_name)][labels] = value
    for name in filter(found.__contains__, CATALOGUE):
        kind, scale = CATALOGUE[name].kind, outside_scale(name)
        outside = outside_name(name) + ("_total" if kind is MetricKind.COUNTER else "")
        yield from _head(outside, CATALOGUE[name].help, kind)
        for labels, value in found[name].items():
            if isinstance(value, Mapping):
                yield from _buckets(outside, labels, value)
            else:
                yield f"{outside}{{{labels}}} {float(value * scale)}"


def _head(outside: str, text: str, kind: MetricKind) -> tuple[str, str]:
    return f"# HELP {outside} {text[0].upper()}{text[1:]}.", f"# TYPE {outside} {kind}"


def _buckets(outside: str, labels: str, counts: Mapping[int, int]) -> Iterator[str]:
    """Yield how many values are at most each power of two, and how many there are in all.

    Only buckets travel, so there is no sum, and no mean: quantiles are what they are for.
    """
    total, bucket = 0, FIRST_BUCKET
    for bound in _BOUNDS:
        total += sum(counts.get(bucket + i, 0) for i in range(BUCKETS_A_DOUBLING))
        bucket += BUCKETS_A_DOUBLING
        yield f'{outside}_bucket{{le="{bound}",{labels}}} {total}'
    yield f'{outside}_bucket{{le="+Inf",{labels}}} {sum(counts.values())}'


@functools.lru_cache(maxsize=_MAX_KNOWN)
def _labels(full_name: str, kind: MetricKind, who: str, role: str) -> str | None:
    """Return the labels of a peer's number as they are written; None: the catalogue does not have it."""
    metric, labels = CATALOGUE.get(base_name(full_name)), labels_of(full_name)
    # A peer may say anything: other labels would break the page for all.
    if metric is None or metric.kind is not kind or not labels.keys() <= set(metric.labels):
        return None
    return _written({"who": who, "role": role, **dict.fromkeys(metric.labels, ""), **labels})


def _written(labels: Mapping[str, str]) -> str:
    def escaped(text: str) -> str:
        return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')

    return ",".join(f'{name}="{escaped(value)}"' for name, value in sorted(labels.items()))
