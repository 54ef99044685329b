"""What the tests of real runs share: the scripts of this checkout as users start them, small configurations, limits."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.e2e.warm import ROOT, WarmLaunched

from shoal.cli import main
from shoal_lab.launched import END_S, START_S, Launched, until

__all__ = [
    "ENDLESS",
    "END_S",
    "FEW",
    "PACE",
    "ROOT",
    "SMALL",
    "SMALLEST",
    "START_S",
    "Launched",
    "completed",
    "launched",
    "run_shoal",
    "until",
]

SMALL = (
    "--deterministic",
    "--no-wandb",
    "--model.hidden-size=48",
    "--data.seq-len=64",
    "--data.holdout-fraction=0.005",
    "--diloco.inner-steps=4",
    "--diloco.outer-steps=2",
    "--diloco.batch-size-per-step=4",
    # As many as stages keep all of them busy, and each one more is four calls in a step.
    "--model-pipeline.microbatches=2",
)
SMALLEST = (
    *SMALL,
    "--diloco.inner-steps=1",
    "--diloco.outer-steps=1",
    "--servers.replicas=1",
    "--no-param-mirror-enable",
)
"""For what depends neither on training nor on replicas: half of what a small swarm takes is that it starts."""
PACE = "0.06"
"""Seconds of a forward or backward where nobody waits for the end of training: swarms leave each other the cores."""
ENDLESS = (*SMALL, "--diloco.outer-steps=10000", f"--emulation.call-s={PACE}")
FEW = (*ENDLESS, "--servers.replicas=1")
"""Endless as well, with one server for each stage: for what does not depend on replicas."""


@contextlib.contextmanager
def launched(directory: Path, *flags: str, cold: bool = False, **options: Any) -> Iterator[Launched]:
    """Start `run_local.py`, or another script, with these flags, and leave nothing of it, however the test ends.

    Args:
        cold: start a Python for it, as users do, which imports all that it needs.
    """
    kind = Launched if cold else WarmLaunched
    run = kind(directory, flags, **{"command": ("run_local.py",), "cwd": ROOT, **options})
    try:
        run.start()
        yield run
    finally:
        run.close()


def completed(directory: Path, *flags: str, within_s: float = 150.0, cold: bool = False) -> Launched:
    """Run `run_local.py` to its end, which has to be a good one."""
    with launched(directory, *flags, cold=cold) as run:
        code = run.ends(within_s)
        assert code == 0, run.output
        run.leaves_nothing()
        return run


def run_shoal(*arguments: str) -> str:
    """Run a command of shoal to its good end, and return what it has printed.

    It runs in this process, which has imported torch and transformers already: a process of its own takes seconds for
    that. As users start them, the same commands run by the first page of test_tasks.py and in test_variants.py.
    """
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = main(arguments)
    assert code == 0, said.getvalue()
    return said.getvalue()
