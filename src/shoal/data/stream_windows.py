"""A stream as samples by index: windows of it that are made as they are needed, read from the disk, and given up again.

    need -> (a process makes it) -> there -> read_into ... -> recorded -> given up
                  '-- it died, or stood still --> another one makes it

A window is a pass, for those who lease and record samples: of pass p the samples p * window to (p + 1) * window, which
are all different. A window is always full, since a stream that has ended begins anew. So nobody has to know how much of
it there is, and what each position names follows from the stream and the seed, whenever it arrives.
"""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from shoal.config.dump import config_to_json
from shoal.config.schema import Config
from shoal.config.training import DataConfig
from shoal.data.builtin import BUILTINS
from shoal.data.element_file import ElementFile
from shoal.data.fields import Fields
from shoal.data.source import Array, DataSet, Indices, KnownSamples
from shoal.data.stream_messages import (
    ExpectWindows,
    FillerOrder,
    FillerReport,
    FillerTells,
    FillWindow,
    OpenStream,
    StreamOpened,
    WindowFilled,
    WindowsCompared,
)
from shoal.data.stream_store import FORMAT, StreamFacts, WindowStore, record_of
from shoal.data.text_corpus import Say
from shoal.errors import ChildDied, ConfigError, RemoteError, ShoalError, StorageError
from shoal.events.data import DataProcessStopped, StreamWindow
from shoal.model.hf.tokenizer import COMPUTES, endless_tokenizer
from shoal.runtime.child import Child
from shoal.runtime.durable_files import make_directory
from shoal.runtime.file_locks import lock
from shoal.runtime.own_limits import is_endless
from shoal.runtime.user_cache import user_cache

_FILLER: Final = "shoal.data.stream_filler"
_MAX_DEATHS: Final = 3
_OPEN_FILES: Final = 4


class WindowSamples(KnownSamples):
    """The samples of a stream, by index; or those of it that are held out.

    `num_samples` are those of a window; there are samples of larger indices, of the windows that follow.

    Args:
        is_holdout: They are all in one file.
    """

    def __init__(self, store: WindowStore, facts: StreamFacts, *, is_holdout: bool = False) -> None:
        super().__init__(facts.fields, facts.num_holdout if is_holdout else facts.window)
        self._store = store
        self._record = record_of(facts.fields)
        self._is_holdout = is_holdout
        # By window; the lock is for those who open and close, what is open can be read by all.
        self._files: dict[int, ElementFile] = {}
        self._opening = threading.Lock()

    def read_into(self, indices: Indices, batch: Fields[Array]) -> None:
        """See `Source.read_into`.

        Raises:
            StorageError: A window is not there, or not whole.
        """
        windows, places = np.divmod(indices, self._num_samples)
        for number in np.unique(windows).tolist():
            chosen = np.flatnonzero(windows == number)
            rows = cast("NDArray[np.void]", self._file(number).read(places[chosen].tolist(), 1))[:, 0]
            batch.inputs[chosen], batch.labels[chosen] = rows["inputs"], rows["labels"]

    def _file(self, number: int) -> ElementFile:
        with self._opening:
            file = self._files.get(number)
            if file is None:
                for old in list(self._files)[: 1 - _OPEN_FILES]:
                    del self._files[old]
                file = self._files[number] = ElementFile(
                    self._store.holdout if self._is_holdout else self._store.path(number), self._record
                )
            return file


class StreamWindows:
    """The windows of a stream that are on this host, and the process that makes them. Usable from several threads.

    Args:
        folder: Of the stream; nobody else uses it.
        lock_fd: By which nobody does; it is closed with this.
        say: Told what happens, by a thread.

    Attributes:
        marks: Of the stream and of all windows that were read so far; empty: nothing was.
    """

    def __init__(self, config: Config, folder: Path, lock_fd: int, say: Say) -> None:
        self.folder = folder
        self._order = OpenStream(config_to_json(config), str(folder))
        self._name = config.data.dataset_name
        self._tokenizer = f"data.tokenizer = {config.data.tokenizer}"
        self._store = WindowStore(folder)
        self._say = say
        self._changed: Callable[[], None] = lambda: None
        self._condition = threading.Condition()
        self.marks = self._expected = b""
        # Of what is expected, what the process that makes windows knows.
        self._told = b""
        self._wanted: frozenset[int] = frozenset()
        self._there: set[int] = set()
        self._facts: StreamFacts | None = None
        self._is_opening = False
        self._error: ShoalError | None = None
        self._thread: threading.Thread | None = None
        self._filler: Child[FillerReport] | None = None
        self._was_stopped = False
        self._is_closed = False
        self._unlock = weakref.finalize(self, os.close, lock_fd)

    def facts(self) -> StreamFacts:
        """Return what holds for the whole stream; waits for its beginning, where this is the first time.

        Raises:
            ConfigError, SampleError, StorageError: There is no such stream, or it cannot be read or kept.
            RemoteError: Who reads it has died, again and again.
        """
        found = self._store.whole_facts()
        if found is not None:
            return found
        with self._condition:
            self._is_opening = True
            self._start()
            self._condition.wait_for(lambda: self._facts is not None or self._error is not None)
            if self._facts is None:
                raise self._error or RemoteError("nobody reads the stream any more")
            return self._facts

    def expect(self, marks: bytes) -> None:
        """Have windows compared with those that a run has trained on; see `need`."""
        with self._condition:
            self._expected = marks
            self._condition.notify_all()

    def watch(self, changed: Callable[[], None]) -> None:
        """Have a function called, by a thread, whenever a window has come, or none will come any more."""
        self._changed = changed

    def has(self, numbers: Iterable[int]) -> bool:
        """Return whether windows are there."""
        with self._condition:
            return self._there.issuperset(numbers)

    def need(self, numbers: Iterable[int]) -> None:
        """Have windows made, the first ones first, instead of those that were needed before.

        Raises:
            ConfigError, SampleError, StorageError, RemoteError: As `facts`; or the stream gives other samples than it
                gave, or than are expected.
        """
        with self._condition:
            if self._error is not None:
                raise self._error
            self._wanted = frozenset(numbers)
            if self._wanted - self._there:
                self._start()

    def wait(self, numbers: Iterable[int]) -> None:
        """Have windows made, and wait for them. Raises as `need`."""
        wanted = frozenset(numbers)
        self.need(wanted)
        with self._condition:
            self._condition.wait_for(lambda: self._there >= wanted or self._error is not None or self._is_closed)
            if self._error is not None:
                raise self._error

    def forget_below(self, number: int) -> None:
        """Give up the windows before one of them: all of their samples are recorded."""
        with self._condition:
            self._there = {each for each in self._there if each >= number}
            self._wanted = frozenset(each for each in self._wanted if each >= number)
        self._store.forget_below(number)

    def close(self) -> None:
        """End the process that makes windows, and give up the folder."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
            if self._filler is not None:
                self._filler.kill()
        if self._thread is not None:
            self._thread.join()
        self._unlock()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="stream", daemon=True)
            self._thread.start()
        self._condition.notify_all()

    def _next(self) -> FillerOrder | None:
        """Return what is to be done next, or None when this was closed; waits until there is something."""
        with self._condition:
            self._condition.wait_for(
                lambda: (
                    self._is_closed
                    or self._is_opening
                    or self._expected != self._told
                    or bool(self._wanted - self._there)
                )
            )
            if self._is_closed:
                return None
            if self._filler is None:
                return self._order
            if self._expected != self._told:
                return ExpectWindows(self._expected)
            return FillWindow(min(self._wanted - self._there))

    def _work(self) -> None:
        deaths = 0
        try:
            while True:
                order = self._next()
                if order is None:
                    return
                match self._carried_out(order):
                    case WindowFilled():
                        deaths = 0
                    case "died" if not self._is_closed:
                        deaths += 1
                        if deaths >= _MAX_DEATHS:
                            raise RemoteError(
                                f"the process that reads data.dataset_name = {self._name} has died {deaths} times in a "
                                "row: see the data server's output; is the memory enough?"
                            )
                    case _:
                        pass
        except ShoalError as error:
            self._end_with(error)
        except OSError as error:
            self._end_with(StorageError(f"data.dataset_name = {self._name} cannot be read: {error}"))
        finally:
            if self._filler is not None:
                self._filler.close()

    def _end_with(self, error: ShoalError) -> None:
        with self._condition:
            self._error = error
            self._condition.notify_all()
        self._changed()

    def _carried_out(
        self, order: FillerOrder
    ) -> StreamOpened | WindowsCompared | WindowFilled | Literal["died", "stopped", "closed"]:
        """Have the filler do something; returns why it has not."""
        if self._filler is None:
            self._told = b""
            filler = Child[FillerReport](_FILLER, FillerReport)
            with self._condition:
                self._filler, self._was_stopped = filler, False
                if self._is_closed:
                    return "closed"
        self._filler.tell(order)
        try:
            answer = self._answer(self._filler)
        except ChildDied as died:
            if is_endless(died, COMPUTES):
                raise endless_tokenizer(self._tokenizer, "one of the texts") from died
            self._filler.close()
            with self._condition:
                self._filler = None
            return "stopped" if self._was_stopped else "died"
        if isinstance(order, ExpectWindows):
            self._told = order.marks
        return answer

    def _answer(self, filler: Child[FillerReport]) -> StreamOpened | WindowsCompared | WindowFilled:
        """Wait until the filler has done what it was told."""

        def kill_stopped() -> None:
            self._was_stopped = True
            self._say(DataProcessStopped("the process that reads the stream", filler.pid))
            filler.kill()

        while True:
            match filler.hear(stands_still=kill_stopped):
                case FillerTells(event):
                    self._say(event)
                case StreamOpened(facts) as report:
                    with self._condition:
                        self._facts, self._is_opening = facts, False
                        self._condition.notify_all()
                    return report
                case WindowsCompared() as report:
                    return report
                case WindowFilled(entry, marks) as report:
                    self._say(
                        StreamWindow(self._name, entry.number, entry.past + entry.read, entry.skipped, entry.sha256)
                    )
                    with self._condition:
                        self.marks = marks
                        self._there.add(entry.number)
                        self._condition.notify_all()
                    self._changed()
                    return report


def open_stream(config: Config, say: Say) -> DataSet:
    """Open the stream that the configuration names. Close its `windows` when it is not needed any more.

    Raises:
        ConfigError, SampleError, StorageError, RemoteError: As `StreamWindows.facts`.
    """
    if config.data.task_type != "llm" and config.data.dataset_name in BUILTINS:
        raise ConfigError(
            f"data.dataset_name = {config.data.dataset_name} is here as a whole: leave out data.streaming"
        )
    folder, lock_fd = _free_folder(config.data)
    windows = StreamWindows(config, folder, lock_fd, say)
    try:
        facts = windows.facts()
    except BaseException:  # also of a Ctrl-C: the process that reads ends, and the folder is free again
        windows.close()
        raise
    return _dataset(config, WindowStore(folder), facts, windows)


def opened_stream(config: Config, folder: str) -> DataSet:
    """Open what another process of this host has opened, and go on reading as its windows come.

    Raises:
        ConfigError: It is not there.
    """
    store = WindowStore(Path(folder))
    facts = store.facts()
    if facts is None:
        raise ConfigError(f"{folder} is not there any more: start the run again")
    return _dataset(config, store, facts, None)


def _dataset(config: Config, store: WindowStore, facts: StreamFacts, windows: StreamWindows | None) -> DataSet:
    train, holdout = WindowSamples(store, facts), WindowSamples(store, facts, is_holdout=True)
    return DataSet(config.data.dataset_name, train, holdout, facts.num_classes, windows=windows)


def _free_folder(data: DataConfig) -> tuple[Path, int]:
    """Return a folder of this stream that no other process has, and the lock by which it is this one's."""
    root = user_cache("streams") if data.cache_dir is None else data.cache_dir.expanduser() / "streams"
    root /= hashlib.sha256(_identity(data).encode()).hexdigest()[:32]
    try:
        for number in count():
            folder = root / str(number)
            make_directory(folder)
            with suppress(BlockingIOError):
                return folder, lock(folder / "user.lock", waits=False)
    except OSError as error:
        raise StorageError(
            f"cannot write {root} ({error.strerror or error}): choose another place by data.cache_dir"
        ) from error
    raise AssertionError("unreachable")


def _identity(data: DataConfig) -> str:
    """Return another text for other samples, where that is known without reading them."""
    name = data.dataset_name
    here = str(Path(name).expanduser().absolute()) if "/" in name and not data.is_own else name
    told = {
        "name": here,
        "config": data.dataset_config,
        "split": data.dataset_split,
        "eval_split": data.eval_split,
        "arguments": data.arguments,
        "columns": data.text_column,
        "tokenizer": data.tokenizer_hash or data.tokenizer,
        "task": data.task_type,
        "image": [data.num_channels, data.img_size],
        "seq_len": data.seq_len,
        "window": data.stream_window,
        "holdout_fraction": data.holdout_fraction,
        "format": FORMAT,
    }
    return repr(sorted(told.items()))
