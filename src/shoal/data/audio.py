"""Audio as samples: decoded, one channel, at the rate of a run, scaled as wav2vec2 is.

WAV with whole numbers is read by Python's own `wave`, so that most corpora need nothing else; everything else that
libsndfile knows (FLAC, OGG, MP3, WAV with floats) by the package soundfile. Other rates are converted by scipy's
polyphase filter, which gives the same samples on every host.
"""

from __future__ import annotations

import importlib
import io
import math
import wave
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from shoal.errors import ConfigError, UnreadableAudio

Audio = NDArray[np.float32]

_WAV: Final = (b"RIFF", b"WAVE")
_LEAST_VARIANCE: Final = 1e-7
_MOST_BYTES_OF_VALUE: Final = 4
_MOST_STEPS: Final = 50_000
"""Of a clip's rate, in what it has in common with the wanted one: the filter grows with them, 160 bytes for each."""
_MOST_VALUES: Final = 1 << 26
"""Of all channels of a clip together, 8 bytes each: a file of some kilobytes may say that it has any number."""
_INSTALL: Final = "pip install 'shoal[speech]'"


def audio_length(file: IO[bytes], sampling_rate: int) -> int:
    """Return how many samples a clip has at another rate, by what its header says.

    Raises:
        UnreadableAudio: It is no audio, its end is missing, or its rate is odd.
        ConfigError: soundfile is needed and not installed.
    """
    if (opened := _opened_wav(file)) is not None:
        with opened as wav:
            num, rate = wav.getnframes(), wav.getframerate()
            _require_few(num, wav.getnchannels())
            size = num * wav.getnchannels() * _width(wav)
        if file.seek(0, io.SEEK_END) < size:
            raise UnreadableAudio("its end is missing")
    else:
        soundfile = _soundfile()
        try:
            info = soundfile.info(file)
        except soundfile.LibsndfileError as error:
            raise UnreadableAudio(str(error)) from error
        num, rate = info.frames, info.samplerate
        _require_few(num, info.channels)
    up, down = _ratio(rate, sampling_rate)
    return -(-num * up // down)


def read_audio(file: IO[bytes], sampling_rate: int) -> Audio:
    """Return the samples of a clip at a rate, the mean of its channels; of mean 0 and variance 1, as wav2vec2's are.

    Raises:
        UnreadableAudio: It cannot be decoded, has values that are no numbers, or its rate is odd.
        ConfigError: soundfile, or scipy, is needed and not installed.
    """
    if (opened := _opened_wav(file)) is not None:
        with opened as wav:
            samples, rate = _of_wav(wav), wav.getframerate()
    else:
        soundfile = _soundfile()
        try:
            with soundfile.SoundFile(file) as opened_file:
                _require_few(opened_file.frames, opened_file.channels)
                samples, rate = opened_file.read(opened_file.frames, "float64", always_2d=True), opened_file.samplerate
        except soundfile.LibsndfileError as error:
            raise UnreadableAudio(str(error)) from error
    if not np.isfinite(samples).all():
        raise UnreadableAudio("it has values that are no numbers")
    return normalised(resampled(samples.mean(axis=1), rate, sampling_rate))


def resampled(samples: NDArray[np.float64], rate: int, wanted: int) -> NDArray[np.float64]:
    """Return the same sound at another rate.

    Raises:
        UnreadableAudio: The two rates have too little in common.
        ConfigError: scipy is not installed.
    """
    up, down = _ratio(rate, wanted)
    if up == down:
        return samples
    try:
        signal: Any = importlib.import_module("scipy.signal")
    except ImportError as error:
        raise ConfigError(
            f"data.sampling_rate = {wanted}: audio of {rate} is converted by scipy, which is not here: {_INSTALL}"
        ) from error
    return signal.resample_poly(samples, up, down)


def normalised(samples: NDArray[np.float64]) -> Audio:
    """Return samples of mean 0 and variance 1."""
    centred = samples - samples.mean()
    return (centred / math.sqrt(float(centred.var()) + _LEAST_VARIANCE)).astype(np.float32)


def _opened_wav(file: IO[bytes]) -> wave.Wave_read | None:
    """Open a file that `wave` reads; None: it is of another kind."""
    file.seek(0)
    head = file.read(12)
    file.seek(0)
    if (head[:4], head[8:]) != _WAV:
        return None
    try:
        return wave.open(file, "rb")
    except (EOFError, RuntimeError) as error:  # or a part of it lies, by what it says, elsewhere than in the file
        raise UnreadableAudio("its header ends too early") from error
    except wave.Error:
        file.seek(0)
        return None


def _require_few(num: int, channels: int) -> None:
    """Refuse what is no clip, by what its header says: nothing of it has been unpacked."""
    if num * channels > _MOST_VALUES:
        raise UnreadableAudio(f"it has {num} samples of {channels} channels, more than any clip")


def _width(wav: wave.Wave_read) -> int:
    """Return how many bytes a value has."""
    if (width := wav.getsampwidth()) > _MOST_BYTES_OF_VALUE:
        raise UnreadableAudio(f"its values have {width} bytes, and at most {_MOST_BYTES_OF_VALUE} are read")
    return width


def _of_wav(wav: wave.Wave_read) -> NDArray[np.float64]:
    """Return the samples (n, channels), from -1 to 1."""
    width, channels, num = _width(wav), wav.getnchannels(), wav.getnframes()
    _require_few(num, channels)
    data = wav.readframes(num)
    if len(data) < num * width * channels:
        raise UnreadableAudio("its end is missing")
    if width == 1:
        return (np.frombuffer(data, np.uint8).reshape(-1, channels) - 128.0) / 128
    # Little-endian; three bytes become the upper three of four.
    of_four = np.zeros((num * channels, 4), np.uint8)
    of_four[:, 4 - width :] = np.frombuffer(data, np.uint8).reshape(-1, width)
    return of_four.view("<i4").reshape(-1, channels) / 2.0**31


def _ratio(rate: int, wanted: int) -> tuple[int, int]:
    common = math.gcd(rate, wanted)
    if not 0 < rate // common <= _MOST_STEPS:
        raise UnreadableAudio(f"its rate is {rate} samples a second, which is not converted to {wanted}; give it 48000")
    return wanted // common, rate // common


def _soundfile() -> Any:
    try:
        return importlib.import_module("soundfile")
    except (ImportError, OSError) as error:
        raise ConfigError(f"audio that is no plain WAV is read by soundfile, which is not here: {_INSTALL}") from error
