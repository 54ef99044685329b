"""100,000 rows of eight parquet files, over a killed trainer and a killed run: each once, in the order of the seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.e2e.launched import run_shoal
from tests.e2e.rows import SEED, SLOTS, STEPS, dealt, row, trained_over_losses
from tests.unit.data.corpora import write_parquet

from shoal.config.load import load_config
from shoal.data.catalog import open_source
from shoal.data.shuffle import permutation
from shoal.report.learning import read_learning

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_FILES, NUM_ROWS = 8, 100_000
ROUNDS, BATCH = 20, 500
assert SLOTS * STEPS * ROUNDS * BATCH == NUM_ROWS


def test_each_row_of_parquet_files_is_trained_once_over_a_killed_trainer_and_a_killed_run(tmp_path: Path) -> None:
    per_file = NUM_ROWS // NUM_FILES
    for file in range(NUM_FILES):
        rows = [row(number) for number in range(per_file * file, per_file * (file + 1))]
        # The last sample has a label that is no more in it.
        write_parquet(tmp_path / f"rows/{file}.parquet", [*rows, "."] if file == NUM_FILES - 1 else rows)
    write_parquet(tmp_path / "held_out/0.parquet", [row(number) for number in range(64)])
    data = {"dataset_name": str(tmp_path / "rows/*.parquet"), "eval_split": str(tmp_path / "held_out")}
    diloco = {
        "outer_steps": ROUNDS,
        "batch_size_per_step": BATCH,
        "inner_optim": {"type": "muon"},
        "inner_state": "reset",
        "lr_schedule": {"type": "wsd", "warmup_steps": 2},
    }
    log_dir = trained_over_losses(tmp_path, data, diloco, "trainer:1").require_log_dir()
    parts = list(dealt(log_dir, ROUNDS))
    assert {part.pass_number for part in parts} == {0}
    trained = np.concatenate([np.arange(part.start, part.stop) for part in parts])
    assert np.array_equal(np.sort(trained), np.arange(NUM_ROWS)), "each position of the pass once"
    assert np.array_equal(trained, np.arange(NUM_ROWS)), "and in the order of a run that nobody has disturbed"
    train = open_source(load_config(log_dir / "config.yaml", (), {})).train
    samples = train.read(permutation(SEED, 0, NUM_ROWS)[trained])
    texts = [bytes(sample).decode().rstrip("\n") for sample in samples.inputs]
    assert sorted(texts) == [row(number) for number in range(NUM_ROWS)], "each row once"
    run_shoal("replay", str(log_dir))  # and these rows were trained: they give the same bits again
    said = [said for _, said in read_learning(log_dir).incidents]
    assert {"trainer 1 lost", "resumed from a checkpoint"} <= set(said)
