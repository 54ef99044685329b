"""Vectors in files: the bits of vectors in memory, and a few megabytes of them in memory at a time."""

from __future__ import annotations

import errno
import hashlib
import logging
from pathlib import Path

import pytest
import torch
from tests.linux_calls import needs
from torch import nn

from shoal.config.diloco import InnerOptimConfig
from shoal.optim import vector_memory
from shoal.optim.flat import FlatLayout, tensor_sha256
from shoal.optim.inner import InnerOptimizer
from shoal.optim.outer import OuterSgd
from shoal.optim.vector_memory import (
    IN_MEMORY,
    LONG_BYTES,
    PART_BYTES,
    FileVectorMemory,
    VectorMemory,
    is_in_file,
    leave,
)
from shoal.runtime import file_memory
from shoal.runtime.linux_calls import LinuxCall

pytestmark = needs(LinuxCall.FILE_MEMORY, "nothing lies in files")
NUM_ELEMENTS = 2 * PART_BYTES + 1000
VECTOR_BYTES = 4 * NUM_ELEMENTS


class Watched:
    """Knows the most bytes of files that were in memory when something was left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._leave = file_memory.leave
        self.begin()
        monkeypatch.setattr(file_memory, "leave", self.leave)

    def begin(self) -> None:
        """Forget what was; code that has run by now lies in files too."""
        self._before, self.most_bytes = _file_bytes(), 0

    def leave(self, address: int, num_bytes: int) -> None:
        self.most_bytes = max(self.most_bytes, _file_bytes() - self._before)
        self._leave(address, num_bytes)


def _file_bytes() -> int:
    """Bytes of files that this process has in its memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssFile:", "RssShmem:")))


@pytest.fixture
def memory(tmp_path: Path) -> FileVectorMemory:
    return FileVectorMemory(tmp_path)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_an_outer_step_its_hash_and_its_load_have_the_same_bits_and_take_parts(
    memory: FileVectorMemory, watched: Watched
) -> None:
    torch.manual_seed(0)
    outer, momentum, average = (torch.randn(NUM_ELEMENTS) for _ in range(3))
    expected = OuterSgd(0.7, 0.9, True).stage(outer, momentum, average)
    hashes = [hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in expected]
    loaded = [torch.zeros(NUM_ELEMENTS - 5), torch.zeros(5)]
    layout = FlatLayout.of_named([("a", loaded[0]), ("b", loaded[1])])
    for _ in range(2):
        watched.begin()
        found = OuterSgd(0.7, 0.9, True).stage(memory.copy(outer), memory.copy(momentum), average, memory)
        assert all(map(is_in_file, found))
        assert [tensor_sha256(each) for each in found] == hashes
        layout.unflatten(found[0], loaded)
    # Four vectors, of each of which a part is looked at.
    assert 0 < watched.most_bytes <= 5 * PART_BYTES < VECTOR_BYTES
    assert torch.equal(torch.cat(loaded), expected[0])


def test_what_lies_in_memory_is_left_where_it_is(memory: FileVectorMemory) -> None:
    filed, plain = memory.zeros_like(torch.ones(LONG_BYTES)), torch.ones(LONG_BYTES)
    assert not filed.any()
    filed += 2
    leave(filed[: LONG_BYTES // 2], plain, torch.empty(0), torch.empty(3, device="meta"))
    assert bool((plain == 1).all())
    assert bool((filed == 2).all())
    assert is_in_file(filed.view(1, -1)[:, 10:].view(torch.int32))
    assert not is_in_file(plain)
    assert not is_in_file(memory.empty(10, torch.float32)), "too short"


def _optimizer(kind: str, memory: VectorMemory) -> tuple[InnerOptimizer, dict[str, nn.Parameter]]:
    torch.manual_seed(1)
    # Narrow: a processor without bfloat16 of its own takes minutes for the products of square ones.
    shapes = {"units.a.weight": (64, 16416), "units.b.weight": (64, 16400), "units.c.bias": (300,)}
    parameters = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    config = InnerOptimConfig.model_validate({"type": kind, "muon_except": []})
    return InnerOptimizer(parameters.items(), config, (), memory), parameters


@pytest.mark.parametrize("kind", ["adam", "sgd", "muon"])
def test_moments_in_files_make_the_same_steps_and_one_parameters_are_in_memory(
    kind: str, memory: FileVectorMemory, watched: Watched
) -> None:
    (plain, expected), (lean, found) = (_optimizer(kind, each) for each in (IN_MEMORY, memory))
    for number in range(3):
        watched.begin()
        for name, parameter in expected.items():
            parameter.grad = torch.randn_like(parameter)
            found[name].grad = parameter.grad.clone()
        plain.step(0.01, number)
        lean.step(0.01, number)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(map(torch.equal, plain.state_tensors, lean.state_tensors))
    moments = 2 if kind == "adam" else 1
    assert 0 < watched.most_bytes <= moments * 4 * 64 * 16416 + LONG_BYTES


def test_what_is_given_no_file_lies_in_memory_and_that_is_told_once(
    memory: FileVectorMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_folder: Path, _num_bytes: int) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(file_memory, "mapped", full)
    with caplog.at_level(logging.WARNING, vector_memory.__name__):
        for _ in range(2):
            assert memory.empty(LONG_BYTES, torch.float32).numel() == LONG_BYTES
    [record] = caplog.records
    assert record.message == "server.file_refused"
    assert "mount it for writing" in str(record.__dict__)
