"""Trains a configuration in small (`--tiny`) by `run_local.py`'s command to its end, and says what became of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shoal.config.load import load_config
from shoal_lab.launched import launched
from shoal_lab.observed import Swarm
from shoal_lab.verdict import (
    Evidence,
    chain_is_whole,
    ended_well,
    judge,
    nothing_is_left,
    replicas_agree,
    samples_are_whole,
    summary_is_true,
)

_CHECKS: Final = (
    ("end", ended_well),
    ("hashes", replicas_agree),
    ("samples", samples_are_whole),
    ("chain", chain_is_whole),
    ("summary", summary_is_true),
    ("leftovers", nothing_is_left),
)
_ENDS_S: Final = 900.0
"""Far more than a run takes; it judges nothing."""


@dataclass(frozen=True, slots=True)
class SmallRun:
    """What one run has come to.

    Attributes:
        model: the family, or which model of transformers it is.
        eval_loss_first: mean held-out loss of the initial parameters, in nats.
        eval_loss_last: of the last ones.
        seconds_total: from the command to the end.
        problems: what is not as it has to be; empty: all is well.
    """

    task: str
    model: str
    stages: int
    replicas: int
    steps: int
    steps_skipped: int
    eval_loss_first: float
    eval_loss_last: float
    seconds_total: float
    problems: tuple[str, ...]


def train_small(path: Path, directory: Path, flags: Sequence[str] = ()) -> SmallRun:
    """Train a configuration file in small.

    Its loss has to fall (of a GAN: to stay finite), the servers of a stage have to end with equal hashes, and each
    sample has to be trained once.

    Args:
        directory: for everything that the run writes.

    Raises:
        RunFailed: it does not end, or has written nothing.
    """
    given = (f"--config-path={path.resolve()}", "--tiny", "--no-wandb", "--deterministic", "--device=cpu", *flags)
    with launched(directory, *given) as run:
        code = run.ends(_ENDS_S)
        leftovers = run.leftovers()
        run.require_log_dir()
        evidence = Evidence(Swarm(run, [run], num_slots=0), code, leftovers, wanted_exit_code=0)
        findings = judge(evidence, _CHECKS)
        problems = [f"{finding.check}: {problem}" for finding in findings for problem in finding.problems]
        problems += [run.output] if code else []
        summary: Mapping[str, Any] = Counter() if code else run.summary()
        first, last = summary["eval_loss_first"], summary["eval_loss_last"]
        config = load_config(run.require_log_dir() / "config.yaml", (), {})
        # Of two players one loses what the other wins: their sum need not fall.
        is_game = config.data.task_type == "image_gen"
        if not (math.isfinite(last) if is_game else last < first):
            problems.append(f"the loss went from {first} to {last}")
    return SmallRun(
        task=config.data.task_type,
        model=config.model.kind,
        stages=config.num_stages,
        replicas=summary["replicas"],
        steps=summary["steps"],
        steps_skipped=summary["steps_skipped"],
        eval_loss_first=first,
        eval_loss_last=last,
        seconds_total=summary["seconds_total"],
        problems=tuple(problems),
    )
