"""`shoal status --watch` as a user sees it: in terminals of three sizes, without colours, dumb, and on a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len
from tests.e2e.hosts import hosts_of, invited
from tests.e2e.launched import END_S, ENDLESS, FEW, ROOT, START_S, Launched, launched
from tests.e2e.terminals import ENTER, LEAVE, terminal

WATCH = ("-m", "shoal", "status", "--watch", "--interval=0.5")
COLOURS = re.compile(r"\x1b\[[0-9;]*3[0-7][0-9;]*m")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    with launched(tmp_path_factory.mktemp("watched"), *FEW) as run:
        run.saw("client_0", "round.recorded", round=1)
        yield run


def seen_by(run: Launched, **more: str) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(run.runtime_dir), "PYTHONPATH": os.pathsep.join(sys.path), **more}


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50), (40, 15)])
def test_it_fills_a_terminal_of_any_size_and_ctrl_c_gives_it_back(run: Launched, columns: int, rows: int) -> None:
    with terminal(WATCH, seen_by(run), columns, rows) as seen:
        seen.until("training round", START_S)
        seen.until("stage 1", START_S)
        seen.press(b"\x03")
        assert seen.ends(END_S) == 0, seen.written
        shown = [screen for screen in seen.screens if any("training" in line for line in screen)]
        for screen in shown[:-1]:  # Ctrl-C itself is echoed on the last one
            assert len(screen) <= rows
            assert max(map(cell_len, screen)) <= columns
        assert COLOURS.search(seen.written)
        # The screen that was there before, with its cursor.
        assert seen.written.count(ENTER) == seen.written.count(LEAVE) == 1
        assert seen.written.rindex("\x1b[?25h") > seen.written.rindex("\x1b[?25l")
        assert not seen.written.partition(LEAVE)[2].strip()


def test_a_client_that_is_killed_is_said_to_be_lost_and_found_again_when_it_is_back(run: Launched) -> None:
    with terminal(WATCH, seen_by(run), 80, 24) as seen:
        seen.until("training round", START_S)
        os.kill(run.living_pid_of("client:0"), signal.SIGKILL)
        seen.until("the client does not answer", START_S)
        seen.until("training round", START_S)
        seen.press(b"\x03")
        assert seen.ends(END_S) == 0


def test_no_color_is_honoured(run: Launched) -> None:
    with terminal(WATCH, seen_by(run, NO_COLOR="1"), 80, 24) as seen:
        seen.until("training round", START_S)
        seen.press(b"\x03")
        assert seen.ends(END_S) == 0
        assert not COLOURS.search(seen.written)


def test_a_dumb_terminal_gets_lines(run: Launched) -> None:
    with terminal(WATCH, seen_by(run, TERM="dumb"), 80, 24) as seen:
        while seen.written.count("training round") < 3 and seen.read():
            pass
        seen.press(b"\x03")
        assert seen.ends(END_S) == 0
        assert "\x1b" not in seen.written


@contextlib.contextmanager
def piped(run: Launched, *flags: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, *WATCH, *flags], env=os.environ | seen_by(run), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_pipe_gets_a_line_each_interval_and_ctrl_c_ends_it_well(run: Launched) -> None:
    with piped(run) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(6)]
        assert all(re.match(r"\d\d:\d\d:\d\dZ  ", line) for line in lines), lines
        assert sum("training round" in line for line in lines) >= 2
        assert "\x1b" not in "".join(lines)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(END_S) == 0


def test_a_reader_that_has_seen_enough_ends_it_well(run: Launched) -> None:
    with piped(run) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(END_S) == 0


def test_json_is_an_object_a_line_and_tells_no_event_twice(run: Launched) -> None:
    with piped(run, "--json") as process:
        assert process.stdout is not None
        said = [json.loads(process.stdout.readline()) for _ in range(8)]
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        assert process.wait(END_S) == 0
    numbers = [event["number"] for each in said for event in each["events"]]
    assert numbers
    assert numbers == sorted(set(numbers))
    assert all(each["run"] == said[0]["run"] and each["stages"] for each in said)


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="sh", dir="/tmp") as folder:
        yield Path(folder)


def test_a_launcher_shows_the_same_in_its_terminal_and_what_happens_stays_above(tmp_path: Path, short: Path) -> None:
    own = {"XDG_RUNTIME_DIR": str(short), "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command = (str(ROOT / "run_local.py"), *FEW, f"--log-dir={tmp_path / 'logs'}")
    with terminal(command, own, 100, 40) as seen:
        # In the first round nothing is kept yet.
        while not re.search(r"stage 1 .*server \d@", seen.written) or not re.search(r"round [2-9]\d*/", seen.written):
            assert seen.read(), seen.written
        assert ENTER not in seen.written
        seen.press(b"\x03")
        assert seen.ends(END_S) == 130, seen.written
    assert "stopping; press Ctrl-C again to end at once" in seen.written
    assert "next: shoal " in seen.written
    assert seen.written.rindex("\x1b[?25h") > seen.written.rindex("\x1b[?25l")


def test_a_host_of_servers_shows_the_whole_run_and_its_own_part(tmp_path: Path, short: Path) -> None:
    with hosts_of(tmp_path) as hosts:
        client = hosts.run("desk", "start_trainer_client.py", *ENDLESS, "--num-servers=2")
        variable, (script, *flags) = invited(client)
        hosts.give_key("desk", "box")
        own = {
            "XDG_RUNTIME_DIR": str(short),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "HOME": str(hosts.home("box")),
            "SHOAL_NETWORK__HOST_NAME": "box",
            "OMP_NUM_THREADS": "1",
            **variable,
        }
        command = (str(ROOT / script), *flags, f"--log-dir={tmp_path / 'logs'}")
        with terminal(command, own, 100, 40) as seen:
            # The client says what it knows of all stages; under that is what this host counts itself.
            while not re.search(r"stage 1 .*server \d@box", seen.written) or not re.search(
                r"steps here.*\n.*\n.*serving stages 0 and 1", seen.written.rpartition("stage 1 ")[2].replace("\r", "")
            ):
                assert seen.read(), seen.written[-4000:]
            while "training round" not in seen.written:
                assert seen.read(), seen.written[-4000:]
            client.saw("client_0", "round.recorded", round=1)
            peers = next(iter(variable.values()))
            events = [sys.executable, "-m", "shoal", "events", f"--initial-peers={peers}"]
            told = subprocess.run(events, env=os.environ | own, capture_output=True, text=True, check=True).stdout
            assert re.search(r"^\d\d:\d\d:\d\d  round\.recorded ", told, re.MULTILINE), told
            client.interrupt()
            assert client.ends(END_S) == 130, client.output
            assert seen.ends(END_S) == 0, seen.written
        assert "has ended (interrupted at its client)" in seen.written


def test_the_end_of_the_run_ends_it_and_is_said(run: Launched) -> None:
    with terminal(WATCH, seen_by(run), 80, 24) as seen:
        seen.until("training round", START_S)
        run.interrupt()
        assert seen.ends(END_S) == 0
        assert "has ended (interrupted at its client)" in seen.written.partition(LEAVE)[2]
    run.ends(END_S)
    run.leaves_nothing()
