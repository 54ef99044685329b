"""What each unit of a model takes on this machine: forward and backward, measured, to cut the model into even stages.

    units that are alike -> one kind -> built -> warmed up with one sample, which tells how many samples fit the time
    kinds in turns: a pass each, again and again; of each kind the fastest pass counts

On a busy machine a pass also waits for a core, a long one surely and a short one mostly not, so waiting would count
against the large units. A thread that computes alone is therefore measured by the time for which it has computed;
several threads, or a GPU, by the clock. What else slows a pass down comes in bursts: so the fastest of several passes,
taken at different times, is what moves least. A pass is what a replica does for a microbatch: forward, for the last
unit the loss, and backward to its parameters and, but for the first unit, to its input. Quantisation is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.clock import Clock, thread_cpu_s
from shoal.config.own_class import kind_of
from shoal.errors import ConfigError, MisfitError
from shoal.model.device_calls import synchronise
from shoal.model.meta import build_without_values
from shoal.model.partition import StageUnits
from shoal.model.seeding import seeded
from shoal.model.stage import Family, StageModule, TensorSpec, checked_unit_costs, dtype_name, initial_unit

_GRADIENTS_TOO = 2
"""Gradients take as much memory as what they belong to."""


@dataclass(frozen=True, slots=True)
class ProfileLimits:
    """How much a profile may take.

    Attributes:
        budget_s: No pass begins after this time; what has not been measured by then is estimated. The time is counted
            as for passes, so a busy machine gets as many passes as an idle one.
        min_rounds: Passes of each kind, if there is time.
        max_rounds: The most passes of each kind.
        enough_s: After `min_rounds`, no further round begins when the passes have taken this time together.
        memory_bytes: The most parameters, activations and gradients that are held at a time, except for a single unit
            that takes more with one sample.
    """

    budget_s: float = 2.0
    min_rounds: int = 2
    max_rounds: int = 12
    enough_s: float = 0.03
    memory_bytes: int = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Profile:
    """What the units take. Each is measured once for all that are like it.

    Attributes:
        costs_s: Of each unit of the model: seconds of forward and backward of one microbatch.
        num_estimated: Units for which there was no time: their costs follow from the family's own figures.
    """

    costs_s: tuple[float, ...]
    num_estimated: int
    elapsed_s: float


def profile_units(
    family: Family,
    *,
    samples: int,
    seed: int,
    device: torch.device,
    clock: Clock,
    limits: ProfileLimits | None = None,
    stopwatch: Callable[[], float] | None = None,
) -> Profile:
    """Measures every unit in this thread, with its torch threads; torch's generators are left as they were.

    Args:
        samples: Of a microbatch. A unit that is too slow or too large for it is measured with fewer, in proportion.
        clock: Measures several threads, and GPUs.
        stopwatch: Measures instead, in seconds.

    Raises:
        MisfitError: What a unit or the loss gives has another shape than the family says.
        ConfigError: The family's `unit_costs` are not one number for each unit.
        Exception: Errors that the family's own code raises where its units are run alone; a note names the unit.
    """
    limits = limits or ProfileLimits()
    static = checked_unit_costs(family)
    if stopwatch is None:
        stopwatch = thread_cpu_s if device.type == "cpu" and torch.get_num_threads() == 1 else clock.now_s
    begun_s = stopwatch()
    with seeded(seed, device):
        kinds = _kinds(family, seed)
        deadline_s = begun_s + limits.budget_s
        groups = [kinds] if _fit_together(family, kinds, samples, limits) else [[kind] for kind in kinds]
        for position, group in enumerate(groups):
            # Kinds that do not fit into memory together share what is left of the time.
            share_s = (deadline_s - stopwatch()) / (len(groups) - position)
            _Group(family, group, samples, seed, device, limits, stopwatch).measure(stopwatch() + share_s)
    costs_s, num_estimated = _costs(kinds, static)
    return Profile(costs_s, num_estimated, stopwatch() - begun_s)


@dataclass(slots=True)
class _Kind:
    """Units that take equally long, and what was measured of the first of them; None: nothing yet."""

    indices: list[int]
    parameter_bytes: int
    cost_s: float | None = None


def _kinds(family: Family, seed: int) -> list[_Kind]:
    """Put units together that are alike: class, submodules with their settings, tensors, what goes in and out."""
    kinds: dict[Hashable, _Kind] = {}
    for index in range(family.num_units):
        unit = build_without_values(family, index, seed)
        tensors = [(name, p.dtype, tuple(p.shape)) for name, p in (*unit.named_parameters(), *unit.named_buffers())]
        alike = (
            type(unit),
            # Says the settings of submodules that no shape shows, such as a stride.
            repr(unit),
            tuple(tensors),
            _received(family, index),
            family.boundary_spec(index),
            index == 0,
            index == family.num_units - 1,
        )
        known = kinds.get(alike)
        if known is None:
            kinds[alike] = _Kind([index], sum(p.nbytes for p in unit.parameters()))
        else:
            known.indices.append(index)
    return list(kinds.values())


def _received(family: Family, index: int) -> TensorSpec:
    return family.input_spec() if index == 0 else family.boundary_spec(index - 1)


def _tensor_bytes(family: Family, index: int) -> int:
    """Bytes of a sample before the unit and behind it."""
    received = _received(family, index).num_bytes
    return received if family.is_in_chunks(index) else received + family.boundary_spec(index).num_bytes


def _sample_bytes(family: Family, index: int) -> int:
    kept = 0 if family.is_in_chunks(index) else family.activation_bytes(index)
    return kept + _GRADIENTS_TOO * _tensor_bytes(family, index)


def _held_bytes(family: Family, kind: _Kind) -> int:
    """What of a unit is there for any number of samples."""
    chunk = family.chunk_bytes if family.is_in_chunks(kind.indices[0]) else 0
    return _GRADIENTS_TOO * kind.parameter_bytes + chunk


def _fit_together(family: Family, kinds: Iterable[_Kind], samples: int, limits: ProfileLimits) -> bool:
    """Whether all kinds may be held at the same time, so that they can take turns."""
    held = activations = 0
    for kind in kinds:
        index = kind.indices[0]
        held += _held_bytes(family, kind) + samples * _tensor_bytes(family, index)
        activations = max(activations, samples * _sample_bytes(family, index))
    return held + activations <= limits.memory_bytes


@dataclass(slots=True)
class _Group:
    """Kinds that are in memory together."""

    family: Family
    kinds: Sequence[_Kind]
    samples: int
    seed: int
    device: torch.device
    limits: ProfileLimits
    stopwatch: Callable[[], float]

    def measure(self, deadline_s: float) -> None:
        """Measure each kind by passes that take turns; at the deadline none is begun any more."""
        time_s = deadline_s - self.stopwatch()
        runs: list[_UnitRun] = []
        for kind in self.kinds:
            if self.stopwatch() < deadline_s:
                run = _UnitRun(self.family, kind, self.samples, self.seed, self.device, self.stopwatch)
                runs.append(run)
                self._warm_up(run, time_s, deadline_s)
        self._take_turns(runs, deadline_s)
        for run in runs:
            run.kind.cost_s = run.cost_s()

    def _take_turns(self, runs: Sequence[_UnitRun], deadline_s: float) -> None:
        passes_s = 0.0
        for number in range(self.limits.max_rounds):
            if number >= self.limits.min_rounds and passes_s >= self.limits.enough_s:
                return
            for run in runs:
                if self.stopwatch() >= deadline_s:
                    return
                passes_s += run.measure()

    def _warm_up(self, run: _UnitRun, time_s: float, deadline_s: float) -> None:
        """Run the unit with one sample, then with as many as its share of the time, and memory, leave it; stay there.

        All of them at once if that is soon enough, else by doublings. In proportion to one sample is the most that they
        can take: some of what a pass takes is the same for any number. Each pass with a new number also has the kernels
        chosen and the memory taken for it, which makes it slow: what does not fit then is looked at once more.
        """
        share_s = time_s / len(self.kinds)
        most = max(1, min(self.samples, self._samples_in_memory(run.kind)))
        run.measure()
        samples = 1
        while self.stopwatch() < deadline_s:
            more = samples
            for _ in range(2):
                per_sample_s = run.measure() / samples
                more = most if per_sample_s * most <= share_s else min(most, 2 * samples)
                if per_sample_s * more <= share_s:
                    break
            else:
                return
            if more == samples:
                return
            samples = more
            run.take(samples)

    def _samples_in_memory(self, kind: _Kind) -> int:
        free_bytes = self.limits.memory_bytes - _held_bytes(self.family, kind)
        return free_bytes // max(1, _sample_bytes(self.family, kind.indices[0]))


@dataclass(eq=False, repr=False)
class _UnitRun:
    """One unit that is run alone; its first passes are with one sample."""

    family: Family
    kind: _Kind
    samples: int
    seed: int
    device: torch.device
    stopwatch: Callable[[], float]

    def __post_init__(self) -> None:
        self._index = self.kind.indices[0]
        self._is_last = self._index == self.family.num_units - 1
        self._fastest_s: dict[int, float] = {}
        unit = initial_unit(self.family, self._index, self.seed)
        units = nn.ModuleDict({self.family.unit_name(self._index): unit})
        alone = StageUnits(range(self._index, self._index + 1))
        self._stage = StageModule(self.family, units, alone, self._index, self.family.num_units).to(self.device)
        self.take(1)

    def take(self, samples: int) -> None:
        """Pass so many samples from now on."""
        family = self.family
        self._taken = samples
        self._input = self._tensor(_received(family, self._index))
        self._target = self._tensor(family.label_spec() if self._is_last else family.boundary_spec(self._index))
        self._context = [self._tensor(spec) for spec in family.context_specs().values()]

    def measure(self) -> float:
        """Run one pass and return how long it took. What the family's own code raises has the unit's name as a note."""
        try:
            return self._pass()
        except MisfitError:
            raise
        except Exception as error:
            error.add_note(self.family.unit_name(self._index))
            raise

    def _pass(self) -> float:
        received = self._input.detach()
        if self._index > 0 and received.is_floating_point():
            received.requires_grad_()
        self._stage.zero_grad(set_to_none=True)
        self._synchronise()
        begun_s = self.stopwatch()
        output = self._stage(received, *self._context)
        self._check(output)
        if self._is_last:
            output, gradient = self._stage.loss(output, self._target), None
            _check_loss(output)
        else:
            gradient = self._target
        if output.requires_grad:
            torch.autograd.backward(output, gradient)
        self._synchronise()
        taken_s = self.stopwatch() - begun_s
        self._fastest_s[self._taken] = min(taken_s, self._fastest_s.get(self._taken, taken_s))
        return taken_s

    def _check(self, output: object) -> None:
        """Raises MisfitError: what the unit gives is not what the family says of it."""
        if self._is_last and self.family.is_in_chunks(self._index):
            return  # it is run a chunk at a time, by the loss
        gives, says = f"model.family: {self.family.unit_name(self._index)} gives", f"boundary_spec({self._index}) says"
        if not isinstance(output, Tensor):
            raise MisfitError(f"{gives} {kind_of(output)}, and has to give one tensor")
        wanted = (self._taken, *self.family.boundary_spec(self._index).shape)
        if tuple(output.shape) != wanted:
            raise MisfitError(
                f"{gives} a tensor of shape {tuple(output.shape)}, and {says} {wanted}, the samples first: every "
                "server would refuse it; make them agree"
            )
        # The output of the last unit does not travel.
        if not self._is_last and not self._stage.output_spec.takes(found := dtype_name(output.dtype)):
            raise MisfitError(
                f"{gives} a tensor of {found}, and {says} {self._stage.output_spec.dtype}: every server would refuse "
                "it; make them agree"
            )

    def cost_s(self) -> float:
        """What the whole microbatch takes: measured, or on the line through one sample and the most that were tried."""
        most = max(self._fastest_s)
        most_s = self._fastest_s[most]
        per_sample_s = most_s if most == 1 else max(0.0, most_s - self._fastest_s[1]) / (most - 1)
        return most_s + (self.samples - most) * per_sample_s

    def _tensor(self, spec: TensorSpec) -> Tensor:
        """Noise, or zeros, which are valid tokens and classes in every family."""
        shape = (self._taken, *spec.shape)
        if spec.torch_dtype.is_floating_point:
            return torch.randn(shape, dtype=spec.torch_dtype, device=self.device)
        return torch.zeros(shape, dtype=spec.torch_dtype, device=self.device)

    def _synchronise(self) -> None:
        synchronise(self.device)


def _check_loss(loss: object) -> None:
    """Raises MisfitError: it is no mean over the microbatch."""
    if isinstance(loss, Tensor) and not loss.dim():
        return
    given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else kind_of(loss)
    raise MisfitError(
        f"model.family: loss() gives {given}, and has to give one number, as a tensor: the mean over the microbatch"
    )


def _costs(kinds: Iterable[_Kind], static: Sequence[float]) -> tuple[tuple[float, ...], int]:
    """Give each unit its kind's cost; what was not measured is to the rest as the family's figures say."""
    costs_s: list[float | None] = [None] * len(static)
    for kind in kinds:
        for index in kind.indices:
            costs_s[index] = kind.cost_s
    measured = [(cost_s, own) for cost_s, own in zip(costs_s, static, strict=True) if cost_s is not None]
    total_s, total = sum(cost_s for cost_s, _ in measured), sum(own for _, own in measured)
    if not total:
        raise ConfigError("none of the units that cost something could be measured in the time there was")
    filled = tuple(
        own * total_s / total if cost_s is None else cost_s for cost_s, own in zip(costs_s, static, strict=True)
    )
    return filled, costs_s.count(None)
