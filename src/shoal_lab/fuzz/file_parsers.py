"""The parsers of what a disk gives back: files of a checkpoint, which anybody may have changed since."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec
import torch

from shoal.checkpoint.manifest import (
    CLIENT,
    GENESIS,
    RECORD,
    Manifest,
    NamedTensors,
    StageContent,
    inner_file,
    stage_file,
    stored_layouts,
)
from shoal.checkpoint.stored import kept_record
from shoal.checkpoint.tensor_file import TensorFile
from shoal.errors import InvariantViolation, RecordRejected, StateMismatch
from shoal.identity import Identity, verify
from shoal.ids import PeerId
from shoal.optim.flat import FlatLayout
from shoal.runtime.durable_files import FileDigest
from shoal.swarm.records import unseal
from shoal.wire.messages.round import SignedRecord
from shoal_lab.fuzz.frame_parsers import RUN, SAMPLES_EACH
from shoal_lab.fuzz.mutation import changed_bytes, changed_tree
from shoal_lab.fuzz.parser import Parser
from shoal_lab.fuzz.record_parsers import RoundParser

_NAME: Final = "units.block_0.weight"
_KINDS: Final[Sequence[tuple[str, str, Sequence[int], int]]] = (
    ("count", "I64", (), 8),
    (_NAME, "F32", (2, 3), 24),
    ("none", "F32", (0, 4), 0),
    ("half", "BF16", (3,), 6),
)
"""Of the tensors in a valid file: name, type, shape, size in bytes."""


class ManifestParser(Parser):
    """`manifest.json`: bytes, and whole ones that say something wrong, with the digest that they would have."""

    name = "manifest"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._valid = [_manifest(self._random) for _ in range(SAMPLES_EACH)]

    def make(self, random: Random) -> bytes:
        manifest = random.choice(self._valid)
        if random.random() < 0.3:
            return changed_bytes(manifest.encoded(), random, random.choice(self._valid).encoded())
        other = msgspec.to_builtins(random.choice(self._valid))
        tree = changed_tree(msgspec.to_builtins(manifest), random, other)
        try:
            return msgspec.convert(tree, Manifest).encoded()
        except (msgspec.MsgspecError, RecursionError):
            return _json(tree, random)

    def feed(self, data: bytes, random: Random) -> bool:
        try:
            manifest = Manifest.decoded(data)
        except StateMismatch:
            return False
        # What is said of tensors is only said: nothing of their size is made.
        for layout in manifest.layouts:
            stored_layouts(layout)
        if any(Path(name).name != name for name in manifest.files):
            raise InvariantViolation(f"a manifest was taken that names {sorted(manifest.files)}")
        return True


class KeptRecordParser(Parser):
    """`record.msgpack`: records that a peer has signed, as the folder of a checkpoint has them."""

    name = "kept_record"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._records = RoundParser(seed)
        self._identity = Identity(self._random.randbytes(32))

    def make(self, random: Random) -> bytes:
        body = self._records.make(random) if random.random() < 0.5 else self._chained(random)
        peer = self._identity.peer_id
        signed = [body, peer, self._identity.sign(body), b""]
        encoded = msgspec.msgpack.encode(signed)
        match random.randrange(4):
            case 0:
                return changed_bytes(encoded, random)
            case 1:
                return _msgpack(changed_tree(signed, random))
            case _:
                return encoded

    def feed(self, data: bytes, random: Random) -> bool:
        def opened(signed: SignedRecord) -> Any:
            return unseal(signed, RUN, verify)

        try:
            kept_record(data, opened)
        except RecordRejected:
            return False
        return True

    def _chained(self, random: Random) -> bytes:
        """A record that is as it should be, or nearly."""
        ballot = [1, self._identity.peer_id, 1]
        tree: list[Any] = [RUN, 3, ballot, "0" * 64, [], [], [], {}, [], [[1, [0, "", 0]], [2, ballot]]]
        return msgspec.msgpack.encode(tree) if random.random() < 0.5 else _msgpack(changed_tree(tree, random))


class TensorFileParser(Parser):
    """A tensor file: changed bytes, and headers that say something wrong in front of the right bytes."""

    name = "tensor_file"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._valid = [_tensor_file(_KINDS[:number]) for number in range(len(_KINDS) + 1)]

    def make(self, random: Random) -> bytes:
        valid = random.choice(self._valid)
        if random.random() < 0.4:
            return changed_bytes(valid, random, random.choice(self._valid))
        (size,) = struct.unpack("<Q", valid[:8])
        header = _json(changed_tree(msgspec.json.decode(valid[8 : 8 + size]), random), random)
        return struct.pack("<Q", len(header)) + header + valid[8 + size :]

    def feed(self, data: bytes, random: Random) -> bool:
        try:
            file = TensorFile(Path("fuzzed"), data)
        except StateMismatch:
            return False
        total = sum(file.read(name).nbytes for name in file.shapes)
        if total > len(data):
            raise InvariantViolation(f"{len(data)} bytes gave tensors of {total}")
        return True


def _manifest(random: Random) -> Manifest:
    weights = FlatLayout.of_named([(_NAME, torch.empty(2, 3))])
    counts = FlatLayout.of_named([("units.block_0.count", torch.tensor(1))], torch.int64)
    named = NamedTensors.of(weights), NamedTensors.of(FlatLayout.of_named([])), NamedTensors.of(counts)
    stages = [StageContent(*named, 1, (PeerId("server"),)) for _ in range(random.randint(1, 3))]
    names = [RECORD, GENESIS, CLIENT, inner_file(0, 1), *(stage_file(stage) for stage in range(len(stages)))]
    files = {name: FileDigest(random.randrange(1 << 20), random.randbytes(32).hex()) for name in names}
    return Manifest.of(RUN, random.randint(1, 1000), random.randbytes(32).hex(), 1.75e9, stages, files)


def _tensor_file(kinds: Sequence[tuple[str, str, Sequence[int], int]]) -> bytes:
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, size_bytes in kinds:
        described[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size_bytes]}
        end += size_bytes
    header = msgspec.json.encode(described)
    return struct.pack("<Q", len(header)) + header + bytes(range(end))


def _json(tree: Any, random: Random) -> bytes:
    encoded = _encoded(msgspec.json.encode, tree)
    if random.random() < 0.02:
        # Deeper than any reader follows.
        return encoded.replace(b":", b":" + random.choice((b"[", b'{"":')) * random.choice((50, 600, 50_000)), 1)
    return encoded


def _msgpack(tree: Any) -> bytes:
    return _encoded(msgspec.msgpack.encode, tree)


def _encoded(encode: Callable[[Any], bytes], tree: Any) -> bytes:
    """A wrong tree, or nothing of it where the form itself cannot say it."""
    try:
        return encode(tree)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return encode(None)
