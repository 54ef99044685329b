#!/usr/bin/env python3
"""How well a swarm fine-tunes a chat model beside an uncut plain loop: held-out loss of answers after as many tokens.

    python benchmarks/sft.py                                  3 seeds: about five minutes of CPU time
    python benchmarks/sft.py --seeds 0 --json sft.json        a glance

First a swarm trains the small Qwen3 of examples/chat/base.yaml on English text, and it is exported. From these weights
each seed fine-tunes twice, on conversations that ask for the next sentence of that text, packed, with answers alone as
targets: on a swarm of three stages with two replicas each, whose two trainers average after every round, and by the
plain loop of one process over the uncut model. The loop takes batches twice as large, so that both see equally many
samples in equally many steps. The two losses of a seed are a pair.

Exit code: 0 if the losses of each pair differ by at most 2 %, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import runpy
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from shoal.cli import main as shoal
from shoal.cli.arguments import load
from shoal.cli.baseline import train_baseline
from shoal.data.builtin import pydoc_topics
from shoal_lab.launched import launched
from shoal_lab.observed import Swarm
from shoal_lab.verdict import require_whole

EXAMPLE = Path(__file__).parents[1] / "examples" / "chat"
MOST_DIFFERENCE = 0.02
BATCH, STEPS, ROUNDS = 8, 10, 8
ENDS_S = 1800.0
"""Far more than a run takes; it judges nothing."""
_CHARACTERS = 30, 160
"""Of a sentence, at least and at most."""


@dataclass(frozen=True)
class Pair:
    """Mean held-out loss of the answers' tokens, in nats: of the weights that both begin from, and after training."""

    seed: int
    before: float
    swarm: float
    loop: float

    @property
    def difference(self) -> float:
        return self.swarm / self.loop - 1


def main() -> int:
    parser = argparse.ArgumentParser(description="fine-tuning by a swarm beside a plain loop")
    parser.add_argument("--seeds", default="0,1,2", help="with commas")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of {STEPS} steps of each trainer")
    parser.add_argument("--trainers", type=int, default=2, help="and replicas of each stage")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(soft_wrap=True, highlight=False)
    pairs: list[Pair] = []
    with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        make_data(Path("chat"))
        pretrain()
        console.print("| seed | before | swarm | plain loop | difference, % |\n|---|---|---|---|---|")
        for seed in map(int, arguments.seeds.split(",")):
            said = flags(seed, arguments.rounds)
            replicas = f"--servers.replicas={arguments.trainers}"
            summary = trained_by_swarm(Path(f"seed_{seed}"), "finetune.yaml", arguments.trainers, (*said, replicas))
            loop = trained_by_loop((*said, f"--diloco.batch-size-per-step={arguments.trainers * BATCH}"))
            pair = Pair(seed, summary["eval_loss_first"], summary["eval_loss_last"], loop)
            pairs.append(pair)
            losses = " | ".join(f"{loss:.4f}" for loss in (pair.before, pair.swarm, pair.loop))
            console.print(f"| {seed} | {losses} | {100 * pair.difference:+.2f} |")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(pair) for pair in pairs], indent=2))
    return 0 if all(abs(pair.difference) <= MOST_DIFFERENCE for pair in pairs) else 1


def flags(seed: int, rounds: int) -> tuple[str, ...]:
    """What is said besides the file; with few rounds, an outer momentum would still be on its way."""
    return (
        "--no-wandb",
        "--deterministic",
        "--device=cpu",
        f"--run.seed={seed}",
        f"--diloco.inner-steps={STEPS}",
        f"--diloco.outer-steps={rounds}",
        f"--diloco.batch-size-per-step={BATCH}",
        "--diloco.outer-optim.sgd-lr=1.0",
        "--diloco.outer-optim.sgd-momentum=0",
        "--no-diloco.outer-optim.sgd-nesterov",
    )


def make_data(folder: Path) -> None:
    """Write the conversations, and the tokenizer of the example."""
    rows = list(conversations())
    folder.mkdir()
    (folder / "conversations.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    example = runpy.run_path(str(EXAMPLE / "make.py"))
    example["tokenizer"](pydoc_topics()).save_pretrained(folder / "tokenizer")


def conversations() -> Iterator[list[dict[str, str]]]:
    """Sentences of Python's help, each the answer to the one before it."""
    least, most = _CHARACTERS
    for topic in pydoc_topics():
        sentences = [" ".join(part.split()) for part in topic.split(".")]
        for asked, answer in pairwise(part for part in sentences if least <= len(part) <= most):
            yield [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def pretrain() -> None:
    """Train the base model, and export it to where the other file looks for it."""
    trained_by_swarm(Path("base"), "base.yaml", 2, ("--no-wandb", "--device=cpu", "--diloco.outer-steps=2"))
    if shoal(["export", "base/logs/chat_base", "--to=chat/base"]) != 0:
        raise SystemExit("the base model cannot be exported")


def trained_by_swarm(folder: Path, file: str, trainers: int, said: tuple[str, ...]) -> dict[str, Any]:
    """Train on a swarm, check the run, and return its summary.

    Args:
        folder: for what it leaves.
        file: of the example.
    """
    with launched(folder.absolute(), f"--config-path={EXAMPLE / file}", *said) as run:
        if run.ends(ENDS_S) != 0:
            raise SystemExit(run.output)
        run.leaves_nothing()
        require_whole(Swarm(run, [run], trainers))
        return run.summary()


def trained_by_loop(said: tuple[str, ...]) -> float:
    """Train the uncut model in this process, and return its held-out loss."""
    config = load(EXAMPLE / "finetune.yaml", (*said, "--model-pipeline.stages=1"))
    losses: list[float] = []
    train_baseline(config, lambda now: losses.append(now.eval_loss) if now.eval_loss is not None else None)
    return losses[-1]


if __name__ == "__main__":
    sys.exit(main())
