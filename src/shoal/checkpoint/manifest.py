"""`manifest.json` of a checkpoint: which files belong to it, what each hashes to, and whose tensors are in them.

    round_000012/
        stage_00.safetensors      parameters/<name>, momentum/<name>, buffers/<name>: the state that a record names
        inner_00_01.safetensors   of the replica of stage 0 at home in slot 1: what its inner optimizer knows, if kept
        record.msgpack            D_12, signed
        genesis.json              D_0
        client.json               what the client knows beyond the records
        manifest.json             written last

It is written by one function alone, so it is read only if that function would have written the very same bytes: no
changed bit of it passes. That is against a bad disk. Who changes it on purpose can compute its digest again: then the
tensors of the stages still hang on the signed record, while inner states, D_0 and client.json hang on the manifest
alone.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import msgspec
import torch

from shoal.checkpoint.model_layout import StageLayout
from shoal.checkpoint.tensor_file import DTYPE_NAMES, DTYPE_OF
from shoal.errors import MALFORMED, StateMismatch
from shoal.ids import PeerId
from shoal.optim.flat import FlatEntry, FlatLayout
from shoal.runtime.durable_files import FileDigest

MANIFEST, RECORD, GENESIS, CLIENT = "manifest.json", "record.msgpack", "genesis.json", "client.json"
FORM: Final = 1
"""Goes up when a reader of the form before would misread a checkpoint."""
MAX_MANIFEST_BYTES: Final = 64 << 20
_INNER: Final = re.compile(r"inner_(\d{2,})_(\d{2,})\.safetensors")
_MAX_SIZE_BYTES: Final = 1 << 50
_MAX_UNIX_S: Final = 2.5e11
"""Calendars end with the year 9999."""
_FLAT_DTYPES: Final = (torch.float32, torch.float64, torch.int64)

_Size = Annotated[int, msgspec.Meta(ge=0, le=_MAX_SIZE_BYTES)]
_Shape = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=16)]
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class NamedTensors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tensors that are one flat vector, in their order.

    Attributes:
        dtype: Of the vector and of each tensor in the file, as safetensors calls it.
        tensors: Names in the uncut model, and shapes.
    """

    dtype: str
    tensors: tuple[tuple[str, _Shape], ...]

    @classmethod
    def of(cls, layout: FlatLayout) -> NamedTensors:
        """What is said of a layout."""
        return cls(DTYPE_NAMES[layout.dtype], tuple((entry.name, entry.shape) for entry in layout.entries))

    @property
    def layout(self) -> FlatLayout:
        """The layout, in which each tensor has the vector's element type.

        Raises:
            ValueError: Such a vector there cannot be.
        """
        dtype = DTYPE_OF.get(self.dtype)
        if dtype not in _FLAT_DTYPES:
            raise ValueError(f"a vector of {self.dtype}")
        entries: list[FlatEntry] = []
        offset = 0
        for name, shape in self.tensors:
            entries.append(FlatEntry(name, shape, dtype, offset))
            offset += math.prod(shape)
            if offset > _MAX_SIZE_BYTES:
                raise ValueError(f"{name} has the shape {shape}")
        return FlatLayout(tuple(entries), dtype)


class StageContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stage.

    Attributes:
        parameters: Those of the momentum are the same.
        num_units: Of the model, which are cut in their order.
        members: The replicas of which the record was made.
    """

    parameters: NamedTensors
    floats: NamedTensors
    integers: NamedTensors
    num_units: Annotated[int, msgspec.Meta(ge=1)]
    members: tuple[PeerId, ...]

    @property
    def layout(self) -> StageLayout:
        """The tensors of the stage.

        Raises:
            ValueError: These there cannot be.
        """
        return StageLayout(self.parameters.layout, self.floats.layout, self.integers.layout)


class KeptFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of the folder."""

    size_bytes: _Size
    sha256: _Sha256


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint is.

    Attributes:
        form: See `FORM`.
        record: The hash of the record.
        unix_s: When it was written.
        stages: In their order.
        files: All but this one, by name.
        digest: Of this file, with nothing in this field's place.
    """

    form: int
    run_id: str
    round: Annotated[int, msgspec.Meta(ge=1)]
    record: _Sha256
    unix_s: Annotated[float, msgspec.Meta(ge=0, le=_MAX_UNIX_S)]
    stages: Annotated[tuple[StageContent, ...], msgspec.Meta(min_length=1)]
    files: dict[str, KeptFile]
    digest: str = ""

    @classmethod
    def of(
        cls,
        run_id: str,
        round: int,
        record: str,
        unix_s: float,
        stages: Sequence[StageContent],
        files: Mapping[str, FileDigest],
    ) -> Manifest:
        """What is said of a checkpoint whose other files are written."""
        kept = {name: KeptFile(*file) for name, file in sorted(files.items())}
        return cls(FORM, run_id, round, record, unix_s, tuple(stages), kept)

    @property
    def size_bytes(self) -> int:
        """Of all files but this one."""
        return sum(file.size_bytes for file in self.files.values())

    @property
    def cut(self) -> tuple[int, ...]:
        """The number of units of each stage."""
        return tuple(stage.num_units for stage in self.stages)

    @property
    def layouts(self) -> list[StageLayout]:
        """The tensors of each stage."""
        return [stage.layout for stage in self.stages]

    def inner_slots(self, stage: int) -> list[int]:
        """The slots of a stage whose inner states were kept, in order."""
        found = filter(None, map(_INNER.fullmatch, self.files))
        return sorted(int(each[2]) for each in found if int(each[1]) == stage)

    def encoded(self) -> bytes:
        """The file."""
        digest = hashlib.sha256(_encoded(self, "")).hexdigest()
        return _encoded(self, digest)

    @classmethod
    def decoded(cls, content: bytes) -> Manifest:
        """Read the file.

        Raises:
            StateMismatch: It is none, was changed, or is of another version.
        """
        try:
            if len(content) > MAX_MANIFEST_BYTES:
                raise ValueError(f"{len(content)} bytes")
            form = msgspec.json.decode(content, type=_ManifestForm).form
            if form != FORM:
                raise StateMismatch(
                    f"{MANIFEST} is of form {form}, this version of shoal reads {FORM}: use the one that has written it"
                )
            manifest = msgspec.json.decode(content, type=cls)
            manifest._require_whole()
        except MALFORMED as error:
            raise StateMismatch(f"{MANIFEST} is damaged ({error})") from error
        if manifest.encoded() != content:
            raise StateMismatch(f"{MANIFEST} is damaged (it has changed since it was written)")
        return manifest

    def _require_whole(self) -> None:
        """Names are a writer's own, so none of them leads out of the folder, and nothing is missing.

        Raises:
            ValueError: It is not so.
        """
        needed = {RECORD, GENESIS, CLIENT, *(stage_file(stage) for stage in range(len(self.stages)))}
        if missing := needed - self.files.keys():
            raise ValueError(f"it does not name {min(missing)}")
        for name in self.files.keys() - needed:
            found = _INNER.fullmatch(name)
            if found is None or name != inner_file(int(found[1]), int(found[2])) or int(found[1]) >= len(self.stages):
                raise ValueError(f"it names {name!r}")
        for layout in self.layouts:
            names = [entry.name for entry in layout.entries]
            if len(set(names)) != len(names):
                raise ValueError("a tensor has two places")


class _ManifestForm(msgspec.Struct):
    form: int


def _encoded(manifest: Manifest, digest: str) -> bytes:
    return msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(manifest, digest=digest)), indent=1)


def stage_file(stage: int) -> str:
    """The name of a stage's file."""
    return f"stage_{stage:02d}.safetensors"


def inner_file(stage: int, slot: int) -> str:
    """The name of the file of a replica's inner state."""
    return f"inner_{stage:02d}_{slot:02d}.safetensors"


def stored_layouts(layout: StageLayout) -> tuple[FlatLayout, FlatLayout, FlatLayout, FlatLayout]:
    """How the vectors of a stage stand in its file: parameters, momentum, floating buffers, integer buffers.

    Each tensor has the element type of its vector, as the record's hashes are taken.
    """
    return (
        _stored("parameters", layout.parameters),
        _stored("momentum", layout.parameters),
        _stored("buffers", layout.floats),
        _stored("buffers", layout.integers),
    )


def _stored(kind: str, layout: FlatLayout) -> FlatLayout:
    entries = [FlatEntry(f"{kind}/{each.name}", each.shape, layout.dtype, each.offset) for each in layout.entries]
    return FlatLayout(tuple(entries), layout.dtype)
