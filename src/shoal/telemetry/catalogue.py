"""Every number that the product measures, once: what kind it is, what it says, and what it is called outside.

`CATALOGUE` is what each process measures, `RUN` what is known of the run as a whole. What is not here is not measured:
a process may not make such a number, and the monitor does not pass one on. docs/metrics.md is made of this.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, NamedTuple


class MetricKind(enum.StrEnum):
    """What a number means over time: a counter only grows, a gauge is as it is now, a histogram counts values."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """What a process measures, and what the number says. `labels` are what it is told apart by."""

    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()


_COUNTER, _GAUGE, _HISTOGRAM = MetricKind
CATALOGUE: Final[Mapping[str, Metric]] = {
    "data.wait_seconds": Metric(_HISTOGRAM, "how long a trainer waited for the batch of a step"),
    "device.busy_us": Metric(_COUNTER, "the device has worked on operations of this kind", ("kind", "stage")),
    "device.open_us": Metric(_COUNTER, "some step was open at this replica", ("stage",)),
    "disk.failing": Metric(
        _GAUGE, "what the system says (errno) while this cannot be written, as 28 of a full disk; else 0", ("what",)
    ),
    "process.crowded": Metric(_GAUGE, "1 while the process takes no more connections: it may have no more files open"),
    "process.loop_lag_seconds": Metric(_HISTOGRAM, "how much too late the event loop woke up, looked at every 2 s"),
    "process.memory_bytes": Metric(_GAUGE, "resident memory of the process"),
    "process.start_time_seconds": Metric(_GAUGE, "when the process was started, by its own clock: seconds since 1970"),
    "process.stalled_ms": Metric(_COUNTER, "the process has not run, in pauses of a second and more"),
    "protocol.unexpected": Metric(_COUNTER, "messages of a kind that nobody in the process takes", ("kind",)),
    "protocol.violated": Metric(
        _COUNTER, "messages that broke the protocol; the sender's connection was closed", ("kind",)
    ),
    "records.dropped": Metric(_COUNTER, "records of the registry that did not verify, by reason", ("reason",)),
    "ring.refused": Metric(_COUNTER, "averages that a member could not take part in"),
    "round.chains_left": Metric(_COUNTER, "chains of records that were left when sides of a split met"),
    "round.foreseen": Metric(_COUNTER, "outer steps that were computed before their round was closed"),
    "round.phase_seconds": Metric(_HISTOGRAM, "how long the phases of outer rounds took", ("phase",)),
    "round.suspects": Metric(_COUNTER, "replicas that a record names, by suspicion", ("suspicion",)),
    "snapshot.kept": Metric(_COUNTER, "snapshots that others have taken in"),
    "step.committed": Metric(_COUNTER, "steps that replicas of this process have committed", ("stage",)),
    "step.open_seconds": Metric(_HISTOGRAM, "how long a step was open at a replica, to its commit or end", ("stage",)),
    "step.out_of_memory": Metric(_COUNTER, "microbatches for which the device had no memory"),
    "step.samples": Metric(_COUNTER, "samples of the committed steps that were not skipped", ("stage",)),
    "transport.accepted": Metric(_COUNTER, "connections that others have dialled"),
    "transport.dialled": Metric(_COUNTER, "connections that this process has dialled"),
    "transport.dropped": Metric(_COUNTER, "messages to peers that could not be reached"),
    "transport.lost": Metric(_COUNTER, "connections that ended, by cause", ("cause",)),
    "transport.received_bytes": Metric(_GAUGE, "bytes of messages that have come in since the process was started"),
    "transport.reconnected": Metric(_COUNTER, "connections in place of others to the same peer"),
    "transport.refused": Metric(_COUNTER, "connections that were refused, by offence", ("offence",)),
    "transport.sent_bytes": Metric(
        _GAUGE, "bytes of messages that were sent since the process was started", ("traffic",)
    ),
}
"""What each process measures. Bytes are gauges: every report of them changes them."""


class RunNumber(NamedTuple):
    """A number of the run as a whole.

    Attributes:
        help: what it says, with its unit.
        label: what the part of its name after the slash tells apart; empty where there is no slash.
        of_a_step: it comes with each step, so that of many the mean counts; of others the last one.
    """

    help: str
    label: str = ""
    of_a_step: bool = False


RUN: Final[Mapping[str, RunNumber]] = {
    "accuracy": RunNumber("share of right answers of a part of the model, if its family reports it", "of", True),
    "alive_peers": RunNumber("processes of the swarm that are there"),
    "grad_norm": RunNumber("length of the gradient of the whole model, before it is clipped", "", True),
    "loss": RunNumber("mean loss over what it was measured on, in nats unless the family says otherwise", "of", True),
    "lr": RunNumber("learning rate of the inner optimizer"),
    "missing_stages": RunNumber("stages without a server"),
    "paused": RunNumber("1 if a user has paused the run"),
    "pipelines": RunNumber("complete paths through the stages"),
    "replicas": RunNumber("servers of this stage", "stage"),
    "round": RunNumber("the outer round that is trained"),
    "router": RunNumber("of layers with experts: how unevenly tokens are dealt out", "of", True),
    "samples": RunNumber("samples that were trained on"),
    "samples_per_s": RunNumber("samples a second, over the last seconds", "of"),
    "share": RunNumber("share of the last round's samples that this slot has trained", "slot"),
    "step": RunNumber("steps of all trainers", "of"),
    "targets_per_s": RunNumber("labels that the loss counts a second, of a language model its tokens"),
    "step_s": RunNumber("seconds that a step took, from its batch to its commit", "", True),
}
"""What is known of the run as a whole, by the part of its name before the slash: `loss/train` is the `loss` of `train`.

`counters/...` are not among them: these are the sums over all peers of what is in `CATALOGUE`.
"""


def run_number(name: str) -> RunNumber | None:
    """Return what a number of the run says; None: it is none."""
    known = RUN.get(name.partition("/")[0])
    return known if known is None or known.label or "/" not in name else None


def outside_name(name: str) -> str:
    """Return what systems like Prometheus call a number of the catalogue: `shoal_device_busy_seconds`."""
    return "shoal_" + _in_base_units(name.replace(".", "_"))


def outside_run_name(base: str) -> str:
    """Return the same of a number of the run, by the part of its name before the slash."""
    return "shoal_run_" + _in_base_units(base)


def outside_scale(name: str) -> float:
    """Return by what a number is multiplied so that it is in base units."""
    return next((scale for ending, scale in _SCALES.items() if name.endswith(ending)), 1.0)


_SCALES: Final = {"_us": 1e-6, "_ms": 1e-3}
_BASE_UNITS: Final = (*((ending, "_seconds") for ending in _SCALES), ("_per_s", "_per_second"), ("_s", "_seconds"))


def _in_base_units(name: str) -> str:
    for ending, written in _BASE_UNITS:
        if name.endswith(ending):
            return name.removesuffix(ending) + written
    return name
