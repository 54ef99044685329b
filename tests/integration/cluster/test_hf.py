"""A model of transformers, cut over servers: it is trained, recorded, computed again and taken home as any other."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

import shoal
from shoal.checkpoint.exporting import export_model
from shoal.checkpoint.loading import open_model
from shoal.config import Config
from shoal.inference.evaluation import held_out_loss
from shoal.wire.messages.step import Forward

from .conftest import SEQ_LEN, MakeCluster, make_text, reproduces

QWEN: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
TIED: dict[str, Any] = {**QWEN, "tie_word_embeddings": True}
EXPERTS: dict[str, Any] = {
    **QWEN,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
ZERO_BUBBLE: dict[str, Any] = {
    "stages": 3,
    "microbatches": 2,
    "schedule": "zero_bubble",
    "activation_checkpointing": True,
}
IN_BF16: dict[str, Any] = {"seq_len": SEQ_LEN, "precision": "bf16-mixed"}


def hf_config(extra: dict[str, Any] = QWEN, **sections: dict[str, Any]) -> Config:
    values: dict[str, dict[str, Any]] = {
        "run": {"deterministic": True, "seed": 3},
        "data": {"seq_len": SEQ_LEN},
        "model": {"family": "hf", "extra": extra},
        "model_pipeline": {"stages": 2, "microbatches": 2},
        "diloco": {"inner_steps": 3, "outer_steps": 2, "batch_size_per_step": 4},
        "servers": {"replicas": 2},
    }
    return Config.model_validate({"device": "cpu", "wandb": False, **values, **sections})


CASES: dict[str, Config] = {
    "qwen3": hf_config(),
    "experts": hf_config(EXPERTS),
    "zero_bubble and bf16": hf_config(data=IN_BF16, model_pipeline=ZERO_BUBBLE),
    "experts, all at once": hf_config(
        {**EXPERTS, "router_aux_loss_coef": 0.1},
        data=IN_BF16,
        model_pipeline=ZERO_BUBBLE,
    ),
    "experts, in float16, in chunks and all at once": hf_config(
        data={"seq_len": SEQ_LEN, "precision": "fp16-mixed"},
        model={"family": "hf", "extra": {**EXPERTS, "router_aux_loss_coef": 0.1}, "loss_chunk_tokens": 7},
        model_pipeline=ZERO_BUBBLE,
    ),
    "quantised": hf_config(quant={"base": {"activation_quant": "off"}}),
    "quantised experts": hf_config(
        EXPERTS,
        quant={
            "base": {"weight_quant": {"per_channel": True}},
            "rules": [{"class_names": ["Embedding"], "weight_quant": {}}],
        },
        data=IN_BF16,
        model_pipeline=ZERO_BUBBLE,
    ),
    "in chunks": hf_config(model={"family": "hf", "extra": QWEN, "loss_chunk_tokens": 7}),
    "tied, in chunks and all at once": hf_config(
        model={"family": "hf", "extra": TIED, "loss_chunk_tokens": 7},
        data=IN_BF16,
        model_pipeline=ZERO_BUBBLE,
    ),
    "quantised, in chunks": hf_config(model={"family": "hf", "extra": QWEN, "loss_chunk_tokens": 7}, quant={}),
    "tied in one stage": hf_config(TIED, model_pipeline={"stages": 1, "microbatches": 2}),
    "tied": hf_config(TIED),
    "tied, quantised": hf_config(
        TIED,
        quant={
            "base": {"activation_quant": "off"},
            "rules": [{"name_patterns": ["head.lm_head"], "weight_quant": "off"}],
        },
    ),
    "experts, tied": hf_config({**EXPERTS, "tie_word_embeddings": True, "router_aux_loss_coef": 0.1}),
    "tied, gpipe": hf_config(TIED, model_pipeline={"stages": 3, "microbatches": 2, "schedule": "gpipe"}),
    "tied, zero_bubble and bf16": hf_config(TIED, data=IN_BF16, model_pipeline=ZERO_BUBBLE),
}


@pytest.mark.usual("tied")
@pytest.mark.parametrize("case", CASES)
async def test_a_run_is_recorded_replayed_bit_for_bit_and_loaded_in_one_piece(
    case: str, make_cluster: MakeCluster
) -> None:
    config, dataset = CASES[case], make_text(200)
    async with make_cluster(config, dataset=dataset) as cluster:
        result = await cluster.run()
    assert (result.audit.steps, result.audit.duplicates, result.audit.missing) == (12, 0, 0)
    log_dir = cluster.host.log_dir
    reproduces(log_dir, config, dataset)
    if case.startswith("experts"):
        steps = [values for values in cluster.monitor.values if "loss/train" in values]
        assert cluster.monitor.num_steps == 12
        assert all(0.9 < step["loss/router"] < 2 and 0 < step["router/load_cv"] < 2 for step in steps)
    model = shoal.load_model(log_dir / "model")
    assert held_out_loss(model, dataset.holdout) == pytest.approx(result.summary["eval_loss_last"], abs=2e-3)
    export_model(open_model(log_dir / "model"), log_dir / "taken_home")
    home = shoal.load_model(log_dir / "taken_home")
    tokens = torch.arange(SEQ_LEN).unsqueeze(0)
    if "quantised" not in case:
        assert torch.equal(home(tokens), model(tokens))


async def test_what_is_trained_is_the_model_of_transformers_with_its_names(
    make_cluster: MakeCluster, transformers: ModuleType
) -> None:
    async with make_cluster(CASES["qwen3"], dataset=make_text(200)) as cluster:
        await cluster.run()
    model = shoal.load_model(cluster.host.log_dir / "model")
    given = {name: value for name, value in QWEN.items() if name != "model_type"}
    described = transformers.AutoConfig.for_model("qwen3", **given, tie_word_embeddings=False)
    theirs = transformers.AutoModelForCausalLM.from_config(described).eval()
    state = {
        name.replace("units.head.lm_head", "lm_head")
        .replace("units.head", "model")
        .replace("units.embedding", "model")
        .replace("units.block_", "model.layers."): value
        for name, value in model.state_dict().items()
    }
    theirs.load_state_dict(state)
    tokens = torch.arange(SEQ_LEN).unsqueeze(0)
    assert torch.equal(theirs(input_ids=tokens, use_cache=False).logits, model(tokens))


@pytest.mark.usual("tied-0")
@pytest.mark.parametrize(("extra", "lost"), [(QWEN, 1), (TIED, 0), (TIED, 1)], ids=["qwen3-1", "tied-0", "tied-1"])
async def test_a_stage_that_loses_a_replica_goes_on(
    make_cluster: MakeCluster, extra: dict[str, Any], lost: int
) -> None:
    config = hf_config(extra, diloco={"inner_steps": 4, "outer_steps": 2, "batch_size_per_step": 4})
    dataset = make_text(200)
    async with make_cluster(config, dataset=dataset) as cluster:
        cluster.when(Forward, action=lambda: cluster.kill_server(lost), receiver=cluster.servers[lost].peer, number=5)
        result = await cluster.run()
    assert result.summary["exit"] == "done"
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    reproduces(cluster.host.log_dir, config, dataset)
