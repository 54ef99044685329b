"""Text on the disk as tokens: what is read, what they are, that they are found again, and what a wrong choice says."""

from __future__ import annotations

import json
import logging
import os
import signal
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tests.fake_hub import FakeBuilder, use_in_place_of_datasets
from tests.linux_calls import needs
from tests.unit.data.corpora import make_tokens_here, of_folder, write_json_lines, write_parquet
from tokenizers import Tokenizer

from shoal.config import Config
from shoal.config.load import load_with_origins
from shoal.config.shared import has_same_samples, shared_configuration
from shoal.data import parquet_files, stream_windows, text_corpus
from shoal.data.catalog import log_event, open_source
from shoal.data.documents import TextPiece, Unreadable
from shoal.data.file_documents import local_documents
from shoal.data.shuffle import PassOrder, permutation
from shoal.data.source import Source
from shoal.data.stream_opening import open_streams
from shoal.data.stream_windows import open_stream
from shoal.data.streams import StreamPlace, Taken
from shoal.data.text_corpus import with_tokenizer
from shoal.data.token_cache import TokenCache
from shoal.errors import ConfigError, RemoteError, StorageError
from shoal.events.base import Event
from shoal.events.data import (
    DocumentsSkipped,
    TokenizerTraining,
    TokensAwaited,
    TokensBuilt,
    TokensDamaged,
    TokensStopped,
)
from shoal.model.hf.tokenizer import kept_tokenizer
from shoal.runtime import child
from shoal.runtime.linux_calls import LinuxCall
from shoal.wire.messages.base import SampleRange

TEXTS = [f"déjà vu number {number} is about the {number * 7} birds of the woods" for number in range(40)]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_tokens_here(monkeypatch)


def tokens_of(source: Source) -> list[int]:
    """All inputs of a source, one window after the other."""
    inputs, labels, _ = source.read(np.arange(source.num_samples))
    assert np.array_equal(inputs.ravel()[1:], labels.ravel()[:-1])
    return inputs.ravel().tolist()


def all_tokens(config: Config, said: list[Event] | None = None) -> list[int]:
    dataset = open_source(config, (said if said is not None else []).append)
    return [*tokens_of(dataset.train), *tokens_of(dataset.holdout)]


def test_without_a_tokenizer_the_documents_of_all_files_are_their_bytes_with_a_line_s_end_behind_each(
    tmp_path: Path,
) -> None:
    corpus = tmp_path / "corpus"
    write_json_lines(corpus / "a.jsonl", TEXTS[:10])
    write_parquet(corpus / "b.parquet", TEXTS[10:20])
    (corpus / "c.csv").write_text('n,text\n1,"one,\ntwo"\n2,three\n')
    (corpus / "d.txt").write_bytes("first line\r\n\nsecond: é".encode())
    dataset = open_source(of_folder(corpus, {"seq_len": 1}))
    expected = "".join(f"{text}\n" for text in (*TEXTS[:20], "one,\ntwo", "three", "first line\n\nsecond: é")).encode()
    assert dataset.fields.inputs.dtype == "uint8"
    assert bytes(tokens_of(dataset.train)) == expected[: dataset.train.num_samples]
    assert bytes(tokens_of(dataset.holdout)) == expected[-1 - dataset.holdout.num_samples : -1]
    assert dataset.num_classes == 256


def test_a_large_file_of_text_is_read_in_parts_and_comes_out_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.data.file_documents._PIECE_CHARACTERS", 50)
    (tmp_path / "corpus").mkdir()
    text = "\n".join(TEXTS) + "\n"
    (tmp_path / "corpus" / "one.txt").write_text(text)
    dataset = open_source(of_folder(tmp_path / "corpus", {"seq_len": 1, "holdout_fraction": 0.001}))
    assert bytes(tokens_of(dataset.train)) == text.encode()[: dataset.train.num_samples]


def trained(tmp_path: Path, said: list[Event], size: int = 300, **data: Any) -> Config:
    write_json_lines(tmp_path / "corpus" / "a.jsonl", TEXTS[:20])
    write_parquet(tmp_path / "corpus" / "b.parquet", TEXTS[20:])
    config = of_folder(tmp_path / "corpus", {"tokenizer": f"train:{size}", **data}, vocab_size=size)
    return with_tokenizer(config, said.append)


def test_the_tokens_of_a_trained_tokenizer_decode_to_the_documents_with_an_end_behind_each(tmp_path: Path) -> None:
    config = trained(tmp_path, [], seq_len=1, holdout_fraction=0.001)
    kept = kept_tokenizer(config.data.tokenizer_hash or "")
    assert kept is not None
    dataset = open_source(config)
    assert dataset.fields.inputs.dtype == "uint16"
    tokenizer = Tokenizer.from_file(str(kept.folder / "tokenizer.json"))
    text = tokenizer.decode(tokens_of(dataset.train), skip_special_tokens=False)
    whole = "".join(f"{each}<|endoftext|>" for each in TEXTS)
    assert whole.startswith(text)
    assert len(text) > len(whole) - 40
    assert kept.facts.end == tokenizer.token_to_id("<|endoftext|>")


def test_a_tokenizer_is_trained_and_tokens_are_made_once_and_found_again_afterwards(tmp_path: Path) -> None:
    said: list[Event] = []
    config = trained(tmp_path, said)
    first = all_tokens(config, said)
    assert [type(event) for event in said] == [TokenizerTraining, TokensBuilt]
    said.clear()
    again = trained_again(config, said)
    assert again.data.tokenizer_hash == config.data.tokenizer_hash
    assert all_tokens(again, said) == first
    assert not said


def trained_again(config: Config, said: list[Event]) -> Config:
    unknown = config.model_copy(update={"data": config.data.model_copy(update={"tokenizer_hash": None})})
    return with_tokenizer(unknown, said.append)


def test_training_a_tokenizer_again_gives_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="shoal")
    config = trained(tmp_path, [])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    said: list[Event] = []
    assert trained_again(config, said).data.tokenizer_hash == config.data.tokenizer_hash
    assert isinstance(said[0], TokenizerTraining)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a third"))
    unknown = config.model_copy(update={"data": config.data.model_copy(update={"tokenizer_hash": None})})
    with_tokenizer(unknown, log_event)
    assert "tokenizer.training" in caplog.messages, "where nobody watches it is logged"


def kept_file(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "kept").glob("*.tokens")
    return path


@pytest.mark.parametrize("how", ["cut off", "a byte changed", "without its description", "description cut off"])
def test_kept_tokens_that_are_damaged_are_noticed_and_made_again(tmp_path: Path, how: str) -> None:
    config = trained(tmp_path, [])
    first = all_tokens(config)
    path = kept_file(tmp_path)
    whole = path.read_bytes()
    described = path.with_suffix(".json")
    match how:
        case "cut off":
            path.write_bytes(whole[:-2])
        case "a byte changed":
            stat = path.stat()
            path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        case "description cut off":
            described.write_bytes(described.read_bytes()[:20])
        case _:
            described.unlink()
    said: list[Event] = []
    assert all_tokens(config, said) == first
    assert any(isinstance(event, TokensBuilt) for event in said)
    assert any(isinstance(event, TokensDamaged) for event in said) == (how != "without its description")
    assert path.read_bytes() == whole


def test_kept_tokens_with_another_time_are_compared_and_used(tmp_path: Path) -> None:
    config = trained(tmp_path, [])
    first = all_tokens(config)
    os.utime(kept_file(tmp_path), ns=(1, 1))
    said: list[Event] = []
    assert all_tokens(config, said) == first
    assert not said


def test_other_documents_have_other_tokens(tmp_path: Path) -> None:
    config = of_folder(tmp_path / "corpus", {"seq_len": 1, "holdout_fraction": 0.001})
    write_json_lines(tmp_path / "corpus" / "a.jsonl", TEXTS)
    first = all_tokens(config)
    write_json_lines(tmp_path / "corpus" / "a.jsonl", TEXTS[::-1])
    assert all_tokens(config) != first


def test_of_two_who_make_the_same_tokens_at_once_one_waits_and_finds_them(tmp_path: Path) -> None:
    config = of_folder(tmp_path / "corpus")
    write_json_lines(tmp_path / "corpus" / "a.jsonl", TEXTS)
    documents = text_corpus.documents_here(config, None)
    assert documents is not None
    cache = text_corpus.cache_of(config.data, documents, "bytes")
    said: list[Event] = []
    waiting = threading.Thread(target=all_tokens, args=(config, said))
    with TokenCache.locked(cache):
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        assert said == [TokensAwaited(config.data.dataset_name, str(cache.path.with_suffix(".lock")))]
    waiting.join()
    assert [type(event) for event in said] == [TokensAwaited, TokensBuilt]


def test_documents_that_cannot_be_read_are_left_out_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_json_lines(tmp_path / "corpus" / "a.jsonl", [*TEXTS[:5], 7, "lone \ud800 half"])
    with (tmp_path / "corpus" / "a.jsonl").open("a") as file:
        file.write("{broken\n")
        file.write(3000 * '{"text":' + "\n")
    write_parquet(tmp_path / "corpus" / "b.parquet", [*TEXTS[5:9], None])
    said: list[Event] = []
    config = of_folder(tmp_path / "corpus", {"seq_len": 1, "max_bad_fraction": 0.5})
    read = tokens_of(open_source(config, said.append).train)
    assert bytes(read) == "".join(f"{text}\n" for text in TEXTS[:9]).encode()[: len(read)]
    (skipped,) = (event for event in said if isinstance(event, DocumentsSkipped))
    assert (skipped.skipped, skipped.documents) == (5, 14)
    for where in ("a.jsonl:6", "a.jsonl:7", "a.jsonl:8", "a.jsonl:9", "b.parquet:5"):
        assert where in skipped.first
    open_source(config)
    assert caplog.messages == ["documents.skipped"], "where nobody watches it is logged"


def test_pages_of_a_form_that_pyarrow_does_not_know_are_documents_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise pyarrow.ArrowNotImplementedError("Unknown encoding")

    write_parquet(tmp_path / "corpus" / "a.parquet", TEXTS)
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", refuse)
    with pytest.raises(ConfigError, match=r"a\.parquet:1: its pages cannot be read \(Unknown encoding\)"):
        all_tokens(of_folder(tmp_path / "corpus"))


def test_a_small_parquet_file_that_says_it_unpacks_to_a_large_one_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it is read")

    (tmp_path / "corpus").mkdir()
    rows = pyarrow.table({"text": ["a" * 1_000_000], "other": ["b" * 1_000_000]})
    options = {"compression": "zstd", "use_dictionary": False}
    pyarrow.parquet.write_table(rows, tmp_path / "corpus" / "a.parquet", **options)
    assert len(all_tokens(of_folder(tmp_path / "corpus"))) > 900_000, "of a size that any host has"
    monkeypatch.setattr(parquet_files, "_MOST_UNPACKED_BYTES", 1_500_000)
    assert len(all_tokens(of_folder(tmp_path / "corpus", {"cache_dir": str(tmp_path / "anew")}))) > 900_000
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", refuse)
    monkeypatch.setattr(parquet_files, "_MOST_UNPACKED_BYTES", 900_000)
    with pytest.raises(ConfigError, match=r"a\.parquet: row group 0 unpacks from \d+ bytes to 1\d{6}, more than 1000"):
        all_tokens(of_folder(tmp_path / "corpus", {"cache_dir": str(tmp_path / "again")}))


@needs(LinuxCall.PROC, "a limit on the memory that a process maps")
def test_a_small_parquet_file_that_unpacks_to_a_large_one_takes_no_more_memory_than_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(text_corpus, "_MAKER", "tests.unit.data.limited_maker")
    (tmp_path / "corpus").mkdir()
    # Of 2 kB it says truly that they unpack to 4 MB; that each row is those 4 MB is in its pages.
    same = pyarrow.DictionaryArray.from_arrays(np.zeros(1000, np.int32), ["a" * 4_000_000])
    path = tmp_path / "corpus" / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": same}), path, compression="zstd")
    assert path.stat().st_size < 5_000
    with pytest.raises(StorageError, match=r"unpacks to more than the 1\.1 GB of memory .* leave out the file"):
        all_tokens(of_folder(tmp_path / "corpus"))


def test_a_lack_of_memory_leaves_no_row_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise pyarrow.ArrowMemoryError("malloc of size 64 failed")

    write_parquet(tmp_path / "corpus" / "a.parquet", TEXTS)
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", refuse)
    with pytest.raises(MemoryError):
        all_tokens(of_folder(tmp_path / "corpus", {"max_bad_fraction": 1.0}))


def test_too_many_documents_that_cannot_be_read_end_the_run_also_when_their_tokens_are_kept(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "corpus" / "a.jsonl", [*TEXTS[:9], None])
    with pytest.raises(ConfigError, match=r"1 of 10 documents .* data\.max_bad_fraction = 0\.01: a\.jsonl:10"):
        all_tokens(of_folder(tmp_path / "corpus"))
    all_tokens(of_folder(tmp_path / "corpus", {"max_bad_fraction": 0.1}))
    with pytest.raises(ConfigError, match=r"1 of 10 documents"):
        all_tokens(of_folder(tmp_path / "corpus"))


def test_another_column_a_split_for_evaluation_and_a_number_of_documents_are_taken(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "corpus" / "train.jsonl", TEXTS[:10], column="body")
    write_parquet(tmp_path / "corpus" / "validation.parquet", TEXTS[10:20], column="body")
    data = {"seq_len": 1, "text_column": "body", "eval_split": "validation", "max_documents": 3}
    dataset = open_source(of_folder(tmp_path / "corpus", data))
    assert bytes(tokens_of(dataset.train)) == "".join(f"{text}\n" for text in TEXTS[:3]).encode()[:-1]
    assert bytes(tokens_of(dataset.holdout)) == "".join(f"{text}\n" for text in TEXTS[10:13]).encode()[:-1]
    by_file = {**data, "eval_split": str(tmp_path / "corpus" / "validation.parquet")}
    assert tokens_of(open_source(of_folder(tmp_path / "corpus", by_file)).holdout) == tokens_of(dataset.holdout)


def files_of(dataset_name: Path, split: str | None = None, **data: Any) -> list[str]:
    """Which files of text are read; each holds its own name."""
    documents = local_documents(of_folder(dataset_name, data).data, split)
    assert documents is not None
    return [str(piece.content) for piece in documents if isinstance(piece, TextPiece)]


def write_named(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".jsonl"):
            write_json_lines(folder / name, [name])
        else:
            (folder / name).write_text(name)


@pytest.mark.parametrize("dataset_name", [".", "*.jsonl"])
@pytest.mark.parametrize("eval_split", ["validation", "{}/validation.jsonl", "{}/val*.jsonl", "{}/link.jsonl"])
def test_what_is_held_out_of_a_folder_or_a_pattern_is_not_trained_on(
    tmp_path: Path, dataset_name: str, eval_split: str
) -> None:
    corpus, split = tmp_path / "corpus", eval_split.format(tmp_path / "corpus")
    write_named(corpus, "train.jsonl", "validation.jsonl")
    if "link" in eval_split:
        (corpus / "link.jsonl").symlink_to("validation.jsonl")
    assert files_of(corpus / dataset_name, eval_split=split) == ["train.jsonl"]
    assert files_of(corpus / dataset_name, split, eval_split=split) == ["validation.jsonl"]


def test_a_file_that_is_held_out_of_a_folder_of_text_is_not_trained_on_also_by_a_link_and_in_a_stream(
    tmp_path: Path,
) -> None:
    corpus, held = tmp_path / "corpus", str(tmp_path / "corpus" / "a.txt")
    write_named(corpus, "a.txt", "b.txt", "c.txt")
    (corpus / "again.txt").symlink_to("a.txt")
    dataset = open_source(of_folder(corpus, {"seq_len": 1, "eval_split": held}))
    assert bytes(tokens_of(dataset.train)) == b"b.txt\nc.txt"
    assert bytes(tokens_of(dataset.holdout)) == b"a.txt"
    streams = open_streams(of_folder(corpus, {"seq_len": 1, "eval_split": held, "streaming": True}), print)
    taken = [each.sample.inputs[0] for each in streams.train.take(StreamPlace(0, 0)) if isinstance(each, Taken)]
    assert bytes(taken) == b"b.txt\nc.txt"


def test_a_link_out_of_a_folder_of_text_is_not_followed_but_a_file_that_somebody_names_here_is(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("a password")
    write_named(tmp_path / "corpus", "a.txt")
    (tmp_path / "corpus" / "b.txt").symlink_to("../secret.txt")
    for data in ({}, {"eval_split": f"{tmp_path}/corpus"}):
        with pytest.raises(ConfigError, match=r"b\.txt' is outside of its data set"):
            files_of(tmp_path / "corpus", data.get("eval_split"), **data)
    assert files_of(tmp_path / "corpus" / "b.txt") == ["a password"]


def test_links_of_the_hub_s_cache_lead_beside_all_snapshots(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "snapshots" / "0123", tmp_path / "blobs"
    write_named(tmp_path, "blobs/a", "snapshots/0123/b.txt")
    (folder / "a.txt").symlink_to("../../blobs/a")
    assert files_of(folder) == ["blobs/a", "snapshots/0123/b.txt"]
    blobs.rename(tmp_path / "elsewhere")
    (folder / "a.txt").unlink()
    (folder / "a.txt").symlink_to("../../elsewhere/a")
    with pytest.raises(ConfigError, match="is outside of its data set"):
        files_of(folder)


@pytest.mark.parametrize(
    ("dataset_name", "eval_split"), [(".", "{}/"), (".", "train"), ("train.txt", "{}/*.txt"), ("train.txt", "train")]
)
def test_where_all_is_held_out_it_is_said_that_nothing_is_left_to_train_on(
    tmp_path: Path, dataset_name: str, eval_split: str
) -> None:
    write_named(tmp_path / "corpus", "train.txt", "b.txt")
    data = {"eval_split": eval_split.format(tmp_path / "corpus")}
    with pytest.raises(ConfigError, match=r"holds out all files of .* none is left to train on; name other files"):
        open_source(of_folder(tmp_path / "corpus" / dataset_name, data))


def test_the_name_of_a_text_file_says_its_split_at_its_end_alone(tmp_path: Path) -> None:
    titles = ["a.txt", "dev-guide.txt", "how-training-works.txt", "test-plan.text", "the-test.txt", "train.of.it.txt"]
    write_named(tmp_path / "txt", *titles)
    assert files_of(tmp_path / "txt") == titles
    held = ["corpus_validation.txt", "dev/a.txt", "my-dev/b.txt", "valid.txt", "wiki.Val-2.txt"]
    write_named(tmp_path / "txt", "test.txt", *held)
    assert files_of(tmp_path / "txt") == titles
    assert files_of(tmp_path / "txt", "validation", eval_split="validation") == held
    assert files_of(tmp_path / "txt", eval_split="validation") == titles
    named = ["my-train/a.txt", "train-00001-of-00004.txt", "train.txt", "training_3.txt", "wiki.train.txt"]
    write_named(tmp_path / "txt", *named)
    assert files_of(tmp_path / "txt") == named
    with pytest.raises(ConfigError, match=r"guide: no file of .* has the name of this split, as guide\.txt"):
        files_of(tmp_path / "txt", "guide")


def test_what_is_named_itself_is_text_whatever_it_is_called_and_a_folder_gives_what_it_knows(tmp_path: Path) -> None:
    write_named(tmp_path, "a.md", "b.md", "c.py", "d.txt")
    assert files_of(tmp_path / "a.md") == ["a.md"]
    assert files_of(tmp_path / "*.md") == ["a.md", "b.md"]
    assert files_of(tmp_path, f"{tmp_path}/c.py", eval_split=f"{tmp_path}/c.py") == ["c.py"]
    # Beside files of a known kind, what else a pattern matches may be anything.
    assert files_of(tmp_path / "*") == files_of(tmp_path) == ["d.txt"]
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"image\.png: it is no text in UTF-8"):
        open_source(of_folder(tmp_path / "image.png"))


def test_rows_may_be_one_json_list(tmp_path: Path) -> None:
    rows = [{"text": text} for text in TEXTS[:3]]
    for name, indent in (("compact.json", None), ("indented.json", 2)):
        (tmp_path / name).write_text("\n " + json.dumps(rows, indent=indent))
        assert files_of(tmp_path / name) == TEXTS[:3]
    (tmp_path / "odd.json").write_text('[{"text": "a"}, 5, {"body": "b"}, {"turns": []}]')
    data = of_folder(tmp_path / "odd.json").data
    found = [item for item in local_documents(data, None) or () if isinstance(item, Unreadable)]
    assert found == [
        Unreadable("odd.json:2", "it is no JSON object"),
        Unreadable("odd.json:3", 'it has no "text" (data.text_column) but body'),
        Unreadable(
            "odd.json:4", 'it has no "text" (data.text_column) but turns; data.messages_column names conversations'
        ),
    ]
    (tmp_path / "broken.json").write_text('[{"text": "a"},')
    with pytest.raises(ConfigError, match=r"broken\.json begins as a JSON list of rows and is none .*; mend it"):
        files_of(tmp_path / "broken.json")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("by_excel.csv", "text,n\nfew words,1\n"),
        ("lines.jsonl", '{"text": "few words"}\n'),
        ("list.json", '[{"text": "few words"}]'),
    ],
)
def test_the_mark_that_windows_puts_before_a_table_is_no_part_of_it(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert files_of(tmp_path / name) == ["few words"]


def test_a_word_anywhere_in_the_name_of_a_file_of_rows_says_its_split(tmp_path: Path) -> None:
    write_named(tmp_path / "rows", "a.jsonl", "dev-guide.jsonl", "my-test-rows.jsonl")
    assert files_of(tmp_path / "rows") == ["a.jsonl"]
    assert files_of(tmp_path / "rows", "validation") == ["dev-guide.jsonl"]


def test_a_pattern_names_files_and_a_text_that_shoal_carries_has_a_tokenizer_too(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "a.jsonl", TEXTS[:3])
    write_json_lines(tmp_path / "b.jsonl", TEXTS[3:])
    first = all_tokens(of_folder(tmp_path / "[a].jsonl", {"seq_len": 1}))
    assert len(first) < len("".join(TEXTS[:3]).encode()) + 4
    topics = of_folder(tmp_path, {"dataset_name": "pydoc-topics", "tokenizer": "train:260"}, vocab_size=260)
    assert open_source(with_tokenizer(topics, print)).num_classes == 260


def test_of_the_hub_only_the_first_documents_are_fetched_where_a_number_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[int] = []

    def rows() -> Iterator[dict[str, str]]:
        for number, text in enumerate(TEXTS):
            fetched.append(number)
            yield {"body": text}

    class Stream:
        column_names = None

        def __iter__(self) -> Iterator[dict[str, str]]:
            return rows()

    stream = Stream()
    asked: list[object] = []
    builder = FakeBuilder(hash="version 1", as_streaming_dataset=lambda split: [asked.append(split), stream][1])
    hub = SimpleNamespace(
        config=SimpleNamespace(HF_ENDPOINT="https://huggingface.co"),
        load_dataset_builder=lambda *names, token: [asked.append((*names, token)), builder][1],
    )
    use_in_place_of_datasets(monkeypatch, hub)
    data = {"dataset_name": "web", "text_column": "body", "max_documents": 4, "seq_len": 1, "hf_token": "secret"}
    dataset = open_source(of_folder(tmp_path / "none", data))
    assert asked == [("web", None, "secret"), "train"]
    assert bytes(tokens_of(dataset.train)) == "\n".join(TEXTS[:4]).encode()[: dataset.train.num_samples]
    assert fetched == [0, 1, 2, 3]


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_token_files_are_taken_as_they_are(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "corpus").mkdir()
    tokens = (np.arange(1000) % 300).astype(np.uint16)
    for part, values in enumerate((tokens[:700], tokens[700:])):
        path = tmp_path / "corpus" / f"{part}{suffix}"
        if suffix == ".npy":
            np.save(path, values)
        else:
            values.tofile(path)
    data = {"token_dtype": "uint16", "seq_len": 1}
    config = of_folder(tmp_path / "corpus", data, vocab_size=300)
    dataset = open_source(config)
    assert dataset.fields.inputs.dtype == "uint16"
    assert dataset.num_classes == 300
    assert tokens_of(dataset.train) == tokens[: dataset.train.num_samples].tolist()
    with pytest.raises(ConfigError, match=r"model\.vocab_size = 298 is too small .* 300 different tokens"):
        open_source(of_folder(tmp_path / "corpus", data, vocab_size=298))
    kept_file(tmp_path).unlink()
    with pytest.raises(ConfigError, match=r"the token 299, and the model .* 0 to 297"):
        open_source(of_folder(tmp_path / "corpus", data, vocab_size=298))
    with pytest.raises(ConfigError, match=r"data\.token_dtype"):
        open_source(of_folder(tmp_path / "corpus", {"seq_len": 1}, vocab_size=300))


def test_of_eight_parquet_files_with_100_000_rows_each_is_there_once_in_a_pass_in_an_order_of_the_seed_alone(
    tmp_path: Path,
) -> None:
    rows = [f"row {number:011d}" for number in range(100_000)]
    for part in range(8):
        path = tmp_path / "corpus" / f"{part}.parquet"
        path.parent.mkdir(exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table({"text": rows[part * 12_500 : (part + 1) * 12_500]}), path)
    # With the line's end behind it, a row is a sample.
    dataset = open_source(of_folder(tmp_path / "corpus", {"seq_len": 16, "holdout_fraction": 0.1}))
    num_train = dataset.train.num_samples

    def in_order_of(seed: int) -> list[str]:
        samples = dataset.train.read(permutation(seed, 0, num_train)).inputs
        return samples.tobytes().decode().splitlines()

    first = in_order_of(1)
    assert sorted(first) == rows[:num_train]
    assert in_order_of(1) == first != in_order_of(2)
    # What is held out ends with the last row, whose last byte is the label of the one before.
    assert num_train + dataset.holdout.num_samples == 99_999


@needs(LinuxCall.CACHE_ADVICE, "nothing is read ahead")
def test_with_a_window_tokens_are_read_ahead_and_given_up_and_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json_lines(tmp_path / "corpus" / "a.jsonl", TEXTS)
    dataset = open_source(of_folder(tmp_path / "corpus", {"seq_len": 4, "shuffle_window": 32}))
    told: list[tuple[int, int, int]] = []
    monkeypatch.setattr("os.posix_fadvise", lambda fd, start, size, advice: told.append((start, size, advice)))
    order, num_train = PassOrder.of(dataset, 1), dataset.train.num_samples
    indices = order.indices((SampleRange(0, 0, num_train),))
    assert sorted(indices.tolist()) == list(range(num_train))
    # Groups of two samples of four bytes, with the label of the second one.
    ahead = {start for start, size, advice in told if advice == os.POSIX_FADV_WILLNEED and size == 9}
    assert ahead == {4 * index for index in indices[32:].tolist() if index % 2 == 0 and index + 1 < num_train}
    behind = [start for start, _, advice in told if advice == os.POSIX_FADV_DONTNEED]
    assert sorted({4 * (index - index % 2) for index in indices[: len(behind) * 2].tolist()}) == sorted(behind)


def tokenizer_folder(tmp_path: Path) -> Path:
    kept = kept_tokenizer(trained(tmp_path, []).data.tokenizer_hash or "")
    assert kept is not None
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, content in kept.files.items():
        (folder / name).write_bytes(content)
    return folder


def test_a_tokenizer_of_a_folder_is_known_by_its_hash_and_needed_no_more_afterwards(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path)
    config = with_tokenizer(of_folder(tmp_path / "corpus", {"tokenizer": str(folder)}, vocab_size=300), print)
    first = all_tokens(config)
    for path in folder.iterdir():
        path.unlink()
    assert all_tokens(config) == first
    assert shared_configuration(config)["data"]["tokenizer_hash"] == config.data.tokenizer_hash


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "chunk size"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"}, "added_tokens": []}, "UNK"),
    ],
    ids=["it panics", "it knows no token for a word"],
)
def test_a_tokenizer_that_gives_up_on_a_text_is_one_error_that_names_it(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    path = tokenizer_folder(tmp_path) / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    config = with_tokenizer(of_folder(tmp_path / "corpus", {"tokenizer": str(path.parent)}, vocab_size=300), print)
    with pytest.raises(ConfigError, match=f"the tokenizer in .* makes no tokens of a text .*{reason}.*another one"):
        all_tokens(config)


def takes_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **data: Any) -> Config:
    """A run on a few lines whose tokenizer cuts them by an expression that tries all ways, in processes of less
    patience."""
    path = tokenizer_folder(tmp_path) / "tokenizer.json"
    split = {"type": "Split", "pattern": {"Regex": "a*a*$"}, "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps({**json.loads(path.read_text()), "pre_tokenizer": split}))
    write_json_lines(tmp_path / "lines" / "a.jsonl", ["a" * 4_000 + "!"] * 3)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(text_corpus, "_MAKER", "tests.unit.data.limited_maker")
    monkeypatch.setattr(stream_windows, "_FILLER", "tests.unit.data.limited_filler")
    config = of_folder(tmp_path / "lines", {"tokenizer": str(path.parent), **data}, vocab_size=300)
    return with_tokenizer(config, print)


def test_a_tokenizer_that_computes_without_end_is_one_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = takes_hours(tmp_path, monkeypatch)
    with pytest.raises(
        ConfigError, match=r"data\.tokenizer = .*mine computes without end on one of the texts.*another"
    ):
        open_source(config)


def test_a_tokenizer_that_computes_without_end_on_a_stream_is_one_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = takes_hours(tmp_path, monkeypatch, streaming=True)
    with pytest.raises(
        ConfigError, match=r"data\.tokenizer = .*mine computes without end on one of the texts.*another"
    ):
        open_stream(config, print)


def test_a_tokenizer_of_a_folder_has_no_file_from_elsewhere(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path)
    (tmp_path / "secret").write_text("secret")
    (folder / "chat_template.jinja").symlink_to("../secret")
    with pytest.raises(ConfigError, match=r"jinja' is outside of its tokenizer, .*mine, and is not read; copy"):
        with_tokenizer(of_folder(tmp_path / "corpus", {"tokenizer": str(folder)}, vocab_size=300), print)


def test_a_host_with_another_tokenizer_under_the_name_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tokenizer_folder(tmp_path)
    config = with_tokenizer(of_folder(tmp_path / "corpus", {"tokenizer": str(folder)}, vocab_size=300), print)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["merges"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another host"))
    with pytest.raises(ConfigError, match=r"not the tokenizer that the run began with .* its files are others"):
        open_source(config)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"tokenizer": "./nosuch"}, r"data\.tokenizer = \./nosuch: there is no such folder"),
        ({"tokenizer": "{tmp_path}"}, r"this folder has no tokenizer\.json"),
        ({"tokenizer": "{tmp_path}/odd"}, r"its tokenizer\.json cannot be read"),
        ({"tokenizer": "train:290"}, r"model\.vocab_size = 256 is too small for .* = train:290: it has 290"),
        ({"tokenizer": "train:300", "dataset_name": "{tmp_path}/t.bin"}, r"tokens already"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_says_why(tmp_path: Path, data: dict[str, str], message: str) -> None:
    write_json_lines(tmp_path / "corpus" / "a.jsonl", TEXTS)
    (tmp_path / "t.bin").write_bytes(bytes(100))
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "tokenizer.json").write_text("{}")
    data = {key: value.replace("{tmp_path}", str(tmp_path)) for key, value in data.items()}
    with pytest.raises(ConfigError, match=message):
        with_tokenizer(of_folder(tmp_path / "corpus", data), print)


def test_without_the_package_a_tokenizer_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json_lines(tmp_path / "corpus" / "a.jsonl", TEXTS)
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"package tokenizers, which is not here: pip install 'shoal\[hf\]'"):
        with_tokenizer(of_folder(tmp_path / "corpus", {"tokenizer": "train:300"}), print)


_NPY = "{'descr': '<u2', 'fortran_order': False, 'shape': (%s,)}"


def _npy(header: str) -> bytes:
    """A file of numpy with this header, an expression of Python."""
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header.encode() + b"\n" + bytes(10)


@pytest.mark.parametrize(
    ("files", "data", "message"),
    [
        ({"a.jsonl": b"", "b.bin": b""}, {}, r"b\.bin holds tokens and a\.jsonl text"),
        ({"train.jsonl": b""}, {"eval_split": "validation"}, r"data\.eval_split = validation: no file .* train\.jsonl"),
        ({"a.jsonl": b""}, {"eval_split": "./no/such"}, r"data\.eval_split = \./no/such: there is no such file"),
        ({"a.parquet": b"PAR1"}, {}, r"a\.parquet is no parquet file"),
        (
            {"a.csv": "n,text\n1,é\n".encode("latin-1")},
            {},
            r"a\.csv, its first row, cannot be read .*; save it as UTF-8",
        ),
        ({"a.bin": bytes(3)}, {"token_dtype": "uint16"}, r"a\.bin ends within a token of data\.token_dtype = uint16"),
        *(
            ({"a.npy": _npy(header)}, {"token_dtype": "uint16"}, r"a\.npy is no array of numpy")
            for header in (9000 * "(", "{[]: 1}", _NPY % 10**30, _NPY % "True", _NPY % (5000 * "-" + "5"))
        ),
        ({"a.csv": b"n,body\n1,x\n"}, {}, r'a\.csv has no column "text" but n, body'),
        ({"a.csv": b"n;text\n1;x\n"}, {}, r'no column "text" but \'n;text\': its columns .* by commas, not by \';\''),
        ({"a.csv": b""}, {}, r'a\.csv has no column "text", and no other one: it is empty'),
        ({"a.jsonl": b'{"text": "few"}\n'}, {}, r"has 4 tokens: too few for data\.seq_len = 8"),
    ],
)
def test_files_that_cannot_be_used_say_why(
    tmp_path: Path, files: dict[str, bytes], data: dict[str, Any], message: str
) -> None:
    (tmp_path / "corpus").mkdir()
    for name, content in files.items():
        (tmp_path / "corpus" / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        open_source(of_folder(tmp_path / "corpus", data))


@pytest.mark.parametrize("data", [{"tokenizer": "train:300"}, {"max_documents": 3}])
def test_what_only_text_has_is_refused_of_images(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"means nothing to data\.task_type = cv"):
        Config.model_validate({"data": {"task_type": "cv", **data}, "model": {"family": "resnet18"}})


def test_a_tokenizer_smaller_than_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="257 tokens"):
        Config.model_validate({"data": {"tokenizer": "train:256"}})


def test_what_was_found_of_a_tokenizer_counts_only_under_its_name() -> None:
    run = {"data": {"tokenizer": "one", "tokenizer_hash": "0" * 64}}
    same, _ = load_with_origins(None, ["--data.tokenizer=one"], {}, run=run)
    other, _ = load_with_origins(None, ["--data.tokenizer=two"], {}, run=run)
    assert same.data.tokenizer_hash == "0" * 64
    assert other.data.tokenizer_hash is None


def test_runs_have_the_same_samples_only_with_the_same_tokenizer_and_older_ones_had_none() -> None:
    now = shared_configuration(Config())
    assert "cache_dir" not in now["data"]
    of_before = {**now, "data": {key: value for key, value in now["data"].items() if "tokenizer" not in key}}
    assert has_same_samples(now, of_before)
    assert not has_same_samples(now, {**now, "data": {**now["data"], "tokenizer_hash": "0" * 64}})


def test_another_process_makes_the_tokens_and_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = trained(tmp_path, [])
    expected = all_tokens(config)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    elsewhere = config.model_copy(update={"data": config.data.model_copy(update={"cache_dir": tmp_path / "other"})})
    said: list[Event] = []
    assert all_tokens(elsewhere, said) == expected
    assert [type(event) for event in said] == [TokensBuilt]
    (tmp_path / "corpus" / "c.csv").write_text("n\n1\n")
    with pytest.raises(ConfigError, match=r"no column"):
        all_tokens(config)


def test_of_a_process_that_makes_tokens_and_stands_still_it_is_said_and_what_it_has_made_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(text_corpus, "_MAKER", "tests.unit.data.stopped_maker")
    monkeypatch.setattr(child, "LOOK_S", 0.01)
    monkeypatch.setattr(child, "STILL_S", 0.0)
    write_json_lines(tmp_path / "corpus" / "a.jsonl", TEXTS)
    said: list[Event] = []

    def say(event: Event) -> None:
        log_event(event)
        said.append(event)
        if isinstance(event, TokensStopped):
            os.kill(event.pid, signal.SIGCONT)

    open_source(of_folder(tmp_path / "corpus"), say)
    assert [type(event) for event in said] == [TokensStopped, TokensBuilt]
    assert [record.levelno for record in caplog.records if record.getMessage() == "tokens.stopped"] == [logging.WARNING]


def test_when_the_process_that_makes_tokens_is_killed_the_message_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(text_corpus, "_MAKER", "this")
    write_json_lines(tmp_path / "corpus" / "a.jsonl", TEXTS)
    with pytest.raises(RemoteError, match=r"has ended with \d+ before it was done"):
        open_source(of_folder(tmp_path / "corpus"))
