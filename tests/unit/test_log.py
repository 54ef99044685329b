"""Log lines: the same event for machines in a file and for people on a terminal."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hung_disk import far_disk, hung_disk

import shoal.log
from shoal.events.base import emit
from shoal.events.losses import LossFound, ServerHeard
from shoal.events.run import RoleCounted
from shoal.ids import PeerId


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames it when it is imported, here by other tests
    yield
    shoal.log.configure("none", None)
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_holds_one_object_a_line_with_the_fields_of_the_event(tmp_path: Path) -> None:
    shoal.log.configure("server_0", tmp_path / "run")
    logging.getLogger("shoal.test").info("round.committed", extra={"round": 3, "path": Path("/x")})
    (line,) = _lines(tmp_path / "run" / "server_0.log")
    assert line["event"] == "round.committed"
    assert (line["round"], line["path"], line["process"], line["level"]) == (3, "/x", "server_0", "INFO")


def test_a_line_says_what_its_peer_is_called_while_the_process_knows(tmp_path: Path) -> None:
    shoal.log.configure("server_0", tmp_path)
    logger = logging.getLogger("shoal.test")
    logger.info("peer.lost", extra={"peer": "p1"})
    shoal.log.name_peers(lambda peer: f"server 1@box-{peer}")
    for peer in ("p1", None):
        logger.info("peer.lost", extra={"peer": peer})
    logger.info("round.committed", extra={"round": 3})
    shoal.log.name_peers(None)
    logger.info("peer.lost", extra={"peer": "p1"})
    assert [line.get("who") for line in _lines(tmp_path / "server_0.log")] == [
        None,
        "server 1@box-p1",
        None,
        None,
        None,
    ]


def test_an_exception_is_part_of_its_line(tmp_path: Path) -> None:
    shoal.log.configure("server_0", tmp_path)
    try:
        raise ValueError("reason")
    except ValueError:
        logging.getLogger("shoal.test").exception("step.failed")
    (line,) = _lines(tmp_path / "server_0.log")
    assert "ValueError: reason" in str(line["error"])


def test_other_libraries_show_warnings_only(tmp_path: Path) -> None:
    shoal.log.configure("server_0", tmp_path)
    logging.getLogger("other").info("chatter")
    logging.getLogger("other").warning("trouble")
    assert [line["event"] for line in _lines(tmp_path / "server_0.log")] == ["trouble"]


def test_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.log, "MAX_FILE_BYTES", 2000)
    shoal.log.configure("server_0", tmp_path)
    for number in range(200):
        logging.getLogger("shoal.test").info("step.committed", extra={"number": number})
    files = sorted(tmp_path.iterdir())
    assert len(files) == 1 + shoal.log.NUM_OLD_FILES
    assert all(file.stat().st_size <= 2000 for file in files)


def test_the_terminal_shows_the_event_and_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    shoal.log.configure("client_0", None, terminal=True)
    logging.getLogger("shoal.test").warning("peer.lost", extra={"reason": "closed"})
    assert capsys.readouterr().err.endswith("WARNING client_0 peer.lost reason=closed\n")


def test_an_event_that_says_who_it_is_about_is_believed(tmp_path: Path) -> None:
    shoal.log.configure("client_0", tmp_path)
    shoal.log.name_peers(lambda peer: f"peer ...{peer}")
    logger = logging.getLogger("shoal.test")
    emit(logger, LossFound("data_server", "the data server", (0,), 5.0, 6.0))
    emit(logger, ServerHeard(PeerId("a"), "server 0@box", 2.0))
    emit(logger, RoleCounted(PeerId(""), {}), level=logging.INFO)
    shoal.log.name_peers(None)
    assert [line.get("who") for line in _lines(tmp_path / "client_0.log")] == ["the data server", "server 0@box", None]


def test_configuring_again_replaces_the_file(tmp_path: Path) -> None:
    shoal.log.configure("a", tmp_path)
    shoal.log.configure("b", tmp_path)
    logging.getLogger("shoal.test").info("once")
    assert _lines(tmp_path / "a.log") == []
    assert len(_lines(tmp_path / "b.log")) == 1


def test_half_a_line_of_a_process_that_was_killed_takes_no_other_with_it(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    for written in (None, '{"whole": 1}\n', '{"half": 1, "ti'):
        path.write_text(written or "")
        file = shoal.log.LinesFile(path)
        for number in (2, 3):
            file.write(f'{{"next": {number}}}')
        file.close()
        before = [] if written is None else written.splitlines()
        assert path.read_text().splitlines() == [*before, '{"next": 2}', '{"next": 3}']


def test_other_libraries_cannot_fill_the_file(tmp_path: Path) -> None:
    shoal.log.configure("server_0", tmp_path)
    for number in range(1000):
        logging.getLogger("other.p2p").warning("handler failed")
        logging.getLogger("shoal.test").info("step.done", extra={"number": number})
    logging.getLogger("asyncio").warning("slow")
    lines = (tmp_path / "server_0.log").read_text().splitlines()
    events = [json.loads(line)["event"] for line in lines]
    assert (events.count("handler failed"), events.count("step.done"), events.count("slow")) == (25, 1000, 1)


def test_a_line_of_another_library_is_cut(tmp_path: Path) -> None:
    shoal.log.configure("server_0", tmp_path)
    logging.getLogger("hivemind.p2p").warning("asked for %s", "\x01" * 100_000)
    assert (tmp_path / "server_0.log").stat().st_size < 10_000


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    shoal.log.configure("server_0", tmp_path)
    logging.getLogger("shoal.test").info(
        "step", extra={"loss": math.nan, "norms": [1.0, math.inf], "by": {"a": -math.inf}}
    )

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    [line] = (tmp_path / "server_0.log").read_text().splitlines()
    found = json.loads(line, parse_constant=refuse)
    assert (found["loss"], found["norms"], found["by"]) == (None, [1.0, None], {"a": None})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux' /dev/full")
def test_a_full_disk_is_said_once_and_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "server_0.log").symlink_to("/dev/full")
    shoal.log.configure("server_0", tmp_path)
    for number in range(3):
        logging.getLogger("shoal.test").info("lost", extra={"number": number})
    assert shoal.log.failure() == errno.ENOSPC
    shoal.log.configure("server_0", None)
    assert not shoal.log.failure()
    assert capsys.readouterr().err == (
        f"shoal: cannot write {tmp_path}/server_0.log (No space left on device): free space there; the run goes on "
        "without this log\n"
    )


def test_a_disk_that_does_not_answer_keeps_nobody_who_logs_is_said_once_and_gets_the_lines_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "server_0.log"
    os.mkfifo(path)  # who opens it waits for its reader
    shoal.log.configure("server_0", tmp_path)
    logger = logging.getLogger("shoal.test")
    for number in range(3):
        logger.info("waits", extra={"number": number})
    assert shoal.log.failure() == errno.ETIMEDOUT
    with path.open() as reader:
        assert [json.loads(reader.readline())["number"] for _ in range(3)] == [0, 1, 2]
        shoal.log.configure("server_0", None)
    for thread in threading.enumerate():
        if thread.name.startswith("said of"):
            thread.join()
    assert capsys.readouterr().err == (
        f"shoal: cannot write {path} (the disk does not answer): what is written there waits for it\n"
    )


def test_lines_that_a_disk_that_does_not_answer_cannot_take_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far_disk(monkeypatch)
    monkeypatch.setattr(shoal.log, "_MAX_WAITING", 5)
    file = shoal.log.LinesFile(tmp_path / "lines")
    with hung_disk(monkeypatch):
        for number in range(10):
            file.write(str(number))
    file.close()
    assert (tmp_path / "lines").read_text().split() == ["0", "1", "2", "3", "4"]


def test_a_folder_that_was_removed_is_made_again_when_the_file_is_full(tmp_path: Path) -> None:
    file = shoal.log.LinesFile(tmp_path / "run" / "lines", max_bytes=10)
    file.write("removed")
    shutil.rmtree(tmp_path / "run")
    for line in ("first", "second"):
        file.write(line)
    file.close()
    assert not file.failure
    assert list(shoal.log.written_lines(tmp_path / "run" / "lines")) == [b"first\n", b"second\n"]


def test_a_log_that_cannot_be_made_is_said_and_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    shoal.log.configure("server_0", tmp_path / "file" / "logs")
    logging.getLogger("shoal.test").info("lost")
    assert "cannot write" in capsys.readouterr().err


def test_what_is_logged_before_there_is_a_log_file_goes_nowhere() -> None:
    code = "import logging, shoal; logging.getLogger('shoal.cli.server_host').error('servers.failed')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_that_torch_imports_a_deprecated_package_is_on_no_terminal_and_other_warnings_are(
    tmp_path: Path,
) -> None:
    said = "The pynvml package is deprecated. Please install nvidia-ml-py instead."
    # As torch.cuda, which imports it: the warning is said to be of who does.
    (tmp_path / "pynvml.py").write_text(f"import warnings\nwarnings.warn({said!r}, FutureWarning, stacklevel=2)\n")
    code = "import shoal, pynvml, warnings; warnings.warn('another one', FutureWarning)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "pynvml" not in done.stderr.replace(code, "")
    assert "FutureWarning: another one" in done.stderr


def test_a_file_whose_disk_was_away_is_opened_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, written = tmp_path / "lines", os.write
    file = shoal.log.LinesFile(path)
    file.write("one")
    stale = path.stat().st_ino

    def write(descriptor: int, content: bytes) -> int:
        if os.fstat(descriptor).st_ino == stale:
            raise OSError(errno.ESTALE, "Stale file handle")
        return written(descriptor, content)

    monkeypatch.setattr(os, "write", write)
    path.rename(tmp_path / "before")
    file.write("two")
    assert file.failure == errno.ESTALE
    file.write("three")
    assert not file.failure
    file.close()
    assert path.read_text() == "three\n"
