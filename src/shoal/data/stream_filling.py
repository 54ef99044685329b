"""Makes the windows of a stream, and makes them again: which samples are in window k follows from the stream alone.

samples, from the first one on -> held out: the first few | window 0 | window 1 | ... | (its end: begin anew) | ...

What has been noted of a window holds: made again, it has the same SHA-256, or the stream is refused. A process that
goes on where another one has stopped makes a window again first, and so sees that it is the same stream. Where a run
has trained on it before, perhaps on another host, each window is compared with the mark that a record has of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, cast

from shoal.data.documents import Unreadable
from shoal.data.stream_store import FORMAT, Cursor, StreamFacts, WindowEntry, WindowStore, packed, record_of
from shoal.data.streams import RowsRead, SampleStream, StreamPlace, Taken
from shoal.errors import ConfigError, SampleError
from shoal.events.base import Event
from shoal.events.data import SamplesSkipped, StreamCompared, StreamRepeats
from shoal.swarm.window_marks import MAX_WINDOWS, first_difference, mark_of, num_windows

_PART_BYTES: Final = 1 << 20


def make_facts(
    train: SampleStream, held_out: SampleStream | None, store: WindowStore, *, window: int, num_holdout: int, name: str
) -> StreamFacts:
    """Write the samples that are held out, and begin the manifest, unless it was begun.

    Args:
        held_out: What is evaluated on; None: the first samples of what is trained on.
        window: Samples of each window.
        num_holdout: At most so many samples are held out.

    Raises:
        ConfigError: There are too few samples, or what was noted is of other ones.
        SampleError: The stream cannot be read.
        StorageError: It cannot be kept.
    """
    source = held_out or train
    record, count, begin = record_of(source.fields), 0, StreamPlace()
    with store.writing(store.holdout) as file:
        with closing(cast("Any", source.take(StreamPlace()))) as items:
            for item in items:
                if isinstance(item, Taken):
                    file.write(packed(item.sample, record))
                    count, begin = count + 1, item.then
                    if count == num_holdout:
                        break
        sha256 = file.finish().sha256
        store.put(store.holdout)
    if not count:
        raise ConfigError(f"data.dataset_name = {name} has no sample that can be held out: it is empty, or too short")
    facts = StreamFacts(
        format=FORMAT,
        window=window,
        inputs=train.fields.inputs,
        labels=train.fields.labels,
        num_classes=train.num_classes,
        num_holdout=count,
        holdout_sha256=sha256,
        begin=StreamPlace() if held_out is not None else begin,
    )
    known = store.facts()
    if known is None:
        store.begin(facts)
    elif known != facts:
        raise _another_stream(name, "its held-out samples", store)
    return facts


@dataclass(eq=False, repr=False)
class WindowFiller:
    """Makes windows of a stream whose facts are known.

    Raises:
        StorageError: The manifest is not as it was written.
    """

    stream: SampleStream
    store: WindowStore
    facts: StreamFacts
    _: KW_ONLY
    name: str
    max_bad_fraction: float
    say: Callable[[Event], None]

    def __post_init__(self) -> None:
        self._record = record_of(self.facts.fields)
        self._entries = self.store.entries()
        self._marks = bytearray(mark_of(self.store.beginning))
        for entry in self._entries:
            self._mark(entry)
        self._expected, self._is_compared = b"", True
        self._is_verified = False
        # What is read at this place, if it is the next one.
        self._cursor: Cursor | None = None
        self._items: Iterator[Taken | RowsRead] = iter(())

    @property
    def marks(self) -> bytes:
        """Of the stream, and of all windows in the manifest."""
        return bytes(self._marks)

    def expect(self, marks: bytes) -> None:
        """Compare the windows in the manifest, and each that is made from now on, with what a run has trained on.

        Raises:
            ConfigError: One of them is another one.
        """
        self._expected, self._is_compared = marks, False
        self._require_expected(self.marks)
        self._say_if_compared()

    def fill(self, number: int) -> WindowEntry:
        """Have a window, and all before it in the manifest, whose files are not kept.

        Raises:
            ConfigError: The stream gives other samples than it gave, or than the run has trained on, or none.
            SampleError: It cannot be read, or too much of it.
            StorageError: The window cannot be kept.
        """
        if not self._is_verified and self._entries:
            self._make_again(min(number, len(self._entries) - 1))
        self._is_verified = True
        while number >= len(self._entries):
            made = self.store.chained(self._make(len(self._entries)))
            self._require_expected(self.marks + mark_of(made.chain), made)
            self._entries.append(self.store.add(made))
            self._mark(made)
            self._say_if_compared()
            if made.number < number:
                # It was made for what follows it, and nobody reads it: a host that takes over a run that has trained on
                # much of a stream may have no room for all of that.
                self.store.path(made.number).unlink(missing_ok=True)
        entry = self._entries[number]
        if not self.store.is_whole(self.store.path(number), entry.sha256):
            self._make_again(number)
        return entry

    def _mark(self, entry: WindowEntry) -> None:
        if entry.number < MAX_WINDOWS:
            self._marks += mark_of(entry.chain)

    def _require_expected(self, marks: bytes, made: WindowEntry | None = None) -> None:
        """Compare what was read with what the run has trained on.

        Args:
            made: The last window, which is in no manifest yet; None: all of them are.
        """
        number = first_difference(self._expected, marks)
        if number is None:
            return
        what = "the one before them, of what is held out"
        remedy = ""
        if number >= 0:
            start = (made or self._entries[number]).start
            what = f"window {number}, of rows from {start.place.row} on"
        if made is None:
            remedy = f"; if it is the same by now, remove {self.store.folder}, which has what was read here before"
        else:
            # So that whoever brings back the data finds no trace of others.
            self.store.path(number).unlink(missing_ok=True)
        raise ConfigError(
            f"data.dataset_name = {self.name} gives other samples than the run has trained on: of "
            f"{num_windows(self._expected)} windows the first that differs is {what}. Have the same data here, in the "
            f"same order and read by the same code and packages, and start again{remedy}"
        )

    def _say_if_compared(self) -> None:
        if not self._is_compared and len(self._marks) >= len(self._expected):
            self._is_compared = True
            self.say(StreamCompared(self.name, num_windows(self._expected)))

    def _make_again(self, number: int) -> None:
        if self._make(number).sha256 != self._entries[number].sha256:
            # What stands there now is none of this run's.
            self.store.path(number).unlink(missing_ok=True)
            raise _another_stream(self.name, f"window {number}", self.store)

    def _make(self, number: int) -> WindowEntry:
        """Write a window to its file."""
        before = self._entries[number - 1] if number else None
        start = before.then if before is not None else Cursor(0, self.facts.begin)
        past, read, skipped = (before.past, before.read, before.skipped) if before is not None else (0, 0, 0)
        if self._cursor != start:
            self._items = self.stream.take(start.place)
        # Of a window that is not completed nothing goes on.
        self._cursor = None
        repeat, place, count = start.repeat, start.place, 0
        path, parts = self.store.path(number), list[bytes]()
        with self.store.writing(path) as file:
            while count < self.facts.window:
                match next(self._items, None):
                    case Taken(sample, then):
                        read, place, count = max(read, then.row), then, count + 1
                        parts.append(packed(sample, self._record))
                        if len(parts) * self._record.itemsize >= _PART_BYTES:
                            file.write(b"".join(parts))
                            parts.clear()
                    # A batch that is made once more was counted when it was read first.
                    case RowsRead(rows, unreadable) if rows > read:
                        read = rows
                        skipped = self._skipped(unreadable, skipped, past + read)
                    case RowsRead():
                        pass
                    case None if place == self.facts.begin:
                        raise ConfigError(
                            f"data.dataset_name = {self.name} gives no sample "
                            f"{'when it is read again' if repeat else 'to train on'}: a stream has to give its samples "
                            "anew, from the first one on, whenever it is read"
                        )
                    case None:
                        past, read, repeat, place = past + read, 0, repeat + 1, self.facts.begin
                        self.say(StreamRepeats(self.name, repeat, past))
                        self._items = self.stream.take(place)
            self._require_few_skipped(skipped, past + read)
            file.write(b"".join(parts))
            sha256 = file.finish().sha256
            self.store.put(path)
        self._cursor = Cursor(repeat, place)
        return WindowEntry(number, start, self._cursor, past, read, skipped, sha256)

    def _skipped(self, unreadable: tuple[Unreadable, ...], skipped: int, rows: int) -> int:
        """Count documents that cannot be read; return how many there are."""
        for item in unreadable:
            skipped += item.documents
            if skipped.bit_count() == 1:
                self.say(SamplesSkipped(self.name, skipped, rows, item.where, item.reason))
        if rows >= self.facts.window:
            self._require_few_skipped(skipped, rows)
        return skipped

    def _require_few_skipped(self, skipped: int, rows: int) -> None:
        if skipped > self.max_bad_fraction * rows:
            raise SampleError(
                f"{skipped} of the first {rows} rows of data.dataset_name = {self.name} cannot be read, more than "
                f"data.max_bad_fraction = {self.max_bad_fraction}; mend them, leave them out, or allow more"
            )


def _another_stream(name: str, what: str, store: WindowStore) -> ConfigError:
    return ConfigError(
        f"data.dataset_name = {name} gives other samples than before: {what} had another SHA-256 when it was read "
        "first. Positions would not be what a run has trained on. Bring back the data, or the code, as it was; to "
        f"begin anew with what is there now, remove {store.folder} and start without --resume"
    )
