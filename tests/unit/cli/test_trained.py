"""`shoal evaluate` of a folder whose configuration names code: what runs, and what is said instead."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.foreign_code import NAME, lay_trap
from tests.linux_calls import needs
from tests.unit.checkpoint.folders import make_config, write_model
from tokenizers import Tokenizer
from tokenizers.models import BPE

from shoal.checkpoint.model_folder import TOKENIZER
from shoal.cli import main
from shoal.model.hf.tokenizer import TOKENIZER_FILE
from shoal.runtime.linux_calls import LinuxCall

OWN = "tests.unit.data.own_sets:Pictures"


def left(path: Path, dataset_name: str, arguments: dict[str, Any] | None = None) -> str:
    """A model's folder whose configuration names a data set."""
    data = {"task_type": "cv", "num_channels": 1, "img_size": 4, "seq_len": 32, "arguments": arguments or {}}
    model = {"family": "mlp", "num_classes": 4, "num_layers": 2, "hidden_size": 8}
    return str(write_model(path / "model", make_config(data={**data, "dataset_name": dataset_name}, model=model)))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["evaluate", *arguments]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_data_that_a_folder_names_as_code_is_not_imported_and_what_names_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = lay_trap(tmp_path, monkeypatch)
    folder = left(tmp_path, f"{NAME}:X")
    for named in ((), ("--dataset-name", OWN), ("--family", f"{NAME}:X")):
        said = refused(capsys, folder, *named)
        assert f"{folder} names '{NAME}:X' by data.dataset_name" in said
        assert f"say --dataset-name {NAME}:X" in said
    assert NAME not in sys.modules
    assert not trace.exists()


def test_a_function_of_python_is_not_called_even_where_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = left(tmp_path, "subprocess:getoutput", {"cmd": f"touch {tmp_path / 'it_has_run'}"})
    assert "--dataset-name subprocess:getoutput" in refused(capsys, folder)
    assert "comes with Python" in refused(capsys, folder, "--dataset-name", "subprocess:getoutput")
    assert not (tmp_path / "it_has_run").exists()


def test_what_is_no_name_of_a_class_is_nowhere_given_back_to_be_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, left(tmp_path, "x:Y; touch it_has_run"))
    assert "is not of the form package.module:Class" in said
    assert "--dataset-name" not in said


def test_a_class_of_ones_own_gives_the_samples_where_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", left(tmp_path, OWN), "--dataset-name", OWN]) == 0
    assert f"over 1 samples of {OWN}" in capsys.readouterr().out


@needs(LinuxCall.PROC, "a limit on the memory that a process maps")
@pytest.mark.parametrize("copies", [2, 15_000_000])
def test_a_small_tokenizer_that_makes_a_text_of_gigabytes_takes_no_more_memory_than_there_is(
    tmp_path: Path, copies: int
) -> None:
    model = write_model(tmp_path / "model", make_config())
    (model / TOKENIZER).mkdir()
    tokenizer: dict[str, Any] = json.loads(Tokenizer(BPE({"a": 0}, [])).to_str())
    replaces = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 3000}
    again = {"type": "Replace", "pattern": {"String": "b"}, "content": "c" * (copies // 3000)}
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [replaces, again] if copies > 3000 else []}
    (model / TOKENIZER / TOKENIZER_FILE).write_text(json.dumps(tokenizer))
    assert (model / TOKENIZER / TOKENIZER_FILE).stat().st_size < 10_000
    command = [sys.executable, "-m", "tests.unit.cli.limited_command", "generate", str(model)]
    done = subprocess.run([*command, "--prompt=a", "--max-tokens=1"], capture_output=True, check=False)
    assert done.returncode == (-signal.SIGABRT if copies > 3000 else 0), done.stderr
    if copies > 3000:
        assert b"memory allocation" in done.stderr
