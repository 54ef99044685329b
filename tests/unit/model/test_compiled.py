"""A compiled stage: the usual sizes by compiled code, all else as before, and never anything in between."""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from pathlib import Path

import pytest
import torch
from tests.threads import one_thread as one_thread
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.model.compiled import compile_stage
from shoal.model.cpp_compiler import require_compiler
from shoal.model.gpt import GptFamily
from shoal.model.gpt_shape import GptShape
from shoal.model.resnet import ResNetFamily
from shoal.model.resnet_shape import ResNetShape
from shoal.model.stage import Family, StageModule, TensorSpec, build_stage

needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")


class TinyNet(ResNetFamily):
    """A stem, a block and a head."""

    name = "tiny"


def tiny() -> StageModule:
    shape = ResNetShape((1, 0, 0, 0), bottleneck=False, stem="cifar", num_channels=1, img_size=4, num_classes=4)
    return build_stage(TinyNet(shape), 0, 1, seed=5)


class Stubborn(Family):
    """One unit whose work depends on values."""

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) if x.sum().item() > 0 else self.linear(-x)

    @classmethod
    def from_config(cls, model: object, data: object) -> Stubborn:
        return cls()

    @property
    def num_units(self) -> int:
        return 1

    def build_unit(self, index: int) -> nn.Module:
        return self.Unit()

    def input_spec(self) -> TensorSpec:
        return TensorSpec("float32", (2,))

    def label_spec(self) -> TensorSpec:
        return TensorSpec("int64", ())

    def boundary_spec(self, index: int) -> TensorSpec:
        return TensorSpec("float32", (2,))

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, labels)

    def unit_costs(self) -> list[float]:
        return [1.0]


def images(num: int) -> Tensor:
    return torch.randn(num, 1, 4, 4, generator=torch.Generator().manual_seed(num))


def trained(module: StageModule, num: int) -> list[Tensor]:
    """What a microbatch leaves: output, gradients, buffers."""
    module.zero_grad()
    output = module(images(num))
    output.square().sum().backward()
    return [output.detach(), *(p.grad for p in module.parameters() if p.grad is not None), *module.buffers()]


def is_same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "g++-of-nobody")
    with pytest.raises(ConfigError, match=r"there is no g\+\+-of-nobody: install one .*apt install g\+\+"):
        compile_stage(tiny(), {2}, tmp_path)


def test_what_runs_on_neither_cpu_nor_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"only what runs on a CPU or a GPU can be compiled, not on meta"):
        compile_stage(tiny().to("meta"), {2}, tmp_path)


def test_missing_headers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(ConfigError, match=r"there is no .*Python\.h: install them .*python3-dev"):
        require_compiler()


def test_a_cache_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "true")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/cache cannot be made.*XDG_CACHE_HOME"):
        compile_stage(tiny(), {2}, tmp_path / "file" / "cache")


@needs_compiler
def test_a_stage_that_cannot_be_compiled_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    module = build_stage(Stubborn(), 0, 1, seed=1)
    environment, temporary = dict(os.environ), tempfile.gettempdir()
    with pytest.raises(ConfigError, match=r"stage 0 of 1 cannot be compiled: .*item.*; train without compile"):
        compile_stage(module, {2}, tmp_path)
    assert (dict(os.environ), tempfile.gettempdir()) == (environment, temporary)
    assert not list(tmp_path.glob("work-*"))
    assert torch.equal(module(torch.ones(2, 2)), module.computed(torch.ones(2, 2)))


@pytest.fixture(scope="module")
def own_caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which nobody else compiles: what is in it afterwards is of these tests."""
    return tmp_path_factory.mktemp("caches")


@needs_compiler
@pytest.mark.slow
def test_only_training_of_the_given_sizes_is_compiled_and_every_replica_has_the_same_bits(
    own_caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, plain = tiny(), tiny(), tiny()
    cache, generator = own_caches / "compiled", torch.get_rng_state()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for module in (one, other):
        compile_stage(module, {4}, cache)
    assert torch.equal(torch.get_rng_state(), generator)
    assert is_same(list(one.state_dict().values()), list(plain.state_dict().values()))
    assert {path.name for path in cache.iterdir() if not path.name.endswith("lock")} == {"kept"}
    assert not list(tmp_path.iterdir()), "nothing outside the cache"

    calls: list[int] = []
    compiled = one._compiled
    assert compiled is not None
    one.compute_by(lambda x: calls.append(len(x)) or compiled.function(x), {4})
    assert is_same(trained(one, 3), trained(plain, 3))
    assert not calls
    trained(other, 3)
    compiled_bits, plain_bits = trained(one, 4), trained(plain, 4)
    assert calls == [4]
    assert is_same(compiled_bits, trained(other, 4))
    for mine, usual in zip(compiled_bits, plain_bits, strict=True):
        torch.testing.assert_close(mine, usual)
    one.eval()
    one(images(4))
    assert calls == [4]


@needs_compiler
@pytest.mark.slow
def test_what_would_be_compiled_again_fails(own_caches: Path) -> None:
    module = tiny()
    compile_stage(module, {4}, own_caches / "compiled")
    torch.set_num_threads(2)
    with pytest.raises(RuntimeError, match="recompile"):
        module(images(4))
    torch.set_num_threads(1)
    assert module(images(4)).shape == (4, 4)


@needs_compiler
@pytest.mark.slow
def test_what_was_built_is_found_again_and_what_a_killed_process_has_left_is_removed(own_caches: Path) -> None:
    cache = own_caches / "compiled"
    compile_stage(tiny(), {4}, cache)
    kept = {path: path.stat().st_mtime_ns for path in (cache / "kept").rglob("*.so")}
    assert kept
    (cache / "work-of-a-killed-process").mkdir()
    torch._dynamo.reset()
    compile_stage(tiny(), {4}, cache)
    assert {path: path.stat().st_mtime_ns for path in (cache / "kept").rglob("*.so")} == kept
    assert not list(cache.glob("work-*"))


@needs_compiler
@pytest.mark.slow
def test_a_loss_in_chunks_is_compiled_for_the_chunks_of_the_given_sizes(user_caches: Path) -> None:
    family = GptFamily(GptShape(seq_len=4, width=8, num_layers=1, num_heads=2, vocab_size=11), 5)
    one, plain = (build_stage(family, 1, 2, seed=3) for _ in range(2))
    compile_stage(one, {3}, user_caches / "compiled")
    calls: list[int] = []
    compiled = one._compiled_loss
    assert compiled is not None
    one.compute_loss_by(lambda x, labels: calls.append(len(x)) or compiled.function(x, labels), compiled.sizes)

    def loss_of(module: StageModule, num: int) -> list[Tensor]:
        module.zero_grad()
        hidden = torch.randn(num, 4, 8, generator=torch.Generator().manual_seed(num)).requires_grad_()
        labels = torch.arange(num * 4).reshape(num, 4) % 11
        loss = module.loss(module(hidden), labels)
        loss.backward()
        assert hidden.grad is not None
        return [loss.detach(), hidden.grad, *(p.grad for p in module.parameters() if p.grad is not None)]

    for mine, usual in zip(loss_of(one, 3), loss_of(plain, 3), strict=True):
        torch.testing.assert_close(mine, usual)
    assert calls == [5, 5, 2], "12 tokens, 5 at a time"
    one.eval()
    with torch.no_grad():
        one.loss(torch.zeros(3, 4, 8), torch.zeros(3, 4, dtype=torch.int64))
    assert calls == [5, 5, 2]
