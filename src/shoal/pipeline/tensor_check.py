"""Whether tensors from the network are what an operation expects; said in words, for the refusal and the log."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.model.stage import StageModule, TensorSpec
from shoal.swarm.open_step import Payload
from shoal.wire.messages.step import Backward, Forward, Labels
from shoal.wire.tensors import WireTensor


def misfit(tensors: Sequence[WireTensor], spec: TensorSpec, num_samples: int) -> str | None:
    """What is wrong with the tensors of a message that carries one of `num_samples` samples; None if nothing is."""
    if len(tensors) != 1:
        return f"one tensor expected, got {len(tensors)}"
    expected = (num_samples, *spec.shape)
    dtype, shape = tensors[0].dtype, tensors[0].shape
    if dtype != spec.dtype or tuple(shape) != expected:
        return f"{spec.dtype}{list(expected)} expected, got {dtype}{list(shape)}"
    return None


def payload_misfit(
    message: Payload, tensors: Sequence[WireTensor], module: StageModule, sizes: Sequence[int]
) -> str | None:
    """The same for a message of a step at a stage, whose microbatches have `sizes` samples."""
    match message:
        case Forward():
            spec = module.input_spec
        case Labels():
            spec = module.label_spec
        case Backward():
            spec = module.output_spec
    return misfit(tensors, spec, sizes[message.microbatch])
