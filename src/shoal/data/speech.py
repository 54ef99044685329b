"""Speech: clips of audio in one length, their transcripts as numbers of characters, how long each clip is.

    inputs   (T,) float32, mean 0 and variance 1, zeros behind the end
    labels   (S,) int32, characters from 1, -100 behind the end; 0 is the blank of CTC
    lengths  () int32, samples that are no padding

What is too long is left out rather than cut: nobody knows where in its transcript a cut would be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from shoal.config.schema import Config
from shoal.config.training import LENGTHS, DataConfig
from shoal.data.audio import Audio, audio_length, read_audio
from shoal.data.clips import Clips, open_clips
from shoal.data.fields import Fields
from shoal.data.passing_errors import read_patiently
from shoal.data.source import Array, ArraySpec, DataSet, Indices, KnownSamples, Source, split
from shoal.data.targets import IGNORED
from shoal.errors import ConfigError, UnreadableAudio
from shoal.events.base import Event
from shoal.events.data import ClipsLeftOut
from shoal.model.hf.described import SPEECH, config_values

logger = logging.getLogger(__name__)

TONES: Final = "tones"
TONE_CHARACTERS: Final = "abcdefgh"
"""The characters of that data set."""

_LEAST_S: Final = 0.1
_SHOWN: Final = 5
_DEFAULT_VOCABULARY: Final = 32


def clip_fields(data: DataConfig) -> Fields[ArraySpec]:
    """Return what samples of clips are like: (T,) float32, (S,) int32, and their lengths."""
    return Fields(
        ArraySpec("float32", (data.audio_samples,)),
        ArraySpec("int32", (data.max_characters,)),
        {LENGTHS: ArraySpec("int32", ())},
    )


class Speech(KnownSamples):
    """Clips that are decoded when they are read.

    Args:
        chosen: The clips that are samples, in order.
        characters: Of the transcripts, in the order of their numbers.
    """

    def __init__(self, data: DataConfig, clips: Clips, chosen: Sequence[int], characters: str) -> None:
        super().__init__(clip_fields(data), len(chosen))
        self._sampling_rate = data.sampling_rate
        self._clips = clips
        self._chosen = chosen
        self._numbers = {character: number for number, character in enumerate(characters, start=1)}

    def name_of(self, index: int) -> str:
        return self._clips.names[self._chosen[index]]

    def read_into(self, indices: Indices, batch: Fields[Array]) -> None:
        """See `Source.read_into`.

        Raises:
            UnreadableAudio: A clip cannot be decoded, though its header is good.
            OSError: A file cannot be read.
        """
        numbered: list[int] = indices.tolist()
        for place, index in enumerate(numbered):
            clip = self._chosen[index]
            with self._clips.open(clip) as file:
                audio = read_audio(file, self._sampling_rate)
            write_clip(batch, place, audio, [self._numbers[character] for character in self._clips.texts[clip]])


def write_clip(batch: Fields[Array], place: int, audio: Audio, numbers: Sequence[int]) -> None:
    """Write a clip and its characters to its place in a batch."""
    batch.inputs[place, : len(audio)] = audio
    batch.inputs[place, len(audio) :] = 0
    batch.labels[place, : len(numbers)] = numbers
    batch.labels[place, len(numbers) :] = IGNORED
    batch.context[LENGTHS][place] = len(audio)


def open_speech(config: Config, say: Callable[[Event], None]) -> DataSet:
    """Open clips with transcripts. Every clip's header is read.

    Raises:
        ConfigError: There are none, too many cannot be read, or the model knows too few characters.
        StorageError: The system does not give one.
    """
    characters = characters_of(config)
    data = config.data
    if data.eval_split is None:
        train, holdout = split(_source(config, None, characters, say), data.holdout_fraction)
    else:
        train = _source(config, None, characters, say)
        holdout = _source(config, data.eval_split, characters, say)
    return DataSet(data.dataset_name, train, holdout, num_classes=len(characters) + 1)


def with_characters(config: Config) -> Config:
    """Return the configuration with the characters of its transcripts.

    Raises:
        ConfigError: There are no transcripts, or the model knows too few characters.
    """
    characters = characters_of(config)
    return config.model_copy(update={"data": config.data.model_copy(update={"characters": characters})})


def characters_of(config: Config) -> str:
    """Return the characters of the transcripts: those that are said, or those that there are.

    Raises:
        ConfigError: As `with_characters`.
    """
    data = config.data
    found = data.characters or _found(data)
    if not found:
        raise ConfigError(f"data.dataset_name = {data.dataset_name}: its transcripts are empty; look at its files")
    if config.model.family == SPEECH:
        knows = config_values(config.model).get("vocab_size", _DEFAULT_VOCABULARY)
        if knows <= len(found):
            raise ConfigError(
                f"model.extra.vocab_size = {knows} is too small for data.dataset_name = {data.dataset_name}: its "
                f"transcripts have {len(found)} different characters, and the blank of CTC is one more; set it to at "
                f"least {len(found) + 1}, or name the characters that count by data.characters"
            )
    return found


def decoded(numbers: Sequence[int], characters: str) -> str:
    """Return the text of characters' numbers; what is none of them (blanks, padding) is left out."""
    return "".join(characters[number - 1] for number in numbers if 0 < number <= len(characters))


def _found(data: DataConfig) -> str:
    if data.dataset_name == TONES:
        return TONE_CHARACTERS
    characters = open_clips(data, None).characters
    if data.eval_split is not None:
        characters += open_clips(data, data.eval_split).characters
    return "".join(sorted(set(characters)))


def _source(config: Config, split_name: str | None, characters: str, say: Callable[[Event], None]) -> Source:
    data = config.data
    clips = open_clips(data, split_name)
    chosen: list[int] = []
    bad: list[str] = []
    long: list[str] = []
    for index, (name, text) in enumerate(zip(clips.names, clips.texts, strict=True)):
        try:
            samples = read_patiently(partial(_samples, data, clips, index, text, characters), partial(str, name))
        except (OSError, UnreadableAudio) as error:
            bad.append(f"{name} ({error})")
            continue
        if samples > data.audio_samples:
            long.append(f"{name} ({samples / data.sampling_rate:.1f} s)")
        elif len(text) > data.max_characters:
            long.append(f"{name} ({len(text)} characters)")
        else:
            chosen.append(index)
    total, first = len(clips.texts), "; ".join([*bad[:_SHOWN], *long[:_SHOWN]])
    if len(bad) > data.max_bad_fraction * total:
        raise ConfigError(
            f"{len(bad)} of {total} clips of data.dataset_name = {data.dataset_name} cannot be read or have no "
            f"transcript, more than data.max_bad_fraction = {data.max_bad_fraction}: {first}; mend them, leave them "
            "out, or allow more"
        )
    if not chosen:
        raise ConfigError(
            f"data.dataset_name = {data.dataset_name}: no clip is left: {first}; raise data.max_audio_s = "
            f"{data.max_audio_s} or data.max_characters = {data.max_characters}"
        )
    if bad or long:
        say(ClipsLeftOut(data.dataset_name, len(bad), len(long), total, first))
    return Speech(data, clips, chosen, characters)


def _samples(data: DataConfig, clips: Clips, index: int, text: str, characters: str) -> int:
    """Return how many samples of audio a clip has.

    Raises:
        UnreadableAudio: It cannot be decoded, is too short, or its transcript cannot be trained on.
        OSError: It cannot be read.
    """
    if not text:
        raise UnreadableAudio("no transcript")
    if odd := sorted(set(text) - set(characters)):
        raise UnreadableAudio(f"{odd[0]!r} is not in data.characters")
    with clips.open(index) as file:
        samples = audio_length(file, data.sampling_rate)
    if samples < _LEAST_S * data.sampling_rate:
        raise UnreadableAudio(f"shorter than {_LEAST_S} s")
    return samples
