"""What the benchmark `pipeline` trains: the flags that say it to a swarm and to the plain loop alike. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_ALIKE = (
    "--run.deterministic=true",
    # One round without end: what is measured are steps.
    "--diloco.inner-steps=1000000",
    "--run.first-deadline-s=1000000",
)


@dataclass(frozen=True, slots=True)
class Workload:
    """One model with its batch.

    Attributes:
        flags: of the configuration, for any number of stages.
        batch: samples in a step.
        microbatches: parts of the batch that are in flight.
    """

    flags: tuple[str, ...]
    batch: int
    microbatches: int

    @property
    def all_flags(self) -> list[str]:
        """Flags that say everything but how many stages there are, and their schedule."""
        return [
            *self.flags,
            f"--diloco.batch-size-per-step={self.batch}",
            f"--model-pipeline.microbatches={self.microbatches}",
            *_ALIKE,
        ]


def schedule_of(stages: int, cores: int) -> str:
    """Return what to train so many stages with: where they take turns on the cores there is no bubble to fill, and only
    the work counts, of which split backwards do a little more."""
    return "zero_bubble" if stages <= cores else "1f1b"


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        "transformer": Workload(
            (
                "--model.family=gpt",
                "--model.hidden-size=256",
                "--model.num-layers=6",
                "--model.num-heads=8",
                "--model.vocab-size=256",
                "--data.task-type=llm",
                "--data.dataset-name=pydoc-topics",
                "--data.seq-len=128",
                # One sample, the fewest: a pass is longer than a measurement.
                "--data.holdout-fraction=0.0001",
            ),
            batch=64,
            microbatches=16,
        ),
        "resnet18": Workload(
            (
                "--model.family=resnet18",
                "--model.stem=cifar",
                "--model.num-classes=10",
                "--data.task-type=cv",
                "--data.dataset-name=digits",
                "--data.num-channels=3",
                "--data.img-size=32",
                # Five of 1,797 samples, so that a pass has no short batch, which would count as a whole one.
                "--data.holdout-fraction=0.0028",
            ),
            # Convolutions over 8 samples at a time take 6 % longer a sample than over 16.
            batch=128,
            microbatches=8,
        ),
    }
)
"""By the name in the cases."""
