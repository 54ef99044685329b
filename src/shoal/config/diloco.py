"""Section `diloco`: inner steps, outer rounds, their optimizers, and what travels in a round."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from shoal.config.base import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section

AveragingCompression = Literal["none", "bf16", "fp16", "int8", "int4", "int4_e3m0", "2bit", "sparse", "auto"]

AUTO_BYTES_PER_VALUE: Final[Mapping[str, float]] = MappingProxyType({"int8": 1.0, "int4": 0.508, "2bit": 0.266})
"""What `averaging_compression = auto` may choose, the finest first, and the bytes of a value."""

InnerOptimType = Literal["adam", "sgd", "muon"]


class ParameterGroup(Section):
    """Other settings for some parameters; at least one pattern has to match a parameter that is trained.

    Of several groups that match, the last one counts that says a setting.
    """

    name_patterns: tuple[str, ...] = Field(
        min_length=1,
        description='Globs for names of parameters, from their unit on, e.g. "block_0.*" or "*.bias"; `shoal model '
        "profile` lists the units. One of them has to match.",
    )
    every_steps: PositiveInt | None = Field(
        default=None,
        description="Only each so many-th step of a trainer changes them, by its own gradient. null: every one.",
    )
    sgd_lr: PositiveFloat | None = Field(default=None, description="Peak learning rate; null: as of all others.")
    sgd_momentum: Fraction | None = Field(default=None, description="null: as of all others.")
    sgd_nesterov: bool | None = Field(default=None, description="null: as of all others.")
    adam_lr: PositiveFloat | None = Field(default=None, description="Peak learning rate; null: as of all others.")
    adam_weight_decay: NonNegativeFloat | None = Field(default=None, description="null: as of all others.")
    adam_betas1: Fraction | None = Field(default=None, description="null: as of all others.")
    adam_betas2: Fraction | None = Field(default=None, description="null: as of all others.")
    adam_eps: PositiveFloat | None = Field(default=None, description="null: as of all others.")
    muon_lr: PositiveFloat | None = Field(default=None, description="Peak learning rate; null: as of all others.")
    muon_momentum: Fraction | None = Field(default=None, description="null: as of all others.")
    muon_nesterov: bool | None = Field(default=None, description="null: as of all others.")
    muon_weight_decay: NonNegativeFloat | None = Field(default=None, description="null: as of all others.")
    muon_ns_steps: Annotated[int, Field(ge=1, le=99)] | None = Field(
        default=None, description="null: as of all others."
    )
    muon_adjust_lr: Literal["original", "match_rms_adamw"] | None = Field(
        default=None, description="null: as of all others."
    )

    def matches(self, name: str) -> bool:
        """Return whether a parameter of that name, from its unit on, belongs to the group."""
        return any(fnmatchcase(name, pattern) for pattern in self.name_patterns)

    @property
    def said(self) -> dict[str, Any]:
        """What it says, by key."""
        return self.model_dump(exclude={"name_patterns"}, exclude_none=True)


class InnerOptimConfig(Section):
    """The optimizer of every training step, one per replica."""

    type: InnerOptimType = Field(
        default="adam",
        description='"sgd" has momentum and no weight decay; "adam" is AdamW (decoupled weight decay); "muon" steps '
        "the matrices of hidden layers, and adam, with its own settings, all other parameters.",
    )
    sgd_lr: PositiveFloat = Field(default=0.1, description="Peak learning rate of sgd.")
    sgd_momentum: Fraction = Field(default=0.9, description="Momentum of sgd.")
    sgd_nesterov: bool = Field(default=True, description="Nesterov's form of the momentum of sgd.")
    adam_lr: PositiveFloat = Field(default=4e-4, description="Peak learning rate of adam.")
    adam_weight_decay: NonNegativeFloat = Field(default=0.1, description="Weight decay of adam, times learning rate.")
    adam_betas1: Fraction = Field(default=0.9, description="Decay of adam's first moment.")
    adam_betas2: Fraction = Field(default=0.95, description="Decay of adam's second moment.")
    adam_eps: PositiveFloat = Field(
        default=1e-8, description="Added to the root of adam's second moment before it divides."
    )
    muon_lr: PositiveFloat = Field(default=0.02, description="Peak learning rate of muon.")
    muon_momentum: Fraction = Field(default=0.95, description="Momentum of muon.")
    muon_nesterov: bool = Field(default=True, description="Nesterov's form of the momentum of muon.")
    muon_weight_decay: NonNegativeFloat = Field(default=0.1, description="Weight decay of muon, times learning rate.")
    muon_ns_steps: int = Field(
        default=5, ge=1, le=99, description="Newton-Schulz iterations that make the direction of muon orthogonal."
    )
    muon_adjust_lr: Literal["original", "match_rms_adamw"] = Field(
        default="original",
        description='How the rate of muon follows the shape of a matrix (A, B): "original": times the root of A / B '
        'where that is above 1; "match_rms_adamw": times 0.2 times the root of the larger one, so that rates of adam '
        "fit.",
    )
    muon_except: tuple[str, ...] = Field(
        default=("embedding.*", "stem.*", "head.*"),
        description="Globs for names of parameters, from their unit on, that adam steps although they are matrices: "
        "those of the first and the last layer. One of them has to match; [] means none.",
    )
    groups: tuple[ParameterGroup, ...] = Field(
        default=(), description="Parameters that have other settings; lr_schedule scales their rates as all others."
    )

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        others = tuple(f"{prefix}_" for prefix in ("adam", "sgd", "muon") if prefix not in self._types)
        for position, group in enumerate(self.groups):
            if not group.said:
                raise ValueError(f"groups[{position}] says nothing about {list(group.name_patterns)}: give a setting")
            if odd := [key for key in group.said if key.startswith(others)]:
                raise ValueError(f"groups[{position}]: {', '.join(odd)} means nothing to type = {self.type}; remove it")
        return self

    @property
    def _types(self) -> tuple[InnerOptimType, ...]:
        """The optimizers that step some parameter."""
        return ("muon", "adam") if self.type == "muon" else (self.type,)

    def type_of(self, name: str, num_dimensions: int) -> InnerOptimType:
        """Return which optimizer steps a parameter of that name, from its unit on."""
        if self.type != "muon":
            return self.type
        return "adam" if num_dimensions != 2 or self.is_excepted(name) else "muon"

    def is_excepted(self, name: str) -> bool:
        """Return whether muon leaves the parameter of that name, from its unit on, to adam whatever its shape."""
        return any(fnmatchcase(name, pattern) for pattern in self.muon_except)

    def settings_of(self, name: str, num_dimensions: int) -> "InnerOptimSettings":
        """Return how a parameter of that name, from its unit on, is stepped: also the type is its own."""
        said: dict[str, Any] = {"every_steps": 1, "type": self.type_of(name, num_dimensions)}
        for group in self.groups:
            if group.matches(name):
                said |= group.said
        every_steps = said.pop("every_steps")
        return InnerOptimSettings(self.model_copy(update={"groups": (), **said}), every_steps)

    @property
    def lr(self) -> float:
        """The peak learning rate of the chosen type."""
        return {"adam": self.adam_lr, "sgd": self.sgd_lr, "muon": self.muon_lr}[self.type]


class InnerOptimSettings(NamedTuple):
    """How one parameter is stepped: the optimizer without groups, and by each so many-th step of a trainer."""

    optim: InnerOptimConfig
    every_steps: int


class OuterOptimConfig(Section):
    """The optimizer of the outer rounds (DiLoCo, arXiv:2311.08105)."""

    type: Literal["sgd"] = Field(default="sgd", description="Nesterov sgd on the averaged pseudo-gradient.")
    sgd_lr: PositiveFloat = Field(default=0.7, description="Outer learning rate.")
    sgd_momentum: Fraction = Field(default=0.9, description="Outer momentum.")
    sgd_nesterov: bool = Field(default=True, description="Nesterov's form of the outer momentum.")

    @field_validator("type", mode="before")
    @classmethod
    def _refuse_other_types(cls, value: object) -> object:
        if value == "adam":
            raise ValueError("an outer adam is not supported yet; use 'sgd'")
        return value


class LrScheduleConfig(Section):
    """How the inner learning rate changes over the `inner_steps * outer_steps` steps of a trainer."""

    type: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="constant",
        description='"constant", "linear", "cosine": the course after the warm-up; "wsd": constant until the last '
        "steps (decay_fraction).",
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps in which the rate rises linearly to its peak.")
    decay_fraction: float = Field(
        default=0.2, gt=0, le=1, description="Share of all steps, at the end, in which the rate of wsd decays."
    )
    decay_form: Literal["linear", "1-sqrt"] = Field(
        default="1-sqrt", description="How it does: in a line, or by 1 minus the root of what is done of the decay."
    )
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1, description="Rate at the end, as a share of the peak.")


class DilocoConfig(Section):
    """Inner steps, outer rounds and their optimizers."""

    inner_optim: InnerOptimConfig = Field(default=InnerOptimConfig(), description="Optimizer of the training steps.")
    outer_optim: OuterOptimConfig = Field(default=OuterOptimConfig(), description="Optimizer of the outer rounds.")
    lr_schedule: LrScheduleConfig = Field(default=LrScheduleConfig(), description="Inner learning rate over time.")
    inner_state: Literal["kept", "reset"] = Field(
        default="kept",
        description="What the inner optimizer knows (its moments) when a round ends: each replica keeps its own, or "
        "begins anew with every round.",
    )
    inner_steps: PositiveInt = Field(default=50, description="Training steps of each trainer between two rounds.")
    outer_steps: PositiveInt = Field(default=10, description="Outer rounds of the run.")
    fragments: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Parts of the parameters of which each round averages one in turn, so that a round sends so many "
        "times less (Streaming DiLoCo, arXiv:2501.18512); divide inner_steps by as much. 1: each averages all.",
    )
    overlap_steps: int = Field(
        default=0,
        ge=0,
        description="Steps at the end of each round, but of the last one, that go on while what was learnt before them "
        "is averaged; the next round averages them. They hide the time that pseudo-gradients travel, and need an "
        "averaging_compression that is encoded as a whole. 0: none, the link is used when the steps are done.",
    )
    overlap_merge: Literal["mean", "carry"] = Field(
        default="mean",
        description='What a replica makes of the average and of what it has learnt meanwhile. "mean": the mean of the '
        'average and its own parameters (Streaming DiLoCo). "carry": the average, plus what it has learnt since.',
    )
    batch_size_per_step: PositiveInt = Field(
        default=64,
        description="Samples in a batch: of each trainer in deterministic runs, else on average over the trainers, of "
        "whom the faster ones get more.",
    )
    gradient_accumulation_steps: PositiveInt = Field(
        default=1, description="Batches of batch_size_per_step samples that make one training step."
    )
    max_grad_norm: PositiveFloat | None = Field(
        default=1.0, description="Gradients are scaled down to this norm over all stages; null does not clip."
    )
    max_pseudo_gradient_ratio: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = Field(
        default=10.0,
        description="A pseudo-gradient that is longer than so many times the median of its stage (each divided by the "
        "root of its number of steps) is clipped to that, where three replicas or more have trained; null: never.",
    )
    averaging_timeout_s: PositiveFloat = Field(
        default=60.0,
        description="Longest duration of averaging within a stage before a new attempt without the silent.",
    )
    averaging_compression: AveragingCompression = Field(
        default="none",
        description="As what pseudo-gradients travel. bf16, fp16: half the bytes, rounded at every hop. int8, int4, "
        "int4_e3m0 (floats of 4 bits), 2bit: 4, 8, 8 and 15 times fewer, encoded once by each replica. sparse: only "
        "the largest values, see averaging_density. auto: for each round int8, int4 or 2bit, as the links that the "
        "replicas have measured allow. docs/learning.md has what each costs.",
    )
    averaging_density: float = Field(
        default=0.0625,
        gt=0,
        le=1,
        description="Share of the values that sparse sends of each 4,096: 0.0625 is about 64 times fewer bytes.",
    )
    averaging_feedback: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="What a replica adds of all that was left out or rounded away so far to its next pseudo-gradient "
        "(error feedback). null: 0.95 with sparse, 1 with 2bit and auto, else nothing.",
    )
    averaging_over: Literal["all", "senders"] | None = Field(
        default=None,
        description="Of which replicas a value is the mean: all, where one that has not sent it counts as zero, or "
        "those that have sent it. null: senders with sparse, else all.",
    )
    load_state_timeout_s: PositiveFloat = Field(
        default=600.0,
        description="A newcomer that has not got the state of its stage so long after the first offer asks everybody "
        "again, also those whose bytes were wrong.",
    )

    snapshot_every_steps: int = Field(
        default=0,
        ge=0,
        description="Every so many steps of a round a replica sends a snapshot of itself to a server of another stage. "
        "One that is killed and started again goes on from there, and only what came after it is lost. 0: never.",
    )

    @property
    def is_gathered(self) -> bool:
        """Whether pseudo-gradients are encoded as a whole, so that each member gets all others'."""
        return self.averaging_compression not in ("none", "bf16", "fp16")

    @property
    def feedback(self) -> float:
        """The decay of what a replica has not sent yet; 0: it is forgotten."""
        if self.averaging_feedback is not None:
            return self.averaging_feedback
        return {"sparse": 0.95, "2bit": 1.0, "auto": 1.0}.get(self.averaging_compression, 0.0)

    @property
    def compression_choices(self) -> Mapping[str, float]:
        """The codecs of which each round has one, the finest first, with the bytes that they make of a value; empty if
        all rounds have the same."""
        return AUTO_BYTES_PER_VALUE if self.averaging_compression == "auto" else {}

    @property
    def averages_senders(self) -> bool:
        """Whether a value is averaged over those replicas alone that have sent it."""
        return (self.averaging_over or ("senders" if self.averaging_compression == "sparse" else "all")) == "senders"

    @model_validator(mode="after")
    def _check_compression(self) -> Self:
        if not self.is_gathered and (self.averaging_feedback or self.averaging_over):
            raise ValueError(
                f"averaging_feedback and averaging_over mean nothing to averaging_compression = "
                f"{self.averaging_compression}, whose sums are formed on their way: remove them, or choose int8, int4, "
                "int4_e3m0, 2bit, sparse or auto"
            )
        return self

    @model_validator(mode="after")
    def _check_overlap(self) -> Self:
        if self.overlap_steps >= self.inner_steps:
            raise ValueError(
                f"overlap_steps = {self.overlap_steps} are no part of the inner_steps = {self.inner_steps} of a round: "
                "choose fewer"
            )
        if self.overlap_steps and not self.is_gathered:
            raise ValueError(
                f"overlap_steps = {self.overlap_steps} would hide nothing with averaging_compression = "
                f"{self.averaging_compression}, whose sums are formed when all have joined: choose int8, int4, "
                "int4_e3m0, 2bit, sparse or auto, or remove it"
            )
        if self.overlap_merge != "mean" and not self.overlap_steps:
            raise ValueError(
                f"overlap_merge = {self.overlap_merge} means nothing without overlap_steps: remove it, or choose some"
            )
        return self

    @property
    def samples_per_step(self) -> int:
        """Samples in one full training step of one trainer."""
        return self.batch_size_per_step * self.gradient_accumulation_steps

    def steps_of(self, round: int) -> range:
        """Return the numbers of a trainer's steps in a round (1-based), counted over the whole run."""
        first = (round - 1) * self.inner_steps
        return range(first, first + self.inner_steps)

    @property
    def total_steps(self) -> int:
        """Training steps of one trainer over the whole run."""
        return self.inner_steps * self.outer_steps
