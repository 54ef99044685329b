"""The whole configuration as one frozen tree, and the checks that need more than one section."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, cast

from pydantic import Field, ValidationInfo, field_validator, model_validator

from shoal.config.base import Section
from shoal.config.diloco import DilocoConfig
from shoal.config.emulation import EmulationConfig
from shoal.config.host import (
    DashboardConfig,
    HealthConfig,
    NetworkConfig,
    NotifyConfig,
    ParamMirrorConfig,
    ServersConfig,
)
from shoal.config.lora import LoraConfig
from shoal.config.model import ModelConfig, ModelPipelineConfig
from shoal.config.per_server import length_problem
from shoal.config.pipeline_entries import apply_pipeline
from shoal.config.quant import QuantConfig
from shoal.config.training import AugmentConfig, DataConfig, RunConfig, trained_size
from shoal.ids import PREFIX_PATTERN

SHARED_SECTIONS = ("run", "data", "model", "diloco", "quant", "lora", "model_pipeline")
"""Of these all hosts of a run have the same, but for a few keys (`config.shared`)."""

NAME_OR_PATH = "model.name_or_path"

_OF_THE_MODEL = ("model.hf_config", "model.commit", "model.weights")
FOUND_BY: Mapping[str, tuple[str, ...]] = {
    NAME_OR_PATH: _OF_THE_MODEL,
    "model.revision": _OF_THE_MODEL,
    "data.tokenizer": ("data.tokenizer_hash",),
    "data.dataset_name": ("data.classes",),
}
"""What is found by a name where a run begins, and is not known any more under another name."""

UNITS_BY = ("model.family", "model.num_layers", NAME_OR_PATH, "model.extra")
"""What decides how many units there are to be cut."""

AS_RUN: Final = MappingProxyType({"is_run": True})
"""The context of a validation that is to find also what keeps the values from being a run by themselves."""

_LOSS_UNITS: Final = {
    "llm": "nats per token",
    "cv": "nats per image",
    "speech": "nats per character",
    "image_gen": "of both players per image",
}
_TASK_OF_FAMILY = {
    "gpt": "llm",
    "hf": "llm",
    "mlp": "cv",
    "resnet18": "cv",
    "resnet50": "cv",
    "resnet101": "cv",
    "biggan": "image_gen",
    "wav2vec2": "speech",
}


class Config(Section):
    """Everything that a run can be told; every part of shoal gets it from here and reads nothing else."""

    experiment_prefix: str = Field(
        default="shoal",
        description="Start of the run id; names the run's folder under log_dir.",
    )
    device: str = Field(
        default="auto",
        description='"auto": server i uses GPU i of those that torch sees (CUDA_VISIBLE_DEVICES hides some), the CPU '
        'where it sees none; or "cpu", "cuda", "cuda:<i>", also for AMD, where "rocm" and "rocm:<i>" mean the same; or '
        '"mps", the GPU of a Mac, which "auto" never means; or one for each server of this host, as in "cuda:0,cpu".',
    )
    log_dir: Path = Field(default=Path("logs"), description="Each run writes to log_dir/<run_id>.")
    log_level: Literal["debug", "info", "warning"] = Field(
        default="info", description="The least severe events in the log files; debug adds one for every training step."
    )
    checkpoint_dir: str | None = Field(
        default=None,
        description="Where the checkpoints of runs lie: a folder, or s3://bucket/prefix. null: checkpoints in log_dir.",
    )
    wandb: bool = Field(default=True, description="Log to Weights & Biases, offline without an account.")
    wandb_project: str | None = Field(default="shoal", description="W&B project; null: W&B's own default.")
    wandb_entity: str | None = Field(default=None, description="W&B user or team; null: your default one.")
    wandb_run_id: str | None = Field(
        default=None, description="W&B run to continue; null: a new one, with the run's id."
    )
    notify: NotifyConfig = Field(default=NotifyConfig(), description="Who else hears of the run.")
    run: RunConfig = Field(default=RunConfig(), description="The run as a whole.")
    data: DataConfig = Field(default=DataConfig(), description="Samples.")
    model: ModelConfig = Field(default=ModelConfig(), description="The uncut model.")
    model_pipeline: ModelPipelineConfig = Field(default=ModelPipelineConfig(), description="Stages and microbatches.")
    diloco: DilocoConfig = Field(default=DilocoConfig(), description="Training steps and outer rounds.")
    quant: QuantConfig | None = Field(default=None, description="Quantisation-aware training; null trains without.")
    lora: LoraConfig | None = Field(
        default=None, description="Adapters that are trained in place of the model (hf); null: the model itself is."
    )
    servers: ServersConfig = Field(default=ServersConfig(), description="Servers of this host.")
    network: NetworkConfig = Field(default=NetworkConfig(), description="How the peers find each other.")
    health: HealthConfig = Field(default=HealthConfig(), description="When a silent peer counts as dead.")
    emulation: EmulationConfig = Field(
        default=EmulationConfig(), description="What this host pretends, for measurements."
    )
    param_mirror: ParamMirrorConfig = Field(default=ParamMirrorConfig(), description="The mirror beside the client.")
    dashboard: DashboardConfig = Field(default=DashboardConfig(), description="The page that shows the run.")

    @property
    def title(self) -> str:
        """What a picture of a run is called: model and data."""
        name = self.data.dataset_name
        data = Path(name).name if name.startswith((".", "/", "~")) else name
        return f"{self.model.kind} on {data}"

    @property
    def loss_unit(self) -> str:
        """In what losses are measured, in words."""
        return _LOSS_UNITS[self.data.task_type]

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return self.model_pipeline.stages

    @property
    def lacks_weights(self) -> bool:
        """Whether the hashes of what the run begins from, and every host has to have, are still to be found."""
        return (self.model.pretrained or self.lora is not None) and self.model.weights is None

    @property
    def begins_from_weights(self) -> bool:
        """Whether D_0 is weights that not every host has. Those under adapters are no part of it."""
        return self.model.weights is not None and self.lora is None

    @property
    def checkpoint_location(self) -> str:
        """`checkpoint_dir`, with its default: the absolute path of a folder, or a URL."""
        if self.checkpoint_dir is not None and "://" in self.checkpoint_dir:
            return self.checkpoint_dir
        given = self.log_dir / "checkpoints" if self.checkpoint_dir is None else Path(self.checkpoint_dir)
        return str(given.expanduser().absolute())

    @property
    def num_servers(self) -> int:
        """Servers on this host, over all stages."""
        if self.servers.num_servers is not None:
            return self.servers.num_servers
        return self.num_stages * self.servers.replicas

    @property
    def devices(self) -> tuple[str, ...]:
        """What is said of the servers' devices: one for all, or one for each."""
        return tuple(self.device.split(","))

    @property
    def servers_timeout_s(self) -> float:
        """How long a client waits for servers: to find their way into the swarm, and to compile what they will run."""
        flow = self.model_pipeline
        return self.network.bootstrap_timeout_s + (flow.compile_timeout_s if flow.compile else 0.0)

    def servers_problem(self) -> str | None:
        """Return why the values of this host's servers are not as many as they are, a line for each key, or None."""
        values = {"servers.threads": self.servers.threads, "servers.nice": self.servers.nice, "device": self.devices}
        problems = (length_problem(key, each, self.num_servers) for key, each in values.items())
        return "\n".join(problem for problem in problems if problem is not None) or None

    def run_problems(self) -> list[str]:
        """Return why no run can be made of this, if none can; what a joining host says may be no run by itself."""
        return [problem for problem in (self._microbatch_problem(), self._cut_problem()) if problem is not None]

    def _microbatch_problem(self) -> str | None:
        microbatches, batch = self.model_pipeline.microbatches, self.diloco.batch_size_per_step
        if microbatches > batch:
            return (
                f"model_pipeline.microbatches = {microbatches} is more than diloco.batch_size_per_step = {batch}: a "
                "microbatch needs at least one sample; lower one or raise the other"
            )
        return None

    def _cut_problem(self) -> str | None:
        cut, units = self.model_pipeline.cut, self.model.num_units
        if cut is not None and units is not None and sum(cut) != units:
            first = "embedding" if self.model.family == "gpt" else "stem"
            return (
                f"model_pipeline.cut = {list(cut)} adds up to {sum(cut)} units, but {self.model.family} of this size "
                f"has {units}: the {first}, {units - 2} blocks and the head; make the numbers add up to {units}, or "
                "remove the cut"
            )
        return None

    def whole_swarm_problem(self) -> str | None:
        """Return why the servers of this host alone make no whole swarm, or None."""
        if self.num_servers < self.num_stages:
            return (
                f"servers.num_servers = {self.num_servers} is too few for model_pipeline.stages = {self.num_stages}: "
                f"each stage needs at least one server; use --num-servers {self.num_stages} or more, or leave it out "
                f"and say with --servers.replicas how many servers each stage gets (now {self.servers.replicas})"
            )
        return None

    @model_validator(mode="before")
    @classmethod
    def _translate_pipeline(cls, raw: object) -> object:
        return apply_pipeline(cast(Mapping[str, Any], raw)) if isinstance(raw, Mapping) else raw

    @field_validator("experiment_prefix")
    @classmethod
    def _check_prefix(cls, value: str) -> str:
        if re.fullmatch(PREFIX_PATTERN, value) is None:
            raise ValueError(
                "takes letters, digits, dots, dashes and underscores, 64 at most, and begins with a letter or a digit"
            )
        return value

    @field_validator("device")
    @classmethod
    def _check_device(cls, value: str) -> str:
        value = re.sub(r"\s", "", value).replace("rocm", "cuda")  # PyTorch names AMD devices cuda as well
        for device in value.split(","):
            if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device):
                raise ValueError(
                    f"{device!r} is not a device; use auto, cpu, mps, cuda or cuda:<index>, or a list of them"
                )
        return value

    @field_validator("wandb_project", "wandb_entity", "wandb_run_id", "checkpoint_dir")
    @classmethod
    def _empty_is_none(cls, value: str | None) -> str | None:
        return value or None

    @model_validator(mode="after")
    def _check_together(self, info: ValidationInfo) -> "Config":
        problems = (
            self.model.keys_problem(),
            self.model.pretrained_problem(),
            self._text_problem(),
            self._own_data_problem(),
            self._lora_problem(),
            self._stage_problem(),
            self._task_problem(),
            self._compile_problem(),
            self._chat_problem(),
            self._stream_problem(),
            self._heads_problem(),
            self._deadline_problem(),
            self._longest_deadline_problem(),
            self._snapshot_problem(),
            self._averaging_problem(),
        )
        found = [problem for problem in problems if problem is not None]
        if info.context is AS_RUN:
            found += self.run_problems()
        if found:
            raise ValueError("\n".join(found))
        return self

    def _stage_problem(self) -> str | None:
        most, stages = self.model.max_stages, self.num_stages
        if most is not None and stages > most:
            return (
                f"model_pipeline.stages = {stages}: {self.model.family} of this size can be cut into at most {most} "
                "stages; use fewer stages or a deeper model"
            )
        return None

    def _lora_problem(self) -> str | None:
        if self.lora is None:
            return None
        if self.model.family != "hf":
            return f"lora: only models of transformers get adapters, and model.family is {self.model.family}; remove it"
        if self.quant is not None:
            return "lora and quant: modules with an adapter are not quantised; remove one of the two"
        return None

    def _snapshot_problem(self) -> str | None:
        if self.diloco.snapshot_every_steps and self.num_stages == 1:
            return (
                f"diloco.snapshot_every_steps = {self.diloco.snapshot_every_steps}: servers of other stages keep the "
                "snapshots, and there is one stage; use 0, or more stages"
            )
        return None

    def _averaging_problem(self) -> str | None:
        compression = self.diloco.averaging_compression
        if compression == "auto" and self.run.deterministic:
            return (
                "diloco.averaging_compression = auto follows links as they are measured, and run.deterministic wants "
                "the same bits each time: name a codec (int8, int4, 2bit), or leave run.deterministic out"
            )
        if self.quant is None or not self.diloco.is_gathered:
            return None
        return (
            f"diloco.averaging_compression = {compression}: learned step sizes (quant) are small and positive, and "
            "it would round them to zero or below, among larger values; use none, bf16 or fp16"
        )

    def _task_problem(self) -> str | None:
        family, task = self.model.family, self.data.task_type
        wanted = _TASK_OF_FAMILY.get(family, task)
        if wanted != task:
            return f"model.family = {family} needs data.task_type = {wanted}, not {task}; change one of them"
        return None

    def _compile_problem(self) -> str | None:
        if not self.model_pipeline.compile or self.model.family != "biggan":
            return None
        return (
            "model_pipeline.compile: the two players of model.family = biggan train by one backward that is not "
            "compiled; remove it"
        )

    def _text_problem(self) -> str | None:
        data = self.data
        given = {
            "tokenizer": data.tokenizer,
            "messages_column": data.messages_column,
            "max_documents": data.max_documents,
        }
        odd = [f"data.{key} = {value}" for key, value in given.items() if value is not None]
        if data.task_type != "speech" and data.characters is not None:
            return f"data.characters: means nothing to data.task_type = {data.task_type}, only speech has it; remove it"
        if data.task_type not in ("cv", "image_gen") and data.classes is not None:
            return f"data.classes: means nothing to data.task_type = {data.task_type}, only images have it; remove it"
        if data.augment != AugmentConfig() and data.task_type not in ("cv", "image_gen"):
            return f"data.augment: changes images, and data.task_type is {data.task_type}; remove it"
        if data.task_type == "llm" or not odd:
            return None
        return f"{', '.join(odd)}: means nothing to data.task_type = {data.task_type}, only text has it; remove it"

    def _own_data_problem(self) -> str | None:
        data = self.data
        if not data.is_own:
            if not data.arguments:
                return None
            return (
                f"data.arguments: data.dataset_name = {data.dataset_name} takes none, only a class of your own does; "
                "remove it"
            )
        given = {
            "messages_column": data.messages_column,
            "max_documents": data.max_documents,
            "token_dtype": data.token_dtype,
            "tokenizer": data.tokenizer if trained_size(data.tokenizer) is not None else None,
        }
        odd = [f"data.{key} = {value}" for key, value in given.items() if value is not None]
        if not odd:
            return None
        return f"{', '.join(odd)}: data.dataset_name = {data.dataset_name} gives samples and no documents; remove it"

    def _chat_problem(self) -> str | None:
        data, family = self.data, self.model.family
        if data.messages_column is None:
            if data.answer_column is None:
                return None
            return (
                f"data.answer_column = {data.answer_column}: name the column of questions by data.messages_column, or "
                "remove it"
            )
        if data.shuffle_window is not None:
            return (
                f"data.shuffle_window = {data.shuffle_window}: conversations share samples by their lengths, not by "
                "where they are, and so have no neighbours; remove it"
            )
        if data.tokenizer is None or trained_size(data.tokenizer) is not None:
            return (
                f"data.messages_column = {data.messages_column} needs a tokenizer with a chat template, and "
                f"data.tokenizer is {data.tokenizer}: name that of a chat model"
            )
        if family in _TASK_OF_FAMILY and family != "hf":
            return (
                f"data.messages_column = {data.messages_column} packs several conversations into a sample, which "
                f"model.family = {family} does not see apart; use hf"
            )
        return None

    def _stream_problem(self) -> str | None:
        data = self.data
        if not data.streaming:
            return None
        odd = {
            "task_type = speech": data.task_type == "speech",
            "messages_column": data.messages_column is not None,
            "max_documents": data.max_documents is not None,
            "token_dtype": data.token_dtype is not None,
            "holdout_fold": data.holdout_fold != 0,
        }
        if any(odd.values()):
            named = " and ".join(f"data.{key}" for key, is_odd in odd.items() if is_odd)
            return (
                f"data.streaming and {named}: what is read from its beginning on can be text, images and samples of a "
                "class of your own, and of all of them; remove one of the two"
            )
        if data.stream_window < self.diloco.samples_per_step:
            return (
                f"data.shuffle_window = {data.stream_window}: a step has {self.diloco.samples_per_step} samples, all "
                "of one window of the stream; use a larger one"
            )
        return None

    def _heads_problem(self) -> str | None:
        if self.model.family == "gpt" and self.model.hidden_size % self.model.num_heads:
            return (
                f"model.hidden_size = {self.model.hidden_size} is not a multiple of model.num_heads = "
                f"{self.model.num_heads}; change one of them"
            )
        return None

    def _deadline_problem(self) -> str | None:
        if self.health.deadline_s < 4 * self.health.heartbeat_s:
            return (
                f"health.deadline_s = {self.health.deadline_s} must be at least 4 times health.heartbeat_s = "
                f"{self.health.heartbeat_s}, or a single late heartbeat closes a good connection"
            )
        return None

    def _longest_deadline_problem(self) -> str | None:
        if self.health.longest_deadline_s < self.health.deadline_s:
            return (
                f"health.max_deadline_s = {self.health.max_deadline_s} is below health.deadline_s = "
                f"{self.health.deadline_s}, which everybody gets; raise it, or leave it out"
            )
        return None
