"""A run on a stream, over a killed data server and a lost host: each row once, in the order of the seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.e2e.launched import run_shoal
from tests.e2e.rows import SEED, SLOTS, STEPS, dealt, row, trained_over_losses
from tests.unit.data.corpora import write_json_lines, write_parquet

from shoal.config.load import load_config
from shoal.data.catalog import open_source
from shoal.data.shuffle import PassOrder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WINDOW, NUM_HELD_OUT = 1000, 10
ROUNDS, BATCH = 12, 100
NUM_ROWS = 9000
"""Of the stream: the run trains on more samples than it has, so that it begins anew."""


def test_each_row_of_a_stream_is_trained_once_over_a_killed_data_server_and_a_killed_run(tmp_path: Path) -> None:
    rows = [row(number) for number in range(NUM_ROWS)]
    write_json_lines(tmp_path / "rows/0.jsonl", rows[:5000])
    # The last sample has a label that is no more in it.
    write_parquet(tmp_path / "rows/1.parquet", [*rows[5000:], "."])
    data = {
        "dataset_name": str(tmp_path / "rows"),
        "streaming": True,
        "shuffle_window": WINDOW,
        "holdout_fraction": NUM_HELD_OUT / WINDOW,
        "cache_dir": str(tmp_path / "kept"),
    }
    diloco = {"outer_steps": ROUNDS, "batch_size_per_step": BATCH}
    resumed = trained_over_losses(tmp_path, data, diloco, "data_server:0")
    log_dir = resumed.require_log_dir()
    assert [event["rows"] for event in resumed.events("data_server_0", "stream.repeats")] == [NUM_ROWS + 1]
    files = list((tmp_path / "kept").glob("streams/*/0/0*.samples"))
    assert len(files) <= 4, "what is recorded is on the disk no more"
    trained = list(dealt(log_dir, ROUNDS))
    passes = [part.pass_number for part in trained]
    assert passes == sorted(passes)
    dataset = open_source(load_config(log_dir / "config.yaml", (), {}))
    assert dataset.windows is not None
    try:
        order = PassOrder.of(dataset, SEED)
        texts: list[str] = []
        for number in range(SLOTS * STEPS * ROUNDS * BATCH // WINDOW):
            dataset.windows.wait({number})
            in_window = tuple(part for part in trained if part.pass_number == number)
            positions = np.concatenate([range(part.start, part.stop) for part in in_window])
            assert np.array_equal(positions, np.arange(WINDOW)), "each position once, as in an undisturbed run"
            samples = order.indices(in_window)
            texts += [bytes(sample).decode().rstrip("\n") for sample in dataset.train.read(samples).inputs]
    finally:
        dataset.windows.close()
    rest = [row(number) for number in range(NUM_HELD_OUT, NUM_ROWS)]
    expected = [*rest, *rest][: len(texts)]
    for start in range(0, len(texts), WINDOW):
        assert sorted(texts[start : start + WINDOW]) == sorted(expected[start : start + WINDOW]), "each row once"
    assert texts != expected
    run_shoal("replay", str(log_dir))  # and these rows were trained: they give the same bits again
