"""A run on clips of a folder: characters are found once for all, and its model says what it hears."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from tests.e2e.launched import completed, run_shoal
from tests.unit.data.test_speech import sound, write_wav

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORDS = ("a", "ab", "abba", "b", "ba", "bab")


def test_clips_are_trained_on_in_two_stages_and_the_model_is_evaluated_by_its_characters(tmp_path: Path) -> None:
    for number in range(24):
        word = WORDS[number % len(WORDS)]
        tones = [sound(0.15, 8_000, 300.0 if letter == "a" else 700.0) for letter in word]
        write_wav(tmp_path / "clips" / f"{number:02}.wav", np.concatenate(tones), rate=8_000)
        (tmp_path / "clips" / f"{number:02}.txt").write_text(word)
    write_wav(tmp_path / "clips" / "long.wav", sound(1.5, 8_000), rate=8_000)
    (tmp_path / "clips" / "long.txt").write_text("a")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    convolutions = {"conv_dim": [16] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
    values = {
        "wandb": False,
        "run": {"deterministic": True},
        "data": {
            "task_type": "speech",
            "dataset_name": str(tmp_path / "clips"),
            "sampling_rate": 16_000,
            "max_audio_s": 1.0,
            "max_characters": 8,
        },
        "model": {"family": "wav2vec2", "extra": {**sizes, **convolutions, "vocab_size": 4}},
        "model_pipeline": {"stages": 2, "microbatches": 2},
        "diloco": {"inner_steps": 10, "outer_steps": 2, "batch_size_per_step": 6, "inner_optim": {"adam_lr": 0.002}},
        "servers": {"replicas": 1},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    run = completed(tmp_path, f"--config-path={tmp_path / 'run.yaml'}")
    summary = run.summary()
    assert (summary["outer_rounds"], summary["exit"]) == (2, "done")
    assert (summary["duplicates"], summary["missing"]) == (0, 0)
    assert summary["eval_loss_last"] < summary["eval_loss_first"]
    (event,) = run.events("data_server_0", "clips.left_out")
    assert (event["bad"], event["long"], event["clips"]) == (0, 1, 25)
    log_dir = run.require_log_dir()
    assert yaml.safe_load((log_dir / "config.yaml").read_text())["data"]["characters"] == "ab"
    run_shoal("replay", str(log_dir))
    report = json.loads(run_shoal("evaluate", str(log_dir / "model"), "--json"))
    assert report["eval_loss"] == pytest.approx(summary["eval_loss_last"], rel=1e-4)
    assert 0 <= report["character_error_rate"] < 10
    assert {said for said, _ in report["transcripts"]} <= set(WORDS)
