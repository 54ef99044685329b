"""A checkpoint in other stages: nothing is computed, so every tensor is the same by its name, bit for bit."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from tests.unit.checkpoint.checkpoints import checkpoint_of, hashes, make_store, signed_record
from tests.unit.checkpoint.folders import make_config, trained_stages
from tests.unit.model.hf.families import values_of
from torch import Tensor

from shoal.checkpoint.model_folder import configuration_with_cut
from shoal.checkpoint.model_layout import StageLayout, stage_layouts
from shoal.checkpoint.recut import Recut
from shoal.checkpoint.store import StagePart
from shoal.checkpoint.stored import StageVectors, StoredCheckpoint
from shoal.checkpoint.tensor_file import TensorFile, encode_tensors
from shoal.config import Config
from shoal.errors import StateMismatch
from shoal.optim.flat import trained_parameters

RESNET = {"family": "resnet18", "num_classes": 4}
GPT = make_config()
MOMENTS = ("exp_avg", "exp_avg_sq")
ADAPTERS = make_config(
    model={"family": "hf", "extra": values_of("llama", vocab_size=256)}, data={"seq_len": 12}, lora={"r": 2}
)
IMAGES = make_config(model=RESNET, data={"task_type": "cv", "img_size": 8, "num_channels": 1})


def cut_into(config: Config, *cut: int) -> Config:
    return config.model_copy(
        update={"model_pipeline": config.model_pipeline.model_copy(update={"stages": len(cut), "cut": cut})}
    )


def parts_of(config: Config) -> list[StagePart]:
    """Every stage of a model, trained, with what an optimizer knew in each of two slots."""
    parts: list[StagePart] = []
    for stage in trained_stages(config):
        parameters, floats, integers = (each.flatten(each.select(stage)) for each in StageLayout.of(stage))
        shapes = {name: value.shape for name, value in trained_parameters(stage)}
        knows = [
            {f"step/{name}": torch.randn(()) for name in shapes}
            | {f"{kind}/{name}": torch.randn(shape) for name, shape in shapes.items() for kind in MOMENTS}
            for _ in range(2)
        ]
        inner = [(slot, encode_tensors(each, {})) for slot, each in enumerate(knows)]
        vectors = parameters, torch.randn_like(parameters), floats, integers
        parts.append(StagePart(stage.stage, vectors, inner))
    return parts


def recut_parts(origin: StoredCheckpoint, config: Config) -> Iterator[StagePart]:
    return Recut(origin, stage_layouts(config)).parts(lambda slot: {"replica": f"peer.{slot}"})


def kept(path: Path, round: int, config: Config, parts: Iterable[StagePart]) -> StoredCheckpoint:
    """What is read of them once they are a checkpoint."""
    layouts = stage_layouts(config)
    parts = list(parts)
    signed = signed_record(round, [hashes(part.vectors) for part in parts])
    cut = configuration_with_cut(config)["model_pipeline"]["cut"]
    store = make_store(path)
    store.write(checkpoint_of(round, signed, layouts=layouts, cut=cut, members=[()] * len(cut)), parts)
    return store.open(round)


def by_name(checkpoint: StoredCheckpoint) -> dict[str, Tensor]:
    """Every tensor of all stages; those of inner optimizers with their slot before the name."""
    found: dict[str, Tensor] = {}
    for stage in range(len(checkpoint.manifest.stages)):
        file = checkpoint.tensors(stage)
        each: list[tuple[str, Mapping[str, Tensor]]] = [("", {name: file.read(name) for name in file.shapes})]
        each += [(f"{slot}: ", inner_of(checkpoint, stage, slot)) for slot in checkpoint.manifest.inner_slots(stage)]
        for prefix, tensors in each:
            new = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
            assert not found.keys() & new.keys()
            found |= new
    return found


def assert_equal(one: StoredCheckpoint, other: StoredCheckpoint) -> None:
    first, second = by_name(one), by_name(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(cut_into(GPT, 3, 2), id="gpt"),
        pytest.param(cut_into(IMAGES, 4, 6), id="resnet18"),
        pytest.param(cut_into(ADAPTERS, 3, 3), id="adapters"),
    ],
)
def test_two_stages_become_three_and_two_again_with_every_tensor_equal_by_name(tmp_path: Path, config: Config) -> None:
    two = kept(tmp_path, 7, config, parts_of(config))
    units = sum(two.manifest.cut)
    in_three = cut_into(config, 1, units - 2, 1)
    three = kept(tmp_path, 8, in_three, recut_parts(two, in_three))
    assert three.manifest.cut == (1, units - 2, 1)
    assert_equal(two, three)
    again = kept(tmp_path, 9, config, recut_parts(three, config))
    assert_equal(two, again)
    assert [again.manifest.files[f"stage_0{s}.safetensors"] for s in range(2)] == [
        two.manifest.files[f"stage_0{s}.safetensors"] for s in range(2)
    ]


def test_the_hashes_are_those_of_the_parts(tmp_path: Path) -> None:
    two = kept(tmp_path, 7, cut_into(GPT, 3, 2), parts_of(cut_into(GPT, 3, 2)))
    in_three = cut_into(GPT, 1, 3, 1)
    found = Recut(two, stage_layouts(in_three)).hashes()
    assert found == [hashes(part.vectors) for part in recut_parts(two, in_three)]


def inner_of(checkpoint: StoredCheckpoint, stage: int, slot: int) -> dict[str, Tensor]:
    found = checkpoint.inner(stage, slot)
    assert found
    return found


def test_a_slot_that_a_stage_did_not_have_goes_on_from_the_first_that_was_kept_of_it(tmp_path: Path) -> None:
    first, second = parts_of(cut_into(GPT, 3, 2))
    [(_, of_slot_1)] = list(second.inner)[1:]
    second = second._replace(inner=[(1, of_slot_1)])
    two = kept(tmp_path, 7, cut_into(GPT, 3, 2), [first, second])
    found = dict(Recut(two, stage_layouts(cut_into(GPT, 1, 3, 1))).inner(1))
    assert found.keys() == {0, 1}
    for slot, knows in found.items():
        origins = inner_of(two, 0, slot), inner_of(two, 1, 1)
        assert all(any(each.keys() & knows.keys()) for each in origins)
        wanted = {name: tensor for each in origins for name, tensor in each.items() if name in knows}
        assert knows.keys() == wanted.keys()
        assert all(torch.equal(knows[name], wanted[name]) for name in wanted)


def test_a_stage_that_is_partly_of_one_of_which_nothing_was_kept_has_nothing(tmp_path: Path) -> None:
    first, second = parts_of(cut_into(GPT, 3, 2))
    two = kept(tmp_path, 7, cut_into(GPT, 3, 2), [first, second._replace(inner=[])])
    recut = Recut(two, stage_layouts(cut_into(GPT, 2, 2, 1)))
    assert [[slot for slot, _ in recut.inner(stage)] for stage in range(3)] == [[0, 1], [], []]


def test_each_inner_state_says_whose_it_is(tmp_path: Path) -> None:
    two = kept(tmp_path, 7, cut_into(GPT, 3, 2), parts_of(cut_into(GPT, 3, 2)))
    three = kept(tmp_path, 8, cut_into(GPT, 1, 3, 1), recut_parts(two, cut_into(GPT, 1, 3, 1)))
    for slot in range(2):
        file = TensorFile(tmp_path, three.inner_content(1, slot))
        assert file.metadata["replica"] == f"peer.{slot}"


def test_one_stage_of_the_checkpoint_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = kept(tmp_path, 7, cut_into(GPT, 1, 1, 1, 1, 1), parts_of(cut_into(GPT, 1, 1, 1, 1, 1)))
    read, order = origin.vectors, list[int]()
    alive: list[weakref.ref[Tensor]] = []

    def watched(stage: int, layout: StageLayout | None = None) -> StageVectors:
        assert [reference() for reference in alive if reference() is not None] == []
        found = read(stage, layout)
        order.append(stage)
        alive.append(weakref.ref(found.parameters_N))
        return found

    monkeypatch.setattr(origin, "vectors", watched)
    Recut(origin, stage_layouts(cut_into(GPT, 3, 2))).vectors(0)
    assert order == [0, 1, 2], "each once, and no other one"


def test_what_one_optimizer_of_the_checkpoint_knew_is_in_memory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = kept(tmp_path, 7, cut_into(GPT, 3, 2), parts_of(cut_into(GPT, 3, 2)))
    last = origin.manifest.stages[0].parameters.tensors[-1][0]
    read, alive = origin.inner, list[weakref.ref[Tensor]]()

    def watched(stage: int, slot: int) -> dict[str, Tensor]:
        assert [reference() for reference in alive if reference() is not None] == []
        found = read(stage, slot) or {}
        alive.extend(weakref.ref(tensor) for name, tensor in found.items() if name == f"exp_avg/{last}")
        return found

    monkeypatch.setattr(origin, "inner", watched)
    for _, found in Recut(origin, stage_layouts(cut_into(GPT, 2, 2, 1))).inner(0):
        del found
    assert len(alive) == 2


def test_of_another_model_all_tensors_that_differ_are_named(tmp_path: Path) -> None:
    two = kept(tmp_path, 7, cut_into(GPT, 3, 2), parts_of(cut_into(GPT, 3, 2)))
    other = make_config(model={**GPT.model.model_dump(), "num_layers": 2, "mlp_ratio": 4})
    with pytest.raises(StateMismatch) as error:
        Recut(two, stage_layouts(other))
    here = {entry.name: entry.shape for layout in stage_layouts(other) for entry in layout.entries}
    there = {entry.name: entry.shape for layout in stage_layouts(GPT) for entry in layout.entries}
    differ = {name for name in there | here if here.get(name) != there.get(name)}
    named = {part.partition(" is ")[0] for part in str(error.value).partition(": ")[2].split("; ")}
    assert named == differ
    assert "is absent, in the checkpoint float32 [" in str(error.value)
