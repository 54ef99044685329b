"""`curves.svg`: how a run has learned, drawn when it ends."""

from __future__ import annotations

from pathlib import Path

from shoal.config.schema import Config
from shoal.ids import RunId
from shoal.report.learning import Learning, read_learning
from shoal.report.plot import Caption, draw
from shoal.runtime.durable_files import put_whole

FILE_NAME = "curves.svg"


def write_curves(log_dir: Path, config: Config, run_id: RunId) -> Path | None:
    """Draw what the run in this folder has learned, also of a run that goes on from a checkpoint.

    Returns:
        The file; None if no round was trained, so that there is nothing to draw.

    Raises:
        OSError: what the run has noted cannot be read, or the file cannot be written.
    """
    learning = read_learning(log_dir)
    if not learning.trained:
        return None
    path = log_dir / FILE_NAME
    put_whole(path, draw(learning, caption_of(config, run_id, learning)).encode(), lasting=False)
    return path


def caption_of(config: Config, run_id: RunId, learning: Learning) -> Caption:
    """Return what stands around a run's curves."""
    stages = f"{config.num_stages} stage{'s'[: config.num_stages != 1]}"
    rounds = f"{len(learning.rounds)} round{'s'[: len(learning.rounds) != 1]}"
    seconds = round(learning.seconds)
    hours = f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return Caption(
        title=config.title,
        run=f"{run_id}, {stages}, {rounds} in {hours}",
        unit=config.loss_unit,
        has_perplexity=config.data.task_type == "llm",
    )
