"""`shoal benchmark` as a user calls it; nothing here judges speed."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.clock import Deadline, SystemClock
from shoal.runtime.process_info import descendants, with_environment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
CODEC = ("benchmark", "codec", "--ignore-busy")


@contextmanager
def _start(*arguments: str, tag: str = "") -> Generator[subprocess.Popen[str], None, None]:
    with subprocess.Popen(
        [sys.executable, "-m", "shoal", *arguments],
        cwd=ROOT,
        env=os.environ | {"TAG_OF_TEST": tag},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as command:
        try:
            yield command
        finally:
            command.kill()


def test_codec_prints_one_json_object_with_all_its_cases_and_leaves_no_process() -> None:
    tag = secrets.token_hex(8)
    with _start(*CODEC, "--json", "--repeat", "1", tag=tag) as command:
        output, errors = command.communicate(timeout=240)
    assert (command.returncode, errors) == (0, "")
    report = json.loads(output)
    assert report.keys() == {"name", "results", "machine"}
    assert report["name"] == "codec"
    assert "hivemind none 4 MB" in [result["case"] for result in report["results"]]
    for result in report["results"]:
        assert result.keys() == {"case", "ours", "reference", "unit", "ratio"}
        assert result["unit"] == "GB/s"
        assert result["ratio"] == result["ours"] / result["reference"]
    assert len(report["machine"]["cores_free"]) == 2, "before and after the measurement"
    assert not with_environment(f"TAG_OF_TEST={tag}")


def test_a_ctrl_c_ends_with_130_and_leaves_no_process() -> None:
    tag = secrets.token_hex(8)
    with _start(*CODEC, "--repeat", "100000", tag=tag) as command:
        deadline = Deadline.after(SystemClock(), 60)
        pause = threading.Event()
        while not descendants(command.pid):  # the peers of the calibration, or of the benchmark
            assert not deadline.expired(), "no peer was started"
            pause.wait(0.02)
        command.send_signal(signal.SIGINT)
        output, errors = command.communicate(timeout=240)
    assert (command.returncode, output, errors) == (130, "", "")
    # A peer whose start was interrupted ends by its lifeline, a moment later.
    while with_environment(f"TAG_OF_TEST={tag}"):
        assert not deadline.expired(), "a process is left"
        pause.wait(0.02)


def test_data_has_a_case_for_each_size_of_a_batch() -> None:
    with _start("benchmark", "data", "--ignore-busy", "--json", "--repeat", "1") as command:
        output, errors = command.communicate(timeout=240)
    assert (command.returncode, errors) == (0, "")
    results = json.loads(output)["results"]
    assert [(result["case"], result["unit"]) for result in results] == [
        ("dataloader 4 MB", "GB/s"),
        ("dataloader 64 KB", "GB/s"),
    ]
    assert all(result["ours"] > 0 and result["reference"] > 0 for result in results)
