#!/usr/bin/env python3
"""What a whole swarm in one process costs, as tests run them: seconds on a core a round, and memory.

    python benchmarks/cluster.py                            400 servers in 8 stages, 3 rounds of 2 steps
    python benchmarks/cluster.py --servers 64 --json cluster.json

Everything that ships runs but sockets, processes and the DHT (`shoal_lab.Cluster`): each server trains its stage of a
model of 30,000 parameters, each of the pipelines has its trainer, and the rings average. A round is counted from its
first StartRound to the next one's.

Exit code: 0 if every round after the first takes at most 15 s on a core and the process has at most 700 MB at any time;
else 1.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import numpy as np
import torch
from rich.console import Console

from shoal.config import Config
from shoal.data.text import text_dataset
from shoal.wire.messages.control import StartRound
from shoal_lab import Cluster

MOST_ROUND_S, MOST_BYTES = 15.0, 700e6
NUM_STAGES, SEQ_LEN = 8, 16


def config_of(num_servers: int, rounds: int) -> Config:
    """Return the configuration of a run."""
    return Config.model_validate(
        {
            "device": "cpu",
            "wandb": False,
            "data": {"seq_len": SEQ_LEN},
            "model": {"num_layers": NUM_STAGES, "hidden_size": 16, "num_heads": 2},
            "model_pipeline": {"stages": NUM_STAGES, "microbatches": 2},
            "diloco": {
                "inner_steps": 2,
                "outer_steps": rounds,
                "batch_size_per_step": 4,
                "averaging_timeout_s": 120.0,
            },
            "servers": {"replicas": num_servers // NUM_STAGES},
        }
    )


async def measure(num_servers: int, rounds: int) -> list[float]:
    """Run a swarm; return the seconds on a core of each round after the first."""
    torch.set_num_threads(1)
    text = np.random.Generator(np.random.Philox(5)).integers(97, 123, 400_000, dtype=np.uint8).tobytes()
    dataset, begun_s = text_dataset("letters", text, SEQ_LEN, 0.01), list[float]()
    with TemporaryDirectory(prefix="cluster-") as folder:
        async with Cluster(config_of(num_servers, rounds + 1), log_dir=Path(folder), dataset=dataset) as cluster:
            for number in range(1, rounds + 2):
                cluster.when(StartRound, action=lambda: begun_s.append(time.process_time()), round=number)
            await cluster.run()
    return [after - before for before, after in pairwise(begun_s)]


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=400, help=f"a multiple of {NUM_STAGES}")
    parser.add_argument("--rounds", type=int, default=3, help="that are counted, after the first")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    if arguments.servers < NUM_STAGES or arguments.servers % NUM_STAGES or arguments.rounds < 1:
        parser.error(f"--servers is a multiple of {NUM_STAGES}, and --rounds at least 1")
    rounds_s = anyio.run(measure, arguments.servers, arguments.rounds)
    most_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    each = ", ".join(f"{seconds:.1f}" for seconds in rounds_s)
    Console().print(
        f"{arguments.servers} servers: a round takes {statistics.median(rounds_s):.1f} s on a core (median of {each}), "
        f"{most_bytes / 1e6:.0f} MB at most"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps({"rounds_s": rounds_s, "bytes": most_bytes}, indent=2))
    return int(max(rounds_s) > MOST_ROUND_S or most_bytes > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
