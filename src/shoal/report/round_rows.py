"""What stands for the numbers of a run whose `metrics.jsonl` is missing: rows by its rounds and by its summary."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec

from shoal.errors import MALFORMED
from shoal.events.base import SUMMARY_FILE
from shoal.events.run import EvaluationDone, RoundBegun, RoundRecorded
from shoal.report.learning import read_course, samples_after
from shoal.telemetry.rows import MetricRow


def rows_of_rounds(log_dir: Path) -> Iterator[MetricRow]:
    """Yield what a run without a file of numbers has come to, by `events.jsonl` and at its end by `summary.json`.

    Raises:
        OSError: these cannot be read.
    """
    for unix_s, event in read_course(log_dir):
        time = datetime.fromtimestamp(unix_s, UTC)
        match event:
            case RoundBegun():
                yield MetricRow(time, {"round": float(event.round)})
            case RoundRecorded():
                loss = {} if event.loss is None else {"loss/train": event.loss}
                yield MetricRow(time, {"samples": float(samples_after(event)), **loss})
            case EvaluationDone():
                yield MetricRow(time, {"loss/eval": event.loss})
            case _:
                pass
    try:
        end = msgspec.json.decode((log_dir / SUMMARY_FILE).read_bytes(), type=_End)
    except (FileNotFoundError, *MALFORMED):
        return
    yield MetricRow(end.ended, end.numbers())


class _End(msgspec.Struct):
    """Of a summary what a page shows."""

    ended: Annotated[datetime, msgspec.Meta(tz=True)]
    outer_rounds: float | None = None
    steps: float | None = None
    samples: float | None = None
    samples_before: float = 0.0
    samples_per_s: float | None = None
    loss_last: float | None = None
    eval_loss_last: float | None = None

    def numbers(self) -> dict[str, float]:
        """Return them by their names in rows."""
        known = {
            "round": self.outer_rounds,
            "step": self.steps,
            "samples": None if self.samples is None else self.samples_before + self.samples,
            "samples_per_s": self.samples_per_s,
            "loss/train": self.loss_last,
            "loss/eval": self.eval_loss_last,
        }
        return {name: value for name, value in known.items() if value is not None}
