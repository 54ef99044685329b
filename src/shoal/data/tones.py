"""The built-in data set "tones": made sound with a transcript, in place of speech where there is no download.

Each letter is a tone of its own pitch with a short rest behind it; a clip is some letters drawn from its number. That
is no speech, but the same task: which characters, in which order, with nothing that says where they are.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from shoal.config.training import DataConfig
from shoal.data.audio import normalised
from shoal.data.fields import Fields
from shoal.data.source import Array, DataSet, Indices, KnownSamples, split
from shoal.data.speech import TONE_CHARACTERS, clip_fields, write_clip
from shoal.errors import ConfigError

_NUM_CLIPS: Final = 512
_TONE_S: Final = 0.1
_REST: Final = 0.25
_LEAST: Final = 2
_LOWEST_HZ: Final = 200.0
_STEP: Final = 2 ** (1 / 3)
_SEED: Final = 0x70E5


class Tones(KnownSamples):
    """Clips of tones, made when they are read."""

    def __init__(self, data: DataConfig) -> None:
        super().__init__(clip_fields(data), _NUM_CLIPS, in_memory=True)
        self._data = data

    def transcript(self, index: int) -> str:
        """Return the letters of a clip."""
        generator = np.random.Generator(np.random.Philox((_SEED << 32) + index))
        most = self.longest(self._data)
        count = int(generator.integers(_LEAST, most + 1))
        return "".join(TONE_CHARACTERS[letter] for letter in generator.integers(0, len(TONE_CHARACTERS), count))

    @staticmethod
    def longest(data: DataConfig) -> int:
        """Return how many letters a clip has at most."""
        return min(data.max_characters, int(data.max_audio_s / _TONE_S + 1e-9))

    def read_into(self, indices: Indices, batch: Fields[Array]) -> None:
        rate = self._data.sampling_rate
        length = round(_TONE_S * rate)
        at_s = np.arange(length) / rate
        is_heard = np.arange(length) < (1 - _REST) * length
        numbered: list[int] = indices.tolist()
        for place, index in enumerate(numbered):
            text = self.transcript(index)
            pitches = [_LOWEST_HZ * _STEP ** TONE_CHARACTERS.index(letter) for letter in text]
            sound = np.concatenate([np.sin(2 * np.pi * pitch * at_s) * is_heard for pitch in pitches])
            write_clip(batch, place, normalised(sound), [TONE_CHARACTERS.index(letter) + 1 for letter in text])


def open_tones(data: DataConfig) -> DataSet:
    """Open the tones.

    Raises:
        ConfigError: The task is not speech, the clips are too short, or it has splits or characters of its own.
    """
    if data.task_type != "speech":
        raise ConfigError(
            f"data.dataset_name = {data.dataset_name} is for data.task_type = speech, not {data.task_type}; change one "
            "of them"
        )
    if data.eval_split is not None:
        raise ConfigError(f"data.eval_split = {data.eval_split}: {data.dataset_name} has no splits; leave it out")
    if data.characters not in (None, TONE_CHARACTERS):
        raise ConfigError(
            f"data.characters = {data.characters}: {data.dataset_name} has {TONE_CHARACTERS}; leave it out"
        )
    if Tones.longest(data) < _LEAST:
        raise ConfigError(
            f"data.max_audio_s = {data.max_audio_s}, data.max_characters = {data.max_characters}: a clip of "
            f"{data.dataset_name} has {_LEAST} letters of {_TONE_S} s at least; raise them"
        )
    train, holdout = split(Tones(data), data.holdout_fraction)
    return DataSet(data.dataset_name, train, holdout, num_classes=len(TONE_CHARACTERS) + 1)
