"""The held-out loss of a model in one piece, on the samples that its run holds out.

Of classes also the accuracy; of speech the character error rate of greedy decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.codec.raw import from_wire
from shoal.data.fields import Fields
from shoal.data.microbatch import wire_view
from shoal.data.source import Source
from shoal.data.speech import decoded
from shoal.data.targets import targets_of
from shoal.model.stage import StageModule
from shoal.swarm.microbatch_cut import EVAL_SAMPLES
from shoal.wire.tensors import WireTensor


@torch.no_grad()
def held_out_loss(model: StageModule, holdout: Source) -> float:
    """The mean loss over all targets, in nats, as the run itself measures it.

    Args:
        model: In eval mode.
    """
    device = next(model.parameters()).device
    loss_sum, num_targets = 0.0, 0
    for batch in _batches(holdout):
        if count := sum(targets_of(batch.labels)):
            inputs, labels, *context = (from_wire(tensor).to(device) for tensor in batch.everything)
            loss_sum += model.loss(model(inputs, *context), labels).item() * count
            num_targets += count
    return loss_sum / max(1, num_targets)


@torch.no_grad()
def held_out_figures(model: StageModule, holdout: Source) -> dict[str, float]:
    """What the model's family reports beside the loss, by name: means over all targets; nothing of most families.

    Args:
        model: In eval mode.
    """
    device = next(model.parameters()).device
    sums: dict[str, float] = {}
    num_targets = 0
    for batch in _batches(holdout):
        if count := sum(targets_of(batch.labels)):
            inputs, labels, *context = (from_wire(tensor).to(device) for tensor in batch.everything)
            for name, figure in model.figures(model(inputs, *context), labels).items():
                sums[name] = sums.get(name, 0.0) + figure.item() * count
            num_targets += count
    return {name: total / num_targets for name, total in sums.items()}


@torch.no_grad()
def held_out_accuracy(model: Callable[[Tensor], Tensor], holdout: Source, device: str = "cpu") -> float:
    """The share of the samples whose class is the one with the largest logit.

    Args:
        model: From samples (B, ...) to logits (B, K), in eval mode.
        holdout: Of classes (B).
    """
    num_right = 0
    for batch in _batches(holdout):
        inputs, labels = from_wire(batch.inputs), from_wire(batch.labels)
        num_right += int((model(inputs.to(device)).argmax(-1).cpu() == labels.long()).sum())
    return num_right / holdout.num_samples


@torch.no_grad()
def class_probabilities(model: StageModule, images_NCHW: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return how probable each class is of each image, (N, K).

    Args:
        model: From images (N, C, H, W) to logits (N, K), in eval mode.
    """
    device = next(model.parameters()).device
    logits_NK: Tensor = model(from_wire(wire_view(images_NCHW)).to(device))
    return logits_NK.float().softmax(-1).cpu().numpy()


@dataclass(frozen=True, slots=True)
class Transcribed:
    """What a model hears in the clips of a data set.

    Attributes:
        pairs: The transcript of each clip, and what the model hears.
    """

    pairs: list[tuple[str, str]]

    @property
    def character_error_rate(self) -> float:
        """Edits that make what is heard of the transcripts (Levenshtein), over the characters of the transcripts."""
        edits = sum(edit_distance(said, heard) for said, heard in self.pairs)
        return edits / max(1, sum(len(said) for said, _ in self.pairs))


@torch.no_grad()
def transcribed(model: StageModule, holdout: Source, characters: str) -> Transcribed:
    """Decode clips greedily: the best character of each frame, repeats once, without CTC's blank.

    Args:
        model: From clips (B, T) to logits (B, L, V), in eval mode. Frames of padding are best as a blank.
        characters: In the order of their numbers, from 1.
    """
    device = next(model.parameters()).device
    pairs: list[tuple[str, str]] = []
    for batch in _batches(holdout):
        inputs, labels, *context = (from_wire(tensor).to(device) for tensor in batch.everything)
        best_BL = model(inputs, *context).argmax(-1)
        for said, best in zip(_rows(labels), _rows(best_BL), strict=True):
            heard = [number for number, _ in groupby(best)]
            pairs.append((decoded(said, characters), decoded(heard, characters)))
    return Transcribed(pairs)


def _rows(numbers: Tensor) -> list[list[int]]:
    return cast("Any", numbers).tolist()


def edit_distance(one: str, other: str) -> int:
    """Return how many insertions, deletions and replacements of characters make one text the other (Levenshtein)."""
    row = list(range(len(other) + 1))
    for line, character in enumerate(one, start=1):
        before, row[0] = row[0], line
        for column, other_character in enumerate(other, start=1):
            replaced = before + (character != other_character)
            before = row[column]
            row[column] = min(replaced, row[column] + 1, row[column - 1] + 1)
    return row[-1]


def _batches(holdout: Source) -> Iterator[Fields[WireTensor]]:
    """Yield all samples, as many at a time as a run evaluates."""
    for start in range(0, holdout.num_samples, EVAL_SAMPLES):
        indices = np.arange(start, min(start + EVAL_SAMPLES, holdout.num_samples), dtype=np.int64)
        yield holdout.read(indices).each(wire_view)
