#!/usr/bin/env python3
"""Train models of real size on one GPU, in stages, beside a plain loop that compiles the whole model.

    python benchmarks/gpu.py                                   about ten minutes, on one GPU of 80 GB
    python benchmarks/gpu.py --cases gpt2:1 --steps 20
    python benchmarks/gpu.py --device cpu --small              the same code on any machine; its figures say nothing

Both sides train in bfloat16 (autocast), compiled, by AdamW with clipped gradients, on equal microbatches; where there
are two stages, two servers share the GPU. The plain loop is transformers' own class with its loss in one compiled
function, as a user of torch would write it. Measured of a swarm: the median time of a step once it has warmed up, from
the log of its trainer; the share of time in which the GPU has computed something, by nvidia-smi. Then each of the
servers that share it is killed with -9 in turn: training has to go on, and when the run is over, the memory of the GPU
has to be as before.

Exit code: 0 if every case trains at least so many times the plain loop's tokens as its goal says, and no kill cost
more than steps; else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from shoal.clock import SystemClock
from shoal.config.load import load_config
from shoal.config.schema import Config
from shoal.model.hf.described import config_values
from shoal_lab.event_log import time_of
from shoal_lab.launched import END_S, START_S, Launched, until

WARM_UP_STEPS = 4
STEPS_S = 3600.0
"""For all steps that are measured; it judges nothing."""
KILL_S = 600.0
"""For a server to start anew and compile; it judges nothing."""
MEMORY_MIB = 64
"""What may differ between two looks at a GPU that nobody uses."""


@dataclass(frozen=True)
class Case:
    """A model in so many stages.

    Attributes:
        goal: tokens a second, as a share of the plain loop's.
    """

    model: str
    stages: int
    goal: float

    @property
    def name(self) -> str:
        return f"{self.model}:{self.stages}"


CASES = {case.name: case for case in (Case("gpt2", 1, 0.98), Case("gpt2", 2, 0.90), Case("qwen3", 2, 0.85))}
CONFIGS = {"gpt2": "gpt2_124m", "qwen3": "qwen3_0.6b"}
SMALL = {
    "gpt2": "{model_type: gpt2, n_layer: 2, n_embd: 32, n_head: 2, n_positions: 64, vocab_size: 512}",
    "qwen3": "{model_type: qwen3, num_hidden_layers: 2, hidden_size: 32, intermediate_size: 64, vocab_size: 512, "
    "num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16, tie_word_embeddings: true}",
}
SAMPLES = {"gpt2": 8, "qwen3": 4}
"""In a microbatch."""
MICROBATCHES = 16


@dataclass
class Result:
    """What was measured of a case; `problems` is what does not hold, in words."""

    case: Case
    plain: float
    swarm: float
    busy: float | None
    first_step_s: float
    problems: list[str] = field(default_factory=list)


def config_path(case: Case) -> Path:
    """The configuration that a case's run begins from."""
    return Path(__file__).parents[1] / "src/shoal/configs" / f"{CONFIGS[case.model]}.yaml"


def flags_of(case: Case, arguments: argparse.Namespace, corpus: Path) -> list[str]:
    """What a case's run is told beside that file."""
    samples, tokens = SAMPLES[case.model], 1024
    flags = [f"--device={arguments.device}"]
    if arguments.small:
        samples, tokens = 2, 32
        flags += [f"--model.extra={SMALL[case.model]}", f"--data.seq-len={tokens}"]
    else:
        # All logits of a microbatch at once: a GPU has the memory, and waits for the launch of each chunk.
        flags.append(f"--model.loss-chunk-tokens={samples * tokens}")
    return [
        *flags,
        f"--model-pipeline.stages={case.stages}",
        f"--model-pipeline.microbatches={MICROBATCHES}",
        f"--diloco.batch-size-per-step={samples * MICROBATCHES}",
        f"--model-pipeline.compile={str(not arguments.small).lower()}",
        "--data.precision=bf16-mixed",
        f"--data.dataset-name={corpus}",
        "--data.holdout-fraction=0.001",
        # One round: what is measured are steps.
        "--diloco.inner-steps=100000",
        "--servers.replicas=1",
        "--param-mirror.enable=false",
        "--wandb=false",
        "--log-level=debug",
    ]


def measure_plain(case: Case, arguments: argparse.Namespace, corpus: Path) -> float:
    """Train the plain loop in a process of its own; return tokens a second."""
    flags = json.dumps(flags_of(case, arguments, corpus))
    told = ["--cases", case.name, f"--steps={arguments.steps}", "--plain", flags]
    return json.loads(
        subprocess.run([sys.executable, __file__, *told], stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1]
    )


def measure(case: Case, arguments: argparse.Namespace, folder: Path, corpus: Path, plain: float) -> Result:
    """Train the swarm; kill its servers at last."""
    flags = flags_of(case, arguments, corpus)
    before = gpu("memory.used")
    run = Launched(folder, (f"--config-path={config_path(case)}", *flags), ("run_local.py",))
    begun_s = SystemClock().unix_s()
    run.start()
    try:
        first = run.saw("trainer_0", "step.committed", within_s=2 * START_S)
        until(lambda: committed(run) > WARM_UP_STEPS, START_S, "warmed up")
        busy: list[float | None] = []

        def has_trained() -> bool:
            run.require_running()
            busy.append(gpu("utilization.gpu"))
            return committed(run) >= WARM_UP_STEPS + arguments.steps

        until(has_trained, STEPS_S, "all steps")
        times = [time_of(event) for event in run.events("trainer_0", "step.committed")][WARM_UP_STEPS:]
        config = load_config(config_path(case), flags)
        tokens = config.diloco.batch_size_per_step * config.data.seq_len
        swarm = tokens / statistics.median(end - begin for begin, end in pairwise(times))
        seen = [share for share in busy if share is not None]
        result = Result(case, plain, swarm, statistics.mean(seen) if seen else None, time_of(first) - begun_s)
        if swarm < case.goal * plain and not arguments.small:
            result.problems.append(f"{swarm / plain:.3f} of the plain loop; the goal is {case.goal}")
        for index in range(case.stages if arguments.kill and case.stages > 1 else 0):
            os.kill(run.living_pid_of(f"server:{index}"), signal.SIGKILL)
            reached = committed(run)
            until(lambda reached=reached: committed(run) > reached + 2, KILL_S, f"steps without server {index}")
        run.interrupt()
        run.ends(END_S)
        summary = run.summary()
        result.problems += [f"{name}: {summary[name]}" for name in ("duplicates", "missing") if summary[name]]
    finally:
        run.close()
    after = gpu("memory.used")
    if before is not None and after is not None and after > before + MEMORY_MIB:
        result.problems.append(f"{after - before:.0f} MiB of the GPU are still in use")
    return result


def committed(run: Launched) -> int:
    """Steps that the trainer has committed."""
    return len(run.events("trainer_0", "step.committed"))


def gpu(what: str) -> float | None:
    """Ask nvidia-smi for one number of the first GPU; None: there is none."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError):
        return None


# ---- the plain loop


def plain_loop(config: Config, device: str, steps: int) -> float:
    """Train transformers' own class, compiled as a whole; return tokens a second."""
    import transformers

    torch.manual_seed(0)
    values: dict[str, Any] = dict(config_values(config.model))
    kind = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model = transformers.AutoModelForCausalLM.from_config(kind, attn_implementation="sdpa").to(device).train()
    adam = config.diloco.inner_optim
    optimizer = torch.optim.AdamW(model.parameters(), adam.lr, fused=True, weight_decay=adam.adam_weight_decay)
    samples = config.diloco.batch_size_per_step // MICROBATCHES
    tokens = torch.randint(256, (samples, config.data.seq_len + 1), device=device)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    computed = torch.compile(loss_of) if config.model_pipeline.compile else loss_of
    clock, took_s = SystemClock(), list[float]()
    for _ in range(WARM_UP_STEPS + steps):
        begun_s = clock.now_s()
        optimizer.zero_grad()
        total = 0.0
        for _ in range(MICROBATCHES):
            loss = computed(tokens) / MICROBATCHES
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.diloco.max_grad_norm or 1.0)
        optimizer.step()
        float(total)  # whoever trains looks at the loss
        took_s.append(clock.now_s() - begun_s)
    return config.diloco.batch_size_per_step * config.data.seq_len / statistics.median(took_s[WARM_UP_STEPS:])


def write_corpus(folder: Path) -> None:
    """Text that is longer than any run, out of words that every CPython carries."""
    from pydoc_data.topics import topics

    words = " ".join(topics.values()).split()
    order = torch.randint(len(words), (5_000_000,), generator=torch.Generator().manual_seed(0)).tolist()
    folder.mkdir()
    (folder / "words.txt").write_text(" ".join(words[number] for number in order))


def table(results: list[Result]) -> Table:
    """Return what a reader wants to see."""
    shown = Table(title="Models on one GPU" if torch.cuda.is_available() else "Models")
    for column in ("case", "plain loop", "swarm", "ratio", "goal", "GPU busy", "first step"):
        shown.add_column(column, justify="left" if column == "case" else "right")
    for result in results:
        shown.add_row(
            f"{result.case.model}, stages: {result.case.stages}",
            f"{result.plain:,.0f} tokens/s",
            f"{result.swarm:,.0f} tokens/s",
            f"{result.swarm / result.plain:.3f}",
            f"{result.case.goal}",
            "" if result.busy is None else f"{result.busy:.0f} %",
            f"{result.first_step_s:.0f} s",
        )
    return shown


def main() -> int:
    """Measure what was asked for, print it, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help=f"some of {', '.join(CASES)}, with commas")
    parser.add_argument("--steps", type=int, default=20, help="that are measured of each side (20)")
    parser.add_argument("--device", default="cuda", help="of the servers and of the plain loop (cuda)")
    parser.add_argument("--small", action="store_true", help="models of a toy's size, not compiled")
    parser.add_argument("--kill", action=argparse.BooleanOptionalAction, default=True, help="kill the servers at last")
    parser.add_argument("--plain", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.cases.split(",")
    if arguments.plain:
        config = load_config(config_path(CASES[names[0]]), json.loads(arguments.plain))
        sys.stdout.write(f"{json.dumps(plain_loop(config, config.devices[0], arguments.steps))}\n")
        return 0
    if unknown := sorted(set(names) - CASES.keys()):
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}")
    console, results, plain = Console(), list[Result](), dict[str, float]()
    with tempfile.TemporaryDirectory(prefix="gpu-") as temporary:
        corpus = Path(temporary) / "corpus"
        write_corpus(corpus)
        for number, name in enumerate(names):
            case = CASES[name]
            if case.model not in plain:
                plain[case.model] = measure_plain(case, arguments, corpus)
            results.append(measure(case, arguments, Path(temporary) / str(number), corpus, plain[case.model]))
            console.print(f"{name}: {results[-1]}")
    console.print(table(results))
    problems = [f"{result.case.name}: {problem}" for result in results for problem in result.problems]
    for problem in problems:
        console.print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
