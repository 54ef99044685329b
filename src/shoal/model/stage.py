"""What a model family is, and how a stage is built from it.

A family names the smallest units a model can be cut into (embedding, blocks, head). A stage is a contiguous range of
units, and the first one of a wrapped model has the head as well (`model.partition`):

    unit 0 | unit 1 | unit 2 | unit 3        units.<name of unit 0> ... in the parameter names of every cut
    `---- stage 0 ---'-- stage 1 ---'

Parameter names and initial values belong to the unit, not to the stage, so that a checkpoint, a quantisation rule or
a hash does not depend on the number of stages. Shapes: B = samples of a microbatch; specs are for one sample, without
B.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, LocalProtocolError
from shoal.model.chunked_loss import ChunkedLoss
from shoal.model.own_errors import asked, configured_name, is_ours, require_module
from shoal.model.partition import StageUnits, counts_by_cost, units_by_counts
from shoal.model.router_loss import RouterLosses, RouterPass
from shoal.model.seeding import seeded, unit_seed

if TYPE_CHECKING:
    from shoal.config.model import ModelConfig
    from shoal.config.training import DataConfig


WHOLE_NUMBERS = ("uint8", "uint16", "int32", "int64")
"""Types of tokens and labels; each holds what those before it hold."""

_KEPT_TENSORS = 16


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One sample's tensor.

    Attributes:
        dtype: torch's name without the prefix: "float32", "int64".
        shape: Without the batch dimension; `()` for a scalar.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return cast("torch.dtype", getattr(torch, self.dtype))

    @property
    def num_bytes(self) -> int:
        """Bytes of one sample."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    def takes(self, dtype: str) -> bool:
        """Whether values of this type may stand for it: whole numbers travel in any type that holds them."""
        if self.dtype not in WHOLE_NUMBERS or dtype not in WHOLE_NUMBERS:
            return dtype == self.dtype
        return WHOLE_NUMBERS.index(dtype) <= WHOLE_NUMBERS.index(self.dtype)

    def with_float(self, dtype: torch.dtype) -> TensorSpec:
        """The same with `dtype` if this is floating, else this itself."""
        return replace(self, dtype=dtype_name(dtype)) if self.torch_dtype.is_floating_point else self


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of the dtype without the prefix."""
    return str(dtype).removeprefix("torch.")


class Family(ABC):
    """A kind of model. Subclass it and name it as `model.family: package.module:Class` to train your own."""

    @classmethod
    @abstractmethod
    def from_config(cls, model: ModelConfig, data: DataConfig) -> Self:
        """Builds the family that the configuration describes.

        Raises:
            ConfigError: The configuration does not fit this family.
        """

    @property
    @abstractmethod
    def num_units(self) -> int:
        """How many units the model consists of: the most stages it can be cut into."""

    @abstractmethod
    def build_unit(self, index: int) -> nn.Module:
        """Builds unit `index` in float32 on the CPU, drawing initial values from torch's global generator.

        The unit maps one tensor (B, ...) to one tensor (B, ...), must not change its input in place, and keeps all
        its state in parameters and persistent buffers; buffers with `persistent=False` are constants. The caller seeds
        the generator.
        """

    @abstractmethod
    def input_spec(self) -> TensorSpec:
        """What a sample is for unit 0."""

    @abstractmethod
    def label_spec(self) -> TensorSpec:
        """What a label is for `loss`."""

    def context_specs(self) -> Mapping[str, TensorSpec]:
        """What every stage gets of a sample beside what the stage before puts out, by name; nothing unless said.

        It is handed on unchanged, as whole numbers or floats that nobody needs a gradient of, and units (or what
        `assemble` returns) take it behind their tensor, in this order. What computes in chunks does without.
        """
        return {}

    @abstractmethod
    def boundary_spec(self, index: int) -> TensorSpec:
        """What unit `index` puts out for one sample; for the last unit, the model's output."""

    @abstractmethod
    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """The mean loss over a microbatch's targets: a scalar, float64 if the output is, else float32.

        Its targets are its labels, one by one, without those that are -100 (torch's `ignore_index`), and there is one
        at least. The swarm weights microbatches, steps and replicas by the number of targets.
        """

    def figures(self, output: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """What is reported of each step beside its loss, by the name in metrics: scalars, each a mean over the
        microbatch; nothing unless said. Not of a loss that is computed in chunks."""
        return {}

    @abstractmethod
    def unit_costs(self) -> list[float]:
        """Rough relative cost of each unit's forward and backward, for an even cut."""

    @property
    def is_tied(self) -> bool:
        """Whether the first and the last unit share a parameter: then one stage hosts both."""
        return False

    def tie(self, units: nn.ModuleDict) -> None:
        """Makes what the units of a stage share one parameter, that of the first unit.

        Args:
            units: By name; changed in place.
        """
        return

    def exactness_problem(self) -> str | None:
        """Why the model must not be trained in stages; None: it may. Every host asks; it takes a moment."""
        return None

    def assemble(self, indices: range, units: nn.ModuleDict) -> Callable[..., Tensor]:
        """Returns how a stage computes over its units: unless a family says otherwise, one after the other.

        Called once for each stage that is built. What it returns holds the units, which may be quantised in place
        later, without registering them again: every cut gives a parameter the same name. It takes a tensor, and behind
        it those of `context_specs`, but for a unit that computes in chunks. If it is a module, it goes
        with the stage to its device and into its mode; it may hold constants, as buffers that are not persistent, and
        no parameters. `RouterLosses` that it has as `routers` are trained with, and reported.

        Args:
            indices: Of the units in the model.
            units: By name, in order.
        """
        return _Chain(units)

    @property
    def loss_chunk_tokens(self) -> int | None:
        """Of how many labels at a time the last unit and the loss are computed; None: of a whole microbatch.

        With chunks the last unit, which must not be the only one, has to compute each position of a sample that has a
        label (B, P.., C) by itself, to draw no random numbers and to have no buffers that change. The same on every
        host: sums over other chunks have other bits.
        """
        return None

    def is_in_chunks(self, index: int) -> bool:
        """Whether unit `index` is computed in chunks, with the loss."""
        return self.loss_chunk_tokens is not None and index == self.num_units - 1

    @property
    def chunk_bytes(self) -> int:
        """About what there is of one chunk of the loss, whatever the number of samples."""
        last, labels = self.num_units - 1, math.prod(self.label_spec().shape)
        logits_gradient_bytes = self.boundary_spec(last).num_bytes
        return (self.loss_chunk_tokens or 0) * (self.activation_bytes(last) + logits_gradient_bytes) // labels

    def activation_bytes(self, index: int) -> int:
        """About what unit `index` keeps of one sample from its forward to its backward, without its input.

        It decides which machines a stage fits. Unless a family knows better, 16 times the larger of what the unit
        takes and what it puts out: a transformer block keeps 17 times that, most others less. What is computed in
        chunks is asked about as if it were not.
        """
        received = self.boundary_spec(index - 1) if index else self.input_spec()
        return _KEPT_TENSORS * max(received.num_bytes, self.boundary_spec(index).num_bytes)

    def unit_name(self, index: int) -> str:
        """The unit's name in parameter names: unique, without dots."""
        return f"unit_{index}"

    def unit_of(self, parameter: str) -> tuple[int, str]:
        """The index of the unit that a parameter of a stage is of, by its name, and its name in the unit."""
        unit, _, inner = parameter.removeprefix("units.").partition(".")
        return self.unit_numbers[unit], inner

    @cached_property
    def unit_numbers(self) -> dict[str, int]:
        """The indices of all units, by name."""
        return {self.unit_name(index): index for index in range(self.num_units)}


class _Chain:
    """Units one after the other."""

    def __init__(self, units: nn.ModuleDict) -> None:
        self._units = units

    def __call__(self, x: Tensor, *context: Tensor) -> Tensor:
        for unit in self._units.values():
            x = unit(x, *context)
        return x


class _Compiled(NamedTuple):
    """What stands for torch's own kernels in training, where the first dimension has one of these sizes."""

    function: Callable[..., Tensor]
    sizes: frozenset[int]


class StageModule(nn.Module):
    """The part of the model that one replica computes; see `build_stage`.

    With `autocast` the units and the loss run under torch's autocast. What stages send each other then has that type:
    half the bytes, and one rounding of a stage's output and of the gradient that comes back for it.

    Attributes:
        stage: 0..num_stages - 1.
        units: By name, in order.
        is_last: Whether the loss is computed of what `forward` returns.
        is_wrapped: Whether the first stage of the model has its last unit.
        last_unit: What computes over the model's last unit, where `loss` does that in chunks; `forward` then returns
            what that unit takes.
        input_spec: One sample of what `forward` takes.
        output_spec: One sample of what `forward` returns.
        label_spec: One sample of the labels that `loss` takes.
        forward_specs: One sample of what `forward` takes, and of the context.
        autocast: The type in which units and loss compute where torch's autocast does so; None: in the parameters'.
        assembled: What computes over the stage's own units, see `Family.assemble`.
    """

    def __init__(
        self,
        family: Family,
        units: nn.ModuleDict,
        indices: StageUnits,
        stage: int,
        num_stages: int,
        autocast: torch.dtype | None = None,
        *,
        in_chunks: bool = True,
    ) -> None:
        super().__init__()
        self.stage = stage
        self.num_stages = num_stages
        self.units = units
        family.tie(units)
        own = indices.own
        self._family = family
        dtype = next((p.dtype for p in units.parameters()), torch.float32)
        sent = autocast or dtype
        received = family.input_spec() if stage == 0 else family.boundary_spec(own.start - 1).with_float(sent)
        self.input_spec: TensorSpec = received
        self.is_last = own.stop == family.num_units
        self.is_wrapped = num_stages > 1 and family.is_tied
        # The last one's output is for its own loss only.
        put_out = dtype if self.is_last else sent
        self._is_in_chunks = in_chunks and family.is_in_chunks(own.stop - 1)
        before_loss = own[:-1] if self._is_in_chunks else own
        self.output_spec: TensorSpec = family.boundary_spec(before_loss.stop - 1).with_float(put_out)
        self.label_spec: TensorSpec = family.label_spec()
        self.forward_specs: tuple[TensorSpec, ...] = (received, *family.context_specs().values())
        self._dtype = dtype
        self.autocast = autocast
        self.assembled = _assembled(family, units, before_loss)
        self.last_unit = _assembled(family, units, own[-1:]) if self._is_in_chunks else None
        self._routers = cast("RouterLosses | None", getattr(self.assembled, "routers", None))
        # In a tuple, where torch does not look: its unit is registered once.
        self._head: tuple[StageModule, ...] = ()
        if indices.head:
            units_of_head = _named(family, units, indices.head)
            of_head = StageUnits(indices.head)
            head = StageModule(family, units_of_head, of_head, num_stages, num_stages, autocast, in_chunks=in_chunks)
            self._head = (head,)
            self.assembled_head = head.last_unit or head.assembled
        self._compiled: _Compiled | None = None
        self._compiled_loss: _Compiled | None = None

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def family_name(self) -> str:
        """What the configuration calls somebody's own family, `package.module:Class`; empty: it is one of shoal's."""
        return "" if is_ours(type(self._family)) else configured_name(type(self._family))

    def parts_of(self, unit_name: str, *, is_of_experts: bool) -> int:
        """As how many samples a module of a unit gets one sample: as its positions where the loss is computed in
        chunks, and where experts take each by itself; else 1."""
        part = self.part(is_head=self.head is not None)
        is_in_chunks = part.last_unit is not None and unit_name == list(part.units)[-1]
        return math.prod(self.label_spec.shape) if is_in_chunks or is_of_experts else 1

    @property
    def head(self) -> StageModule | None:
        """The model's last unit as a stage behind all others, where the first stage of a wrapped model hosts it; its
        unit is one of `units`."""
        return self._head[0] if self._head else None

    @property
    def has_loss(self) -> bool:
        """Whether the loss is computed here: by this stage or by its head."""
        return self.is_last or self.head is not None

    def part(self, *, is_head: bool) -> StageModule:
        """The stage itself, or its head.

        Raises:
            LocalProtocolError: It has none.
        """
        if not is_head:
            return self
        if self.head is None:
            raise LocalProtocolError(f"stage {self.stage} of {self.num_stages} hosts no head")
        return self.head

    def forward(self, x: Tensor, *context: Tensor, is_head: bool = False, labels: Tensor | None = None) -> Tensor:
        """Runs the stage's own units on `x` (B, *input_spec.shape), which stays as it is; or its head.

        Behind `x` comes the context (`Family.context_specs`). Whole numbers may be of any type (`TensorSpec.takes`).
        Which code runs depends on B and the mode alone, see `compute_by`: never on what came before.

        Returns:
            (B, *output_spec.shape), each of that part; or, if there are labels, its `loss`.
        """
        if is_head:
            return self.part(is_head=True)(x, *context, labels=labels)
        taken = [self._widened(tensor, spec) for tensor, spec in zip((x, *context), self.forward_specs, strict=False)]
        output = self._trained_by(self._compiled, self.computed, *taken)
        return output if labels is None else self.loss(output, labels)

    def train(self, mode: bool = True) -> Self:
        """As every module, and the head with it."""
        for head in self._head:
            head.train(mode)
        return super().train(mode)

    @property
    def is_compiled(self) -> bool:
        """Whether compiled code stands for a part of it."""
        return self._compiled is not None

    def compute_by(self, compiled: Callable[..., Tensor], sizes: Collection[int]) -> None:
        """Has `compiled` stand for `computed` in training mode, where B is one of `sizes`."""
        self._compiled = _Compiled(compiled, frozenset(sizes))

    def compute_loss_by(self, compiled: Callable[[Tensor, Tensor], Tensor], sizes: Collection[int]) -> None:
        """Has `compiled` stand for `computed_loss` in training mode, where a chunk has one of `sizes` positions."""
        self._compiled_loss = _Compiled(compiled, frozenset(sizes))

    def _trained_by(self, compiled: _Compiled | None, usual: Callable[..., Tensor], *taken: Tensor) -> Tensor:
        if compiled is None or not self.training or len(taken[0]) not in compiled.sizes:
            return usual(*taken)
        return compiled.function(*taken)

    def computed(self, x: Tensor, *context: Tensor) -> Tensor:
        """As `forward`, by torch's own kernels."""
        return self._computed_by(self.assembled, x, *context)

    def _computed_by(self, assembled: Callable[..., Tensor], x: Tensor, *context: Tensor) -> Tensor:
        if x.is_floating_point():
            # Under autocast too: a residual stream is added up, here and for its gradient, in the parameters' type.
            x = x.to(self._dtype)
        with self._casting(x.device):
            x = assembled(x, *context)
        if self.autocast is not None and x.is_floating_point():
            x = x.to(self.output_spec.torch_dtype)
        return x

    def weighed(self, weight: float) -> AbstractContextManager[list[RouterPass]]:
        """Inside, a forward also trains the stage's routers, if it has any: see `RouterLosses.weighed`.

        Args:
            weight: The microbatch's share of the step's targets.
        """
        if self._routers is None:
            return nullcontext([])
        device = next((p.device for p in self.parameters()), torch.device("cpu"))
        return self._routers.weighed(weight, device)

    def _widened(self, tensor: Tensor, spec: TensorSpec) -> Tensor:
        return tensor if tensor.is_floating_point() else tensor.to(spec.torch_dtype)

    def _casting(self, device: torch.device) -> AbstractContextManager[object]:
        return torch.autocast(device.type, self.autocast) if self.autocast is not None else nullcontext()

    def loss(self, output: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
        """The family's mean loss over the targets, of which there must be one, from what `forward` returns.

        Args:
            scale: From about which gradient the backward will start: what is differentiated before it starts from that.

        Raises:
            LocalProtocolError: The loss is not computed here.
        """
        if not self.has_loss:
            raise LocalProtocolError(f"stage {self.stage} of {self.num_stages} has no loss, only one stage has")
        if self.head is not None:
            return self.head.loss(output, labels, scale)
        labels, chunk = self._widened(labels, self.label_spec), self._family.loss_chunk_tokens
        if self.last_unit is None or chunk is None:
            return self.computed_loss(output, labels)
        unit = self.units[self._family.unit_name(self._family.num_units - 1)]
        trained = [parameter for parameter in unit.parameters() if parameter.requires_grad]
        return ChunkedLoss(self._loss_of_chunk, labels, trained, chunk, scale).of(output)

    @torch.no_grad()
    def figures(self, output: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """What the family reports beside the `loss` of the same; see `Family.figures`."""
        part = self.head or self
        if part.last_unit is not None:
            return {}
        return part._family.figures(output, self._widened(labels, self.label_spec))

    def computed_loss(self, received: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of a chunk, or of a microbatch where there are none, by torch's own kernels."""
        # Also where a backward computes it again.
        with self._casting(received.device):
            output = received if self.last_unit is None else self._computed_by(self.last_unit, received)
            return self._family.loss(output, labels)

    def chunk_sizes(self, num_samples: int) -> frozenset[int]:
        """How many positions the chunks of a microbatch's loss have; empty where it is not computed in chunks."""
        chunk, positions = self._family.loss_chunk_tokens, num_samples * math.prod(self.label_spec.shape)
        if self.last_unit is None or chunk is None:
            return frozenset()
        return frozenset({min(chunk, positions), positions % chunk}) - {0}

    @property
    def chunk_specs(self) -> tuple[TensorSpec, TensorSpec]:
        """One position of what the loss in chunks takes, and of its labels."""
        positions = self.label_spec.shape
        one = (1,) * len(positions)
        taken = replace(self.output_spec, shape=(*one, *self.output_spec.shape[len(positions) :]))
        return taken, replace(self.label_spec, shape=one)

    def _loss_of_chunk(self, received: Tensor, labels: Tensor) -> Tensor:
        return self._trained_by(self._compiled_loss, self.computed_loss, received, labels)

    # nn.Module's own hint says Any; callers of a stage get a tensor.
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return cast("Tensor", super().__call__(*args, **kwargs))


PrepareUnit = Callable[[int, nn.Module], None]
"""Changes a unit, which it is given with its index, before a stage is made of it: its values, what of it is trained."""


def build_stage(
    family: Family,
    stage: int,
    num_stages: int,
    *,
    seed: int,
    cut: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    in_chunks: bool = True,
    prepare: PrepareUnit | None = None,
) -> StageModule:
    """Builds one stage on the CPU, in training mode.

    Each unit's initial values are a pure function of `seed` and the unit's index: neither the cut nor any global
    state (generator, default dtype) changes them, and no global state is changed. They are drawn in float32 whatever
    `dtype` is.

    Args:
        num_stages: Into how many the model is cut.
        cut: Number of units of each stage; None: by `unit_costs`.
        dtype: Of parameters and floating buffers.
        autocast: Forwards and loss compute in this type where torch's autocast does so, and stages send each other
            tensors of it; None: all in `dtype`.
        in_chunks: The loss is computed in chunks where the family says so (`Family.loss_chunk_tokens`); False: the last
            stage puts out what the last unit does.
        prepare: Is given each unit once it has its initial values; None: that is what is trained.

    Raises:
        ConfigError: The model cannot be cut like this, or there is no such stage.
        ShoalError: What `prepare` raises.
    """
    if not 0 <= stage < num_stages:
        raise ConfigError(f"there is no stage {stage} of {num_stages}; choose 0 to {num_stages - 1}")
    indices = stage_units(family, num_stages, cut)[stage]
    units = nn.ModuleDict()
    for index in indices.indices:
        unit = initial_unit(family, index, seed).to(dtype)
        if prepare is not None:
            prepare(index, unit)
        units[family.unit_name(index)] = unit
    return StageModule(family, units, indices, stage, num_stages, autocast, in_chunks=in_chunks)


def initial_unit(family: Family, index: int, seed: int) -> nn.Module:
    """Builds a unit on the CPU, in float32, with the initial values of a run's seed.

    Raises:
        MisfitError: Code of somebody's own family raises, or gives no module.
    """
    kind = type(family)
    with asked(kind, f"build_unit({index})"), seeded(unit_seed(seed, index)), default_float32():
        return require_module(kind, index, family.build_unit(index))


def whole_stage(
    family: Family, units: Mapping[str, nn.Module], autocast: torch.dtype | None = None, *, in_chunks: bool = False
) -> StageModule:
    """Makes the uncut model of all its units, which may be in any order. Arguments as of `build_stage`."""
    everything = StageUnits(range(family.num_units))
    named = _named(family, units, everything.own)
    return StageModule(family, named, everything, 0, 1, autocast, in_chunks=in_chunks)


def _assembled(family: Family, units: nn.ModuleDict, indices: range) -> Callable[..., Tensor]:
    """What computes over some of the units, which may be none."""
    named = _named(family, units, indices)
    return family.assemble(indices, named) if indices else _Chain(named)


def _named(family: Family, units: Mapping[str, nn.Module] | nn.ModuleDict, indices: range) -> nn.ModuleDict:
    """Some of the units, in order."""
    names = map(family.unit_name, indices)
    return nn.ModuleDict({name: units[name] for name in names})


def stage_units(family: Family, num_stages: int, cut: Sequence[int] | None = None) -> list[StageUnits]:
    """The units of every stage: by the counts in `cut`, else evenly by cost.

    Raises:
        ConfigError: The model cannot be cut like this.
    """
    if cut is None:
        cut = counts_by_cost(checked_unit_costs(family), num_stages, is_tied=family.is_tied)
    return units_by_counts(cut, family.num_units, num_stages, is_tied=family.is_tied)


def checked_unit_costs(family: Family) -> list[float]:
    """What the family says that its units cost.

    Raises:
        ConfigError: Those are not one finite number for each unit, 0 or more.
    """
    costs = [float(cost) for cost in family.unit_costs()]
    if len(costs) != family.num_units or not all(math.isfinite(cost) and cost >= 0 for cost in costs):
        raise ConfigError(
            f"model.family: unit_costs of {type(family).__name__} gives {costs}: it has to give one number of 0 or "
            f"more for each of its {family.num_units} units"
        )
    return costs


@contextmanager
def default_float32() -> Generator[None]:
    """Inside, torch makes float32 where nothing else is said."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)
