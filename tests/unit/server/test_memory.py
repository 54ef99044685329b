"""What a stage needs: parameters to the byte, activations as autograd keeps them, and nothing allocated for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.linux_calls import needs
from torch import Tensor, nn

from shoal.averaging.replica_state import ReplicaState
from shoal.checkpoint.start_weights import prepared
from shoal.codec.gathered import GatheredCodec
from shoal.codec.registry import CodecSettings, codec_of
from shoal.config import Config
from shoal.config.diloco import InnerOptimConfig
from shoal.ids import PeerId
from shoal.model.gpt import GptFamily
from shoal.model.registry import load_family
from shoal.model.stage import Family, build_stage, stage_units
from shoal.optim.inner import InnerOptimizer
from shoal.optim.outer import OuterSgd
from shoal.pipeline.stage_compute import StageCompute
from shoal.runtime.clean_interpreter import allocator_settings
from shoal.runtime.linux_calls import LinuxCall
from shoal.server.memory import (
    COMPILER_BYTES,
    MAX_OPEN_STEPS,
    PROCESS_BYTES,
    UNKNOWN_ROOM_BYTES,
    ServerMemory,
    StageNeed,
    server_memory,
    snapshot_room,
    stage_needs,
)
from shoal.swarm.assignment import Files
from shoal.swarm.microbatch_cut import MAX_MICROBATCHES
from shoal.swarm.view import Candidate
from shoal.wire.messages import Hop

IMAGES = {"task_type": "cv", "img_size": 16}
CASES: dict[str, dict[str, Any]] = {
    "gpt": {"model": {"num_layers": 2, "hidden_size": 32}, "data": {"seq_len": 32}},
    "gpt with dropout": {"model": {"num_layers": 2, "hidden_size": 32, "dropout": 0.1}, "data": {"seq_len": 32}},
    "mlp": {"model": {"family": "mlp", "num_layers": 3, "hidden_size": 4096}, "data": IMAGES},
    "resnet18": {"model": {"family": "resnet18"}, "data": IMAGES},
    "resnet50": {"model": {"family": "resnet50", "stem": "imagenet"}, "data": {**IMAGES, "img_size": 64}},
}


def config_of(case: str, **sections: Any) -> Config:
    return Config.model_validate({"model_pipeline": {"stages": 2}, **CASES[case], **sections})


def kept_bytes(family: Family, index: int, received: Tensor) -> tuple[int, Tensor]:
    """Bytes that autograd keeps of a unit's forward, its output included, without parameters, buffers and the input."""
    unit = family.build_unit(index)
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = unit(received)
        if index == family.num_units - 1:
            labels = torch.zeros((len(received), *family.label_spec().shape), dtype=torch.int64)
            family.loss(output, labels)
    kept[output.untyped_storage().data_ptr()] = output
    for tensor in (received, *unit.parameters(), *unit.buffers()):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), output


@pytest.mark.parametrize("case", CASES)
def test_native_families_know_what_their_units_keep(case: str) -> None:
    config = config_of(case)
    family = load_family(config.model, config.data)
    spec, num_samples = family.input_spec(), 4
    hidden = torch.zeros((num_samples, *spec.shape), dtype=spec.torch_dtype)
    for index in range(family.num_units):
        hidden = hidden.detach().requires_grad_(hidden.is_floating_point())
        found, hidden = kept_bytes(family, index, hidden)
        # Statistics of norms are not counted: they show where an image has shrunk to a pixel.
        assert found / num_samples == pytest.approx(family.activation_bytes(index), rel=0.1, abs=8192), index


def test_of_matrices_muon_keeps_one_moment_where_adam_keeps_two() -> None:
    config, of_adam = (config_of("gpt", diloco={"inner_optim": {"type": each}}) for each in ("muon", "adam"))
    module = build_stage(load_family(config.model, config.data), 0, 2, seed=0)
    matrices = [p for name, p in module.named_parameters() if p.ndim == 2 and "embedding" not in name]
    assert matrices
    # Of each the second moment and the number of steps are not there.
    less_bytes = sum(p.nbytes + 4 for p in matrices)
    assert stage_needs(of_adam)[0].device_bytes - stage_needs(config)[0].device_bytes == less_bytes


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("optim", "moments"), [("adam", 2), ("sgd", 1)])
def test_parameters_and_optimizer_are_counted_to_the_byte(case: str, optim: str, moments: int) -> None:
    config = config_of(case, diloco={"inner_optim": {"type": optim}})
    family = load_family(config.model, config.data)
    for stage, need in enumerate(stage_needs(config)):
        module = build_stage(family, stage, 2, seed=0)
        parameters = list(module.parameters())
        parameter_bytes = sum(p.nbytes for p in parameters)
        buffer_bytes = sum(b.nbytes for b in module.buffers())
        steps = 4 * len(parameters) * (optim == "adam")
        assert need.device_bytes == (1 + moments) * parameter_bytes + steps + buffer_bytes
        assert (need.step_bytes, need.max_steps) == (parameter_bytes + 2 * buffer_bytes, MAX_OPEN_STEPS)
        # The outer state is what a real replica holds.
        optimizer = InnerOptimizer(module.named_parameters(), InnerOptimConfig())
        state = ReplicaState(StageCompute(module, optimizer, run_seed=0, stage=stage), OuterSgd(0.7, 0.9, True))
        elements, dtype = state.gradient_kind
        # With the vector in which its contribution to rounds is averaged, which stays for the next one, averages of two
        # rounds for a mirror, and what the inner optimizer knew for a checkpoint.
        outer = sum(vector.nbytes for vector in state.base) + 3 * elements * dtype.itemsize
        outer += moments * parameter_bytes + steps
        assert need.host_bytes - PROCESS_BYTES == pytest.approx(outer, abs=64)


TIED: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
}


def test_what_a_wrapped_first_stage_shares_is_counted_once_and_its_gradients_twice() -> None:
    def config_of_tied(stages: int, **model: Any) -> Config:
        return Config.model_validate(
            {
                "model": {"family": "hf", "extra": TIED, **model},
                "data": {"seq_len": 8},
                "model_pipeline": {"stages": stages, "microbatches": 4},
                "diloco": {"batch_size_per_step": 8, "inner_optim": {"type": "sgd"}},
            }
        )

    shared_bytes = 4 * 256 * 16
    for stages in (1, 2):
        config = config_of_tied(stages)
        family = load_family(config.model, config.data)
        for stage, need in enumerate(stage_needs(config)):
            module = build_stage(family, stage, stages, seed=0)
            parameter_bytes = sum(p.nbytes for p in module.parameters())
            assert need.device_bytes == 2 * parameter_bytes
            twice_bytes = shared_bytes if module.head is not None else 0
            assert need.step_bytes == parameter_bytes + twice_bytes
    # Three microbatches are in flight: as many inputs of the head wait, and it goes back at once.
    [first, _] = stage_needs(config_of_tied(2))
    hidden, logits = family.boundary_spec(0).num_bytes, family.activation_bytes(family.num_units - 1)
    own = sum(family.activation_bytes(index) for index in stage_units(family, 2)[0].own)
    assert first.sample_bytes == 3 * (own + family.input_spec().num_bytes) + (logits + 3 * hidden) + logits


@pytest.mark.parametrize("base_dtype", ["float32", "bfloat16"])
def test_what_is_frozen_takes_itself_and_no_gradient_no_moment_and_no_outer_state(base_dtype: str) -> None:
    def config_with(precision: str = "32-true", dropout: float = 0.0) -> Config:
        return Config.model_validate(
            {
                "model": {"family": "hf", "extra": TIED, "tie": False},
                "data": {"seq_len": 8, "precision": precision},
                "model_pipeline": {"cut": [2, 3], "microbatches": 4, "window": 3},
                "diloco": {"batch_size_per_step": 8, "inner_optim": {"type": "sgd"}},
                "lora": {"r": 2, "base_dtype": base_dtype, "dropout": dropout},
            }
        )

    config = config_with()
    family = load_family(config.model, config.data)
    for stage, need in enumerate(stage_needs(config)):
        module = build_stage(family, stage, 2, seed=0, cut=[2, 3], prepare=prepared(config, family))
        trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
        frozen = sum(p.nbytes for p in module.parameters() if not p.requires_grad)
        assert 0 < trained < frozen
        assert need.device_bytes == frozen + 2 * trained
        assert (need.step_bytes, need.open_bytes, need.round_bytes) == (trained, 0, 2 * trained)
        # With the copy of the inner optimizer's state that a checkpoint wants.
        assert need.host_bytes - PROCESS_BYTES == (5 + 1) * trained
        # Autocast keeps no cast of what is frozen: each forward in flight has its own, and the last stage has one.
        matrices = [p for p in module.parameters() if p.dim() > 1 and not p.requires_grad and p.dtype == torch.float32]
        mixed = stage_needs(config_with("bf16-mixed"))[stage]
        adapters = 2 * sum(p.numel() for p in module.parameters() if p.dim() > 1 and p.requires_grad)
        assert mixed.open_bytes - adapters == (1 if stage else 3) * 2 * sum(p.numel() for p in matrices)
    kept = [stage_needs(config_with(dropout=dropout))[0].sample_bytes for dropout in (0.0, 0.5)]
    assert kept[0] < kept[1]


def test_what_a_model_keeps_as_constants_is_no_state_of_a_replica() -> None:
    extra = {
        "model_type": "gemma3_text",
        "vocab_size": 256,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "layer_types": ["full_attention"] * 2,
    }
    config = Config.model_validate(
        {
            "model": {"family": "hf", "extra": extra, "tie": False},
            "data": {"seq_len": 8},
            "model_pipeline": {"stages": 2},
        }
    )
    family = load_family(config.model, config.data)
    assert [name for name, _ in family.build_unit(0).named_buffers()] == ["embed_tokens.embed_scale"]
    for stage, need in enumerate(stage_needs(config)):
        module = build_stage(family, stage, 2, seed=0)
        assert need.step_bytes == sum(p.nbytes for p in module.parameters())


def test_a_server_that_compiles_keeps_the_compiler() -> None:
    usual, compiled = (stage_needs(config_of("gpt", model_pipeline={"stages": 2, "compile": c})) for c in (False, True))
    assert [b.host_bytes - a.host_bytes for a, b in zip(usual, compiled, strict=True)] == [COMPILER_BYTES] * 2


def test_the_window_decides_how_many_activations_are_in_flight() -> None:
    def sample_bytes(**pipeline: int) -> list[int]:
        return [need.sample_bytes for need in stage_needs(config_of("gpt", model_pipeline={"stages": 2, **pipeline}))]

    assert sample_bytes() == sample_bytes(window=3)
    (narrow, last_narrow), (wide, last_wide) = sample_bytes(window=2), sample_bytes(window=4)
    family = load_family(config_of("gpt").model, config_of("gpt").data)
    boundary, kept = family.boundary_spec(0).num_bytes, (narrow - last_narrow, wide - last_wide)
    assert wide - narrow >= 2 * family.activation_bytes(1)
    # The last stage goes back at once: only what it has received waits.
    assert last_wide - last_narrow == 2 * boundary
    assert kept[0] < kept[1]


@pytest.mark.parametrize("flow", [{}, {"schedule": "zero_bubble"}, {"activation_checkpointing": True}])
def test_a_further_microbatch_takes_what_one_more_in_the_window_does_and_what_waits_for_a_line(
    flow: dict[str, Any],
) -> None:
    def needs_of(**more: Any) -> tuple[StageNeed, ...]:
        return stage_needs(config_of("gpt", model_pipeline={"stages": 2, **flow, **more}))

    family = load_family(config_of("gpt").model, config_of("gpt").data)
    for stage, (need, narrow, wide) in enumerate(zip(needs_of(), needs_of(window=5), needs_of(window=6), strict=True)):
        sent = 0 if stage else family.boundary_spec(1).num_bytes
        assert need.further_sample_bytes == wide.sample_bytes - narrow.sample_bytes + sent
        assert need.further_bytes == wide.open_bytes - narrow.open_bytes
        assert need.further_sample_bytes > 0
        assert need.max_further == MAX_MICROBATCHES - 3
        assert narrow.max_further == 0, "at most the window that the user says"
    [gpipe, _] = stage_needs(config_of("gpt", model_pipeline={"stages": 2, "schedule": "gpipe"}))
    assert gpipe.max_further == 0, "all are in flight anyway"


def test_a_step_is_cut_into_no_more_microbatches_than_replicas_take() -> None:
    many = {"batch_size_per_step": 2 * MAX_MICROBATCHES, "gradient_accumulation_steps": 3}
    need = stage_needs(config_of("gpt", diloco=many, model_pipeline={"stages": 2, "microbatches": 4}))[0]
    assert (need.min_samples, need.max_samples) == (7, MAX_MICROBATCHES // 2)
    assert stage_needs(config_of("gpt"))[0].min_samples == 1


def test_more_stages_and_smaller_microbatches_need_less() -> None:
    def largest(stages: int, microbatches: int) -> int:
        pipeline = {"stages": stages, "microbatches": microbatches}
        needs = stage_needs(config_of("resnet18", model_pipeline=pipeline))
        return max(need.device_bytes + need.step_bytes + need.sample_bytes * need.max_samples for need in needs)

    assert largest(4, 4) < largest(2, 4) < largest(1, 4)
    assert largest(2, 16) < largest(2, 4)


def test_a_schedule_needs_what_it_holds() -> None:
    def activations(stage: int, **flow: Any) -> int:
        sections = {"model_pipeline": {"stages": 4, "microbatches": 9, **flow}, "model": {"num_layers": 8}}
        need = stage_needs(Config.model_validate(sections))[stage]
        return need.sample_bytes

    one = activations(1, activation_checkpointing=True)
    assert one < activations(1) < activations(1, schedule="zero_bubble") < activations(1, schedule="gpipe")
    # The last stage of 1f1b goes back at once, the others put something off.
    assert activations(3) < activations(3, schedule="zero_bubble") < activations(3, schedule="gpipe")
    recomputed = activations(3, schedule="gpipe", activation_checkpointing=True)
    assert activations(3) < recomputed < activations(3, schedule="zero_bubble", activation_checkpointing=True)


def test_quantised_weights_are_kept_by_each_microbatch_in_flight() -> None:
    plain, quantised = (stage_needs(config_of("gpt", quant=quant))[0] for quant in (None, {}))
    assert quantised.open_bytes > plain.open_bytes
    assert quantised.sample_bytes > plain.sample_bytes
    assert quantised.device_bytes == plain.device_bytes


def test_of_quantised_experts_both_matrices_are_kept() -> None:
    experts = {**TIED, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}

    def kept_bytes(*rules: dict[str, Any]) -> int:
        off = {"name_patterns": ["*"], "weight_quant": "off"}
        config = Config.model_validate(
            {
                "model": {"family": "hf", "extra": {**experts, "tie_word_embeddings": False}},
                "data": {"seq_len": 8},
                "model_pipeline": {"stages": 3, "microbatches": 1, "cut": [1, 1, 3]},
                "quant": {"base": {"activation_quant": "off"}, "rules": [off, *rules]},
            }
        )
        assert config.model_pipeline.microbatches_in_flight == 4
        return stage_needs(config)[1].open_bytes

    of_block_0 = {"name_patterns": ["block_0.mlp.experts"], "weight_quant": {}}
    assert kept_bytes(of_block_0) - kept_bytes() == 4 * 4 * 4 * (2 * 32 * 16 + 16 * 32)


def test_what_autocast_casts_is_kept_once_by_each_open_step() -> None:
    precisions = ("32-true", "bf16-mixed")
    plain, mixed = (stage_needs(config_of("gpt", data={"seq_len": 32, "precision": each})) for each in precisions)
    family = load_family(config_of("gpt").model, config_of("gpt").data)
    for stage in range(2):
        matrices = sum(p.numel() for p in build_stage(family, stage, 2, seed=0).parameters() if p.dim() > 1)
        assert mixed[stage].step_bytes - plain[stage].step_bytes == 2 * matrices
        assert mixed[stage].open_bytes - plain[stage].open_bytes == 2 * matrices, "as gradients of the casts"
        assert mixed[stage].device_bytes == plain[stage].device_bytes, "parameters stay float32"


def test_what_compiled_code_casts_is_kept_by_each_microbatch_in_flight() -> None:
    def mixed(**flow: Any) -> StageNeed:
        sections = {"data": {"seq_len": 32, "precision": "bf16-mixed"}, "model_pipeline": {"stages": 2, **flow}}
        return stage_needs(config_of("gpt", **sections))[0]

    eager, compiled = mixed(), mixed(compile=True)
    cast_bytes = eager.step_bytes - compiled.step_bytes
    assert compiled.open_bytes - eager.open_bytes == 3 * cast_bytes > 0


class Stubborn(nn.Module):
    """Looks at its values while it is built, which the meta device has none of."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("scale", torch.tensor(float(self.weight.detach().abs().mean().item())))


class StubbornFamily(GptFamily):
    """A family that cannot be built without memory."""

    def build_unit(self, index: int) -> nn.Module:
        return Stubborn()


def test_a_family_that_needs_values_is_counted_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("gpt")
    family = StubbornFamily.from_config(config.model, config.data)
    monkeypatch.setattr("shoal.server.memory.load_family", lambda *_: family)
    before = torch.get_rng_state()
    first, second = stage_needs(config)
    assert first.step_bytes + second.step_bytes == family.num_units * (8 * 8 * 4 + 2 * 4)
    assert torch.equal(torch.get_rng_state(), before), "nothing that is drawn later depends on it"


@pytest.mark.slow
def test_counting_imports_no_compiler() -> None:
    # It costs 0.7 s and 75 MB a process, see `optim.inner`.
    program = (
        "import sys\nfrom shoal.config import Config\nfrom shoal.server.memory import stage_needs\n"
        "for values in ({}, {'model': {'family': 'resnet18'}, 'data': {'task_type': 'cv'}}, {'quant': {}}):\n"
        "    stage_needs(Config.model_validate(values))\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)


@pytest.mark.parametrize(
    ("host_bytes", "cap_bytes", "expected"),
    [(100, None, 100), (100, 30, 30), (100, 300, 100), (0, 30, 30), (0, None, 0)],
)
def test_a_cap_lowers_what_a_server_may_use(host_bytes: int, cap_bytes: int | None, expected: int) -> None:
    memory = server_memory("cpu", host_bytes, 2, cap_bytes)
    assert (memory.host_bytes, memory.device_bytes) == (expected, 0)


@pytest.mark.parametrize(
    ("free", "sharers", "cap_bytes", "expected"),
    [(80, 1, None, 80), (80, 2, None, 50), (30, 2, None, 30), (80, 1, 20, 20), (0, 1, None, 1)],
)
def test_a_gpu_is_shared_by_the_servers_on_it(
    monkeypatch: pytest.MonkeyPatch, free: int, sharers: int, cap_bytes: int | None, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, 100))
    memory = server_memory("cuda:0", 1000, sharers, cap_bytes)
    assert (memory.host_bytes, memory.device_bytes) == (1000, expected)


def test_the_needs_follow_the_cut_of_the_run() -> None:
    by_figures, by_hand = (stage_needs(config_of("gpt", model_pipeline=p)) for p in ({"stages": 2}, {"cut": [1, 3]}))
    assert by_hand[0].device_bytes < by_figures[0].device_bytes
    assert by_hand[1].device_bytes > by_figures[1].device_bytes
    assert sum(need.device_bytes for need in by_hand) == sum(need.device_bytes for need in by_figures)


def test_a_snapshot_that_is_on_its_way_is_counted() -> None:
    without, with_snapshots = (
        stage_needs(config_of("resnet18", diloco={"snapshot_every_steps": every}))[1] for every in (0, 5)
    )
    config = config_of("resnet18")
    module = build_stage(load_family(config.model, config.data), 1, 2, seed=0)
    optimizer = InnerOptimizer(module.named_parameters(), config.diloco.inner_optim)
    compute = StageCompute(module, optimizer, run_seed=0, stage=1)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.1, 0)
    num_parameters = len(list(module.parameters()))  # a byte each says whether it has had a gradient
    assert with_snapshots.host_bytes - without.host_bytes == compute.snapshot().numel() - num_parameters


def test_what_is_encoded_beside_steps_is_counted() -> None:
    said = {"averaging_compression": "int8"}
    without, overlapping = (
        stage_needs(config_of("resnet18", diloco=said | {"overlap_steps": steps}))[1] for steps in (0, 5)
    )
    config = config_of("resnet18")
    module = build_stage(load_family(config.model, config.data), 1, 2, seed=0)
    num_elements = sum(parameter.numel() for parameter in module.parameters())
    codec = codec_of(CodecSettings("int8"))
    assert isinstance(codec, GatheredCodec)
    # The copy of the cut, the pseudo-gradient, and what that leaves out; of what is foreseen the average, momentum,
    # parameters, and what is being decoded; and the payloads of eight members.
    expected = (3 + 4) * 4 * num_elements + 8 * codec.max_size_bytes(num_elements)
    assert overlapping.host_bytes - without.host_bytes == expected


def test_others_snapshots_have_the_room_that_the_stage_leaves() -> None:
    assert snapshot_room(ServerMemory(1000), 600) == 400
    assert snapshot_room(ServerMemory(1000), 1200) == 0
    assert snapshot_room(ServerMemory(0), 600) == UNKNOWN_ROOM_BYTES


ALONE: dict[str, Any] = {
    "device": "cpu",
    "model": {"num_layers": 6, "hidden_size": 512},
    "data": {"seq_len": 8},
    "model_pipeline": {"stages": 1, "microbatches": 2},
    "diloco": {"batch_size_per_step": 2},
}


@pytest.mark.slow
@needs(LinuxCall.FILE_MEMORY, "nothing lies in files")
@pytest.mark.parametrize(
    ("precision", "files"),
    [("32-true", Files.VECTORS), ("32-true", Files.MOMENTS), ("bf16-mixed", Files.VECTORS)],
)
def test_a_replica_takes_what_is_planned_whatever_of_it_lies_in_files(
    precision: str, files: Files, tmp_path: Path
) -> None:
    values = ALONE | {"data": {**ALONE["data"], "precision": precision}}
    config = Config.model_validate(values)
    [need] = stage_needs(config)
    arguments = (json.dumps(values), files.name, str(tmp_path), json.dumps({"num_layers": 1, "hidden_size": 64}))
    said = subprocess.run(
        [sys.executable, "-m", "shoal_lab.bench.lone_replica", *arguments],
        env=os.environ | allocator_settings(),
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    ).stdout
    peaks = {(moment := json.loads(line))["name"]: moment["peak_bytes"] for line in said.splitlines()}
    planned = need.of(Candidate(Hop(PeerId("any"), ()), 0.0), None, files=files)[0] - PROCESS_BYTES
    assert max(peaks.values()) == pytest.approx(planned, rel=0.1), peaks
