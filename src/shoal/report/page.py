"""`report.html`: what the dashboard has shown of a run, in one file that opens from the disk and can be mailed.

It is the dashboard's own page with its files and the run's numbers inside, and nothing from anywhere else: the policy
in it names the hash of each script and style, so that a browser runs these alone. Where the run has left no numbers,
its events and its summary give a point of the curves for each round.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec

from shoal.config.schema import Config
from shoal.errors import MALFORMED
from shoal.events.base import SUMMARY_FILE
from shoal.events.run import EvaluationDone, RoundBegun, RoundRecorded
from shoal.monitor.page.chronicle import info_of, read_chronicle
from shoal.monitor.page.files import MODULES, PAGE, PLOT, STATIC, STYLES
from shoal.report.learning import read_course, samples_after
from shoal.runtime.durable_files import put_whole
from shoal.telemetry.rows import MetricRow

FILE_NAME = "report.html"
_IMPORT = re.compile(r"^import .*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def write_page(
    log_dir: Path, config: Config, run_id: str, ended: str = "the run has ended", commands: Sequence[str] = ()
) -> Path | None:
    """Write what the run in this folder has come to.

    Args:
        ended: how the run has ended, as a sentence without its full stop.
        commands: what can be done next.

    Returns:
        The file; None if the run has left neither numbers nor anything that stands for them.

    Raises:
        OSError: what the run has left cannot be read, or the file cannot be written.
    """
    chronicle, _ = read_chronicle(log_dir, info_of(config, run_id))
    if not chronicle.last_s:
        for row in rows_of_rounds(log_dir):
            chronicle.row(row)
    if not chronicle.last_s:
        return None
    path = log_dir / FILE_NAME
    past = msgspec.json.encode(chronicle.past(chronicle.last_s, ended=ended, commands=commands))
    put_whole(path, page_with(past).encode(), lasting=False)
    return path


def page_with(past: bytes) -> str:
    """Return the page with all of its files and this past (JSON) inside."""
    styles = [style.read_text(encoding="utf-8") for style in STYLES]
    scripts = [PLOT.read_text(encoding="utf-8"), one_module()]
    html = PAGE.read_text(encoding="utf-8")
    for path, style in zip(STYLES, styles, strict=True):
        html = _replaced(html, f'<link rel="stylesheet" href="{_address(path)}">', f"<style>{style}</style>")
    html = _replaced(html, f'<script src="{_address(PLOT)}"></script>', f"<script>{scripts[0]}</script>")
    # What peers have said could close the element.
    data = past.decode().replace("<", "\\u003c")
    inside = f'<script id="past" type="application/json">{data}</script>\n<script type="module">{scripts[1]}</script>'
    html = _replaced(html, f'<script type="module" src="{_address(MODULES[-1])}"></script>', inside)
    policy = f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; img-src data:"
    policy += "; base-uri 'none'; form-action 'none'"
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return _replaced(html, '<meta charset="utf-8">', f'<meta charset="utf-8">\n{meta}')


def one_module() -> str:
    """Return the modules of the page as one: a page from the disk may not import another file."""
    parts = (_EXPORT.sub("", _IMPORT.sub("", module.read_text(encoding="utf-8"))) for module in MODULES)
    return "\n".join(parts)


def _address(path: Path) -> str:
    return f"/static/{path.relative_to(STATIC).as_posix()}"


def _replaced(html: str, old: str, new: str) -> str:
    before, found, after = html.partition(old)
    if not found:
        raise ValueError(f"the page has no {old}")
    return before + new + after


def _hashes(texts: Iterable[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


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
