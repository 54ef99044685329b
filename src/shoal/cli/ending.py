"""What is said at the end of a run beside its results: what was lost on the way, and what can be done next. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.cli.run_row import duration
from shoal.config import Config
from shoal.config.named_code import naming_options
from shoal.events.incidents import Cause

_SHOWN = 5
_GENERATES = ("gpt", "hf")
"""Families whose models go on from a text; one of the user's own may, and is not known to."""


def incident_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each of the last incidents in `summary.json`, and how many there were before."""
    incidents: list[dict[str, Any]] = summary.get("incidents") or []
    if len(incidents) > _SHOWN:
        yield f"{len(incidents)} incidents on the way; the last of them:"
    for incident in incidents[-_SHOWN:]:
        yield _sentence(incident)


def _sentence(incident: Mapping[str, Any]) -> str:
    stage = "" if incident["stage"] is None else f" (stage {incident['stage']})"
    when = f"in round {incident['round']}, {duration(incident['at_s'])} after launch"
    recovered_s, back_s, lost = incident["recovered_after_s"], incident["back_after_s"], incident["steps_lost"]
    cause, at_end = incident["cause"], "it was not over at the end"
    if cause == Cause.LEFT and back_s is None:
        cause, at_end = "wanted to leave", "still there at the end"
    parts = [f"{incident['who']}{stage}: {cause} {when}"]
    if recovered_s is not None:
        parts.append(f"training went on after {recovered_s:.1f} s")
    parts.append(at_end if back_s is None else f"over after {back_s:.1f} s")
    if lost:
        parts.append(f"{lost} step{'s'[: lost != 1]} lost")
    return "; ".join(parts)


def next_lines(
    config: Config,
    summary: Mapping[str, Any] | None,
    failure: str | None,
    log_dir: Path,
    *,
    is_local: bool,
    checkpoints: str | None = None,
) -> Iterator[str]:
    """Yield commands that say more of a run, use what it has trained, or go on with it.

    Args:
        is_local: what its servers have logged is here, and not on other hosts.
        checkpoints: where those of this run lie; None: it has left none.
    """
    title = "next: "
    for command in _commands(config, summary or {}, failure, str(log_dir), checkpoints, is_local=is_local):
        yield title + shlex.join(("shoal", *command))
        title = " " * len(title)


def _commands(
    config: Config,
    summary: Mapping[str, Any],
    failure: str | None,
    log_dir: str,
    checkpoints: str | None,
    *,
    is_local: bool,
) -> Iterator[tuple[str, ...]]:
    model = summary.get("model")
    if model and summary.get("samples"):
        if config.data.task_type == "llm" and config.model.family in _GENERATES:
            yield "generate", str(model), "--prompt", "Once upon a time"
        elif config.data.task_type == "image_gen":
            yield "images", str(model), "--to", "images.png"
        else:
            yield "evaluate", str(model), *naming_options(config)
    if checkpoints is not None and summary.get("exit") == "interrupted":
        yield "run-local" if is_local else "start-trainer-client", "--resume", checkpoints
    if summary.get("samples") and is_local:
        yield "replay", log_dir, *naming_options(config)
    if failure is not None:
        yield "logs", log_dir, "--level", "warning"
    if summary:
        yield "events", log_dir
