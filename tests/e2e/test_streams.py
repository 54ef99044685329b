"""A run on a stream, over a killed data server and a lost host: each row once, in the order of the seed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import yaml
from tests.e2e.launched import END_S, launched, run_shoal, until
from tests.unit.data.corpora import write_json_lines, write_parquet

from shoal.averaging.journal import read_steps
from shoal.config.load import load_config
from shoal.data.catalog import open_source
from shoal.data.shuffle import PassOrder
from shoal.wire.messages.base import SampleRange

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROW_BYTES, WINDOW, NUM_HELD_OUT = 12, 1000, 10
SEED, SLOTS, STEPS, ROUNDS, BATCH = 5, 2, 5, 12, 100
NUM_ROWS = 9000
"""Of the stream: the run trains on more samples than it has, so that it begins anew."""


def _row(number: int) -> str:
    """As many bytes as a sample, with the line's end behind it: the samples are the rows."""
    return f"row {number:0{ROW_BYTES - 5}d}"


def _file(tmp_path: Path) -> str:
    rows = [_row(number) for number in range(NUM_ROWS)]
    write_json_lines(tmp_path / "rows/0.jsonl", rows[:5000])
    # The last sample has a label that is no more in it.
    write_parquet(tmp_path / "rows/1.parquet", [*rows[5000:], "."])
    values = {
        "wandb": False,
        "run": {"deterministic": True, "seed": SEED},
        "data": {
            "dataset_name": str(tmp_path / "rows"),
            "streaming": True,
            "shuffle_window": WINDOW,
            "holdout_fraction": NUM_HELD_OUT / WINDOW,
            "seq_len": ROW_BYTES,
            "cache_dir": str(tmp_path / "kept"),
        },
        "model": {"num_layers": 2, "hidden_size": 8, "num_heads": 1},
        "model_pipeline": {"stages": 2, "microbatches": 2},
        "diloco": {"inner_steps": STEPS, "outer_steps": ROUNDS, "batch_size_per_step": BATCH},
        "servers": {"replicas": SLOTS},
        "param_mirror": {"every_rounds": 2},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    return f"--config-path={tmp_path / 'run.yaml'}"


def test_each_row_of_a_stream_is_trained_once_over_a_killed_data_server_and_a_killed_run(tmp_path: Path) -> None:
    with launched(tmp_path, _file(tmp_path)) as lost:
        lost.saw("client_0", "round.recorded", round=1)
        os.kill(lost.pid_of("data_server:0"), signal.SIGKILL)
        kept = until(lambda: lost.events("mirror_0", "checkpoint.written")[1:], END_S, "two checkpoints")
        lost.saw("client_0", "round.recorded", within_s=END_S, round=int(kept[-1]["round"]) + 1)
        lost.lose_host()
    with launched(tmp_path, "--resume=latest", "--no-wandb") as resumed:
        assert resumed.ends(240.0) == 0, resumed.output
        resumed.leaves_nothing()
        log_dir, summary = resumed.require_log_dir(), resumed.summary()
    assert (summary["exit"], summary["duplicates"], summary["missing"]) == ("done", 0, 0)
    assert [event["rows"] for event in resumed.events("data_server_0", "stream.repeats")] == [NUM_ROWS + 1]
    files = list((tmp_path / "kept").glob("streams/*/0/0*.samples"))
    assert len(files) <= 4, "what is recorded is on the disk no more"
    trained = _trained(log_dir)
    assert [pass_number for pass_number, _ in trained] == sorted(pass_number for pass_number, _ in trained)
    dataset = open_source(load_config(log_dir / "config.yaml", (), {}))
    assert dataset.windows is not None
    try:
        order = PassOrder.of(dataset, SEED)
        texts: list[str] = []
        for number in range(SLOTS * STEPS * ROUNDS * BATCH // WINDOW):
            dataset.windows.wait({number})
            positions = np.concatenate([range(item.start, item.stop) for at, item in trained if at == number])
            assert np.array_equal(positions, np.arange(WINDOW)), "each position once, as in an undisturbed run"
            samples = order.indices(tuple(item for at, item in trained if at == number))
            texts += [bytes(row).decode().rstrip("\n") for row in dataset.train.read(samples).inputs]
    finally:
        dataset.windows.close()
    rest = [_row(number) for number in range(NUM_HELD_OUT, NUM_ROWS)]
    expected = [*rest, *rest][: len(texts)]
    for start in range(0, len(texts), WINDOW):
        assert sorted(texts[start : start + WINDOW]) == sorted(expected[start : start + WINDOW]), "each row once"
    assert texts != expected
    run_shoal("replay", str(log_dir))  # and these rows were trained: they give the same bits again


def _trained(log_dir: Path) -> list[tuple[int, SampleRange]]:
    """What was trained on, in the order in which it is dealt: by round, step of the round, and slot."""
    found: list[tuple[int, SampleRange]] = []
    for round in range(1, ROUNDS + 1):
        entries = {line.entry.key[:3]: line.entry for line in read_steps(log_dir, round) if line.stage == 0}
        numbers = {slot: sorted(key for key in entries if key[0] == slot) for slot in range(SLOTS)}
        assert [len(keys) for keys in numbers.values()] == [STEPS] * SLOTS
        for step in range(STEPS):
            for slot in range(SLOTS):
                found += [(part.pass_number, part) for part in entries[numbers[slot][step]].samples]
    return found
