"""One replica by itself, in the moments of a round: what its process takes in each, to compare with what is planned.

    python -m shoal_lab.bench.lone_replica '{"model": {...}, ...}' vectors FOLDER '{"hidden_size": 64, ...}'

The model is one stage. Nothing is sent: the ring's vector is this replica's alone. A mirror follows the run. Prints a
line of JSON for each moment. What a process takes before it has a replica is taken off, with what torch has loaded by
then: a small model of the same kind, which has other values in its section, goes the same way before.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.averaging.contents import Offered
from shoal.checkpoint.tensor_file import encode_tensors
from shoal.collective.shared_memory import SharedMemory
from shoal.config.schema import Config
from shoal.ids import StepKey
from shoal.model.registry import load_family
from shoal.optim.vector_memory import IN_MEMORY, FileVectorMemory
from shoal.pipeline.stage_compute import StageCompute
from shoal.server.replica import build_state
from shoal.swarm.assignment import Files
from shoal.swarm.content_transfer import CHUNK_BYTES

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_PEAK_ANEW = "5"


class Moment(NamedTuple):
    """The most that a process took in a part of a round, and what it took after it, without what it took before all."""

    name: str
    peak_bytes: int
    rest_bytes: int


def _resident(line: str) -> int:
    return next(int(each.split()[1]) * 1024 for each in _STATUS.read_text().splitlines() if each.startswith(line))


class _Watched:
    """What happens while this process's peak is looked at."""

    def __init__(self, base_bytes: int) -> None:
        self._base_bytes = base_bytes
        self.moments: list[Moment] = []

    @contextmanager
    def moment(self, name: str) -> Generator[None]:
        _CLEAR.write_text(_PEAK_ANEW)
        yield
        peak, rest = _resident("VmHWM:"), _resident("VmRSS:")
        self.moments.append(Moment(name, peak - self._base_bytes, rest - self._base_bytes))


def moments_of(config: Config, files: Files, folder: Path) -> list[Moment]:
    """Go through two rounds of one replica."""
    watched = _Watched(_resident("VmRSS:"))
    memory = FileVectorMemory(folder) if files else IN_MEMORY
    of_inner = memory if files is Files.MOMENTS else IN_MEMORY
    with watched.moment("built"):
        compute, state = build_state(config, 0, "cpu", memory=memory, of_inner=of_inner)
    shared, content, kept = SharedMemory(), None, None
    for round in (1, 2):
        compute.start_round()
        for number in (0, 1):
            with watched.moment("a step"):
                _step(compute, config, StepKey(0, 1, 2 * round + number, 0))
        with watched.moment("an evaluation"):
            compute.evaluate(*_batch(config, 1))
        with watched.moment("the exchange"):
            state.brought()
            [gradient_N] = shared.vectors([state.gradient_kind])
            share = state.contribution(1, 2, gradient_N)
        with watched.moment("the outer step"):
            hashes = state.stage(share, keep_average=True)
        with watched.moment("the swap"):
            del gradient_N, share
            if memory.is_short:
                shared.rest()
            kept = state.swap(hashes)
        content = None
        with watched.moment("a checkpoint's copy"):
            content = encode_tensors(compute.parts.inner_state(), {}, memory)
            Offered((content,), CHUNK_BYTES).hashes()
        with watched.moment("a newcomer's copy"):
            for each in (kept or (), state.base):
                offered = Offered(each, CHUNK_BYTES)
                offered.hashes()
                for number in range(len(offered.plan)):
                    bytes(offered.chunk(number).data)
    shared.close()
    return watched.moments


def _step(compute: StageCompute, config: Config, key: StepKey) -> None:
    num_microbatches = config.model_pipeline.microbatches
    given = _batch(config, -(-config.diloco.batch_size_per_step // num_microbatches))
    for microbatch in range(num_microbatches):
        compute.loss(key, microbatch, *given, 1 / num_microbatches)
    compute.totals(key)
    compute.commit(key, 1.0, 1e-4, False)


def _batch(config: Config, num_samples: int) -> tuple[Tensor, Tensor]:
    """Any samples and labels."""
    family = load_family(config.model, config.data)
    specs = family.input_spec(), family.label_spec()
    inputs, labels = (torch.ones((num_samples, *spec.shape), dtype=spec.torch_dtype) for spec in specs)
    return inputs, labels


def main() -> None:
    """Print the moments of a configuration."""
    values, files, folder = json.loads(sys.argv[1]), Files[sys.argv[2].upper()], Path(sys.argv[3])
    torch.set_num_threads(1)
    small = Config.model_validate(values | {"model": values["model"] | json.loads(sys.argv[4])})
    moments_of(small, files, folder)
    for moment in moments_of(Config.model_validate(values), files, folder):
        sys.stdout.write(json.dumps(moment._asdict()) + "\n")


if __name__ == "__main__":
    main()
