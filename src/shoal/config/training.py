"""Sections `run` and `data`: what is trained on, and from which seed."""

import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from shoal.config.base import NonNegativeInt, PositiveFloat, PositiveInt, Section

POSITIONS = "positions"
"""The name of the places of tokens in their texts."""

LENGTHS = "lengths"
"""The name of how many samples of a clip of audio are no padding."""

_STREAM_WINDOW = 8192

LEAST_TRAINED = 257
"""Tokens of the smallest tokenizer that is trained."""


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
        "for what is evaluated on. All hosts are told them, so no password belongs here.",
    )
    dataset_config: str | None = Field(default=None, description='Subset of a hub data set, e.g. "wikitext-2-raw-v1".')
    dataset_split: str = Field(default="train", min_length=1, description="Split of a hub data set that is trained on.")
    hf_token: SecretStr | None = Field(
        default=None,
        description="Token for gated hub data sets, in a file or by the environment variable HF_TOKEN; as a flag it is "
        "refused. Never written to logs or to the resolved configuration.",
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
    answer_column: str | None = Field(
        default=None,
        min_length=1,
        description="The column with the answer, where messages_column is one with a question, as text: both are a "
        "conversation of two messages. null: messages_column has lists of messages.",
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
    shuffle_window: PositiveInt | None = Field(
        default=None,
        description="Samples of a pass that are shuffled at one time: a sixteenth of them in each of 16 places of the "
        "data set, drawn anew for each pass, so that data larger than the memory is not read at random; of a stream, "
        "so many that follow one another. null: all samples of a pass are.",
    )
    streaming: bool = Field(
        default=False,
        description="The data set is read from its beginning on while it is trained on, and never lies here as a "
        "whole: files, a data set of the hub, or an iterable without a length, given by a class of your own. A pass "
        "is shuffle_window samples of it, 8192 unless said otherwise, which are on the disk while they are trained on. "
        "At its end it begins anew.",
    )
    cache_dir: Path | None = Field(
        default=None,
        description="Where this host keeps tokens of text from one start to the next, and what it has of streams; may "
        "be emptied. null: the user's cache folder of shoal.",
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
    classes: tuple[str, ...] | None = Field(
        default=None,
        description="What the classes of images are called, in the order of their numbers, from 0. null: what a folder "
        "or a data set of the hub calls them, asked where a run begins, and others have them from the run; of other "
        "data, their numbers (cv, image_gen).",
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
    def stream_window(self) -> int:
        """Samples of a stream that are a pass."""
        return self.shuffle_window or _STREAM_WINDOW

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

    @field_validator("classes")
    @classmethod
    def _check_classes(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and len(set(value)) < len(value):
            raise ValueError("classes: one is there twice; name each of them once")
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
