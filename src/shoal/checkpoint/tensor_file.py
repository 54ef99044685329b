"""Named tensors in one safetensors file, written and read one at a time, in any order.

    8 bytes: size of the header | header: name -> dtype, shape, place | the tensors' bytes

The file is laid out before the first tensor is there, and a reader takes the bytes of one tensor alone.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self, cast

import torch
from torch import Tensor

from shoal.codec.raw import to_wire
from shoal.errors import MALFORMED, StateMismatch
from shoal.optim.flat import FlatEntry, FlatLayout
from shoal.optim.vector_memory import IN_MEMORY, VectorMemory, leave
from shoal.runtime.durable_files import FileDigest

if TYPE_CHECKING:
    from typing_extensions import Buffer

DTYPE_NAMES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPE_OF: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_ALIGNMENT = 8
_PIECE_BYTES = 1 << 23
MAX_HEADER_BYTES = 100_000_000
"""The most that safetensors itself reads."""
_MAX_DIMENSIONS, _MAX_ELEMENTS = 32, 1 << 50


class _Stored(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """From the beginning of the file, in bytes."""


class OutFile(Protocol):
    """Where a tensor file is written to: `runtime.durable_files.DurableFile`, or an object of a store."""

    def write(self, content: Buffer, offset: int | None = None) -> None:
        """Write a part, at `offset` or behind the part before. Raises OSError if it is not written in full."""
        ...

    def finish(self) -> FileDigest:
        """Have it last. Raises OSError if that failed."""
        ...

    def close(self) -> None:
        """Leave it as it is."""
        ...


def encode_tensors(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], memory: VectorMemory = IN_MEMORY
) -> Tensor:
    """Return the bytes of a file with these tensors, of any device, as a vector on the CPU that lies in `memory`."""
    entries = FlatLayout.of_named(tensors.items()).entries
    places, header = _laid_out(entries, metadata)
    num_bytes = len(header) + sum(tensor.nbytes for tensor in tensors.values())
    content = memory.empty(num_bytes, torch.uint8)
    view = to_wire(content).data
    view[: len(header)] = header
    for name, place in places.items():
        end = place + tensors[name].nbytes
        view[place:end] = _content(tensors[name])
        leave(content[place:end], tensors[name])
    return content


class TensorFileWriter:
    """A file that is being written: each tensor once, then `finish`; a context that closes it.

    Args:
        file: Nothing is in it yet.
        entries: Names, shapes and element types of all tensors.
    """

    def __init__(self, file: OutFile, entries: Iterable[FlatEntry]) -> None:
        self._file = file
        self._entries = {entry.name: entry for entry in entries}
        self._places, self._header = _laid_out(self._entries.values(), {})
        self._missing = set(self._entries)

    def write(self, name: str, values: Tensor) -> None:
        """Write a tensor where it belongs, in the element type that was laid out.

        Raises:
            OSError: It cannot be written in full.
            StateMismatch: It has another shape.
        """
        entry = self._entries[name]
        if tuple(values.shape) != entry.shape:
            raise StateMismatch(f"{name} is {tuple(values.shape)}, the file has room for {entry.shape}")
        self._file.write(_content(values.to(entry.dtype)), self._places[name])
        self._missing.discard(name)

    def write_all(self, tensors: Mapping[str, Tensor], reached: Callable[[str], None]) -> FileDigest:
        """Write all tensors from the file's beginning to its end, and finish it.

        Args:
            reached: Told "file" when a part of it is written, and "sync" when all of it is, before it is finished.

        Raises:
            OSError, StateMismatch: As `write`.
        """
        self._file.write(self._header)
        for name in self._places:
            self.write(name, tensors[name])
            reached("file")
        reached("sync")
        return self._file.finish()

    def finish(self) -> FileDigest:
        """Force everything to the disk.

        Raises:
            OSError: That failed, or a tensor was not written.
        """
        if self._missing:
            raise OSError(f"{len(self._missing)} tensors were not written, such as {min(self._missing)}")
        self._file.write(self._header, 0)
        return self._file.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file as it is."""
        self._file.close()


class TensorFile:
    """A file that is read. Nothing is mapped: a mapped file that is cut meanwhile would end the process.

    Args:
        content: All bytes of the file, where they were read, and compared with something, before; None: each tensor is
            read from `path` when it is asked for.

    Attributes:
        metadata: What its header says beside that.

    Raises:
        OSError: It cannot be read.
        StateMismatch: It is no whole safetensors file.
    """

    def __init__(self, path: Path, content: bytes | None = None) -> None:
        self._path = path
        self._content = content
        with self._open() as file:
            try:
                size_bytes = path.stat().st_size if content is None else len(content)
                self._places, self.metadata = _places(file.read(8), file.read, size_bytes)
            except (TypeError, KeyError, AttributeError, *MALFORMED) as error:
                raise self._damaged(f"{type(error).__name__}: {error}") from error

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: place.shape for name, place in self._places.items()}

    def read(self, name: str) -> Tensor:
        """Read one tensor, in memory of its own.

        Raises:
            OSError: The file cannot be read.
            StateMismatch: The file has become shorter.
        """
        place = self._places[name]
        content = bytearray(_num_bytes(place))
        with self._open() as file:
            file.seek(place.offset)
            if file.readinto(content) != len(content):
                raise self._damaged(f"it ends within {name}")
        if not content:
            return torch.empty(place.shape, dtype=place.dtype)
        return torch.frombuffer(content, dtype=place.dtype).view(place.shape)

    @torch.no_grad()
    def read_into(self, name: str, out: Tensor) -> None:
        """Read one tensor, piece by piece, into another of its shape, of whose type its values become.

        Raises:
            OSError: The file cannot be read.
            StateMismatch: The file has become shorter, or whole numbers are to become others.
        """
        place = self._places[name]
        if place.dtype.is_floating_point != out.dtype.is_floating_point:
            raise StateMismatch(f"{name} in {self._path} is {place.dtype}, the model has {out.dtype}")
        values, size = out.view(-1), place.dtype.itemsize
        piece = bytearray(_PIECE_BYTES)
        with self._open() as file:
            file.seek(place.offset)
            for start in range(0, values.numel(), _PIECE_BYTES // size):
                part = values[start : start + _PIECE_BYTES // size]
                view = memoryview(piece)[: part.numel() * size]
                if file.readinto(view) != len(view):
                    raise self._damaged(f"it ends within {name}")
                part.copy_(torch.frombuffer(view, dtype=place.dtype))

    def _open(self) -> BufferedReader | BytesIO:
        return self._path.open("rb") if self._content is None else BytesIO(self._content)

    def _damaged(self, why: str) -> StateMismatch:
        return StateMismatch(f"{self._path} is damaged ({why}): take it as it was written")


def _places(size: bytes, read: Any, file_bytes: int) -> tuple[dict[str, _Stored], dict[str, str]]:
    """Read a header: tensors lie one after the other without gaps, from the header's end to that of the file. Returns
    its metadata as well.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, RecursionError: It is none, or lies.
    """
    header_bytes = int.from_bytes(size, "little")
    if len(size) != 8:
        raise ValueError("no header")
    if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
        raise ValueError(f"a header of {header_bytes} bytes")
    described = cast("dict[str, Any]", json.loads(read(header_bytes)))
    metadata = cast("dict[str, Any]", described.pop("__metadata__", {}))
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata are no texts")
    start = 8 + header_bytes
    found: dict[str, _Stored] = {}
    ends: list[tuple[int, int]] = []
    for name, entry in described.items():
        begin, end = cast("list[int]", entry["data_offsets"])
        shape = tuple(cast("list[int]", entry["shape"]))
        if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
            raise ValueError(f"{name} has no shape or place")
        if len(shape) > _MAX_DIMENSIONS or math.prod(size or 1 for size in shape) > _MAX_ELEMENTS:
            raise ValueError(f"{name} has a shape that no tensor has")
        found[name] = _Stored(DTYPE_OF[entry["dtype"]], shape, start + begin)
        if end - begin != _num_bytes(found[name]):
            raise ValueError(f"{name} has {end - begin} bytes")
        ends.append((begin, end))
    reached = 0
    for begin, end in sorted(ends):
        if begin != reached:
            raise ValueError(f"its tensors leave gaps, or overlap, at {begin}")
        reached = end
    if start + reached != file_bytes:
        raise ValueError(f"{file_bytes} bytes instead of {start + reached}")
    return found, metadata


def _content(tensor: Tensor) -> memoryview:
    """A tensor's bytes, whatever its type: a file has more of them than the wire."""
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    return to_wire(flat.view(torch.uint8)).data


def _num_bytes(place: _Stored) -> int:
    return math.prod(place.shape) * place.dtype.itemsize


def _laid_out(entries: Iterable[FlatEntry], metadata: Mapping[str, str]) -> tuple[dict[str, int], bytes]:
    """Where each tensor lies, in the file's order, and the file's beginning: wide types first, so all are aligned."""
    offset = 0
    offsets: dict[str, int] = {}
    described: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    for entry in sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name)):
        end = offset + entry.numel * entry.dtype.itemsize
        offsets[entry.name] = offset
        described[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return {name: len(header) + start for name, start in offsets.items()}, header
