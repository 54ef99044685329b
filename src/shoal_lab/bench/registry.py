"""The names of all benchmarks: one line each."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

from shoal.errors import ConfigError
from shoal_lab.bench.case import BenchmarkOptions, Case
from shoal_lab.faults.link_grammar import parse_link

OpenCases = Callable[[BenchmarkOptions], AbstractContextManager[Sequence[Case]]]
"""What a benchmark's module offers as `open_cases`: it starts all processes, and ends them on the way out."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Where a benchmark is.

    Attributes:
        module: has `open_cases`; imported only when the benchmark runs.
        summary: one line for the list of names.
        uses_link: whether its peers can be put at the two ends of an emulated link.
        repeat: measured repetitions, unless the user sets another number.
    """

    module: str
    summary: str
    uses_link: bool = False
    repeat: int = 5


BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {
        "ring": Benchmark("shoal_lab.bench.ring", "an all-reduce of two to four peers, beside gloo's and hivemind's"),
        "codec": Benchmark("shoal_lab.bench.codec", "a tensor into its form on the wire and back, beside hivemind's"),
        "data": Benchmark("shoal_lab.bench.data", "batches from a data server, beside torch's DataLoader"),
        # A repetition is a turn over all sides, and takes more than ten seconds.
        "pipeline": Benchmark(
            "shoal_lab.bench.pipeline", "training over two and four stages, beside a plain loop", repeat=3
        ),
        "startup": Benchmark(
            "shoal_lab.bench.startup", "seconds and memory of the sandbox's processes, by cause and role"
        ),
        "transport": Benchmark(
            "shoal_lab.bench.transport", "tensors and small messages between two processes of this host", uses_link=True
        ),
    }
)


def find_benchmark(name: str, options: BenchmarkOptions) -> Benchmark:
    """Return the benchmark of that name.

    Raises:
        ConfigError: there is none, or it cannot do what the options ask for.
    """
    benchmark = BENCHMARKS.get(name)
    if benchmark is None:
        near = difflib.get_close_matches(name.lower(), BENCHMARKS, n=1)
        advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(BENCHMARKS)}."
        raise ConfigError(f"unknown benchmark {name}; {advice}")
    if options.repeat is not None and options.repeat < 1:
        raise ConfigError(f"--repeat {options.repeat}: at least 1 repetition is needed")
    if options.link is not None and not benchmark.uses_link:
        able = [other for other, entry in BENCHMARKS.items() if entry.uses_link]
        advice = f" (it is for {', '.join(able)})" if able else ""
        raise ConfigError(
            f"--link {options.link}: nothing in the benchmark {name} goes over a link{advice}; leave it out"
        )
    if options.link is not None:
        parse_link(options.link)
    return benchmark


def load_open_cases(name: str, benchmark: Benchmark) -> OpenCases:
    """Import a benchmark.

    Raises:
        ConfigError: a library that it compares with is not installed.
    """
    try:
        module = importlib.import_module(benchmark.module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("shoal", "shoal_lab"):
            raise
        raise ConfigError(
            f"the benchmark {name} compares with {error.name}, which is not installed: pip install {error.name}"
        ) from error
    return cast("OpenCases", module.open_cases)
