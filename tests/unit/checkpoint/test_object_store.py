"""Checkpoints in an object store, which moto emulates on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from fsspec import asyn
from tests.buckets import CREDENTIALS, KEY, SECRET, bucket
from tests.unit.checkpoint.checkpoints import LAYOUTS, RUN_ID, make_store, vectors_of, write_rounds

from shoal.checkpoint import object_requests, object_store
from shoal.checkpoint.object_store import ObjectDraft, ObjectFile, ObjectPlace
from shoal.checkpoint.store import KeepPolicy, stores_at
from shoal.errors import ConfigError, StorageError

NUM_FILES = 8


class Killed(BaseException):
    """In the place of SIGKILL: nobody catches it, and nothing is tidied up."""


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close all connections, and end the loop that fsspec has for the whole process: it begins another when asked."""
    made: list[Any] = []
    init = ObjectPlace.__init__

    def begun(self: ObjectPlace, location: str) -> None:
        init(self, location)
        made.append(self.store)

    monkeypatch.setattr(ObjectPlace, "__init__", begun)
    # It waits a tenth of a second for a connection to be closed, which is none on a busy machine.
    monkeypatch.setattr("s3fs.S3FileSystem.close_session", staticmethod(lambda loop, client: None))
    yield
    loop, thread = asyn.loop[0], asyn.iothread[0]
    if loop is None or thread is None:
        return
    for creator in [fs._s3creator for fs in made if hasattr(fs, "_s3creator")]:
        asyncio.run_coroutine_threadsafe(creator.__aexit__(None, None, None), loop).result()
    asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    asyn.loop[0] = asyn.iothread[0] = None


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def location(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with bucket() as empty:
        for name, value in empty.environment.items():
            monkeypatch.setenv(name, value)
        # Nothing here is away, however busy the machine is.
        patient = {**object_store._TIMEOUTS, "connect_timeout": 600, "read_timeout": 600}
        monkeypatch.setattr(object_store, "_TIMEOUTS", patient)
        yield empty.location


def objects(place: ObjectPlace) -> list[str]:
    return sorted(place.store.find(place._root))


@pytest.mark.slow
def test_checkpoints_in_a_bucket_are_written_kept_damaged_and_found_as_in_a_folder(location: str) -> None:
    place = ObjectPlace(f"{location}/{RUN_ID}")
    assert make_store(location).newest_good() == (None, ())
    store = make_store(location, KeepPolicy(keep_last=2))
    write_rounds(store, 1, 2, 3)
    assert store.rounds() == [2, 3]
    assert len(objects(place)) == 2 * NUM_FILES
    (found,) = stores_at(location)
    assert [(each.run_id, each.round, each.problems) for each in found.listed()] == [(RUN_ID, 2, ()), (RUN_ID, 3, ())]
    checkpoint = store.open(3)
    for stage, layout in enumerate(LAYOUTS):
        expected = vectors_of(stage, 3)
        assert all(map(torch.equal, checkpoint.vectors(stage, layout), expected))
    assert checkpoint.inner(0, 1) == {}
    root = f"{place._root}/round_000003"
    stage = place.read("round_000003", "stage_00.safetensors", 10_000)
    place.store.pipe_file(f"{root}/stage_00.safetensors", stage[:-1] + bytes([stage[-1] ^ 1]))
    place.store.pipe_file(f"{root}/client.json", b"")
    (passed,) = store.newest_good().passed_over
    assert set(passed.problems) == {
        "client.json has 0 of 12 bytes",
        "stage_00.safetensors has changed since it was written",
    }
    place.store.rm_file(f"{root}/manifest.json")
    assert "manifest.json is not there" in str(store.newest_good().passed_over[0])
    assert store.newest_unix_s() > 1.75e9 + 3, "the store says when its files were written"
    store = make_store(location, KeepPolicy(keep_last=2))
    write_rounds(store, 4)
    assert store.rounds() == [2, 3, 4]
    write_rounds(store, 5)
    assert store.rounds() == [4, 5]


@pytest.mark.slow
def test_a_kill_at_any_object_leaves_the_checkpoint_before(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = ObjectPlace(f"{location}/{RUN_ID}")
    store = make_store(location, KeepPolicy(keep_last=1))
    write_rounds(store, 1)
    for method, calls, newest in (("write", (2,), 1), ("finish", (1, NUM_FILES), 1), ("_removed", (2, NUM_FILES), 100)):
        for number in calls:
            round = 100 if newest == 100 else 2
            with monkeypatch.context() as patch:
                killing(patch, store._place, method, number)
                with pytest.raises(Killed):
                    write_rounds(store, round)
            found = make_store(location).newest_good().checkpoint
            assert found is not None
            assert found.manifest.round == newest, (method, number)
            if newest == 100:
                write_rounds(store, 1)
    write_rounds(store, 200)
    assert store.rounds() == [200]
    assert len(objects(place)) == NUM_FILES


def killing(patch: pytest.MonkeyPatch, place: Any, method: str, number: int) -> None:
    """Kill the writer before a call; what it has begun stays as it is."""
    left = iter(range(number - 1))

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def killed(*arguments: Any) -> Any:
            if next(left, None) is None:
                raise Killed
            return call(*arguments)

        return killed

    if method == "_removed":
        patch.setattr(place.store, "rm_file", watched(place.store.rm_file))
    else:
        patch.setattr(ObjectFile, method, watched(getattr(ObjectFile, method)))
    patch.setattr(ObjectDraft, "discard", lambda self: None)
    patch.setattr(ObjectFile, "close", lambda self: setattr(self._file, "closed", True) if self._file else None)


@pytest.mark.slow
@pytest.mark.parametrize("silent", [False, True], ids=["refuses", "says nothing"])
def test_a_store_that_is_away_is_one_error_without_a_secret(
    credentials: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, silent: bool
) -> None:
    caplog.set_level("DEBUG")
    monkeypatch.setattr(object_store, "_ATTEMPTS", 1)
    monkeypatch.setattr(object_store, "_TIMEOUTS", {**object_store._TIMEOUTS, "read_timeout": 1})
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not silent:
            server.close()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        store = make_store("s3://bucket/prefix")
        for act in (store.newest_good, store.listed, lambda: write_rounds(store, 1)):
            with pytest.raises(StorageError, match=r"s3://bucket/prefix/test-run .*look at the network") as refused:
                act()
            assert SECRET not in str(refused.value)
            assert KEY not in str(refused.value)
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    "location", ["s3://key:secret@bucket/x", "s3:///x", "gs://bucket/secret", "s3://bucket/x?secret=1"]
)
def test_a_location_that_is_none_or_has_a_secret_is_refused_without_naming_it(location: str) -> None:
    with pytest.raises(ConfigError, match="s3://bucket/prefix, without a user") as refused:
        make_store(location)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        f"Could not connect to http://{KEY}:{SECRET.replace('/', '_')}@host:9000/bucket",
        f"https://host/x?X-Amz-Credential={KEY}&X-Amz-Signature={SECRET}&y=1",
        f"https://host/x?AWSAccessKeyId={KEY}&y=1",
    ],
)
def test_what_a_library_says_is_passed_on_without_credentials(credentials: None, text: str) -> None:
    place = ObjectPlace("s3://bucket")
    with pytest.raises(StorageError, match=r"cannot read checkpoints in s3://bucket \(PermissionError: ") as refused:
        raise_within(place, PermissionError(text))
    said = str(refused.value)
    assert "host" in said
    assert KEY not in said
    assert "secret" not in said
    assert refused.value.__suppress_context__


def raise_within(place: ObjectPlace, error: OSError) -> None:
    with place.told("read"):
        raise error


class HostileStore(ThreadingHTTPServer):
    """Answers every request without end, as `mode` says, until the asker has had enough or the test is over."""

    daemon_threads = False

    def __init__(self, mode: str) -> None:
        super().__init__(("127.0.0.1", 0), _HostileAnswer)
        self.mode = mode
        self.is_over = threading.Event()
        self.sent_bytes = 0


class _HostileAnswer(BaseHTTPRequestHandler):
    server: HostileStore
    protocol_version = "HTTP/1.1"
    timeout = 60.0

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        with contextlib.suppress(OSError):
            if self.server.mode == "pages":
                self._page()
            else:
                self._endless()

    def _page(self) -> None:
        keys = "".join(
            f"<Contents><Key>x/{number}</Key><Size>1</Size><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
            for number in range(1000)
        )
        raw = (
            f'<?xml version="1.0"?><ListBucketResult><IsTruncated>true</IsTruncated>'
            f"<NextContinuationToken>more</NextContinuationToken>{keys}</ListBucketResult>"
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _endless(self) -> None:
        """Take no notice of a range that is asked for."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        drips = self.server.mode == "drips"
        content = b"<" if drips else b"<" * 65_536
        while not self.server.is_over.wait(0.02 if drips else 0.0):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
            self.server.sent_bytes += len(content)


@pytest.fixture
def hostile(credentials: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], HostileStore]]:
    """Return a store that answers in a hostile way; of a request there is one attempt."""
    monkeypatch.setattr(object_store, "_ATTEMPTS", 1)
    begun: list[tuple[HostileStore, threading.Thread]] = []

    def begin(mode: str) -> HostileStore:
        server = HostileStore(mode)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        begun.append((server, thread))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        return server

    yield begin
    for server, thread in begun:
        server.is_over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_store_that_lists_without_end_is_one_error(
    hostile: Callable[[str], HostileStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile("pages")
    monkeypatch.setattr(object_requests, "MAX_ENTRIES", 5_000)
    with pytest.raises(StorageError, match=r"lists more than 5,000 entries directly in bucket/prefix.* come to an end"):
        make_store("s3://bucket/prefix").newest_good()


def test_a_page_without_end_is_one_error_before_it_fills_the_memory(
    hostile: Callable[[str], HostileStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = hostile("floods")
    monkeypatch.setattr(object_requests, "_MAX_ANSWER_BYTES", 1 << 20)
    with pytest.raises(StorageError, match="an answer has more than 1048576 bytes"):
        make_store("s3://bucket/prefix").newest_good()
    assert server.sent_bytes < 64 << 20


def test_a_page_that_drips_is_one_error(
    hostile: Callable[[str], HostileStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile("drips")
    monkeypatch.setattr(object_requests, "_ANSWER_S", 0.5)
    with pytest.raises(StorageError, match="a whole answer did not come within"):
        make_store("s3://bucket/prefix").newest_good()


def test_of_an_object_that_is_sent_without_end_what_was_asked_for_is_read(
    hostile: Callable[[str], HostileStore],
) -> None:
    server = hostile("floods")
    assert ObjectPlace("s3://bucket/prefix").read("round_000001", "manifest.json", 3 << 20) == b"<" * ((3 << 20) + 1)
    assert server.sent_bytes < 64 << 20


def test_an_object_that_drips_is_one_error(
    hostile: Callable[[str], HostileStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile("drips")
    monkeypatch.setattr(object_requests, "_PART_S", 0.5)
    with pytest.raises(StorageError, match="100001 bytes of an object did not come within"):
        ObjectPlace("s3://bucket/prefix").read("round_000001", "manifest.json", 100_000)
