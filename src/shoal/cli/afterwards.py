"""What can be done when a run has ended: commands that say more of it, use what it has trained, or go on with it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.checkpoint.places import LocalPlace, folder_of, round_of
from shoal.cli.run_folder import LOCAL_MARK
from shoal.config import Config
from shoal.config.host import NetworkConfig
from shoal.config.named_code import naming_options, own_family

_GENERATES = ("gpt", "hf")
"""Families whose models go on from a text; one of the user's own may, and is not known to."""


def how_ended(exit: str, failure: str | None = None) -> str:
    """Return a sentence without its full stop.

    Args:
        exit: as in `summary.json`, or of a run that has left none what `shoal runs` says.
        failure: why it failed, if that is known.
    """
    match exit:
        case "done":
            return "the run is complete"
        case "failed":
            return f"the run has failed: {failure}" if failure else "the run has failed"
        case "interrupted":
            return "the run was interrupted"
        case "runs":
            return "the run went on when this was written"
        case _:
            return "the run has broken off: its launcher was killed, or its disk took no summary"


def left_commands(
    config: Config, run_id: str, log_dir: Path, summary: Mapping[str, Any] | None, failure: str | None = None
) -> list[str]:
    """Return `next_commands` of a run, with what it has left on this host.

    Args:
        log_dir: the folder of the run.
        summary: as in `summary.json`; None: the run did not get that far.
        failure: why it failed; None: it did not, or nobody knows.
    """
    checkpoints = checkpoints_left(config, run_id)
    if summary is None and checkpoints is not None:
        summary = {"exit": "interrupted" if failure is None else "failed"}
    is_local = (log_dir / LOCAL_MARK).exists()
    return list(next_commands(config, summary, failure, log_dir, is_local=is_local, checkpoints=checkpoints))


def checkpoints_left(config: Config, run_id: str) -> str | None:
    """Return where the checkpoints of a run lie; None: it has left none."""
    if not config.param_mirror.enable:
        return None
    place = f"{config.checkpoint_location}/{run_id}"
    return place if "://" in place or _newest(place) is not None else None


def next_lines(commands: Iterable[str]) -> Iterator[str]:
    """Yield commands as a terminal shows them."""
    title = "next: "
    for command in commands:
        yield title + command
        title = " " * len(title)


def next_commands(
    config: Config,
    summary: Mapping[str, Any] | None,
    failure: str | None,
    log_dir: Path,
    *,
    is_local: bool,
    checkpoints: str | None = None,
) -> Iterator[str]:
    """Yield commands that say more of a run, use what it has trained, or go on with it, as a shell takes them.

    Args:
        is_local: what its servers have logged is here, and not on other hosts.
        checkpoints: where those of this run lie; None: it has left none.
    """
    for command in _commands(config, summary or {}, failure, log_dir, checkpoints, is_local=is_local):
        yield shlex.join(("shoal", *command))


def _commands(
    config: Config,
    summary: Mapping[str, Any],
    failure: str | None,
    log_dir: Path,
    checkpoints: str | None,
    *,
    is_local: bool,
) -> Iterator[tuple[str, ...]]:
    model, end = summary.get("model"), summary.get("exit")
    newest = None if checkpoints is None else _newest(checkpoints)
    if model and summary.get("samples"):
        if config.data.messages_column is not None and config.model.family in _GENERATES:
            yield "chat", str(model)
        elif config.data.task_type == "llm" and config.model.family in _GENERATES:
            yield "generate", str(model), "--prompt", "Once upon a time"
        elif config.data.task_type == "image_gen":
            yield "images", str(model), "--to", "images.png"
        else:
            yield "evaluate", str(model), *naming_options(config)
    elif newest is not None and end == "done":
        family = own_family(config)
        yield "export", newest, "--to", "model", *(() if family is None else ("--family", family))
    if failure is not None or end == "failed":
        yield "logs", str(log_dir), "--level", "warning"
    # All rounds may be trained, and the model be there: then nothing is left to go on with.
    is_whole = model and newest is not None and newest.endswith(folder_of(config.diloco.outer_steps))
    if checkpoints is not None and end in ("interrupted", "failed") and not is_whole:
        command = "run-local" if is_local else "start-trainer-client"
        yield command, "--resume", checkpoints, *_where(config, log_dir, is_local=is_local)
    if summary.get("samples") and is_local:
        yield "replay", str(log_dir), *naming_options(config)
    if summary:
        yield "events", str(log_dir)


def _where(config: Config, log_dir: Path, *, is_local: bool) -> Iterator[str]:
    """Yield what tells a resumed run where its folder and its key are, unless they are where they are by themselves."""
    if log_dir.parent != Config().log_dir.absolute():
        yield from ("--log-dir", str(log_dir.parent))
    key = config.network.swarm_key_file
    if not is_local and key != NetworkConfig().swarm_key_file:
        yield from ("--network.swarm-key-file", str(key))


def _newest(checkpoints: str) -> str | None:
    """Return the newest checkpoint of a folder of this host; None: there is none."""
    if "://" in checkpoints:
        return None
    with suppress(OSError):
        rounds = [round for name in LocalPlace(Path(checkpoints)).folders() if (round := round_of(name)) is not None]
        return f"{checkpoints}/{folder_of(max(rounds))}" if rounds else None
    return None
