"""What a host has read of its stream is lost with it: the next one reads the stream anew, and it has to be the same."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from tests.unit.data.corpora import write_json_lines

from shoal.averaging.journal import read_records
from shoal.client.resuming import go_back
from shoal.clock import SystemClock
from shoal.config import Config
from shoal.data.catalog import open_source
from shoal.data.source import DataSet
from shoal.data.stream_store import WindowStore
from shoal.errors import ConfigError
from shoal.events.base import Event
from shoal.events.data import StreamCompared
from shoal.swarm.records import used_samples
from shoal.swarm.sample_ranges import merge
from shoal.swarm.window_marks import mark_of, num_windows
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.control import StartRound
from shoal.wire.messages.round import Record
from shoal.wire.messages.step import Forward, Open
from shoal_lab import Cluster
from shoal_lab.client_host import ClientHost
from shoal_lab.process import Process

from .conftest import SEQ_LEN, make_config
from .test_resuming import good, keep

WINDOW, ROUNDS = 16, 4
TEXTS = [f"row {number:011d}" for number in range(400)]
EDITED = [*TEXTS[:20], "row 000000wrong", *TEXTS[21:]]
"""A row of window 1, in which the first round trains."""


def config_of(rows: Path) -> Config:
    return make_config(
        data={
            "dataset_name": str(rows),
            "streaming": True,
            "shuffle_window": WINDOW,
            "holdout_fraction": 0.125,
            "seq_len": SEQ_LEN,
        },
        model={"vocab_size": 256},
        diloco={"inner_steps": 4, "outer_steps": ROUNDS},
        health={"lost_state_after_s": 0.3},
    )


class WatchedCluster(Cluster):
    """Ends with the error of a data server, as a host does."""

    def start_client_host(self, number: int) -> ClientHost:
        host = super().start_client_host(number)
        self._tasks.start_soon(self._watch, host.data_process)
        return host

    async def _watch(self, process: Process) -> None:
        await process.ended.wait()
        if process.error is not None:
            raise process.error


class Hosts:
    """Hosts that have the same rows, or say so, and have read nothing of them yet."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._tmp_path, self._monkeypatch = tmp_path, monkeypatch
        self.config = config_of(tmp_path / "first/rows")
        self.log_dir = tmp_path / "run"
        self.log_dir.mkdir()
        self.said: list[Event] = []

    @contextmanager
    def reads(self, name: str, texts: list[str]) -> Iterator[DataSet]:
        place = self._tmp_path / name
        write_json_lines(place / "rows/a.jsonl", texts)
        self._monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        dataset = open_source(config_of(place / "rows"), self.said.append)
        assert dataset.windows is not None
        try:
            yield dataset
        finally:
            dataset.windows.close()

    @property
    def records(self) -> list[Record]:
        """Of all hosts, in order."""
        folders = [self.log_dir, *self.log_dir.parent.glob("run-host*")]
        found = {record.round: record for folder in folders for record, _ in read_records(folder)}
        return [found[round] for round in sorted(found)]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return Hosts(tmp_path, monkeypatch)


async def taken_over(hosts: Hosts, first: DataSet, second: DataSet) -> None:
    """The host of the client is lost in the third round, and another one's client goes on."""

    def lose_host() -> None:
        cluster.kill_client_host()
        cluster._opened = second

    async with WatchedCluster(hosts.config, log_dir=hosts.log_dir, dataset=first) as cluster:
        cluster.when(Open, action=lose_host, number=9)
        result = await cluster.run()
    assert (result.summary["duplicates"], result.summary["missing"]) == (0, 0)


async def resumed(hosts: Hosts, first: DataSet, second: DataSet) -> None:
    """Everything is lost in the third round, and another host begins with the checkpoint of the second."""
    gone = anyio.Event()
    async with WatchedCluster(hosts.config, log_dir=hosts.log_dir, dataset=first) as cluster:
        cluster.when(StartRound, action=lambda: keep(cluster, hosts.config, hosts.log_dir), round=3)
        cluster.when(Forward, action=gone.set, number=10)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cluster.run)
            await gone.wait()
            tasks.cancel_scope.cancel()
    checkpoint = good(hosts.log_dir)
    go_back(hosts.log_dir, checkpoint, SystemClock().now_s())
    async with WatchedCluster(hosts.config, log_dir=hosts.log_dir, dataset=second, checkpoint=checkpoint) as cluster:
        result = await cluster.run()
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)


GoesOn = Callable[[Hosts, DataSet, DataSet], Awaitable[None]]


@pytest.mark.parametrize("goes_on", [taken_over, resumed])
async def test_the_next_host_compares_what_it_reads_and_goes_on_at_the_next_row(hosts: Hosts, goes_on: GoesOn) -> None:
    with hosts.reads("first", TEXTS) as first, hosts.reads("second", TEXTS) as second:
        await goes_on(hosts, first, second)
        assert second.windows is not None
        store = WindowStore(second.windows.folder)
        chains = [entry.chain for entry in store.entries()]
    read = b"".join(mark_of(chain) for chain in (store.beginning, *chains))
    records = hosts.records
    used = [used_samples(record) for record in records]
    assert used[-1] == merge((*used[-2], *records[-1].samples))
    assert [record.round for record in records] == [1, 2, 3, 4]
    for record, samples in zip(records, used, strict=True):
        assert read.startswith(record.marks)
        trained_on = 1 + samples[-1].pass_number
        # The round that the first host has left is ended by one that has read nothing yet.
        known = {trained_on, 4} if record.round == 3 else {trained_on}
        assert num_windows(record.marks) in known
    compared = [event for event in hosts.said if isinstance(event, StreamCompared)]
    assert [event.windows for event in compared] == [num_windows(records[1].marks)]
    assert used[1] == tuple(SampleRange(number, 0, WINDOW) for number in range(4))


@pytest.mark.parametrize("goes_on", [taken_over, resumed])
async def test_the_next_host_with_other_rows_is_refused_and_trains_on_none(hosts: Hosts, goes_on: GoesOn) -> None:
    with hosts.reads("first", TEXTS) as first, hosts.reads("second", EDITED) as second:
        with pytest.raises(ExceptionGroup) as caught:
            await goes_on(hosts, first, second)
        says = r"second/rows gives other samples than the run has trained on: of 4 windows .* is window 1, of rows"
        assert caught.group_contains(ConfigError, match=says)
    assert max(item.pass_number for item in used_samples(hosts.records[-1])) < 6
