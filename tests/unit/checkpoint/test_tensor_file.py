"""A safetensors file, written and read tensor by tensor; what is damaged is refused before anything is allocated."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from shoal.checkpoint.tensor_file import TensorFile, TensorFileWriter
from shoal.errors import StateMismatch
from shoal.optim.flat import FlatLayout
from shoal.runtime.durable_files import DurableFile

TENSORS = {
    "half": torch.arange(3, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(5, dtype=torch.int64),
    "matrix": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)),
    "truth": torch.tensor([True, False]),
}


def written(path: Path) -> Path:
    layout = FlatLayout.of_named(TENSORS.items(), torch.float32)
    with TensorFileWriter(DurableFile(path), layout.entries) as file:
        for name in ("scalar", "matrix", "empty", "truth", "half"):
            file.write(name, TENSORS[name])
        file.finish()
    return path


def test_what_is_written_in_any_order_is_what_safetensors_reads_and_the_other_way(tmp_path: Path) -> None:
    found = safetensors.torch.load_file(written(tmp_path / "ours"))
    safetensors.torch.save_file(TENSORS, tmp_path / "theirs")
    for path in (tmp_path / "ours", tmp_path / "theirs"):
        file = TensorFile(path)
        assert file.shapes == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
        for name, tensor in TENSORS.items():
            assert file.read(name).dtype == found[name].dtype == tensor.dtype
            assert torch.equal(file.read(name), tensor)
            assert torch.equal(found[name], tensor)


def test_a_file_that_lacks_a_tensor_is_not_finished(tmp_path: Path) -> None:
    layout = FlatLayout.of_named(TENSORS.items(), torch.float32)
    with TensorFileWriter(DurableFile(tmp_path / "file"), layout.entries) as file:
        file.write("half", TENSORS["half"])
        with pytest.raises(StateMismatch, match="room for"):
            file.write("matrix", torch.zeros(5, 3))
        with pytest.raises(OSError, match="4 tensors were not written"):
            file.finish()


def entry(begin: int, end: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry(0, 8, [2]), "b": entry(4, 12, [2])},
        {"a": entry(0, 4, [1]), "b": entry(8, 12, [1])},
        {"a": entry(0, 12, [2])},
        {"a": entry(0, 1 << 40, [1 << 38])},
        {"a": entry(0, 12, [-3])},
        {"a": entry(0, 12, [3.0])},
        {"a": entry(0, 12, [True, 3])},
        {"a": entry(0, 12, [3], "PICKLE")},
        {"a": [0, 12]},
        {"a": {"dtype": "F32", "shape": [3]}},
        ["a"],
        "a",
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "file").write_bytes(struct.pack("<Q", len(text)) + text + bytes(12))
    with pytest.raises(StateMismatch, match="is damaged"):
        TensorFile(tmp_path / "file")


@pytest.mark.parametrize(
    "content",
    [b"", b"1234", struct.pack("<Q", 1 << 60), struct.pack("<Q", 5) + b"{", struct.pack("<Q", 90_000) + b"[" * 90_000],
)
def test_what_is_no_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(StateMismatch, match="is damaged"):
        TensorFile(tmp_path / "file")


def test_a_file_that_is_cut_while_it_is_read_is_damaged_and_ends_no_process(tmp_path: Path) -> None:
    path = written(tmp_path / "file")
    file = TensorFile(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(StateMismatch, match="it ends within"):
        file.read("truth")


@pytest.mark.slow
def test_every_bit_of_a_header_that_is_turned_is_refused_or_gives_tensors_of_the_file(tmp_path: Path) -> None:
    content = written(tmp_path / "file").read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    for place in range(size * 8):
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        (tmp_path / "file").write_bytes(changed)
        try:
            file = TensorFile(tmp_path / "file")
            read = [file.read(name) for name in file.shapes]
        except StateMismatch:
            continue
        assert sum(tensor.nbytes for tensor in read) == len(content) - size
