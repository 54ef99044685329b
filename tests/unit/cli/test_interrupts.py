"""A Ctrl-C is not forgotten when what it has raised gets lost."""

from __future__ import annotations

import signal
from contextlib import suppress

import pytest

from shoal.cli.early import Interrupts, ending_signals
from shoal_lab.bench import command as benchmark
from shoal_lab.bench.case import BenchmarkOptions


def test_a_swallowed_ctrl_c_is_raised_again_at_the_next_check() -> None:
    with Interrupts() as interrupts:
        interrupts.check()
        with suppress(KeyboardInterrupt):  # as a finalizer or a library does
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("outlives", [True, False])
def test_a_launcher_ends_well_when_its_terminal_goes_away_unless_it_was_started_to_outlive_it(outlives: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if outlives else signal.SIG_DFL)
    try:
        assert (signal.SIGHUP in ending_signals()) is not outlives
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_ctrl_c_that_an_import_of_a_benchmark_swallows_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(benchmark, "load_open_cases", load)
    monkeypatch.setattr(benchmark, "calibrate", lambda: pytest.fail("it measures although Ctrl-C was pressed"))
    with pytest.raises(KeyboardInterrupt):
        benchmark.run_benchmark("codec", BenchmarkOptions(ignore_busy=True), as_json=True)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
