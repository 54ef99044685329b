"""A checkpoint is taken wherever a model is, and listed by a command."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.unit.checkpoint.checkpoints import make_store, write_checkpoint, write_rounds
from tests.unit.checkpoint.folders import assert_same, make_config, write_model

import shoal
from shoal.checkpoint.exporting import export_model
from shoal.checkpoint.loading import open_model
from shoal.cli import main
from shoal.config import dump_config
from shoal.errors import ConfigError, StateMismatch

IMAGES = {"dataset_name": "digits", "task_type": "cv", "num_channels": 1, "img_size": 8}
FOUR_BITS = {"base": {"weight_quant": {"num_bits": 4}, "activation_quant": {"num_bits": 8}}}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model_pipeline": {"stages": 3}},
        {"model_pipeline": {"stages": 2, "cut": [1, 4]}},
        {"model": {"family": "resnet18"}, "data": IMAGES},
        {"model": {"family": "resnet18"}, "data": IMAGES, "quant": FOUR_BITS},
    ],
    ids=["gpt", "three stages", "a cut of one's own", "buffers", "step sizes"],
)
def test_a_checkpoint_is_the_model_that_was_trained(tmp_path: Path, sections: dict[str, Any]) -> None:
    config = make_config(**sections)
    path = write_checkpoint(tmp_path / "checkpoints", config)
    loaded = shoal.load_model(path)
    assert_same(loaded, shoal.load_model(write_model(tmp_path / "model", config)))
    export_model(open_model(path), tmp_path / "out", "safetensors")
    if "quant" not in sections:
        assert_same(shoal.load_model(tmp_path / "out"), loaded)


def test_a_checkpoint_that_was_changed_is_no_model(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, make_config())
    kept = shutil.copytree(path, tmp_path / "kept")

    def changed(name: str, content: bytes) -> Path:
        shutil.rmtree(path)
        shutil.copytree(kept, path)
        (path / name).write_bytes(content)
        return path

    stage = (kept / "stage_00.safetensors").read_bytes()
    with pytest.raises(StateMismatch, match=r"stage_00\.safetensors has changed"):
        shoal.load_model(changed("stage_00.safetensors", stage[:-1] + bytes([stage[-1] ^ 1])))
    with pytest.raises(StateMismatch, match=r"stage_00\.safetensors has .* bytes"):
        shoal.load_model(changed("stage_00.safetensors", stage[:-1]))
    with pytest.raises(StateMismatch, match=r"manifest\.json is damaged"):
        shoal.load_model(changed("manifest.json", b"{}"))
    with pytest.raises(StateMismatch, match=r"record\.msgpack has"):
        shoal.load_model(changed("record.msgpack", b""))
    genesis = (kept / "genesis.json").read_bytes()
    with pytest.raises(StateMismatch, match=r"genesis\.json has changed"):
        shoal.load_model(changed("genesis.json", genesis.replace(b'"hidden_size": 24', b'"hidden_size": 42')))


def test_a_checkpoint_is_listed_with_what_is_wrong_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rounds(make_store(tmp_path), 1, 2, 3)
    (tmp_path / "test-run" / "round_000002" / "client.json").unlink()
    os.truncate(tmp_path / "test-run" / "round_000003" / "stage_01.safetensors", 9)
    assert main(["checkpoints", str(tmp_path)]) == 0
    titles, *lines = capsys.readouterr().out.splitlines()
    assert titles.split() == ["run", "round", "when", "MB", "state"]
    assert [line.split()[:2] for line in lines] == [["test-run", str(round)] for round in (1, 2, 3)]
    assert lines[0].endswith("good")
    assert lines[1].endswith("damaged: client.json is not there")
    assert "stage_01.safetensors has 9 of " in lines[2]
    assert main(["checkpoints", str(tmp_path / "test-run"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(each["round"], each["good"], len(each["problems"])) for each in report] == [
        (1, True, 0),
        (2, False, 1),
        (3, False, 1),
    ]
    assert report[0]["when"] == "2025-06-15T15:06:41.000+00:00"
    assert report[0]["size_bytes"] > 1000
    (tmp_path / "empty").mkdir()
    assert main(["checkpoints", str(tmp_path / "empty")]) == 0
    assert "there is no checkpoint in" in capsys.readouterr().out
    assert main(["checkpoints", str(tmp_path / "nowhere")]) == 2
    assert "is no folder" in capsys.readouterr().err
    assert main(["checkpoints", "ftp://secret@host/x"]) == 2
    said = capsys.readouterr().err
    assert "s3://bucket/prefix" in said
    assert "secret" not in said


def test_evaluate_and_export_take_a_checkpoint_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(data={"seq_len": 32})
    path, model = write_checkpoint(tmp_path, config), write_model(tmp_path / "model", config)
    losses: list[float] = []
    for each in (path, model):
        assert main(["evaluate", str(each), "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["eval_loss"])
    assert losses[0] == losses[1]
    texts: list[str] = []
    for each in (path, model):
        assert main(["generate", str(each), "--prompt", "a", "--max-tokens", "4"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert main(["export", str(path), "--to", str(tmp_path / "out")]) == 0
    assert main(["export", str(model), "--to", str(path), "--force"]) == 2
    assert "holds no model, and is not replaced" in capsys.readouterr().err


def test_a_beginning_that_describes_no_model_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write_rounds(store, 1)
    with pytest.raises(ConfigError, match=r"genesis\.json describes no model"):
        shoal.load_model(tmp_path / "test-run" / "round_000001")


def test_the_folder_of_a_run_that_has_left_no_model_yet_says_when_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(make_config()))
    with pytest.raises(ConfigError, match=rf"a run leaves one in {tmp_path}/model when it ends"):
        open_model(tmp_path)


def test_without_a_place_checkpoints_are_those_beside_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "logs" / "checkpoints", make_config())
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoints"]) == 0
    assert "good" in capsys.readouterr().out
