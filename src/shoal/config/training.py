"""Sections `run`, `data` and `diloco`: what is trained on, for how long, and with which optimizers."""

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from shoal.config.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section

POSITIONS = "positions"
"""The name of the places of tokens in their texts."""

LENGTHS = "lengths"
"""The name of how many samples of a clip of audio are no padding."""

LEAST_TRAINED = 257
"""Tokens of the smallest tokenizer that is trained."""


InnerOptimType = Literal["adam", "sgd", "muon"]


def trained_size(tokenizer: str | None) -> int | None:
    """Return how many tokens a tokenizer is to have that is to be trained: `train:1024`; None: it is another one."""
    found = re.fullmatch(r"train:(\d{1,9})", tokenizer or "")
    return int(found[1]) if found else None


class RunConfig(Section):
    """How the whole run behaves."""

    deterministic: bool = Field(
        default=False,
        description="Samples depend only on (seed, pass, round, trainer slot, step), so that two undisturbed runs end "
        "with equal hashes. All trainers get equally many: machines of different speed wait for the slowest.",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of the initial weights, the shuffling and dropout.")
    eval_every: PositiveInt = Field(
        default=1,
        description="Outer rounds from one evaluation on the held-out samples to the next; the initial and the last "
        "parameters are always evaluated.",
    )

    def evaluates(self, base_round: int, outer_steps: int) -> bool:
        """Return whether the parameters that `base_round` rounds have led to are evaluated, in a run of
        `outer_steps`."""
        return base_round % self.eval_every == 0 or base_round == outer_steps

    first_deadline_s: PositiveFloat = Field(
        default=600.0, description="Longest duration of an outer round before three rounds have shown what is usual."
    )


class AugmentConfig(Section):
    """Random changes of images that are trained on; a sample that is evaluated on stays as it is."""

    crop_padding: NonNegativeInt = Field(
        default=0,
        description="A random crop of the image after so many pixels were added on each side, in which it is mirrored. "
        "0: none.",
    )
    horizontal_flip: bool = Field(default=False, description="Every other image, at random, is mirrored left to right.")


class DataConfig(Section):
    """Where samples come from and what shape they have."""

    dataset_name: str = Field(
        default="pydoc-topics",
        min_length=1,
        description='Built in, no download: "pydoc-topics" (English text), "digits" (8x8 images), "tones" (a tone for '
        "each character). Or a folder of the client's host, as ./corpus, with text files, or images in one folder for "
        "each class, or audio with transcripts, or parquet, JSON lines "
        'or CSV with columns "text", or "image" and "label"; for text also one file, a pattern as ./corpus/*.parquet, '
        "or token files (token_dtype). Or a class of your own as package.module:Class: a map-style data set of torch, "
        "or a Source or DataSet of shoal.data.source. Any other name is loaded from the Hugging Face hub.",
    )
    arguments: dict[str, Any] = Field(
        default={},
        description="Keyword arguments of a class of your own. If it takes split, it gets dataset_split and eval_split "
        "for what is evaluated on.",
    )
    dataset_config: str | None = Field(default=None, description='Subset of a hub data set, e.g. "wikitext-2-raw-v1".')
    dataset_split: str = Field(default="train", min_length=1, description="Split of a hub data set that is trained on.")
    hf_token: SecretStr | None = Field(
        default=None,
        description="Token for gated hub data sets; the environment variable HF_TOKEN serves as well. Never written "
        "to logs or to the resolved configuration.",
    )
    tokenizer: str | None = Field(
        default=None,
        min_length=1,
        description="What makes tokens of text: a folder with a tokenizer.json, a name on the Hugging Face hub, or "
        "train:1024, a byte-level BPE of at most so many tokens, trained on the first 16 MiB of the text. null: tokens "
        "are bytes.",
    )
    tokenizer_hash: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="The SHA-256 of the tokenizer, of its chat template and of which token ends a document. null: it "
        "is found where a run begins, and others have it from the run.",
    )
    text_column: str = Field(
        default="text",
        min_length=1,
        description="Column of parquet, JSON lines, CSV and the hub with the text (llm), or the transcript (speech).",
    )
    messages_column: str | None = Field(
        default=None,
        min_length=1,
        description="Column with conversations, lists of messages with role and content, to train on their answers "
        "alone (chat fine-tuning): the chat template of data.tokenizer makes text of them, and several share a sample, "
        "apart from each other. null: it is plain text.",
    )
    tools_column: str = Field(
        default="tools",
        min_length=1,
        description="Column with the tools of a conversation, a list or JSON of one, which its template writes, where "
        "there is such a column.",
    )
    eval_split: str | None = Field(
        default=None,
        min_length=1,
        description="What is evaluated on: a split of the data set, or a folder with a / in it, for text also a file, "
        "or a pattern. null: holdout_fraction of what is trained on.",
    )
    max_documents: PositiveInt | None = Field(
        default=None,
        description="Only so many documents, the first ones, are taken of text; of the hub no more than these are "
        "downloaded. null: all.",
    )
    max_bad_fraction: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Documents that cannot be read or are no text, clips of audio, images and samples of your own that "
        "cannot be read, are skipped, counted and named; a larger share of them ends the run.",
    )
    token_dtype: Literal["uint8", "uint16", "int32"] | None = Field(
        default=None,
        description="What is trained on are token files: *.bin, whole numbers of this type one after the other, or "
        "*.npy, arrays of it. null: it is text.",
    )
    cache_dir: Path | None = Field(
        default=None,
        description="Where this host keeps tokens of text from one start to the next; may be emptied. null: tokens in "
        "the user's cache folder of shoal.",
    )
    num_workers: int = Field(
        default=0,
        ge=0,
        le=256,
        description="Processes in which the data server of this host prepares batches: as many as decoding keeps busy. "
        "0: two threads of the data server itself, which is best for data that lies in memory.",
    )
    precision: Literal["32-true", "bf16-mixed", "fp16-mixed"] = Field(
        default="32-true",
        description='"32-true": float32 everywhere; "bf16-mixed": forwards and what stages send each other in bfloat16 '
        "where torch's autocast does so, parameters, their gradients and the optimizer in float32; "
        '"fp16-mixed": the same in float16, for GPUs without bfloat16: the loss is scaled up, and a step whose '
        "gradients get too large for that is skipped and halves the scale. Each trainer begins with 65536.",
    )
    task_type: Literal["llm", "cv", "image_gen", "speech"] = Field(
        default="llm",
        description='"llm": next-token prediction on text; "cv": image classification; "image_gen": making images of a '
        'class; "speech": transcripts of audio.',
    )
    sampling_rate: int = Field(
        default=16_000,
        ge=1_000,
        le=192_000,
        description="Samples of audio in a second; clips of another rate are converted (speech).",
    )
    max_audio_s: PositiveFloat = Field(
        default=20.0,
        description="Length of a clip of audio: shorter ones are padded, longer ones left out and counted (speech).",
    )
    max_characters: PositiveInt = Field(
        default=512,
        description="Characters of a transcript: clips with a longer one are left out and counted (speech).",
    )
    characters: str | None = Field(
        default=None,
        min_length=1,
        description="The characters of transcripts in the order of their numbers, from 1; a clip with another one is "
        "skipped. null: those that there are, found where a run begins, and others have them from the run (speech).",
    )
    num_channels: PositiveInt = Field(default=3, description="Channels of an image (cv, image_gen).")
    img_size: PositiveInt = Field(default=32, description="Width and height of an image in pixels (cv, image_gen).")
    seq_len: PositiveInt = Field(default=128, description="Tokens in a sample (llm).")
    holdout_fraction: float = Field(
        default=0.05, gt=0, lt=1, description="Share of the samples that is kept for evaluation and never trained on."
    )
    augment: AugmentConfig = Field(
        default=AugmentConfig(), description="Random changes of images that are trained on, anew in each pass (cv)."
    )
    holdout_fold: int = Field(
        default=0,
        ge=0,
        description="Which share that is, for cross-validation: with a holdout_fraction of 0.2 there are 0 to 4, which "
        "have no sample in common (cv, image_gen).",
    )

    @model_validator(mode="after")
    def _check_own(self) -> Self:
        if self.is_own and self.task_type == "speech":
            raise ValueError(
                f"dataset_name = {self.dataset_name}: clips of audio come from a folder or a table, not from a class "
                "of your own; write them to a folder with a metadata.csv"
            )
        return self

    @model_validator(mode="after")
    def _check_fold(self) -> Self:
        if self.holdout_fold and self.task_type in ("llm", "speech"):
            raise ValueError(f"holdout_fold = {self.holdout_fold}: only images are held out in folds; leave it out")
        if self.holdout_fold and self.eval_split is not None:
            raise ValueError(
                f"holdout_fold = {self.holdout_fold} and eval_split = {self.eval_split}: folds are of what is trained "
                "on; leave one of the two out"
            )
        # A fraction such as 0.1 is not exactly a tenth.
        if (self.holdout_fold + 1) * self.holdout_fraction > 1 + 1e-9:
            raise ValueError(
                f"holdout_fold = {self.holdout_fold}: with holdout_fraction = {self.holdout_fraction} the last one is "
                f"{int((1 + 1e-9) / self.holdout_fraction) - 1}"
            )
        return self

    @property
    def is_own(self) -> bool:
        """Whether the samples come from code of the user's own, and not from files or the hub."""
        return ":" in self.dataset_name and "/" not in self.dataset_name

    @property
    def context(self) -> tuple[str, ...]:
        """What every stage gets of a sample, by name: positions of tokens, where several texts share a sample; lengths
        of clips."""
        if self.task_type == "speech":
            return (LENGTHS,)
        return () if self.messages_column is None else (POSITIONS,)

    @property
    def audio_samples(self) -> int:
        """Samples of the longest clip of audio."""
        return round(self.max_audio_s * self.sampling_rate)

    @field_validator("characters")
    @classmethod
    def _check_characters(cls, value: str | None) -> str | None:
        if value is not None and len(set(value)) < len(value):
            raise ValueError("characters: one is there twice; name each of them once")
        return value

    @property
    def has_bytes(self) -> bool:
        """Whether the tokens of text are its bytes."""
        return self.tokenizer is None and self.token_dtype is None

    @field_validator("tokenizer")
    @classmethod
    def _check_tokenizer(cls, value: str | None) -> str | None:
        size = trained_size(value)
        if size is not None and size < LEAST_TRAINED:
            raise ValueError(f"the bytes and the end of a text are {LEAST_TRAINED} tokens: train at least so many")
        return value

    @field_validator("precision", mode="before")
    @classmethod
    def _refuse_other_precisions(cls, value: object) -> object:
        if value in ("bf16-true", "16-true", "64-true"):
            raise ValueError("this precision is not supported; use '32-true', 'bf16-mixed' or 'fp16-mixed'")
        return "fp16-mixed" if value == "16-mixed" else value

    @field_validator("task_type", mode="before")
    @classmethod
    def _refuse_other_tasks(cls, value: object) -> object:
        if value in ("node_pred", "rl"):
            raise ValueError("this task is not supported yet; use 'llm', 'cv', 'image_gen' or 'speech'")
        return value


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
        description='"adam" is AdamW (decoupled weight decay); "muon" steps the matrices of hidden layers, and adam, '
        "with its own settings, all other parameters.",
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
        description='Form of the decay after the warm-up; "wsd": none until the last steps (decay_fraction).',
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
    averaging_compression: Literal["none", "bf16", "fp16", "int8", "int4", "int4_e3m0", "2bit", "sparse"] = Field(
        default="none",
        description="As what pseudo-gradients travel. bf16, fp16: half the bytes, rounded at every hop. int8, int4, "
        "int4_e3m0 (floats of 4 bits), 2bit: 4, 8, 8 and 15 times fewer, encoded once by each replica. sparse: only "
        "the largest values, see averaging_density. docs/learning.md has what each costs.",
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
        "(error feedback). null: 0.95 with sparse, 1 with 2bit, else nothing.",
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
        return {"sparse": 0.95, "2bit": 1.0}.get(self.averaging_compression, 0.0)

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
                "int4_e3m0, 2bit or sparse"
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
