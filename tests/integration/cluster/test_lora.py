"""Adapters on a frozen model: rounds, records and newcomers know of nothing else."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch

import shoal
from shoal.checkpoint.model_layout import stage_layouts
from shoal.checkpoint.start_weights import StartWeights
from shoal.config import Config
from shoal.errors import WeightsMissing
from shoal.ids import PeerId
from shoal.inference.evaluation import held_out_loss
from shoal.model.hf.described import with_hf_config
from shoal.wire.messages.base import Traffic
from shoal.wire.messages.control import StartRound
from shoal_lab import Cluster

from .conftest import SEQ_LEN, MakeCluster, make_text, reproduces
from .test_joining import hold_up

# Of peft, when it wraps a model of a newer transformers.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

QWEN: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def lora_config(
    extra: dict[str, Any] = QWEN,
    folder: Path | None = None,
    rounds: int = 2,
    lora: dict[str, Any] | None = None,
    **more: Any,
) -> Config:
    """As the first host of a run leaves it: with what its base hashes to."""
    model = {"extra": extra} if folder is None else {"name_or_path": str(folder), "pretrained": True}
    values: dict[str, Any] = {
        "run": {"deterministic": True, "seed": 3},
        "data": {"seq_len": SEQ_LEN},
        "model": {"family": "hf", **model},
        "lora": {"r": 8, "dropout": 0.1, **(lora or {})},
        "model_pipeline": {"stages": 2, "microbatches": 2},
        "diloco": {"inner_steps": 3, "outer_steps": rounds, "batch_size_per_step": 4},
        "servers": {"replicas": 2},
    }
    config = Config.model_validate({"device": "cpu", "wandb": False, **values, **more})
    config = config.model_copy(update={"model": with_hf_config(config.model)})
    weights = StartWeights(config).digests()
    return config.model_copy(update={"model": config.model.model_copy(update={"weights": weights})})


def base_in(folder: Path, transformers: ModuleType, **more: Any) -> Path:
    """A model of transformers with random weights."""
    given = {name: value for name, value in QWEN.items() if name != "model_type"}
    torch.manual_seed(11)
    config = transformers.AutoConfig.for_model("qwen3", **{**given, **more})
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    theirs.save_pretrained(folder)
    return folder


def adapter_bytes(config: Config) -> list[int]:
    """Of each stage."""
    layouts = stage_layouts(config)
    assert all(".lora_" in name for layout in layouts for name in layout.parameters.names)
    return [4 * layout.parameters.numel for layout in layouts]


CASES: dict[str, dict[str, Any]] = {
    "usual": {},
    "bfloat16 base": {"lora": {"base_dtype": "bfloat16"}, "data": {"seq_len": SEQ_LEN, "precision": "bf16-mixed"}},
    "tied, in chunks and all at once": {
        "extra": {**QWEN, "tie_word_embeddings": True},
        "model_pipeline": {
            "stages": 3,
            "microbatches": 2,
            "schedule": "zero_bubble",
            "activation_checkpointing": True,
        },
    },
    "experts": {
        "extra": {
            **QWEN,
            "model_type": "qwen3_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "router_aux_loss_coef": 0.1,
        },
    },
    "a stage without adapters": {"model_pipeline": {"stages": 3, "microbatches": 2, "cut": [1, 3, 2]}},
}


@pytest.mark.usual("usual")
@pytest.mark.parametrize("case", CASES)
async def test_a_run_of_adapters_is_recorded_replayed_bit_for_bit_and_loaded_in_one_piece(
    case: str, make_cluster: MakeCluster
) -> None:
    config, dataset = lora_config(**CASES[case]), make_text(200)
    if "chunks" in case:
        model = config.model.model_copy(update={"loss_chunk_tokens": 7})
        config = config.model_copy(update={"model": model})
    async with make_cluster(config, dataset=dataset) as cluster:
        result = await cluster.run()
    assert (result.audit.steps, result.audit.duplicates, result.audit.missing) == (12, 0, 0)
    reproduces(cluster.host.log_dir, config, dataset)
    model = shoal.load_model(cluster.host.log_dir / "model")
    assert held_out_loss(model, dataset.holdout) == pytest.approx(result.summary["eval_loss_last"], abs=5e-3)


async def test_rings_and_a_newcomer_move_adapters_alone_and_peft_loads_what_is_left(
    tmp_path: Path,
    make_cluster: MakeCluster,
    monkeypatch: pytest.MonkeyPatch,
    peft: ModuleType,
    transformers: ModuleType,
) -> None:
    folder = base_in(tmp_path / "base", transformers)
    config = lora_config(folder=folder, rounds=4)
    adapters = adapter_bytes(config)
    async with make_cluster(config) as cluster:
        cluster.when(StartRound, action=partial(cluster._tasks.start_soon, cluster.start_server, 0), round=2)
        hold_up(cluster, monkeypatch, 3, (PeerId("server4"),))
        result = await cluster.run()
        newcomer = cluster.servers[4]
        assert (newcomer.stage, newcomer.replica.member.base_round) == (0, 4)
        for server in cluster.servers:
            held = hashlib.sha256(server.parameters().numpy().tobytes()).hexdigest()
            assert held == result.hashes[server.stage]
        # Of the stage that nobody joins: of two members each sends all of it, half as it is and half as a sum.
        pair = [server for server in cluster.servers if server.stage == 1]
        sent = [server.process.endpoint.sent_bytes[Traffic.PSEUDO_GRADIENTS] for server in pair]
        assert [4 * adapters[1] < each <= 1.01 * 4 * adapters[1] for each in sent] == [True, True], (sent, adapters)
        # Outer parameters and momentum of one stage for the newcomer, those of all for the model that is left.
        state = sum(server.process.endpoint.sent_bytes[Traffic.STATE] for server in cluster.servers)
        assert 0 < state <= 1.01 * (2 * adapters[0] + 2 * sum(adapters)), (state, adapters)
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    left = cluster.host.log_dir / "model"
    assert safetensors.torch.load_file(left / "model.safetensors").keys() == {
        name for layout in stage_layouts(config) for name in layout.parameters.names
    }
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    theirs = peft.PeftModel.from_pretrained(base, str(left)).eval()
    tokens = torch.arange(SEQ_LEN)[None]
    with torch.no_grad():
        assert torch.equal(theirs(input_ids=tokens, use_cache=False).logits, shoal.load_model(left)(tokens))


async def test_a_server_whose_base_has_another_bit_is_refused_before_it_serves(
    tmp_path: Path, make_cluster: MakeCluster, transformers: ModuleType
) -> None:
    folder = base_in(tmp_path / "base", transformers)
    config = lora_config(folder=folder)
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"].view(torch.int32)[0, 0] ^= 1
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    cluster: Cluster = make_cluster(config)
    with pytest.raises(WeightsMissing, match=r"^block_0 of .* the run began from other weights"):
        async with cluster:
            pass
