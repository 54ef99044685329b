"""Whether tensors from the network are what an operation expects; said in words, for the refusal and the log."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.data.targets import targets_of
from shoal.model.stage import StageModule, TensorSpec
from shoal.swarm.microbatch_pass import Payload
from shoal.wire.messages.step import Backward, Forward, Labels, Open
from shoal.wire.tensors import WireTensor


def misfit(tensors: Sequence[WireTensor], specs: Sequence[TensorSpec], num_samples: int) -> str | None:
    """What is wrong with the tensors of a message that carries those of `num_samples` samples; None if nothing is."""
    if len(tensors) != len(specs):
        return f"{len(specs)} tensors expected, got {len(tensors)}"
    for tensor, spec in zip(tensors, specs, strict=True):
        expected = (num_samples, *spec.shape)
        dtype, shape = tensor.dtype, tensor.shape
        if not spec.takes(dtype) or tuple(shape) != expected:
            return f"{spec.dtype}{list(expected)} expected, got {dtype}{list(shape)}"
    return None


def payload_misfit(message: Payload, tensors: Sequence[WireTensor], module: StageModule, request: Open) -> str | None:
    """The same for a message of a step at a stage; labels must also have the targets that the step was opened with."""
    match message:
        case Forward():
            specs = module.forward_specs
        case Labels():
            specs = (module.label_spec,)
        case Backward():
            specs = (module.output_spec,)
    problem = misfit(tensors, specs, request.microbatch_samples[message.microbatch])
    if problem is None and isinstance(message, Labels):
        found, wanted = sum(targets_of(tensors[0])), request.microbatch_targets[message.microbatch]
        if found != wanted:
            problem = f"{wanted} targets expected in microbatch {message.microbatch}, its labels have {found}"
    return problem
