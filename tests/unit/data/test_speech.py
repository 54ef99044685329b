"""Clips with transcripts: every form of a folder, what is left out, and what a sample is."""

from __future__ import annotations

import io
import json
import struct
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from numpy.typing import NDArray

from shoal.config import Config
from shoal.data import audio
from shoal.data.audio import audio_length, normalised, read_audio, resampled
from shoal.data.catalog import open_source
from shoal.data.clips import open_clips
from shoal.data.source import DataSet
from shoal.data.speech import decoded, with_characters
from shoal.errors import ConfigError, SampleError, UnreadableAudio
from shoal.events.base import Event
from shoal.events.data import ClipsLeftOut, SamplesSkipped

RATE = 4_000
SECONDS = 0.5


def sound(seconds: float = SECONDS, rate: int = RATE, pitch_hz: float = 440.0) -> NDArray[np.float64]:
    return 0.5 * np.sin(2 * np.pi * pitch_hz * np.arange(round(seconds * rate)) / rate)


def write_wav(path: Path, samples: NDArray[np.float64] | None = None, *, rate: int = RATE, width: int = 2) -> None:
    """One channel, or (n, channels)."""
    samples = sound() if samples is None else samples
    scaled = np.round(samples.reshape(len(samples), -1) * (2 ** (8 * width - 1) - 1)).astype("<i4")
    data = (scaled + 128).astype(np.uint8) if width == 1 else scaled.reshape(-1, 1).view(np.uint8)[:, :width]
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(scaled.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data.tobytes())


def config(dataset_name: str | Path = "tones", model: dict[str, Any] | None = None, **data: Any) -> Config:
    section = {
        "task_type": "speech",
        "dataset_name": str(dataset_name),
        "sampling_rate": RATE,
        "max_audio_s": 1.0,
        "max_characters": 12,
        **data,
    }
    return Config.model_validate({"data": section, "model": model or {"family": "wav2vec2"}})


def opened(given: Config, heard: list[Event] | None = None) -> DataSet:
    return open_source(given, (heard if heard is not None else []).append)


def texts(dataset: DataSet, characters: str) -> list[str]:
    """The transcripts of all that is trained on or held out, sorted."""
    parts = (dataset.train, dataset.holdout)
    samples = [part.sample(index) for part in parts for index in range(part.num_samples)]
    return sorted(decoded(sample.labels.tolist(), characters) for sample in samples)


def of_metadata_csv(folder: Path) -> None:
    rows = ["file_name,text", *(f"audio/{name}.wav,{text}" for name, text in TEXTS.items())]
    for name in TEXTS:
        write_wav(folder / "audio" / f"{name}.wav")
    (folder / "metadata.csv").write_text("\n".join(rows))


def of_metadata_jsonl(folder: Path) -> None:
    for name in TEXTS:
        write_wav(folder / "train" / f"{name}.wav")
    rows = [{"file_name": f"{name}.wav", "transcription": text} for name, text in TEXTS.items()]
    (folder / "train" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))


def of_librispeech(folder: Path) -> None:
    chapter = folder / "19" / "198"
    chapter.mkdir(parents=True)
    for name in TEXTS:
        soundfile.write(chapter / f"19-198-{name}.flac", sound(), RATE)
    lines = (f"19-198-{name} {text}" for name, text in TEXTS.items())
    (chapter / "19-198.trans.txt").write_text("\n".join(lines))


def of_sphinx(folder: Path) -> None:
    for name in TEXTS:
        write_wav(folder / f"{name}.wav")
    (folder / "fileids").write_text("\n".join(TEXTS))
    (folder / "transcription").write_text("\n".join(f"<s> {text} </s> ({name})" for name, text in TEXTS.items()))


def of_texts_beside(folder: Path) -> None:
    for name, text in TEXTS.items():
        write_wav(folder / f"{name}.wav")
        (folder / f"{name}.txt").write_text(f"{text}\n")


TEXTS = {"c1": "to be", "c2": "or  not", "c3": "a bee"}
PLAIN = ["a bee", "or not", "to be"]
FORMS = [of_metadata_csv, of_metadata_jsonl, of_librispeech, of_sphinx, of_texts_beside]


@pytest.mark.parametrize("form", FORMS, ids=[form.__name__ for form in FORMS])
def test_a_folder_gives_the_same_samples_in_every_form(form: Callable[[Path], None], tmp_path: Path) -> None:
    form(tmp_path)
    given = with_characters(config(tmp_path))
    assert given.data.characters == " abenort"
    dataset = opened(given)
    assert texts(dataset, " abenort") == PLAIN
    assert dataset.num_classes == 9
    sample = dataset.train.sample(0)
    length = round(SECONDS * RATE)
    assert sample.context["lengths"] == length
    assert sample.inputs.shape == (RATE,)
    assert not sample.inputs[length:].any()
    assert np.allclose(sample.inputs[:length], normalised(sound()), atol=1e-3)
    assert sample.labels.dtype == np.int32
    assert (sample.labels == -100).sum() == 12 - len(decoded(sample.labels.tolist(), " abenort"))


def test_a_table_with_a_column_of_audio_gives_them_too(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows: dict[str, list[Any]] = {"audio": [], "sentence": list(TEXTS.values())}
    for name in TEXTS:
        write_wav(tmp_path / "wav" / f"{name}.wav")
        rows["audio"].append({"bytes": (tmp_path / "wav" / f"{name}.wav").read_bytes(), "path": None})
    (tmp_path / "table").mkdir()
    datasets.Dataset.from_dict(rows).to_parquet(str(tmp_path / "table" / "train.parquet"))
    dataset = opened(config(tmp_path / "table"))
    assert texts(dataset, " abenort") == PLAIN


OUTSIDE = {
    "metadata.csv": "file_name,text\n../secret.wav,to be\n",
    "metadata.jsonl": '{"file_name": "{there}/secret.wav", "text": "to be"}',
    "x.trans.txt": "../secret to be",
    "fileids": "../secret",
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_a_data_set_names_outside_of_it_is_not_read(name: str, tmp_path: Path) -> None:
    write_wav(tmp_path / "secret.wav")
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "transcription").write_text("to be (secret)")
    (tmp_path / "clips" / name).write_text(OUTSIDE[name].replace("{there}", str(tmp_path)))
    with pytest.raises(ConfigError, match=r"secret\.wav' is outside of its data set, .*clips, and is not read; copy"):
        opened(config(tmp_path / "clips"))


def test_what_a_row_of_a_table_names_outside_of_its_data_set_is_not_read(tmp_path: Path) -> None:
    write_wav(tmp_path / "secret.wav")
    (tmp_path / "rows").mkdir()
    rows = {"audio": [{"bytes": None, "path": str(tmp_path / "secret.wav")}] * 3, "text": ["to be"] * 3}
    of_audio = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    table = pa.table(rows, schema=pa.schema({"audio": of_audio, "text": pa.string()}))
    pq.write_table(table, tmp_path / "rows" / "train.parquet")
    with pytest.raises(ConfigError, match=r"secret\.wav' is outside of its data set, .*rows, and is not read; copy"):
        opened(config(tmp_path / "rows"))


def test_a_name_that_no_file_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.trans.txt").write_text("a\0b to be")
    with pytest.raises(ConfigError, match="is outside of its data set"):
        opened(config(tmp_path))


@pytest.mark.parametrize("link", ["c1.wav", "c1.txt"])
def test_a_link_out_of_a_data_set_is_not_followed_but_that_of_the_hub_s_cache_is(link: str, tmp_path: Path) -> None:
    folder = tmp_path / "repository" / "snapshots" / "0123"
    of_texts_beside(folder)
    (tmp_path / "repository" / "blobs").mkdir()
    (folder / link).rename(tmp_path / "repository" / "blobs" / link)
    (folder / link).symlink_to(f"../../blobs/{link}")
    assert sorted(open_clips(config(folder).data, None).texts) == PLAIN
    (tmp_path / "repository" / "blobs").rename(tmp_path / "repository" / "elsewhere")
    (folder / link).unlink()
    (folder / link).symlink_to(f"../../elsewhere/{link}")
    with pytest.raises(ConfigError, match=rf"{link}' is outside of its data set"):
        open_clips(config(folder).data, None)


def test_clips_beside_the_folder_of_a_split_are_of_the_data_set(tmp_path: Path) -> None:
    write_wav(tmp_path / "audio" / "a.wav")
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "metadata.csv").write_text("file_name,text\n../audio/a.wav,to be\n")
    assert open_clips(config(tmp_path).data, None).names == ["../audio/a.wav"]


def test_a_long_line_of_a_transcription_takes_no_long_time(tmp_path: Path) -> None:
    write_wav(tmp_path / "a.wav")
    (tmp_path / "fileids").write_text("a")
    (tmp_path / "transcription").write_text(f"<s> to be </s> (a)\nx{200_000 * ' '}x")
    assert open_clips(config(tmp_path).data, None).texts == ["to be"]


def test_characters_that_are_said_come_in_their_order_and_a_clip_with_another_one_is_bad(tmp_path: Path) -> None:
    of_texts_beside(tmp_path)
    dataset = opened(config(tmp_path, characters="tonebar ", holdout_fraction=0.5))
    assert texts(dataset, "tonebar ") == PLAIN
    with pytest.raises(ConfigError, match=r"c3.wav \('a' is not in data.characters\)"):
        opened(config(tmp_path, characters="toneb r"))
    with pytest.raises(ValueError, match="one is there twice"):
        config(tmp_path, characters="too")
    with pytest.raises(ValueError, match=r"data.characters: means nothing to data.task_type = llm"):
        Config.model_validate({"data": {"characters": "abc"}})


def test_the_model_must_know_all_characters_and_the_blank(tmp_path: Path) -> None:
    of_texts_beside(tmp_path)
    few = {"family": "wav2vec2", "extra": {"vocab_size": 8}}
    with pytest.raises(ConfigError, match=r"vocab_size = 8 is too small .* set it to at least 9"):
        with_characters(config(tmp_path, few))
    assert with_characters(config(tmp_path, {"family": "wav2vec2", "extra": {"vocab_size": 9}}))


def test_what_is_evaluated_may_be_a_folder_of_its_own(tmp_path: Path) -> None:
    of_texts_beside(tmp_path / "train")
    write_wav(tmp_path / "other" / "x.wav")
    (tmp_path / "other" / "x.txt").write_text("zoo")
    given = with_characters(config(tmp_path, eval_split=f"{tmp_path}/other"))
    assert given.data.characters == " abenortz"
    dataset = opened(given)
    assert (dataset.train.num_samples, dataset.holdout.num_samples) == (3, 1)
    assert decoded(dataset.holdout.sample(0).labels.tolist(), " abenortz") == "zoo"
    by_name = opened(config(tmp_path, eval_split="other"))
    assert by_name.holdout.num_samples == 1
    with pytest.raises(ConfigError, match="there is no such folder here"):
        opened(config(tmp_path, eval_split="./nowhere"))
    with pytest.raises(ConfigError, match="has no such folder"):
        opened(config(tmp_path, eval_split="validation"))


def write_spoken(folder: Path, *names: str) -> None:
    """Clips, each of which says the name of its folder."""
    for name in names:
        write_wav(folder / f"{name}.wav")
        (folder / f"{name}.txt").write_text(Path(name).parent.name)


@pytest.mark.parametrize("eval_split", ["dev", "{}/dev", "{}/linked"])
def test_a_folder_that_is_evaluated_is_not_trained_on(eval_split: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_spoken(root, "clean/a", "clean/b", "dev/19/a", "dev/20/b")
    (root / "clean" / "c.wav").symlink_to("../dev/19/a.wav")
    (root / "clean" / "c.txt").write_text("dev")
    if "linked" in eval_split:
        (root / "linked").symlink_to("dev")
    given = with_characters(config(root, eval_split=eval_split.format(root)))
    dataset = opened(given)
    trained = [dataset.train.sample(index) for index in range(dataset.train.num_samples)]
    assert given.data.characters is not None
    assert [decoded(each.labels.tolist(), given.data.characters) for each in trained] == ["clean", "clean"]
    assert dataset.holdout.num_samples == 2


def test_a_clip_of_a_folder_that_is_evaluated_is_not_trained_on_though_only_the_whole_one_has_its_text(
    tmp_path: Path,
) -> None:
    write_spoken(tmp_path, "dev/a")
    write_wav(tmp_path / "dev" / "b.wav")
    write_wav(tmp_path / "c.wav")
    (tmp_path / "metadata.csv").write_text("file_name,text\ndev/b.wav,dev\nc.wav,on\n")
    assert open_clips(config(tmp_path, eval_split="dev").data, None).names == ["c.wav"]


def test_where_all_clips_are_evaluated_it_is_said_that_nothing_is_left_to_train_on(tmp_path: Path) -> None:
    of_texts_beside(tmp_path / "train")
    for eval_split in ("train", f"{tmp_path}/"):
        with pytest.raises(ConfigError, match=r"holds out all clips of .* none is left to train on; name another"):
            opened(config(tmp_path, eval_split=eval_split))


def test_a_folder_of_tables_is_evaluated_on_and_refused_where_it_is_trained_on_too(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    write_wav(tmp_path / "a.wav")
    for place, text in (("table", "to be"), ("held", "or not"), ("table/inner", "a bee")):
        (tmp_path / place).mkdir()
        row = {"audio": [{"bytes": (tmp_path / "a.wav").read_bytes(), "path": None}], "text": [text]}
        datasets.Dataset.from_dict(row).to_parquet(str(tmp_path / place / "rows.parquet"))
    beside = config(tmp_path / "table", eval_split=f"{tmp_path}/held").data
    assert open_clips(beside, beside.eval_split).texts == ["or not"]
    assert open_clips(beside, None).texts == ["a bee", "to be"]
    inside = config(tmp_path / "table", eval_split=f"{tmp_path}/table/inner").data
    with pytest.raises(ConfigError, match=r"holds out 1 of the files that .*inner/rows\.parquet; move what"):
        open_clips(inside, None)


def test_bad_clips_are_left_out_named_and_counted_until_they_are_too_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of_texts_beside(tmp_path)
    (tmp_path / "cut.wav").write_bytes((tmp_path / "c1.wav").read_bytes()[:500])
    (tmp_path / "noise.wav").write_bytes(b"RIFF....WAVEnothing of this kind")
    write_wav(tmp_path / "empty.wav")
    write_wav(tmp_path / "short.wav", sound(0.05))
    for name, text in {"cut": "to", "noise": "be", "empty": " ", "short": "or"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    heard: list[Event] = []
    dataset = opened(config(tmp_path, max_bad_fraction=0.6), heard)
    assert texts(dataset, " abenort") == PLAIN
    (event,) = heard
    assert isinstance(event, ClipsLeftOut)
    assert (event.bad, event.long, event.clips) == (4, 0, 7)
    for part in (
        "cut.wav (its end is missing)",
        "empty.wav (no transcript)",
        "short.wav (shorter than 0.1 s)",
        "noise",
    ):
        assert part in event.first
    open_source(config(tmp_path, max_bad_fraction=0.6))
    assert caplog.messages == ["clips.left_out"], "where nobody watches it is logged"
    with pytest.raises(ConfigError, match=r"4 of 7 clips .* more than data.max_bad_fraction = 0.5"):
        opened(config(tmp_path, max_bad_fraction=0.5))


def test_what_is_too_long_is_left_out_and_is_not_bad(tmp_path: Path) -> None:
    of_texts_beside(tmp_path)
    write_wav(tmp_path / "long.wav", sound(1.01))
    write_wav(tmp_path / "said.wav")
    (tmp_path / "long.txt").write_text("to")
    (tmp_path / "said.txt").write_text("to be or not to")
    heard: list[Event] = []
    assert texts(opened(config(tmp_path, max_bad_fraction=0.0), heard), " abenort") == PLAIN
    (event,) = heard
    assert isinstance(event, ClipsLeftOut)
    assert (event.bad, event.long) == (0, 2)
    assert "long.wav (1.0 s); said.wav (15 characters)" in event.first
    with pytest.raises(ConfigError, match=r"no clip is left: .*; raise data.max_audio_s = 0.2"):
        opened(config(tmp_path, max_audio_s=0.2))


def test_in_place_of_a_clip_that_cannot_be_decoded_when_it_is_read_stands_the_next_one(tmp_path: Path) -> None:
    clips = tmp_path / "clips"
    for folder in (clips, tmp_path / "held"):
        of_texts_beside(folder)
    heard: list[Event] = []
    dataset = opened(config(clips, eval_split=f"{tmp_path}/held", max_bad_fraction=0.2), heard)
    (clips / "c2.wav").unlink()
    gone, following = dataset.train.sample(1), dataset.train.sample(2)
    assert all(np.array_equal(mine, other) for mine, other in zip(gone.everything, following.everything, strict=True))
    [skipped] = heard
    assert isinstance(skipped, SamplesSkipped)
    assert skipped.which == "training sample c2.wav"
    (clips / "c3.wav").write_bytes(b"no audio any more")
    (clips / "c1.wav").write_bytes(b"nor this")
    with pytest.raises(SampleError, match=r"more than data\.max_bad_fraction = 0\.2"):
        dataset.train.read(np.arange(3))


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_of_every_width_is_read_by_python_alone(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    both = np.stack([sound(), np.zeros_like(sound())], axis=1)
    write_wav(tmp_path / "a.wav", both, width=width)
    with (tmp_path / "a.wav").open("rb") as file:
        assert audio_length(file, RATE) == len(both)
        found = read_audio(file, RATE)
    assert found.dtype == np.float32
    assert np.allclose(found, normalised(sound()), atol=0.02 if width == 1 else 1e-3)


@pytest.mark.parametrize(
    ("at", "header", "part"),
    [
        (24, "<I", "its rate is 0 samples a second, which is not converted to 4000"),
        (24, "<I", f"its rate is {2**31 - 1} samples a second"),
        (32, "<HH", "its values have 8 bytes"),
    ],
)
def test_a_header_that_says_what_no_clip_is_makes_a_bad_clip_and_no_large_filter(
    at: int, header: str, part: str, tmp_path: Path
) -> None:
    write_wav(tmp_path / "a.wav", sound())
    values = {"<HH": (8, 64), "<I": (2**31 - 1 if str(2**31 - 1) in part else 0,)}[header]
    content = bytearray((tmp_path / "a.wav").read_bytes())
    struct.pack_into(header, content, at, *values)
    for read in (audio_length, read_audio):
        with pytest.raises(UnreadableAudio, match=part):
            read(io.BytesIO(bytes(content)), RATE)


def test_a_header_with_a_part_that_lies_behind_the_file_s_end_makes_a_bad_clip(tmp_path: Path) -> None:
    write_wav(tmp_path / "a.wav", sound())
    content = bytearray((tmp_path / "a.wav").read_bytes())
    struct.pack_into("<I", content, 16, 2**31 - 1)
    for read in (audio_length, read_audio):
        with pytest.raises(UnreadableAudio, match="ends too early"):
            read(io.BytesIO(bytes(content)), RATE)


def test_a_clip_of_a_form_in_which_soundfile_cannot_seek_is_read_whole(tmp_path: Path) -> None:
    write_wav(tmp_path / "a.wav", sound())
    content = bytearray((tmp_path / "a.wav").read_bytes())
    struct.pack_into("<H", content, 20, 0x40)  # G.721, of 4 bits
    length = audio_length(io.BytesIO(bytes(content)), RATE)
    assert len(read_audio(io.BytesIO(bytes(content)), RATE)) == length > 0


@pytest.mark.parametrize("suffix", ["wav", "flac"])
def test_a_clip_of_more_values_than_any_has_is_not_unpacked(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"a.{suffix}"
    soundfile.write(path, np.zeros((RATE, 8)), RATE, subtype="PCM_16")
    monkeypatch.setattr(audio, "_MOST_VALUES", 8 * RATE - 1)
    monkeypatch.setattr(soundfile.SoundFile, "read", None)
    monkeypatch.setattr(wave.Wave_read, "readframes", None)
    for read in (audio_length, read_audio):
        with path.open("rb") as file, pytest.raises(UnreadableAudio, match=f"{RATE} samples of 8 channels, more than"):
            read(file, RATE)


def test_a_clip_with_values_that_are_no_numbers_is_bad(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.full(RATE, np.nan), RATE, subtype="FLOAT")
    with (tmp_path / "a.wav").open("rb") as file, pytest.raises(UnreadableAudio, match="no numbers"):
        read_audio(file, RATE)


@pytest.mark.parametrize(("suffix", "subtype"), [("flac", "PCM_16"), ("wav", "FLOAT"), ("ogg", "VORBIS")])
def test_other_audio_is_read_by_soundfile_or_says_what_to_install(
    suffix: str, subtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"a.{suffix}"
    soundfile.write(path, sound(rate=16_000), 16_000, subtype=subtype)
    with path.open("rb") as file:
        assert audio_length(file, 16_000) == 8_000
        found = read_audio(file, 16_000)
        assert np.corrcoef(found, sound(rate=16_000))[0, 1] > 0.99
        monkeypatch.setitem(sys.modules, "soundfile", None)
        with pytest.raises(ConfigError, match=r"pip install 'shoal\[speech\]'"):
            read_audio(file, 16_000)
    monkeypatch.undo()
    with pytest.raises(UnreadableAudio):
        audio_length(io.BytesIO(b"fLaC nothing"), RATE)


@pytest.mark.parametrize("rate", [8_000, 6_000, 2_000])
def test_another_rate_is_converted_to_the_same_sound_of_the_length_that_the_header_promised(
    rate: int, tmp_path: Path
) -> None:
    write_wav(tmp_path / "a.wav", sound(rate=rate, pitch_hz=300.0), rate=rate, width=4)
    with (tmp_path / "a.wav").open("rb") as file:
        length = audio_length(file, RATE)
        found = read_audio(file, RATE)
    assert len(found) == length == round(SECONDS * RATE)
    inner = slice(200, -200)
    assert np.allclose(found[inner], normalised(sound(pitch_hz=300.0))[inner], atol=0.02)


def test_what_is_too_high_for_a_rate_is_filtered_and_not_folded() -> None:
    high = sound(rate=16_000, pitch_hz=3_000.0)
    assert np.abs(resampled(high, 16_000, RATE)[100:-100]).max() < 0.01


def test_tones_are_the_same_everywhere_and_each_character_has_its_own() -> None:
    dataset = opened(with_characters(config(sampling_rate=16_000)))
    again = opened(config(sampling_rate=16_000))
    one, other = dataset.train.read(np.array([3, 4])), again.train.read(np.array([3, 4]))
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(one.everything, other.everything, strict=True))
    length = int(one.context["lengths"][0])
    labels = one.labels[0][one.labels[0] >= 0]
    assert length == len(labels) * 1_600
    tones = one.inputs[0, :length].reshape(len(labels), 1_600)
    loudest = np.abs(np.fft.rfft(tones)).argmax(axis=1) * 10.0
    assert np.allclose(loudest, [200.0 * 2 ** ((label - 1) / 3) for label in labels], atol=6)
    assert not one.inputs[0, length:].any()
    assert dataset.train.num_samples + dataset.holdout.num_samples == 512


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ({"task_type": "cv"}, "is for data.task_type = speech"),
        ({"characters": "xyz"}, "has abcdefgh"),
        ({"eval_split": "test"}, "has no splits"),
        ({"max_audio_s": 0.15}, "2 letters of 0.1 s at least"),
    ],
)
def test_tones_refuse_what_they_are_not(data: dict[str, Any], part: str) -> None:
    model = {"family": "mlp"} if data.get("task_type") == "cv" else None
    with pytest.raises(ConfigError, match=part):
        opened(config(model=model, **data))


def test_what_is_built_in_for_another_task_is_refused_before_a_network_is_asked() -> None:
    with pytest.raises(ConfigError, match="digits has no audio"):
        with_characters(config("digits"))


@pytest.mark.parametrize(
    ("files", "part"),
    [
        ({"notes.md": "x"}, "this folder has no transcripts of audio: metadata.csv"),
        ({"metadata.csv": "name,text\na,b\n"}, "row 1 has name, text, and needs file_name and text"),
        ({"metadata.jsonl": "{no json"}, "is no JSON lines"),
        ({"metadata.jsonl": 3000 * "["}, "is no JSON lines"),
        ({"metadata.jsonl": '["file_name"]'}, "row 1 has , and needs file_name"),
        ({"metadata.jsonl": '{"file_name": 5, "text": "a"}'}, "row 1 has file_name, text, and needs"),
        ({"metadata.csv": "name,text\na,b,c\n"}, "row 1 has name, text, None, and needs"),
        ({"metadata.csv": f"file_name,text\n{200_000 * 'a'},b\n"}, "is no table of text"),
        ({"fileids": "a"}, "has no transcription beside it"),
    ],
)
def test_a_folder_without_transcripts_says_what_is_read(files: dict[str, str], part: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=part):
        opened(config(tmp_path))
