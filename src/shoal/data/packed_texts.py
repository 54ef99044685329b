"""Samples of several texts each, which a model sees apart: tokens, the targets among them, positions in the texts.

    file      text 0 | text 1 | text 2 ...     marked tokens: the first one of a text, and those that are targets
    sample    text 1, text 7, text 2, nothing  by a plan made from the lengths (`best_fit`)

A text of n tokens takes n - 1 places: each token but the last with the one that follows it for a label, if that is a
target. Positions (T) begin at 0 in each text, and in what fills up a sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.config.training import POSITIONS
from shoal.data.element_file import ElementFile
from shoal.data.fields import Fields
from shoal.data.source import Array, ArraySpec, DataSet, Indices, KnownSamples, split_indices
from shoal.data.targets import IGNORED
from shoal.data.token_windows import token_dtype
from shoal.errors import ConfigError

MARKED_DTYPE: Final = "int32"
_BEGINS: Final = 1 << 29
_IS_TARGET: Final = 1 << 30
_TOKEN: Final = _BEGINS - 1
MOST_VOCABULARY: Final = _BEGINS
_FORMAT: Final = 1
_SCANNED_TOKENS: Final = 1 << 22


def chat_identity(tokenizer_hash: str) -> str:
    """Return another text for other tokens of conversations."""
    return f"chat {_FORMAT} {tokenizer_hash}"


def endless_template() -> ConfigError:
    """Return what to say of a template that the process was ended for which has run it."""
    return ConfigError(
        "the chat template of data.tokenizer computes without end on one of the conversations, and was given up: name "
        "another tokenizer, or mend the chat_template.jinja in its folder"
    )


def marked(tokens: NDArray[np.int64], is_target: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the tokens (n,) of one text with what a file has to say of each."""
    found = tokens | np.where(is_target, _IS_TARGET, 0)
    found[:1] |= _BEGINS
    return found.astype(np.int32)


@dataclass(frozen=True, slots=True)
class Texts:
    """Where texts are in a file, and which of their tokens are taken.

    Attributes:
        starts: (n,) Of each.
        lengths: (n,) Tokens of each that are taken, from its first one on.
    """

    starts: Indices
    lengths: Indices


def texts_of(file: ElementFile) -> Texts:
    """Find the texts in a file of marked tokens, each of which has a target behind its first token."""
    starts: list[Indices] = []
    for start in range(0, file.num_elements, _SCANNED_TOKENS):
        [part] = file.read([start], min(_SCANNED_TOKENS, file.num_elements - start))
        starts.append(np.flatnonzero(part & _BEGINS) + start)
    found = np.concatenate(starts) if starts else np.empty(0, np.int64)
    return Texts(found, np.diff(found, append=file.num_elements))


class PackedTexts(KnownSamples):
    """Samples of T places: tokens, 0 behind the last text; and for each the one that follows it, if that is a target.

    The context is the place of each token in its text.

    Args:
        file: Of marked tokens.
        texts: Each of at most T + 1 tokens, and of two at least.
    """

    def __init__(self, file: ElementFile, texts: Texts, seq_len: int, vocabulary: int) -> None:
        self._packing = best_fit(texts.lengths - 1, seq_len)
        fields = Fields(
            ArraySpec(token_dtype(vocabulary), (seq_len,)),
            ArraySpec("int32", (seq_len,)),
            {POSITIONS: ArraySpec(token_dtype(seq_len), (seq_len,))},
        )
        super().__init__(fields, self._packing.num_samples)
        self._file = file
        self._texts = texts
        self._seq_len = seq_len

    def read_into(self, indices: Indices, batch: Fields[Array]) -> None:
        batch.inputs[...] = 0
        batch.labels[...] = IGNORED
        positions = batch.context[POSITIONS]
        for row, sample in enumerate(indices.tolist()):
            place = 0
            for text in self._packing.of(sample).tolist():
                num_tokens = int(self._texts.lengths[text])
                [found] = self._file.read([int(self._texts.starts[text])], num_tokens)
                tokens, stop = found & _TOKEN, place + num_tokens - 1
                batch.inputs[row, place:stop] = tokens[:-1]
                batch.labels[row, place:stop] = np.where(found[1:] & _IS_TARGET, tokens[1:], IGNORED)
                positions[row, place:stop] = np.arange(num_tokens - 1)
                place = stop
            positions[row, place:] = np.arange(self._seq_len - place)


def shortened(file: ElementFile, texts: Texts, seq_len: int) -> Texts:
    """Cut texts to T + 1 tokens, and leave out those that have no target any more."""
    lengths = np.minimum(texts.lengths, seq_len + 1)
    is_kept = np.ones(len(lengths), dtype=np.bool_)
    for text in np.flatnonzero(lengths < texts.lengths).tolist():
        [found] = file.read([int(texts.starts[text])], seq_len + 1)
        # The first token has no place before it, so it is nobody's label.
        is_kept[text] = bool((found[1:] & _IS_TARGET).any())
    return Texts(texts.starts[is_kept], lengths[is_kept])


def packed_dataset(
    name: str,
    train: ElementFile,
    holdout: ElementFile | None,
    *,
    seq_len: int,
    holdout_fraction: float,
    vocabulary: int,
) -> DataSet:
    """Pack the texts of files of marked tokens into a data set. Without texts of their own, some are held out.

    Raises:
        ConfigError: There are too few.
    """
    texts = shortened(train, texts_of(train), seq_len)
    if len(texts.starts) < (2 if holdout is None else 1):
        raise ConfigError(
            f"data.dataset_name = {name} has {len(texts.starts)} texts with an answer in their first {seq_len + 1} "
            "tokens: one to train on and one to evaluate on are needed; use a longer data.seq_len or another data set"
        )
    if holdout is None:
        chosen, others = split_indices(len(texts.starts), holdout_fraction)
        held_out = Texts(texts.starts[others], texts.lengths[others])
        texts = Texts(texts.starts[chosen], texts.lengths[chosen])
    else:
        held_out = shortened(holdout, texts_of(holdout), seq_len)
        if not len(held_out.starts):
            raise ConfigError(f"data.eval_split has no text with an answer in its first {seq_len + 1} tokens")
    return DataSet(
        name,
        PackedTexts(train, texts, seq_len, vocabulary),
        PackedTexts(holdout or train, held_out, seq_len, vocabulary),
        num_classes=vocabulary,
    )


class Packing(NamedTuple):
    """The plan.

    Attributes:
        texts: (n,) All texts, those of the first sample first.
        starts: (samples + 1,) Where in `texts` those of each sample begin, and the end.
    """

    texts: Indices
    starts: Indices

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self.starts) - 1

    def of(self, sample: int) -> Indices:
        """Return the texts of a sample, in the order in which they stand in it."""
        return self.texts[self.starts[sample] : self.starts[sample + 1]]


def best_fit(lengths: Indices, capacity: int) -> Packing:
    """Plan which texts share a sample, from their lengths alone: the plan is the same wherever it is made.

    Best fit, the longest first: each text goes where the least room is left behind it (Johnson et al. 1974, "Worst-case
    performance bounds for simple one-dimensional packing algorithms"). Every text is in one sample, whole.

    Args:
        lengths: (n,) Of each text, 1..capacity.
    """
    # Equal lengths keep the order of the texts.
    order = np.argsort(-lengths, kind="stable")
    ordered: list[int] = lengths[order].tolist()
    sample_of = np.empty(len(lengths), dtype=np.int64)
    with_room = [list[int]() for _ in range(capacity + 1)]
    # Bit r is set where a sample has room r left: the least room that is enough is the lowest bit from there on.
    rooms = num_samples = 0
    for text, length in zip(order.tolist(), ordered, strict=True):
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            sample = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, sample = capacity, num_samples
            num_samples += 1
        sample_of[text] = sample
        left = room - length
        if left:
            with_room[left].append(sample)
            rooms |= 1 << left
    texts = np.argsort(sample_of, kind="stable")
    counts = np.bincount(sample_of, minlength=num_samples)
    return Packing(texts, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
