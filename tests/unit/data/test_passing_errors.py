"""An error of the system that passes leaves nothing out of a data set: not of clips, streams, own data or tables."""

from __future__ import annotations

import errno
import os
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from tests.set_clock import ManualClock

from shoal.config import Config
from shoal.data import passing_errors
from shoal.data.catalog import open_source
from shoal.data.clips import FileClips
from shoal.data.fields import Fields
from shoal.data.own_data import MapSamples
from shoal.data.source import Array, ArraySpec
from shoal.data.streams import RowStream, StreamPlace, Taken
from shoal.data.text_corpus import documents_here
from shoal.errors import ConfigError, StorageError
from shoal.events.base import Event


@pytest.fixture(autouse=True)
def _nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(passing_errors, "SystemClock", ManualClock)


def raiser(times: int) -> Callable[[object], None]:
    """Raises so many times for each thing."""
    raised: dict[object, int] = {}

    def check(which: object) -> None:
        raised[which] = raised.get(which, 0) + 1
        if raised[which] <= times:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    return check


def test_a_clip_whose_header_is_not_given_at_once_is_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        with wave.open(str(tmp_path / f"{name}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(4_000)
            file.writeframes(np.arange(2_000, dtype="<i2").tobytes())
        (tmp_path / f"{name}.txt").write_text("ab")
    plain = FileClips.open
    check = raiser(2)

    def opened(clips: FileClips, index: int) -> IO[bytes]:
        check(index)
        return plain(clips, index)

    monkeypatch.setattr(FileClips, "open", opened)
    section = {"task_type": "speech", "dataset_name": str(tmp_path), "sampling_rate": 4_000, "max_audio_s": 1.0}
    heard: list[Event] = []
    dataset = open_source(
        Config.model_validate({"data": {**section, "max_bad_fraction": 0.5}, "model": {"family": "wav2vec2"}}),
        heard.append,
    )
    assert dataset.train.num_samples + dataset.holdout.num_samples == 3
    assert heard == []


def rows(check: Callable[[object], None]) -> RowStream:
    def convert(row: object, where: str) -> Fields[Array]:
        check(row)
        return Fields(np.full(2, row, np.float32), np.asarray(row))

    specs = Fields(ArraySpec("float32", (2,)), ArraySpec("int64", ()))
    return RowStream(lambda: range(5), convert, specs, 10, "numbers")


def test_a_row_of_a_stream_that_is_not_given_at_once_is_a_sample() -> None:
    found = list(rows(raiser(2)).take(StreamPlace()))
    assert [int(each.sample.labels) for each in found if isinstance(each, Taken)] == list(range(5))
    with pytest.raises(StorageError, match=r"numbers:0 is not read, for a reason that is none of its own, .*Errno 5"):
        list(rows(raiser(1000)).take(StreamPlace()))


class Numbers:
    def __init__(self, times: int) -> None:
        self._check = raiser(times)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Any, int]:
        self._check(index)
        return np.full(3, index, np.float32), index


def test_own_samples_that_are_looked_at_are_asked_for_again() -> None:
    assert MapSamples(Numbers(2), "own:Numbers").inputs.shape == (3,)
    with pytest.raises(StorageError, match=r"own:Numbers\[0\] is not read, for a reason that is none of its own"):
        MapSamples(Numbers(1000), "own:Numbers")


def test_pages_of_a_table_that_the_system_does_not_give_are_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens without them would be kept, and found again by each later run."""
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    table: Any = pytest.importorskip("pyarrow").table({"text": [f"text {number}" for number in range(100)]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=50)

    class Failing(parquet.ParquetFile):
        def iter_batches(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(parquet, "ParquetFile", Failing)
    documents = documents_here(Config.model_validate({"data": {"dataset_name": str(tmp_path)}}), None)
    assert documents is not None
    with pytest.raises(ConfigError, match=r"a\.parquet cannot be read \(Input/output error\)"):
        list(documents)
