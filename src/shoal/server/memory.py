"""What memory each stage needs, and what this server has: so that nobody takes a stage that does not fit.

Nothing is allocated for it: units are built on torch's meta device, with shapes and without values. The need is an
estimate of the most that a replica takes, the same on every host, since all compute who takes which stage:

    device:  parameters + optimizer state          + gradients of each open step + activations in flight, or of one
                                                     unit in an evaluation, whose batches are larger
             (of frozen parameters: themselves)
    host:    outer parameters, outer momentum,     + averaging, which begins when no step is open
             the vector that rounds are averaged in,
             averages for mirrors, inner states for checkpoints

Where a server has not so much, what no step needs lies in files of its disk (`swarm.assignment.Files`). Of the host it
takes, beside the process, the vector that a round is averaged in, while it is; and as a last resort the optimizer's
state lies there too, but for that of the parameter that is being stepped:

    device:  parameters [+ optimizer state]        + gradients of each open step + activations
    host:                                          + one vector while averaging

Pages of files that are being looked at, some megabytes, are not counted: the system takes them back when it needs them.

Exact are parameters, optimizer and outer state. Activations follow from what flows between units (see
`Family.activation_bytes`); the allocator's own overhead and the workspaces of kernels are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from shoal.averaging.round_average import averaging_codec
from shoal.config.load import config_from_json
from shoal.config.quant import QuantConfig
from shoal.config.schema import Config
from shoal.model.hf.lora import lora_of
from shoal.model.meta import build_units_without_values
from shoal.model.partition import StageUnits
from shoal.model.registry import load_family
from shoal.model.stage import Family, stage_units
from shoal.optim.flat import state_buffers, trained_parameters
from shoal.optim.inner import InnerOptimizer
from shoal.optim.parts import AveragedParts, ReplicaParts
from shoal.optim.vector_memory import LONG_BYTES
from shoal.quant.targets import module_path, plan_of, target_of
from shoal.runtime.child import Parent
from shoal.server.stage_question import StagesAsked, StagesNeed
from shoal.swarm.assignment import StageNeed
from shoal.swarm.microbatch_cut import MAX_MICROBATCHES, within

MAX_OPEN_STEPS = 4
"""Steps of different trainers that a replica works on at the same time; each keeps gradients of its own. A replica has
fewer where its server has not the memory for so many."""

PROCESS_BYTES = 128 * 2**20
"""Of a server without its stage, measured: its own pages of interpreter and libraries, and its libp2p daemon."""

COMPILER_BYTES = 160 * 2**20
"""Of torch's compiler, measured: it stays in the memory of a server that has compiled its stage."""

# Vectors of the size of the parameters that a replica keeps: outer parameters, outer momentum, from its first round on
# the one in which contributions are averaged (`averaging.round_average`), and what those who follow the run, as mirrors
# do, read of the last two rounds (`swarm.state_keeping`).
_HELD_VECTORS = 5
# Where the last steps of a round go on while it is averaged: what the parameters were before these, and the
# pseudo-gradient and what it leaves out, since they are encoded beside steps.
_CUT_VECTORS = 3
# Those that an outer round adds for a moment: the new momentum and the new parameters.
_ROUND_VECTORS = 2
# What a round comes to is computed beside steps too (`averaging.foresight`), and once more if that was in vain: the
# average, the new momentum and the new parameters, and the values that are being decoded.
_FORESEEN_VECTORS = 4
# Where pseudo-gradients are encoded as a whole it adds more (`averaging.gathered`): the sum, the values that are being
# decoded, what a coordinate is divided by, and what is left out of the own one.
_GATHER_VECTORS = 4
# Members whose encoded pseudo-gradients are counted.
_GATHERED_MEMBERS = 8
_FLOAT_BYTES = 4
_HALF_BYTES = 2


@dataclass(slots=True)
class _Tally:
    """Of units in a row: parameters and buffers on the meta device, bytes of weights as autocast casts them, once for
    all forwards of a version, bytes of weights of which each forward keeps its own, since they are quantised, or frozen
    and cast, and what there is while a loss is computed in chunks."""

    parameters: list[Tensor]
    frozen: list[Tensor]
    buffers: list[Tensor]
    constant_bytes: int = 0
    cast_bytes: int = 0
    frozen_cast_bytes: int = 0
    quantised_bytes: int = 0
    chunk_bytes: int = 0
    activation_bytes: int = 0
    largest_activation_bytes: int = 0


def stage_needs(config: Config) -> tuple[StageNeed, ...]:
    """Return what each stage needs, a function of what the hosts of a run share.

    Raises:
        ConfigError: the model does not fit the configuration.
    """
    family = load_family(config.model, config.data)
    stages = stage_units(family, config.num_stages, config.model_pipeline.cut)
    return tuple(_need(config, family, stage, units) for stage, units in enumerate(stages))


def _need(config: Config, family: Family, stage: int, units: StageUnits) -> StageNeed:
    built = build_units_without_values(family, units, config)
    # A wrapped first stage computes twice for each microbatch: what goes through its own units, and through the head.
    parts = [part for part in units if part]
    tallies = [_tally(config, family, stage, part, built) for part in parts]
    replica = _replica(config, built, tallies)
    buffer_bytes = replica.averaged.floats.num_bytes + replica.averaged.integers.num_bytes
    # Until all are there, a parameter that both share has a gradient from each.
    gradient_bytes = sum(each.nbytes for tally in tallies for each in _once(tally.parameters))
    # Each commit makes a version. A step keeps the casts of the versions with which its microbatches went forward: one,
    # where trainers are about equally fast.
    cast_bytes = sum(tally.cast_bytes for tally in tallies) if _casts_once(config) else 0
    frozen = _once([each for tally in tallies for each in tally.frozen])
    constant_bytes = sum(tally.constant_bytes for tally in tallies) + sum(each.nbytes for each in frozen)
    largest_bytes = max(tally.largest_activation_bytes for tally in tallies)
    own_bytes, sample_bytes = _in_flight(config, family, parts, tallies, further=0)
    more_bytes, more_sample_bytes = _in_flight(config, family, parts, tallies, further=1)
    vector_bytes = replica.averaged.parameters.layout.numel * _FLOAT_BYTES
    file_bytes, round_file_bytes = _file_bytes(config, replica)
    moment_bytes = _moment_bytes(replica.inner) if file_bytes else 0
    microbatches = config.model_pipeline.microbatches
    max_samples = -(-config.diloco.batch_size_per_step // microbatches)
    return StageNeed(
        device_bytes=replica.num_bytes + constant_bytes,
        step_bytes=gradient_bytes + 2 * buffer_bytes + cast_bytes,
        # A gradient of a cast is there before that of its weight, and leaves a gap where the next one has no room.
        open_bytes=own_bytes + sum(tally.chunk_bytes + tally.cast_bytes for tally in tallies),
        sample_bytes=largest_bytes + sample_bytes,
        further_bytes=more_bytes - own_bytes,
        further_sample_bytes=more_sample_bytes - sample_bytes,
        max_further=_max_further(config),
        eval_sample_bytes=largest_bytes,
        host_bytes=_host_bytes(config, replica) + buffer_bytes,
        round_bytes=_round_bytes(config, replica.averaged.parameters.layout.numel) + 2 * buffer_bytes,
        file_bytes=file_bytes,
        round_file_bytes=round_file_bytes,
        moment_bytes=moment_bytes,
        disk_bytes=file_bytes + _ROUND_VECTORS * vector_bytes + moment_bytes if file_bytes else 0,
        max_samples=max_samples,
        min_samples=within([max_samples] * microbatches * config.diloco.gradient_accumulation_steps),
        max_steps=MAX_OPEN_STEPS,
    )


def _replica(config: Config, built: nn.ModuleDict, tallies: Sequence[_Tally]) -> ReplicaParts:
    """The parts of a replica, on the meta device."""
    parameters = list(_once([each for tally in tallies for each in tally.parameters]))
    buffers = [each for tally in tallies for each in tally.buffers]
    averaged = AveragedParts.of(_numbered(parameters), _numbered(buffers))
    names = {id(parameter): name for name, parameter in built.named_parameters()}
    named = ((names[id(parameter)], parameter) for parameter in parameters)
    return ReplicaParts(averaged, InnerOptimizer(named, config.diloco.inner_optim))


def _casts_once(config: Config) -> bool:
    """Whether a weight is cast once for a version, as by autocast; compiled code does so in each forward, and then each
    keeps its own."""
    return not config.model_pipeline.compile


def _in_flight(
    config: Config, family: Family, parts: Sequence[range], tallies: Sequence[_Tally], further: int
) -> tuple[int, int]:
    """Return the bytes of all microbatches in flight, with so many further ones than the window says: by themselves,
    and by sample."""
    own_bytes, sample_bytes = 0, 0
    for part, tally in zip(parts, tallies, strict=True):
        is_last = part.stop == family.num_units
        in_flight, kept = _kept(config, further, is_last=is_last)
        received = family.boundary_spec(part.start - 1) if part.start else family.input_spec()
        each_bytes = tally.quantised_bytes + tally.frozen_cast_bytes
        own_bytes += kept * (each_bytes + (0 if _casts_once(config) else tally.cast_bytes))
        sample_bytes += kept * tally.activation_bytes + in_flight * received.num_bytes
        # What the stage puts out waits for a line, or its gradient for the device.
        sample_bytes += 0 if is_last else further * family.boundary_spec(part.stop - 1).num_bytes
    return own_bytes, sample_bytes


def _round_bytes(config: Config, num_elements: int) -> int:
    """Return what an outer round adds for a moment, without buffers."""
    codec = averaging_codec(config.diloco)
    round_bytes = _ROUND_VECTORS * num_elements * _FLOAT_BYTES
    if not codec.is_elementwise:
        round_bytes += _GATHER_VECTORS * num_elements * _FLOAT_BYTES
        round_bytes += _GATHERED_MEMBERS * codec.max_size_bytes(num_elements)
    return round_bytes


def _file_bytes(config: Config, replica: ReplicaParts) -> tuple[int, int]:
    """Return what of the bytes of a server's host may lie in files: of those that it always has, and of a round's."""
    vector_bytes = replica.averaged.parameters.layout.numel * _FLOAT_BYTES
    if vector_bytes < LONG_BYTES:
        return 0, 0
    copied_bytes = replica.inner.state_bytes + (vector_bytes if config.diloco.feedback else 0)
    # New parameters and momentum lie in files. What sums are formed in is memory, now of the round; and where a round
    # averages a fragment, so is a copy of the local parameters.
    new_bytes = _ROUND_VECTORS * vector_bytes
    if averaging_codec(config.diloco).is_elementwise:
        new_bytes -= vector_bytes if config.diloco.fragments == 1 else new_bytes
    return _HELD_VECTORS * vector_bytes + copied_bytes, new_bytes


def _moment_bytes(inner: InnerOptimizer) -> int:
    """Return what of the optimizer's state may lie in files: not that of the parameter that is being stepped."""
    states = inner.begun([True] * len(inner.has_state)).values()
    of_each = [sum(tensor.nbytes for tensor in state.values() if tensor.nbytes >= LONG_BYTES) for state in states]
    return sum(of_each) - max(of_each, default=0)


def _host_bytes(config: Config, replica: ReplicaParts) -> int:
    """Return what a server has beside its device's memory, without buffers."""
    vector_bytes = replica.averaged.parameters.layout.numel * _FLOAT_BYTES
    residual_bytes = vector_bytes if config.diloco.feedback else 0
    # What codecs have left out, and the copy of this and of what the inner optimizer knew at the newest record, or at
    # the one of which a checkpoint was wanted last (`averaging.inner_exchange`).
    host_bytes = PROCESS_BYTES + _HELD_VECTORS * vector_bytes + replica.inner.state_bytes + 2 * residual_bytes
    if config.diloco.snapshot_every_steps:
        # The copy of its own state that is on its way to a buddy.
        host_bytes += replica.num_bytes + residual_bytes
    if config.diloco.overlap_steps:
        # Payloads of the other members lie beside steps too.
        host_bytes += (_CUT_VECTORS + _FORESEEN_VECTORS) * vector_bytes
        host_bytes += _GATHERED_MEMBERS * averaging_codec(config.diloco).max_size_bytes(vector_bytes // _FLOAT_BYTES)
    return host_bytes + (COMPILER_BYTES if config.model_pipeline.compile else 0)


def _once(tensors: Sequence[Tensor]) -> Iterable[Tensor]:
    """Each tensor once."""
    return {id(tensor): tensor for tensor in tensors}.values()


def _numbered(tensors: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Names for tensors of several units."""
    return ((str(number), tensor) for number, tensor in enumerate(tensors))


def _max_further(config: Config) -> int:
    """Return the most microbatches that a step may have in flight where its way is long, beside those of the window."""
    flow = config.model_pipeline
    in_flight = flow.microbatches_in_flight
    return 0 if flow.window is not None or in_flight is None else max(0, MAX_MICROBATCHES - in_flight)


def _kept(config: Config, further: int, *, is_last: bool) -> tuple[int, int]:
    """Return the most microbatches of a step whose inputs a stage holds, and whose activations, with so many further
    ones in flight than the window says."""
    num = config.model_pipeline.microbatches * config.diloco.gradient_accumulation_steps
    flow = config.model_pipeline
    in_flight = (flow.microbatches_in_flight or num) + further
    if flow.schedule == "zero_bubble":
        # Also what is computed again is kept, until the gradients of the parameters are done.
        return in_flight, in_flight
    # With 1f1b the last stage goes back at once.
    at_once = flow.activation_checkpointing or (is_last and flow.schedule == "1f1b")
    return in_flight, 1 if at_once else in_flight


def _tally(config: Config, family: Family, stage: int, units: range, built: nn.ModuleDict) -> _Tally:
    tally, lora = _Tally([], [], []), lora_of(config, family)
    for index in units:
        unit = built[family.unit_name(index)]
        trained = [parameter for _, parameter in trained_parameters(unit)]
        frozen = [parameter for parameter in unit.parameters() if not parameter.requires_grad]
        tally.parameters += trained
        tally.frozen += frozen
        buffers = [buffer for _, buffer in state_buffers(unit)]
        tally.buffers += buffers
        constants_too_bytes = sum(buffer.nbytes for buffer in unit.buffers())
        tally.constant_bytes += constants_too_bytes - sum(buffer.nbytes for buffer in buffers)
        quantised, num_inputs = _quantised(unit, family.unit_name(index), stage, config.quant)
        casts = 0 if config.data.precision == "32-true" else _HALF_BYTES
        tally.quantised_bytes += sum(weight.nbytes + casts * weight.numel() for weight in quantised)
        once = [p for p in trained if p.dim() > 1 and not any(p is weight for weight in quantised)]
        tally.cast_bytes += sum(casts * p.numel() for p in once)
        # Autocast keeps its casts of what gets gradients alone.
        wide = [p for p in frozen if p.dim() > 1 and p.dtype == torch.float32]
        tally.frozen_cast_bytes += sum(casts * p.numel() for p in wide)
        activation_bytes = family.activation_bytes(index)
        if lora is not None:
            activation_bytes += lora.activation_bytes(index, config.data.seq_len)
        if num_inputs:
            # A quantised input is kept before and after the rounding.
            activation_bytes += activation_bytes // 2
        if family.is_in_chunks(index):
            # Of a microbatch there is the gradient of what the unit takes. Those of its parameters are added up apart.
            activation_bytes = family.boundary_spec(index - 1).num_bytes
            chunk_bytes = family.chunk_bytes + bool(num_inputs) * family.chunk_bytes // 2
            tally.chunk_bytes = chunk_bytes + sum(p.nbytes for p in trained)
        tally.activation_bytes += activation_bytes
        tally.largest_activation_bytes = max(tally.largest_activation_bytes, activation_bytes)
    return tally


def _quantised(unit: nn.Module, unit_name: str, stage: int, quant: QuantConfig | None) -> tuple[list[Tensor], int]:
    """Return the weights that are quantised in each forward, and how many inputs are."""
    weights, num_inputs = list[Tensor](), 0
    for name, module in cast("Iterable[tuple[str, nn.Module]]", unit.named_modules()):
        target = target_of(module)
        if quant is None or target is None:
            continue
        plan = plan_of(quant, module_path(unit_name, name), module, stage)
        if plan.weight is not None:
            weights += target.parameters(module)
        num_inputs += plan.activation is not None
    return weights, num_inputs


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """What a stage may use: of the host, and of the device where that has memory of its own (0: it has not)."""

    host_bytes: int
    device_bytes: int = 0


def server_memory(device: str, host_bytes: int, device_sharers: int, cap_bytes: int | None) -> ServerMemory:
    """Return what this server may plan with; runs on its device thread.

    Args:
        device: "cpu", "mps" or "cuda:<i>".
        host_bytes: the server's share of the host's memory; 0: not known.
        device_sharers: servers of this host on the same device, including this one.
        cap_bytes: `servers.max_memory_bytes`: limits the memory in which it computes; None: no limit.
    """
    if device == "cpu":
        return ServerMemory(min(host_bytes or cap_bytes or 0, cap_bytes or host_bytes))
    if device == "mps":
        # The host's own memory, of which the GPU may have so much.
        limit = torch.mps.recommended_max_memory() // device_sharers
        return ServerMemory(min(limit, host_bytes or limit, cap_bytes or limit))
    free, total = torch.cuda.mem_get_info(torch.device(device))
    # One that is started again finds what the others have taken: their share is not its own to halve again.
    share = min(free, total // device_sharers)
    return ServerMemory(host_bytes, max(1, min(share, cap_bytes or share)))


UNKNOWN_ROOM_BYTES = 1 << 30
"""What is kept of snapshots where nobody knows how much memory there is."""


def snapshot_room(memory: ServerMemory, needed_bytes: int) -> int:
    """Return how many bytes of others' snapshots a server keeps, which needs so much of its host's memory itself."""
    return max(0, memory.host_bytes - needed_bytes) if memory.host_bytes else UNKNOWN_ROOM_BYTES


if __name__ == "__main__":
    with Parent(StagesAsked) as launcher:
        for asked in launcher.orders:
            launcher.say(StagesNeed(stage_needs(config_from_json(asked.config_json))))
