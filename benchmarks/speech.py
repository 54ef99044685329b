#!/usr/bin/env python3
"""A small wav2vec2 learns five real clips by heart, in a swarm of two stages: the whole path of speech, seen to work.

    apt-get download pocketsphinx-testdata && dpkg -x pocketsphinx-testdata_*.deb testdata
    python benchmarks/speech.py testdata/usr/share/pocketsphinx/test/data/librivox     about three minutes on two cores

Five sentences that people read for LibriVox, with their transcripts, by `run_local.py`; then `shoal evaluate` decodes
the same clips with what the run has left.

Exit code: 0 if the character error rate is under 10 %, else 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from shoal_lab.launched import launched
from shoal_lab.observed import Swarm
from shoal_lab.verdict import require_whole

MOST_ERRORS = 0.1
ENDS_S = 3600.0
"""Far more than a run takes; it judges nothing."""
_NO_DROPOUT = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout")
_MODEL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "conv_dim": [32] * 7,
    "num_conv_pos_embeddings": 32,
    "num_conv_pos_embedding_groups": 4,
    **dict.fromkeys(_NO_DROPOUT, 0.0),
}


def values(folder: Path, same: Path) -> dict[str, Any]:
    """What the run is told: all clips are trained on, and the same ones, copied to another folder, are evaluated."""
    return {
        "wandb": False,
        "device": "cpu",
        "run": {"deterministic": True},
        "data": {
            "task_type": "speech",
            "dataset_name": f"{folder.resolve()}/",
            "eval_split": f"{same.resolve()}/",
            "max_audio_s": 7.2,
            "max_characters": 128,
        },
        "model": {"family": "wav2vec2", "extra": _MODEL},
        "model_pipeline": {"stages": 2, "microbatches": 2},
        "diloco": {
            "inner_steps": 50,
            "outer_steps": 8,
            "batch_size_per_step": 5,
            "lr_schedule": {"type": "cosine", "warmup_steps": 50, "min_lr_ratio": 0.1},
            "inner_optim": {"adam_lr": 1.5e-3, "adam_weight_decay": 0.0},
            "outer_optim": {"sgd_lr": 1.0, "sgd_momentum": 0.0},
        },
    }


def learned(folder: Path, directory: Path, flags: Sequence[str] = ()) -> dict[str, Any]:
    """Return the run's summary, with what `shoal evaluate` says of its model.

    Raises:
        RunFailed, SystemExit: it does not end as it has to.
    """
    file = directory / "speech.yaml"
    # What is evaluated is never trained on, unless it is a copy.
    same = Path(shutil.copytree(folder, directory / "same"))
    file.write_text(yaml.safe_dump(values(folder, same)))
    with launched(directory, f"--config-path={file}", *flags) as run:
        if run.ends(ENDS_S) != 0:
            raise SystemExit(run.output)
        run.leaves_nothing()
        require_whole(Swarm(run, [run], num_slots=0))
        summary = run.summary()
        command = [sys.executable, "-m", "shoal", "evaluate", str(run.require_log_dir()), "--json"]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return {**summary, **json.loads(report)}


def main() -> int:
    parser = argparse.ArgumentParser(description="learn five clips by heart")
    parser.add_argument("folder", type=Path, help="with clips and transcripts")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False, markup=False)
    with tempfile.TemporaryDirectory() as temporary:
        found = learned(arguments.folder, Path(temporary))
    for said, heard in found["transcripts"]:
        console.print(f"said:  {said}\nheard: {heard}")
    rate, seconds = found["character_error_rate"], found["seconds_total"]
    losses = f"loss {found['eval_loss_first']:.3f} -> {found['eval_loss_last']:.4f}"
    console.print(f"{losses}, character error rate {100 * rate:.2f} %, {found['steps']} steps, {seconds:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))
    return 0 if rate < MOST_ERRORS else 1


if __name__ == "__main__":
    sys.exit(main())
