"""100,000 rows of eight parquet files, over a killed trainer and a killed run: each once, in the order of the seed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import yaml
from tests.e2e.launched import END_S, launched, run_shoal, until
from tests.unit.data.corpora import write_parquet

from shoal.averaging.journal import read_steps
from shoal.config.load import load_config
from shoal.data.catalog import open_source
from shoal.data.shuffle import permutation
from shoal.report.learning import read_learning

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_FILES, NUM_ROWS, ROW_BYTES = 8, 100_000, 12
SEED, SLOTS, STEPS, ROUNDS, BATCH = 5, 2, 5, 20, 500
assert SLOTS * STEPS * ROUNDS * BATCH == NUM_ROWS


def _row(number: int) -> str:
    """As many bytes as a sample, with the line's end behind it: the samples are the rows."""
    return f"row {number:0{ROW_BYTES - 5}d}"


def _file(tmp_path: Path) -> str:
    per_file = NUM_ROWS // NUM_FILES
    for file in range(NUM_FILES):
        rows = [_row(number) for number in range(per_file * file, per_file * (file + 1))]
        # The last sample has a label that is no more in it.
        write_parquet(tmp_path / f"rows/{file}.parquet", [*rows, "."] if file == NUM_FILES - 1 else rows)
    write_parquet(tmp_path / "held_out/0.parquet", [_row(number) for number in range(64)])
    values = {
        "wandb": False,
        "run": {"deterministic": True, "seed": SEED},
        "data": {
            "dataset_name": str(tmp_path / "rows/*.parquet"),
            "eval_split": str(tmp_path / "held_out"),
            "seq_len": ROW_BYTES,
        },
        "model": {"num_layers": 2, "hidden_size": 8, "num_heads": 1},
        "model_pipeline": {"stages": 2, "microbatches": 2},
        "diloco": {
            "inner_steps": STEPS,
            "outer_steps": ROUNDS,
            "batch_size_per_step": BATCH,
            "inner_optim": {"type": "muon"},
            "inner_state": "reset",
            "lr_schedule": {"type": "wsd", "warmup_steps": 2},
        },
        "servers": {"replicas": SLOTS},
        "param_mirror": {"every_rounds": 2},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    return f"--config-path={tmp_path / 'run.yaml'}"


def test_each_row_of_parquet_files_is_trained_once_over_a_killed_trainer_and_a_killed_run(tmp_path: Path) -> None:
    with launched(tmp_path, _file(tmp_path)) as lost:
        lost.saw("client_0", "round.recorded", round=1)
        os.kill(lost.pid_of("trainer:1"), signal.SIGKILL)
        lost.saw("client_0", "trainer.replaced", within_s=END_S)
        kept = until(lambda: lost.events("mirror_0", "checkpoint.written")[1:], END_S, "two checkpoints")
        lost.saw("client_0", "round.recorded", within_s=END_S, round=int(kept[-1]["round"]) + 1)
        lost.lose_host()
    with launched(tmp_path, "--resume=latest", "--no-wandb") as resumed:
        assert resumed.ends(240.0) == 0, resumed.output
        resumed.leaves_nothing()
        log_dir, summary = resumed.require_log_dir(), resumed.summary()
    assert (summary["exit"], summary["duplicates"], summary["missing"]) == ("done", 0, 0)
    trained = _positions(log_dir)
    assert np.array_equal(np.sort(trained), np.arange(NUM_ROWS)), "each position of the pass once"
    assert np.array_equal(trained, np.arange(NUM_ROWS)), "and in the order of a run that nobody has disturbed"
    train = open_source(load_config(log_dir / "config.yaml", (), {})).train
    rows = train.read(permutation(SEED, 0, NUM_ROWS)[trained])
    texts = [bytes(row).decode().rstrip("\n") for row in rows.inputs]
    assert sorted(texts) == [_row(number) for number in range(NUM_ROWS)], "each row once"
    run_shoal("replay", str(log_dir))  # and these rows were trained: they give the same bits again
    said = [said for _, said in read_learning(log_dir).incidents]
    assert {"trainer 1 lost", "resumed from a checkpoint"} <= set(said)


def _positions(log_dir: Path) -> np.ndarray:
    """Positions of the pass, in the order in which they are dealt: by round, step of the round, and slot."""
    found: list[np.ndarray] = []
    for round in range(1, ROUNDS + 1):
        entries = {line.entry.key[:3]: line.entry for line in read_steps(log_dir, round) if line.stage == 0}
        numbers = {slot: sorted(key for key in entries if key[0] == slot) for slot in range(SLOTS)}
        assert [len(keys) for keys in numbers.values()] == [STEPS] * SLOTS
        for step in range(STEPS):
            for slot in range(SLOTS):
                entry = entries[numbers[slot][step]]
                assert {part.pass_number for part in entry.samples} == {0}
                found += [np.arange(part.start, part.stop) for part in entry.samples]
    return np.concatenate(found)
