"""What tests of text share: small corpora on the disk, and tokens that are made in the test's own process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from shoal.config import Config
from shoal.data import text_corpus
from shoal.data.token_maker import carry_out
from shoal.data.token_messages import MakerOrder, MakerReport, MakerTells
from shoal.events.base import Event


def make_tokens_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tokens in this process, where a test has replaced a library; what the other process says is the same."""

    def order(order: MakerOrder, say: Callable[[Event], None]) -> MakerReport:
        def tell(report: MakerReport) -> None:
            assert isinstance(report, MakerTells)
            say(report.event)

        return carry_out(order, tell)

    monkeypatch.setattr(text_corpus, "_order", order)


def of_folder(folder: Path, data: dict[str, Any] | None = None, **model: object) -> Config:
    """A run on the text of a folder, which keeps its tokens beside it."""
    values = {"dataset_name": str(folder), "cache_dir": str(folder.parent / "kept"), "seq_len": 8, **(data or {})}
    return Config.model_validate({"data": values, "model": model})


def write_json_lines(path: Path, texts: Sequence[object], column: str = "text") -> None:
    """A row for each text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({column: text, "n": number}) + "\n" for number, text in enumerate(texts)))


def write_parquet(path: Path, texts: Sequence[object], column: str = "text") -> None:
    """A row for each text, three of them in a row group."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({column: list(texts)}), path, row_group_size=3)
