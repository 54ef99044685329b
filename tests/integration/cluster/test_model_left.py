"""The folder `model/` at the end of a run, loaded in one piece, is what the run has evaluated last."""

from __future__ import annotations

import errno
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import numpy as np
import pytest
import safetensors.torch
import torch

import shoal
from shoal.averaging import stage_fetch
from shoal.checkpoint.exporting import export_model
from shoal.checkpoint.loading import open_model
from shoal.checkpoint.whole_folder import WholeFolder
from shoal.client import round_records
from shoal.config import Config
from shoal.data.catalog import open_source
from shoal.data.source import Source
from shoal.errors import ConfigError, RecordRejected, StateMismatch
from shoal.ids import PeerId
from shoal.inference.evaluation import held_out_loss
from shoal.wire.messages.control import EvalReport
from shoal.wire.messages.round import RecordPrepared
from shoal.wire.messages.step import Forward
from shoal.wire.messages.transfer import Chunk
from shoal_lab import Cluster

from .conftest import MakeCluster, make_config, make_text

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "own_model"
OWN_FAMILY = "residual_mlp:ResidualMlp"
SHORT = {"inner_steps": 2, "outer_steps": 2, "batch_size_per_step": 4}


def uncut_loss(module: Any, holdout: Source) -> float:
    """The mean loss over the held-out samples, as anybody computes it who has nothing but the module."""
    losses: list[float] = []
    with torch.no_grad():
        for index in range(holdout.num_samples):
            inputs, labels = (torch.from_numpy(array) for array in holdout.read(np.array([index])).everything)
            losses.append(module.loss(module(inputs), labels).item())
    return sum(losses) / len(losses)


class LikeOurs:
    """A model of transformers, as `uncut_loss` calls one."""

    def __init__(self, theirs: Any, ours: Any) -> None:
        self._theirs = theirs.eval()
        self.loss = ours.loss

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._theirs(tokens.long()).logits


def of_models(log_dir: Path) -> list[str]:
    return [path.name for path in log_dir.iterdir() if "model" in path.name]


def digits(**sections: dict[str, Any]) -> Config:
    data = {"dataset_name": "digits", "task_type": "cv", "num_channels": 1, "img_size": 8, "holdout_fraction": 0.02}
    values = {"run": {"seed": 3}, "data": data, "model_pipeline": {"stages": 2, "microbatches": 2}, "diloco": SHORT}
    return Config.model_validate({"device": "cpu", "wandb": False, "servers": {"replicas": 2}, **values, **sections})


def text(**sections: dict[str, Any]) -> Config:
    return make_config(diloco={"inner_steps": 2, "outer_steps": 2}, **sections)


QUANTISED = {"quant": {"rules": [{"stages": [1], "weight_quant": {"num_bits": 4, "per_channel": True}}]}}
"""What is quantised how depends on the stage, which the uncut model has not."""
CASES: dict[str, Callable[[], Config]] = {
    "gpt in two stages": text,
    "gpt in three": lambda: text(model={"num_layers": 3}, model_pipeline={"stages": 3, "microbatches": 2}),
    "resnet18 with its running statistics": lambda: digits(model={"family": "resnet18", "num_classes": 10}),
    "a quantised one": lambda: text(**QUANTISED),
    "a family of somebody's own": lambda: digits(
        model={"family": OWN_FAMILY, "num_classes": 10, "extra": {"width": 16, "depth": 2}}
    ),
}


@pytest.mark.usual("gpt in two stages", "a quantised one")
@pytest.mark.parametrize("case", CASES)
async def test_the_model_that_is_left_has_the_loss_of_the_last_evaluation(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transformers: ModuleType
) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    config = CASES[case]()
    dataset = open_source(config) if config.data.task_type == "cv" else make_text(200)
    async with Cluster(config, log_dir=tmp_path, dataset=dataset) as cluster:
        with anyio.fail_after(200):
            result = await cluster.run()
    folder = tmp_path / "model"
    assert (result.summary["model"], result.summary["model_round"]) == (str(folder), 2)
    assert of_models(tmp_path) == ["model"], "nothing is left beside it"
    own = OWN_FAMILY if config.model.family == OWN_FAMILY else None
    model = shoal.load_model(folder, family=own)
    assert not model.training
    assert uncut_loss(model, dataset.holdout) == pytest.approx(result.summary["eval_loss_last"], abs=1e-6)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    assert tensors.keys() == state.keys()
    format = export_model(open_model(folder, family=own), tmp_path / "taken_home")
    taken_home = shoal.load_model(tmp_path / "taken_home", family=own)
    assert held_out_loss(taken_home, dataset.holdout) == pytest.approx(result.summary["eval_loss_last"], abs=1e-6)
    if format == "hf":
        theirs = LikeOurs(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "taken_home"), model)
        assert uncut_loss(theirs, dataset.holdout) == pytest.approx(result.summary["eval_loss_last"], abs=1e-6)


async def _left(tmp_path: Path) -> Path:
    async with Cluster(text(), log_dir=tmp_path, dataset=make_text(200)) as cluster:
        await cluster.run()
    return tmp_path / "model"


async def test_a_folder_that_was_changed_is_refused_and_the_reason_is_named(tmp_path: Path) -> None:
    folder = await _left(tmp_path)
    weights = (folder / "model.safetensors").read_bytes()
    for changed, says in ((weights[:-1] + bytes([weights[-1] ^ 1]), "hash to"), (weights[:-8], "damaged")):
        (folder / "model.safetensors").write_bytes(changed)
        with pytest.raises(StateMismatch, match=says):
            shoal.load_model(folder)
    (folder / "model.safetensors").write_bytes(weights)
    described = json.loads((folder / "config.json").read_text())
    for name, value, kind in (("run_id", "another", RecordRejected), ("record", "0" * 64, RecordRejected)):
        (folder / "config.json").write_text(json.dumps({**described, name: value}))
        with pytest.raises(kind):
            shoal.load_model(folder)
    (folder / "config.json").write_text(json.dumps({**described, "format": 99}))
    with pytest.raises(ConfigError, match="format 99"):
        shoal.load_model(folder)
    for nowhere in (tmp_path / "nowhere", folder / "config.json"):
        with pytest.raises(ConfigError, match="does not exist"):
            shoal.load_model(nowhere)


async def test_code_of_somebody_else_is_imported_only_if_the_caller_names_it(tmp_path: Path) -> None:
    folder = await _left(tmp_path)
    described = json.loads((folder / "config.json").read_text())
    described["configuration"]["model"]["family"] = "antigravity:Class"
    (folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match=r"load_model\(\.\.\., family='antigravity:Class'\)"):
        shoal.load_model(folder)
    assert "antigravity" not in sys.modules


async def test_a_model_of_an_earlier_end_is_replaced_and_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    for left in ("model", ".model.1.unfinished", ".model.1.old"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "old").touch()
    folder = await _left(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "record.json"]
    assert of_models(tmp_path) == ["model"]


async def test_an_interrupted_run_leaves_the_model_of_its_last_record(make_cluster: MakeCluster) -> None:
    async with make_cluster(make_config(diloco={"inner_steps": 4, "outer_steps": 50})) as cluster:
        cluster.when(Forward, action=lambda: cluster.client.stop(), receiver=cluster.servers[1].peer, number=9)
        result = await cluster.run()
        assert result.records[-1].round < 50
        assert result.summary["model_round"] == result.records[-1].round
        shoal.load_model(cluster.host.log_dir / "model")


async def test_a_record_that_is_damaged_before_the_run_ends_is_written_again_and_its_model_is_left(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster(text()) as cluster:
        path = cluster.host.log_dir / "rounds" / "round_0002.json"
        whole: list[bytes] = []

        def damage() -> None:
            whole.append(path.read_bytes())
            path.write_bytes(whole[0][:100])

        cluster.when(EvalReport, action=damage, base_round=2)
        result = await cluster.run()
        assert path.read_bytes() == whole[0]
        assert (result.summary["model_round"], result.summary["rounds_unread"]) == (2, [])
        [said] = [event for event in told(cluster) if event["event"] == "record.restored"]
        assert said["says"].startswith("the record of round 2 was damaged on the disk")
        shoal.load_model(cluster.host.log_dir / "model")


def told(cluster: Cluster) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (cluster.host.log_dir / "events.jsonl").read_text().splitlines()]


async def test_what_is_prepared_too_late_is_not_committed_once_the_last_record_is_on_the_disk(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the replicas would swap, and nobody would hold the model of the record that the run leaves."""
    is_written, original = anyio.Event(), round_records.write_last

    async def write_last(*arguments: Any) -> bool:
        try:
            return await original(*arguments)
        finally:
            is_written.set()

    monkeypatch.setattr(round_records, "write_last", write_last)
    async with (
        make_cluster(make_config(diloco={"inner_steps": 4, "outer_steps": 50})) as cluster,
        anyio.create_task_group() as tasks,
    ):
        late = cluster.servers[3].process.endpoint
        post: Callable[..., None] = late.post

        async def post_late(*said: object) -> None:
            await is_written.wait()
            post(*said)

        def hold_back(peer: PeerId, message: object, *rest: object) -> None:
            if isinstance(message, RecordPrepared) and message.round == 2:
                cluster.client.stop()
                tasks.start_soon(post_late, peer, message, *rest)
            else:
                post(peer, message, *rest)

        monkeypatch.setattr(late, "post", hold_back)
        result = await cluster.run()
        assert [record.round for record in result.records] == [1]
        assert result.summary["model_round"] == 1
        shoal.load_model(cluster.host.log_dir / "model")


async def test_a_donor_that_dies_in_the_transfer_of_the_model_is_replaced(make_cluster: MakeCluster) -> None:
    async with make_cluster(text(), chunk_bytes=1 << 20) as cluster:
        cluster.when(Chunk, action=lambda: cluster.kill_server(1), sender=cluster.servers[1].peer)
        cluster.when(Chunk, action=lambda: cluster.kill_server(0), sender=cluster.servers[0].peer)
        result = await cluster.run()
        assert result.summary["model_round"] == 2
        shoal.load_model(cluster.host.log_dir / "model")


async def test_a_stage_that_nobody_holds_any_more_is_named_and_no_half_of_a_model_is_left(
    make_cluster: MakeCluster,
) -> None:
    notices: list[str] = []
    async with make_cluster(make_config(diloco={"inner_steps": 4, "outer_steps": 50})) as cluster:
        cluster.client.ledger.show = notices.append

        def end() -> None:
            for index in (1, 3):
                cluster.kill_server(index)
            cluster.client.stop()

        cluster.when(Forward, action=end, receiver=cluster.servers[1].peer, number=9)
        result = await cluster.run()
        log_dir = cluster.host.log_dir
    round = result.records[-1].round
    reason = f"nobody holds the parameters of stage 1 after round {round} any more"
    assert (result.summary["model"], result.summary["model_missing"]) == (None, reason)
    assert [text for text in notices if "model" in text] == [f"no model is left: {reason}"]
    assert of_models(log_dir) == []


async def test_servers_that_give_other_bytes_than_the_record_names_are_not_waited_for(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_fetch, "_SILENT_S", math.inf)
    # The client expects larger chunks, so what these servers offer is wrong.
    async with make_cluster(text(), chunk_bytes=4096) as cluster:
        with anyio.fail_after(60):
            result = await cluster.run()
    assert result.summary["model_missing"] == "nobody holds the parameters of stage 0 after round 2 any more"


async def test_a_full_disk_leaves_the_old_model_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: WholeFolder, name: str, content: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()
    monkeypatch.setattr(WholeFolder, "write_json", full)
    async with Cluster(text(), log_dir=tmp_path, dataset=make_text(200)) as cluster:
        result = await cluster.run()
    assert "No space left on device" in result.summary["model_missing"]
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["old"]
    assert of_models(tmp_path) == ["model"]
