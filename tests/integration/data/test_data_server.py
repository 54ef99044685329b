"""A data server with its socket and its memory, used from another process."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import pytest
from tests.alongside import until
from tests.integration.data.spec import RUN, hop_of, spec

from shoal import log
from shoal.config import Config
from shoal.data.catalog import open_source
from shoal.data.feed import Feed
from shoal.data.fields import Fields
from shoal.data.pool import Pool
from shoal.data.server import DataService
from shoal.data.shuffle import permutation
from shoal.data.source import Array, ArraySpec, DataSet, Indices, KnownSamples
from shoal.data.text_corpus import Say
from shoal.data_server.service import main
from shoal.errors import ConfigError
from shoal.events.data import TokensProgress
from shoal.identity import Identity
from shoal.ids import PeerId, StepKey
from shoal.runtime.control_pipe import open_role_control
from shoal.runtime.launcher_messages import RoleDoes, RoleReady, StopRole
from shoal.transport.connection import Connection
from shoal.transport.dispatch import dispatch
from shoal.transport.peers import StreamEndpoint
from shoal.transport.unix import open_unix_endpoint
from shoal.wire.messages.base import Hop, SampleRange, StepRange
from shoal.wire.messages.feed import PlanRound, RecordSamples

# What a trainer in another process sees of a place of the pool. Maps the segment as `data.feed` does.
CHILD = """
import json, sys
import numpy as np
from shoal.data.pool import map_pool
path, num_bytes, offset, count = json.loads(sys.argv[1])
view = np.frombuffer(map_pool(path, num_bytes), dtype="int64", count=count, offset=offset)
print(json.dumps(view.tolist()))
"""


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """The role sets up logging for its process: put back what was there."""
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    root.handlers = []
    yield
    log.configure("test", None)
    logging.captureWarnings(False)
    root.handlers, root.level = before[0], before[1]


def config(data: dict[str, Any]) -> Config:
    return Config.model_validate({"data": data, "diloco": {"batch_size_per_step": 16}})


@asynccontextmanager
async def data_server(tmp_path: Path, client: PeerId | None, data: dict[str, Any]) -> AsyncIterator[Hop]:
    """Run the role in this process; its control pipe is read as the supervisor would."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        async with open_role_control(theirs) as control, anyio.create_task_group() as group:
            start = spec(tmp_path, client, config(data))
            group.start_soon(main, start, control)
            line = await anyio.to_thread.run_sync(ours.makefile("rb").readline)
            assert msgspec.json.decode(line, type=RoleReady) == RoleReady()
            yield hop_of(start)
            ours.sendall(msgspec.json.encode(StopRole("")) + b"\n")


class ToldSource(KnownSamples):
    """Samples in memory that call a function whenever some are read."""

    def __init__(self, told: Callable[[], None]) -> None:
        spec = ArraySpec("int64", ())
        super().__init__(Fields(spec, spec), 64, in_memory=True)
        self._told = told

    def read_into(self, indices: Indices, batch: Fields[Array]) -> None:
        self._told()
        batch.inputs[...] = batch.labels[...] = indices


async def test_what_is_asked_for_together_is_answered_in_one_write_before_the_next_batches_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    written = Connection._write

    def write(connection: Connection) -> None:
        if connection.peer == PeerId("trainer") and connection.queued_bytes:
            seen.append("written")
        written(connection)

    monkeypatch.setattr(Connection, "_write", write)
    source = ToldSource(lambda: seen.append("read"))
    at = Hop(PeerId("data"), (f"unix:{tmp_path / 'data'}",))
    async with (
        open_unix_endpoint(peer_id=at.peer, run_id=RUN, role="data", path=tmp_path / "data") as endpoint,
        open_unix_endpoint(peer_id=PeerId("trainer"), run_id=RUN, role="trainer", path=None) as trainer,
        anyio.create_task_group() as group,
    ):
        service = DataService(
            endpoint=endpoint,
            dataset=DataSet("told", source, source, num_classes=64),
            samples_per_step=4,
            seed=0,
            deterministic=True,
            num_workers=0,
            opening=None,
            client=PeerId("trainer"),
            num_places=16,
        )
        with closing(service):
            feed = Feed(endpoint=trainer, data_server=at, trainer=0, generation=1)
            group.start_soon(service.run)
            group.start_soon(dispatch, endpoint, (service,))
            group.start_soon(dispatch, trainer, (feed,))
            trainer.post(at.peer, PlanRound(1, 1, StepRange(0, 100)))

            async def use_three(first: int) -> None:
                async def use(step: int) -> None:
                    batch = await feed.lease(1, step)
                    assert batch is not None
                    feed.acknowledge(StepKey(0, 1, step, 0), batch, committed=True)

                async with anyio.create_task_group() as users:
                    for step in range(first, first + 3):
                        users.start_soon(use, step)

            await use_three(0)
            await use_three(3)
            await anyio.wait_all_tasks_blocked()
            await until(lambda: len(service.preparer._ready) == 4)
            del seen[:]
            await use_three(6)
            await until(lambda: seen.count("read") == 3)
            assert seen == ["written", "read", "read", "read"]
            group.cancel_scope.cancel()


async def test_while_it_opens_a_folder_it_says_how_many_files_that_has_and_for_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, may_go_on = tmp_path / "many", threading.Event()
    (folder / "inner").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "inner/c.txt"):
        (folder / name).write_text("a text, long enough for a sample " * 200)
    opened = open_source

    def slow(config: Config, say: Say) -> DataSet:
        say(TokensProgress("many", 7.5, 1.0, 3))
        may_go_on.wait()
        return opened(config, say)

    monkeypatch.setattr("shoal.data_server.service.open_source", slow)
    for name in ("FIRST_S", "_EVERY_S", "_QUIET_S"):
        monkeypatch.setattr(f"shoal.data_server.service.{name}", 0.01)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        async with open_role_control(theirs) as control, anyio.create_task_group() as group:
            start = spec(tmp_path, None, config({"dataset_name": str(folder), "seq_len": 64}))
            group.start_soon(main, start, control)
            lines = ours.makefile("rb")

            async def said() -> str:
                line = await anyio.to_thread.run_sync(lines.readline)
                return msgspec.json.decode(line, type=RoleDoes).text

            try:
                assert await said() == "making tokens of many: 1.0 MB/s, 7.5 %, 3 s left"
                while not (text := await said()).startswith(f"opening the data set {folder}, 3 files (for "):
                    assert text.startswith(f"opening the data set {folder}, ")
            finally:
                may_go_on.set()
            while b"RoleReady" not in await anyio.to_thread.run_sync(lines.readline):
                pass
            ours.sendall(msgspec.json.encode(StopRole("")) + b"\n")


def trainer_endpoint(tmp_path: Path, name: str) -> StreamEndpoint:
    peer = Identity.generate().peer_id
    return open_unix_endpoint(peer_id=peer, run_id=RUN, role="trainer", path=tmp_path / f"{name}.sock")


async def test_a_trainer_leases_over_a_socket_and_another_process_sees_the_same_memory(tmp_path: Path) -> None:
    segments = set(os.listdir("/dev/shm"))
    async with (
        trainer_endpoint(tmp_path, "c") as client,
        trainer_endpoint(tmp_path, "t") as endpoint,
        data_server(tmp_path, client.peer_id, {"seq_len": 64}) as hop,
        anyio.create_task_group() as group,
    ):
        client.introduce(hop)
        feed = Feed(endpoint=endpoint, data_server=hop, trainer=0, generation=1)
        group.start_soon(dispatch, endpoint, (feed,))
        group.start_soon(dispatch, client, ())
        client.post(hop.peer, PlanRound(1, 1, StepRange(0, 3)))
        info = await feed.hello()
        source = open_source(config({"seq_len": 64})).train
        assert info.num_train == source.num_samples
        order = permutation(0, 0, source.num_samples)
        for step in range(3):
            batch = await feed.lease(1, step)
            assert batch is not None
            inputs, labels, _ = source.read(order[16 * step : 16 * step + 16])
            assert np.array_equal(batch.fields.inputs, inputs)
            assert np.array_equal(batch.fields.labels, labels)
            feed.note(StepKey(0, 1, step, 0), (), batch)
            feed.acknowledge(StepKey(0, 1, step, 0), batch, committed=True)
        client.post(hop.peer, RecordSamples(1, ()))
        client.post(hop.peer, PlanRound(2, 1, StepRange(0, 3)))
        again = await feed.lease(2, 0)
        assert again is not None
        assert again.samples == (SampleRange(0, 0, 16),)
        assert set(os.listdir("/dev/shm")) == segments
        group.cancel_scope.cancel()
    assert not (tmp_path / "d.sock").exists()
    assert "dataset.opened" in (tmp_path / "logs" / "data_server_0.log").read_text()


def test_a_batch_written_here_is_read_by_another_process_without_a_name_in_shared_memory() -> None:
    segments = set(os.listdir("/dev/shm"))
    with closing(Pool(place_bytes=4096, num_places=4)) as pool:
        pool.memory(2)[:80] = np.arange(10, dtype=np.int64).view(np.uint8)
        where = json.dumps([pool.path, pool.num_bytes, pool.offset_bytes(2), 10])
        done = subprocess.run([sys.executable, "-c", CHILD, where], capture_output=True, check=True, timeout=240)
        assert json.loads(done.stdout) == list(range(10))
        assert set(os.listdir("/dev/shm")) == segments


async def test_a_data_set_that_does_not_fit_ends_the_role_with_the_users_error(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ExceptionGroup) as caught:
        async with open_role_control(theirs) as control:
            await main(spec(tmp_path, None, config({"dataset_name": "digits"})), control)
    assert caught.group_contains(ConfigError, match=r"data\.task_type = cv")
