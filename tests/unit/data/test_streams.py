"""Streams: places in them, windows of them, and what is noted of these."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.data.documents import Documents, TextPiece, Unreadable
from shoal.data.fields import Fields
from shoal.data.source import Array, ArraySpec
from shoal.data.stream_filling import WindowFiller, make_facts
from shoal.data.stream_store import StreamFacts, WindowEntry, WindowStore, record_of
from shoal.data.streams import RowsRead, RowStream, SampleStream, StreamPlace, Taken, TokenStream
from shoal.data.tokenising import ByteEncoder
from shoal.errors import ConfigError, SampleError, StorageError
from shoal.events.base import Event
from shoal.events.data import SamplesSkipped, StreamCompared, StreamRepeats
from shoal.swarm.window_marks import num_windows, up_to

WINDOW = 8
SPECS = Fields(ArraySpec("float32", (2,)), ArraySpec("int64", ()))


def numbers(count: int, bad: Sequence[int] = (), add: int = 0) -> RowStream:
    """Row i is the number i + add."""

    def convert(row: object, where: str) -> Fields[Array]:
        assert isinstance(row, int)
        if row in bad:
            raise ValueError("no number")
        return Fields(np.full(2, row + add, np.float32), np.asarray(row + add))

    return RowStream(lambda: range(count), convert, SPECS, 1000, "numbers")


class Host:
    """A store, and the process that fills it, which may die at any time."""

    def __init__(self, folder: Path, stream: SampleStream, held_out: SampleStream | None = None) -> None:
        self.store, self.stream = WindowStore(folder), stream
        self.said: list[Event] = []
        make = self.store.whole_facts()
        self.facts: StreamFacts = make or make_facts(
            stream, held_out, self.store, window=WINDOW, num_holdout=3, name="numbers"
        )
        self.begin()

    def begin(self, stream: SampleStream | None = None, max_bad_fraction: float = 0.2) -> None:
        """As a new process does."""
        self.filler = WindowFiller(
            stream or self.stream,
            self.store,
            self.facts,
            name="numbers",
            max_bad_fraction=max_bad_fraction,
            say=self.said.append,
        )

    def labels(self, number: int) -> list[int]:
        entry = self.filler.fill(number)
        assert self.store.is_whole(self.store.path(number), entry.sha256)
        return labels_in(self.store.path(number), self.facts)

    @property
    def manifest(self) -> Path:
        return self.store.folder / "manifest.jsonl"


def labels_in(path: Path, facts: StreamFacts) -> list[int]:
    rows = np.frombuffer(path.read_bytes(), record_of(facts.fields))
    assert (rows["inputs"] == rows["labels"][:, None]).all()
    return rows["labels"].tolist()


def test_windows_have_each_sample_once_in_its_order_and_go_on_with_the_first_one_where_the_stream_ends(
    tmp_path: Path,
) -> None:
    host = Host(tmp_path, numbers(30))
    assert labels_in(host.store.holdout, host.facts) == [0, 1, 2]
    found = [label for number in range(7) for label in host.labels(number)]
    assert found == [*range(3, 30), *range(3, 30), 3, 4]
    assert host.said == [StreamRepeats("numbers", 1, 30), StreamRepeats("numbers", 2, 60)]


def test_a_split_of_its_own_is_held_out_and_all_of_the_stream_is_trained_on(tmp_path: Path) -> None:
    host = Host(tmp_path, numbers(30), numbers(2, add=500))
    assert labels_in(host.store.holdout, host.facts) == [500, 501]
    assert host.labels(0) == list(range(8))


def test_whoever_makes_a_window_and_however_often_one_dies_it_is_the_same_and_so_is_the_manifest(
    tmp_path: Path,
) -> None:
    bad = (4, 17, 29)
    undisturbed, other = Host(tmp_path / "a", numbers(30, bad)), Host(tmp_path / "b", numbers(30, bad))
    expected = [undisturbed.labels(number) for number in range(9)]
    assert sorted(set(chain(*expected))) == [each for each in range(3, 30) if each not in bad]
    for number in range(9):
        other.begin()
        other.store.path(number).with_suffix(".unfinished").write_bytes(b"half of it")
        with other.manifest.open("ab") as file:
            file.write(b'{"number":9,"st')
        assert other.labels(number) == expected[number]
    assert other.manifest.read_bytes() == undisturbed.manifest.read_bytes()
    assert [event.skipped for event in undisturbed.said if isinstance(event, SamplesSkipped)] == [1, 2, 4, 8]


def test_a_window_that_was_given_up_is_made_again_also_out_of_order_and_those_behind_it_stay(tmp_path: Path) -> None:
    host = Host(tmp_path, numbers(1000))
    expected = [host.labels(number) for number in range(12)]
    host.store.forget_below(10)
    assert sorted(path.name for path in tmp_path.glob("0*")) == ["00000010.samples", "00000011.samples"]
    before = host.manifest.read_bytes()
    for number in (3, 4, 11, 0):
        host.begin()
        assert host.labels(number) == expected[number]
    assert host.manifest.read_bytes() == before
    assert host.labels(12)[0] == expected[11][-1] + 1


def test_where_a_run_is_taken_over_the_windows_before_take_no_room(tmp_path: Path) -> None:
    begun, taken_over = Host(tmp_path / "a", numbers(1000)), Host(tmp_path / "b", numbers(1000))
    expected = [begun.labels(number) for number in range(12)]
    most, add = 0, taken_over.store.add

    def counted(entry: WindowEntry) -> WindowEntry:
        nonlocal most
        most = max(most, len([*taken_over.store.folder.glob("0*.samples")]))
        return add(entry)

    taken_over.store.add = counted
    assert taken_over.labels(11) == expected[11]
    assert most == 1
    assert [path.name for path in taken_over.store.folder.glob("0*")] == ["00000011.samples"]
    assert taken_over.manifest.read_bytes() == begun.manifest.read_bytes()
    assert taken_over.labels(3) == expected[3]


def test_a_file_that_was_damaged_is_made_again(tmp_path: Path) -> None:
    host = Host(tmp_path, numbers(100))
    expected = host.labels(1)
    host.store.path(1).write_bytes(bytes(len(host.store.path(1).read_bytes())))
    assert host.labels(1) == expected


@pytest.mark.parametrize("number", [0, 3, 5])
def test_a_stream_that_gives_other_samples_is_refused_whichever_window_is_needed_next(
    tmp_path: Path, number: int
) -> None:
    host = Host(tmp_path, numbers(100))
    for each in range(4):
        host.labels(each)
    host.begin(numbers(100, add=1))
    before = host.manifest.read_bytes()
    with pytest.raises(ConfigError, match=r"numbers gives other samples than before: window . had another SHA-256"):
        host.labels(number)
    assert host.manifest.read_bytes() == before
    host.begin(numbers(100))
    assert host.labels(number) == list(range(3 + number * 8, 11 + number * 8))


def changed_at(changed: int, count: int = 100) -> RowStream:
    """Numbers, of which one is another one."""

    def convert(row: object, where: str) -> Fields[Array]:
        assert isinstance(row, int)
        label = 900 if row == changed else row
        return Fields(np.full(2, label, np.float32), np.asarray(label))

    return RowStream(lambda: range(count), convert, SPECS, 1000, "numbers")


def marks_of_a_run(folder: Path, windows: int) -> bytes:
    """What the records have that were trained on so many windows, of which one more was read."""
    begun = Host(folder, numbers(100))
    for number in range(windows + 1):
        begun.labels(number)
    assert num_windows(begun.filler.marks) == windows + 1
    return up_to(begun.filler.marks, windows)


@pytest.mark.parametrize("first_read", [0, 2, 9])
def test_another_host_that_reads_a_stream_anew_goes_on_where_it_is_the_same(tmp_path: Path, first_read: int) -> None:
    marks = marks_of_a_run(tmp_path / "a", 4)
    other = Host(tmp_path / "b", numbers(100))
    for number in range(first_read):
        other.labels(number)
    other.begin()
    other.filler.expect(marks)
    assert other.labels(4) == list(range(35, 43))
    assert other.said == [StreamCompared("numbers", 4)], "once, wherever it has come from"
    assert up_to(other.filler.marks, 4) == marks


@pytest.mark.parametrize(("changed", "window"), [(3, 0), (10, 0), (11, 1), (34, 3)])
def test_another_host_whose_stream_differs_is_refused_at_the_first_window_that_does(
    tmp_path: Path, changed: int, window: int
) -> None:
    marks = marks_of_a_run(tmp_path / "a", 4)
    other = Host(tmp_path / "b", changed_at(changed))
    other.filler.expect(marks)
    says = rf"numbers gives other .* of 4 windows the first .* is window {window}, of rows from {3 + 8 * window} on"
    with pytest.raises(ConfigError, match=says) as caught:
        other.labels(4)
    assert "start again" in str(caught.value)
    assert "remove" not in str(caught.value)
    assert len(other.store.entries()) == window, "nothing of it is noted"
    assert not other.store.path(window).exists()
    # The data are brought back.
    other.begin(numbers(100))
    other.filler.expect(marks)
    assert other.labels(4) == list(range(35, 43))


def test_what_differs_behind_the_marks_was_never_trained_on_and_is_taken(tmp_path: Path) -> None:
    marks = marks_of_a_run(tmp_path / "a", 4)
    other = Host(tmp_path / "b", changed_at(35))
    other.filler.expect(marks)
    assert other.labels(4) == [900, *range(36, 43)]


def test_a_stream_that_has_become_shorter_differs_where_it_begins_anew(tmp_path: Path) -> None:
    marks = marks_of_a_run(tmp_path / "a", 4)
    other = Host(tmp_path / "b", numbers(30))
    other.filler.expect(marks)
    with pytest.raises(ConfigError, match="the first that differs is window 3, of rows from 27 on"):
        other.labels(4)


def test_what_a_host_has_read_of_other_data_before_is_named_and_so_is_its_folder(tmp_path: Path) -> None:
    marks = marks_of_a_run(tmp_path / "a", 4)
    other = Host(tmp_path / "b", changed_at(20))
    other.labels(4)
    other.begin(numbers(100))
    says = rf"is window 2, of rows from 19 on.*; if it is the same by now, remove {tmp_path / 'b'}, which"
    with pytest.raises(ConfigError, match=says):
        other.filler.expect(marks)


def test_other_samples_that_are_held_out_elsewhere_are_refused_before_any_window(tmp_path: Path) -> None:
    marks = marks_of_a_run(tmp_path / "a", 4)
    other = Host(tmp_path / "b", changed_at(2))
    with pytest.raises(ConfigError, match="the first that differs is the one before them, of what is held out"):
        other.filler.expect(marks)


def test_other_samples_that_are_held_out_are_refused(tmp_path: Path) -> None:
    host = Host(tmp_path, numbers(100))
    host.store.holdout.unlink()
    with pytest.raises(ConfigError, match=r"its held-out samples had another SHA-256 .* remove .* without --resume"):
        Host(tmp_path, numbers(100, add=1))
    assert Host(tmp_path, numbers(100)).facts == host.facts


def _other_hash(lines: list[Any]) -> None:
    lines[2]["sha256"] = lines[1]["sha256"]


def _one_less(lines: list[Any]) -> None:
    del lines[2]


def _other_facts(lines: list[Any]) -> None:
    lines[0]["num_classes"] += 1


@pytest.mark.parametrize("change", [_other_hash, _one_less, _other_facts])
def test_a_manifest_that_was_changed_is_refused(tmp_path: Path, change: Callable[[list[Any]], None]) -> None:
    host = Host(tmp_path, numbers(100))
    host.labels(3)
    lines = [json.loads(line) for line in host.manifest.read_bytes().splitlines()]
    change(lines)
    host.manifest.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    with pytest.raises(StorageError, match=r"manifest\.jsonl .* is not as it was written .* does not follow"):
        host.begin()


def test_more_rows_that_cannot_be_read_than_allowed_end_it_by_name(tmp_path: Path) -> None:
    host = Host(tmp_path, numbers(100, bad=(20, 21, 30)))
    host.begin(max_bad_fraction=0.1)
    assert len(host.labels(1)) == WINDOW
    host.begin(max_bad_fraction=0.05)
    with pytest.raises(SampleError, match=r"2 of the first 2[0-9] rows of .* numbers cannot be read, .* = 0\.05"):
        host.labels(3)


@pytest.mark.parametrize(("count", "message"), [(0, "no sample that can be held out"), (3, "no sample to train on")])
def test_a_stream_with_too_few_samples_is_refused(tmp_path: Path, count: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Host(tmp_path, numbers(count)).labels(0)


def test_a_stream_that_can_be_read_once_is_refused_where_it_ends(tmp_path: Path) -> None:
    rows = iter(range(20))

    def convert(row: object, where: str) -> Fields[Array]:
        return Fields(np.full(2, row, np.float32), np.asarray(row))

    host = Host(tmp_path, RowStream(lambda: rows, convert, SPECS, 100, "numbers"))
    with pytest.raises(ConfigError, match="no sample when it is read again: a stream has to give its samples anew"):
        host.labels(3)


def test_what_cannot_be_written_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path, numbers(100))

    def full(self: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shoal.data.stream_store.DurableFile.finish", full)
    with pytest.raises(StorageError, match=r"No space left .* a smaller data\.shuffle_window"):
        host.labels(0)
    assert not list(tmp_path.glob("*.unfinished"))


class Texts(Documents):
    """Documents of different lengths, some of which cannot be read, in pieces some of them."""

    identity = "texts"

    def __iter__(self) -> Iterator[TextPiece | Unreadable]:
        for number in range(60):
            if number % 13 == 5:
                yield Unreadable(f"texts:{number}", "no text")
            else:
                yield TextPiece(f"{number}:" + "abcdefghij"[: number % 11] * (number % 3), ends=number % 7 != 2)


@pytest.mark.parametrize("most_characters", [1, 20, 100, 1 << 20])
def test_text_is_its_bytes_in_a_row_and_any_sample_can_be_begun_with(
    monkeypatch: pytest.MonkeyPatch, most_characters: int
) -> None:
    monkeypatch.setattr("shoal.data.streams._BATCH_CHARACTERS", most_characters)
    stream = TokenStream(Texts(), ByteEncoder(), 16)
    pieces = [item for item in Texts() if isinstance(item, TextPiece)]
    text = "".join(f"{piece.content}\n" if piece.ends else str(piece.content) for piece in pieces).encode()
    items = list(stream.take(StreamPlace()))
    taken = [item for item in items if isinstance(item, Taken)]
    assert b"".join(bytes(item.sample.inputs) for item in taken) == text[: (len(text) - 1) // 16 * 16]
    assert all(bytes(item.sample.labels[:-1]) == bytes(item.sample.inputs[1:]) for item in taken)
    unreadable = [each.where for item in items if isinstance(item, RowsRead) for each in item.unreadable]
    assert unreadable == ["texts:5", "texts:18", "texts:31", "texts:44", "texts:57"]
    assert max(item.rows for item in items if isinstance(item, RowsRead)) == 60
    for number, item in enumerate(taken):
        again = [each for each in stream.take(item.then) if isinstance(each, Taken)]
        assert [bytes(each.sample.inputs) for each in again] == [
            bytes(each.sample.inputs) for each in taken[number + 1 :]
        ]
        assert [each.then for each in again] == [each.then for each in taken[number + 1 :]]


def test_text_with_documents_that_cannot_be_read_is_counted_once_whoever_reads_on(tmp_path: Path) -> None:
    stream = TokenStream(Texts(), ByteEncoder(), 16)
    host = Host(tmp_path, stream)
    entries: list[WindowEntry] = []
    for number in range(12):
        host.begin()
        # In between it reads from elsewhere, so that it reads a part of the stream again.
        host.filler.fill(0)
        entries.append(host.filler.fill(number))
    repeats = entries[-1].then.repeat
    assert repeats > 1
    assert (entries[-1].past, entries[-1].read, entries[-1].skipped) == (60 * repeats, 60, 5 * (repeats + 1))


def test_a_stream_is_read_no_further_than_its_window(tmp_path: Path) -> None:
    read: list[int] = []

    def rows() -> Iterator[int]:
        for number in range(10**9):
            read.append(number)
            yield number

    def convert(row: object, where: str) -> Fields[Array]:
        return Fields(np.full(2, row, np.float32), np.asarray(row))

    host = Host(tmp_path, RowStream(rows, convert, SPECS, 10**9, "numbers"))
    host.labels(0)
    assert max(read) == 3 + WINDOW - 1
    assert list(islice(read, 4)) == [0, 1, 2, 0], "what was held out is passed over"
