"""Wrong inputs for all parsers: a few thousand here, more by the benchmark; and the fuzzer itself."""

from __future__ import annotations

import json
import subprocess
import sys
from mmap import mmap
from pathlib import Path
from random import Random
from typing import Any, get_args

import msgspec
import msgspec.inspect as schema
import pytest

from shoal.wire.messages import Message
from shoal.wire.messages.control import MetricReport
from shoal_lab.fuzz import campaign as campaigns
from shoal_lab.fuzz.campaign import MAX_GROWTH_BYTES, Campaign, Failure, FixedClock
from shoal_lab.fuzz.grammar import tree_of
from shoal_lab.fuzz.parser import Parser
from shoal_lab.fuzz.parsers import all_parsers

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """What is refused would be logged by the thousand."""
    caplog.set_level("CRITICAL", logger="shoal")


def test_the_corpus_has_valid_messages_of_every_kind() -> None:
    wrong: list[str] = []
    for kind in get_args(Message):
        try:
            for seed in range(20):
                _sample(kind, seed)
        except msgspec.ValidationError as error:
            wrong.append(f"{kind.__name__}: {error}")
    assert wrong == []


def _sample(kind: Any, seed: int) -> Any:
    tree = tree_of(schema.type_info(kind), Random(seed))
    return msgspec.msgpack.decode(msgspec.msgpack.encode(tree), type=kind)


def test_the_corpus_has_reports_with_numbers_of_every_sort() -> None:
    reports = [_sample(MetricReport, seed) for seed in range(20)]
    for sort in ("counters", "gauges", "histograms"):
        assert any(getattr(report, sort) for report in reports), sort


def test_some_thousand_wrong_inputs_are_refused_or_taken() -> None:
    report = Campaign(seed=3).run(0, 4000)
    assert report.failures == []
    assert report.growth_bytes <= MAX_GROWTH_BYTES
    assert sum(report.inputs.values()) == 4000
    # They reach what lies behind the form: some are valid by chance, in every parser.
    assert set(report.inputs) == set(+report.taken) == {parser.name for parser in all_parsers(0, FixedClock())}
    assert all(report.taken[name] < count / 2 for name, count in report.inputs.items())


def test_records_reach_every_check_and_a_good_share_comes_through_all_of_them() -> None:
    parsers = [parser for parser in all_parsers(5, FixedClock()) if parser.name == "record"]
    report = Campaign(5, parsers).run(0, 2000)
    reached = report.reached["record"]
    assert sum(reached.values()) == 2000
    assert reached["taken"] == report.taken["record"] >= 0.2 * 2000
    # Behind the MAC lies what an insider can bring: two thirds of the inputs get there.
    assert 2000 - reached["bad_mac"] >= 0.67 * 2000
    for reason in ("bad_mac", "malformed", "wrong_topic", "bad_signature", "bad_expiry", "expired"):
        assert reached[reason] >= 5, reached


@pytest.mark.slow
@pytest.mark.timeout(600)  # these seconds are a core's, which many may want
def test_what_the_benchmark_makes_in_15_s_is_refused_or_taken(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/fuzz.py", "--seed=17", "--cpu-s=15", "--json", f"--save={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["good"]
    assert figures["failed"] == 0
    assert figures["growth_mib"] <= 64
    assert figures["inputs"] > 1_000


class Fragile(Parser):
    """Breaks at some of the inputs."""

    name = "fragile"

    def make(self, random: Random) -> bytes:
        return random.randbytes(4)

    def feed(self, data: bytes, random: Random) -> bool:
        if data[0] < 64:
            raise IndexError("broken")
        return True


def test_what_is_no_error_of_the_parser_is_a_failure_written_down_and_tried_again(tmp_path: Path) -> None:
    campaign = Campaign(1, [Fragile(1)], save=tmp_path)
    report = campaign.run(0, 100)
    assert 5 < report.failed < 60
    assert report.taken["fragile"] + report.failed == 100
    assert not report.is_good
    [failure], [path] = report.failures, tmp_path.iterdir()
    assert (failure.parser, failure.error) == ("fragile", "IndexError: broken")
    assert isinstance(campaign.again(msgspec.json.decode(path.read_bytes(), type=Failure)), IndexError)
    # The same numbers are the same inputs.
    [again] = Campaign(1, [Fragile(1)]).run(failure.number, failure.number + 1).failures
    assert again.data == failure.data


class Endless(Fragile):
    """Never ends."""

    def feed(self, data: bytes, random: Random) -> bool:
        while True:
            data = data[::-1]


def test_an_input_that_never_ends_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaigns, "HANG_S", 0.05)
    [failure] = Campaign(1, [Endless(1)]).run(0, 1).failures
    assert "has not ended" in failure.error


class Hoarding(Fragile):
    """Keeps something of every input, in pages of its own: freed memory would not make it grow."""

    def __init__(self) -> None:
        self.kept = list[mmap]()

    def feed(self, data: bytes, random: Random) -> bool:
        pages = mmap(-1, 1 << 19)
        pages.write(b"x" * (1 << 19))
        self.kept.append(pages)
        return True


def test_memory_that_grows_is_a_failure() -> None:
    hoarding = Hoarding()
    report = Campaign(1, [hoarding]).run(0, 300)
    assert report.failed == 0
    assert report.growth_bytes > MAX_GROWTH_BYTES
    assert not report.is_good
