"""So many inputs for all parsers in turn, and what they did: crashes, hangs, memory that grows.

An input depends on the seed and its number alone, so each one can be made again; one that fails is written down too,
since another version of the code makes other inputs.
"""

from __future__ import annotations

import base64
import signal
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Final

import msgspec

from shoal.clock import thread_cpu_s
from shoal.errors import ConfigError, InvariantViolation
from shoal.runtime.process_info import resident_bytes
from shoal_lab.fuzz.parser import Parser
from shoal_lab.fuzz.parsers import all_parsers

HANG_S: Final = 10.0
"""Processor time after which a single input is taken for one that never ends; they take some tens of microseconds."""
MAX_GROWTH_BYTES: Final = 64 << 20
MAX_FAILURES: Final = 20
_LOOK_EVERY: Final = 500


class FixedClock:
    """Stands still, so that an input does the same whenever it is tried."""

    def now_s(self) -> float:
        """Return always the same."""
        return 0.0

    def unix_s(self) -> float:
        """Return always the same."""
        return 1.75e9

    async def sleep_s(self, duration_s: float) -> None:
        """Return at once."""


class Failure(msgspec.Struct, frozen=True):
    """An input that did what no input may do, as it is written to a file.

    Attributes:
        seed, number: the input and the cuts of its reads were made from them.
        data: the input, in base64.
    """

    parser: str
    seed: int
    number: int
    error: str
    data: str


@dataclass
class Report:
    """What came of a campaign.

    Attributes:
        inputs: how many were tried, by parser.
        taken: how many of them were taken as valid, by parser.
        reached: by parser that tells, how many inputs came how far.
        failures: the first ones of each kind.
        growth_bytes: the most by which the process's memory exceeded that at the beginning.
    """

    inputs: Counter[str] = field(default_factory=Counter[str])
    taken: Counter[str] = field(default_factory=Counter[str])
    reached: dict[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    failures: list[Failure] = field(default_factory=list[Failure])
    failed: int = 0
    growth_bytes: int = 0
    cpu_s: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether nothing failed and memory stayed within its bound."""
        return not self.failed and self.growth_bytes <= MAX_GROWTH_BYTES


class Campaign:
    """Tries inputs. Must run in the main thread, because a signal notices a hang.

    Args:
        parsers: all of them if None.
        save: folder for failing inputs; None writes none.
    """

    def __init__(self, seed: int, parsers: Sequence[Parser] | None = None, save: Path | None = None) -> None:
        self._seed = seed
        self._parsers = list(parsers or all_parsers(seed, FixedClock()))
        self._save = save
        self._number = -1
        self._watched = -1
        self._kinds: set[tuple[str, str]] = set()
        self.report = Report()

    def run(
        self, start: int, stop: int, cpu_s: float | None = None, progress: Callable[[int], None] | None = None
    ) -> Report:
        """Try the inputs from `start` to before `stop`, or as many as fit into `cpu_s` of processor time.

        Args:
            cpu_s: ends the campaign earlier; None: does not.
            progress: is told now and then how many inputs have been tried.
        """
        report, before_s, before_bytes = self.report, thread_cpu_s(), resident_bytes()
        with self._hangs_noticed():
            for number in range(start, stop):
                self._try(number)
                if number % _LOOK_EVERY == 0 or number == stop - 1:
                    report.growth_bytes = max(report.growth_bytes, resident_bytes() - before_bytes)
                    report.cpu_s = thread_cpu_s() - before_s
                    if progress is not None:
                        progress(number + 1 - start)
                    if cpu_s is not None and report.cpu_s >= cpu_s:
                        break
        report.reached = {parser.name: dict(parser.reached) for parser in self._parsers if parser.reached}
        return report

    def again(self, failure: Failure) -> Exception | None:
        """Try a failing input once more; returns what it does now.

        Raises:
            ConfigError: there is no such parser.
        """
        found = [parser for parser in self._parsers if parser.name == failure.parser]
        if not found:
            raise ConfigError(f"there is no parser {failure.parser!r}: {', '.join(p.name for p in self._parsers)}")
        with self._hangs_noticed():
            return self._fed(found[0], base64.b64decode(failure.data), failure.seed, failure.number)

    def _try(self, number: int) -> None:
        self._number = number
        parser = self._parsers[number % len(self._parsers)]
        data = parser.make(_random(self._seed, number))
        self.report.inputs[parser.name] += 1
        error = self._fed(parser, data, self._seed, number)
        if error is None:
            return
        self.report.failed += 1
        kind = parser.name, _place(error)
        if kind in self._kinds or len(self._kinds) >= MAX_FAILURES:
            return
        self._kinds.add(kind)
        text = f"{type(error).__name__}: {error}"[:500]
        failure = Failure(parser.name, self._seed, number, text, base64.b64encode(data).decode())
        self.report.failures.append(failure)
        if self._save is not None:
            self._save.mkdir(parents=True, exist_ok=True)
            path = self._save / f"{parser.name}_{self._seed}_{number}.json"
            path.write_bytes(msgspec.json.encode(failure))

    def _fed(self, parser: Parser, data: bytes, seed: int, number: int) -> Exception | None:
        try:
            self.report.taken[parser.name] += parser.feed(data, _random(seed, ~number))
        except Exception as error:  # noqa: BLE001 - whatever it is, it would end a role that reads from a stranger
            return error
        return None

    @contextmanager
    def _hangs_noticed(self) -> Generator[None]:
        """Inside, an input that computes for `HANG_S` fails."""

        def look(_signal: int, _frame: FrameType | None) -> None:
            if self._watched == self._number:
                raise InvariantViolation(f"input {self._number} has not ended after {HANG_S} s of computing")
            self._watched = self._number

        before = signal.signal(signal.SIGPROF, look)
        signal.setitimer(signal.ITIMER_PROF, HANG_S, HANG_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)


def _random(seed: int, number: int) -> Random:
    return Random((seed << 64) ^ (number & ((1 << 64) - 1)))


def _place(error: Exception) -> str:
    """Where an error was raised: inputs that fail there fail for one reason."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    where = "" if last is None else f"{last.tb_frame.f_code.co_filename}:{last.tb_lineno}"
    return f"{type(error).__name__} at {where}"
