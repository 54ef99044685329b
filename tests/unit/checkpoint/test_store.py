"""Checkpoints on a disk: written as a whole or not at all, and believed only after they were compared."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.unit.checkpoint.checkpoints import (
    CLIENT,
    LAYOUTS,
    RUN_ID,
    SERVERS,
    checkpoint_of,
    folder,
    hashes,
    inner_of,
    make_store,
    open_record,
    parts_of,
    signed_record,
    vectors_of,
    write_rounds,
)

from shoal.checkpoint import places, whole_folder
from shoal.checkpoint.manifest import Manifest, inner_file, stage_file
from shoal.checkpoint.model_layout import StageLayout
from shoal.checkpoint.places import round_of
from shoal.checkpoint.store import CheckpointStore, KeepPolicy, StagePart, stores_at
from shoal.checkpoint.stored import StoredCheckpoint
from shoal.errors import ConfigError, PlaceTaken, RecordRejected, SignatureError, StateMismatch, StorageError
from shoal.file_thread import number_of
from shoal.identity import Identity
from shoal.ids import PeerId
from shoal.optim.flat import FlatLayout
from shoal.runtime import durable_files
from shoal.runtime.durable_files import DurableFile, require_size
from shoal.runtime.linux_calls import LinuxCall, has
from shoal.swarm.records import record_hash, seal
from shoal.wire.messages.round import Origin, Record, SignedRecord

FILES = (
    "client.json",
    "genesis.json",
    "inner_00_00.safetensors",
    "inner_00_01.safetensors",
    "manifest.json",
    "record.msgpack",
    "stage_00.safetensors",
    "stage_01.safetensors",
)


def good(store: CheckpointStore) -> StoredCheckpoint:
    found = store.newest_good().checkpoint
    assert found is not None
    return found


def test_what_a_fork_began_with_stays_as_long_as_there_is_room(tmp_path: Path) -> None:
    first = msgspec.structs.replace(
        open_record(signed_record(3, [hashes(vectors_of(stage, 3)) for stage in range(2)])),
        origin=Origin("another run", "a hash"),
    )
    store = make_store(tmp_path, KeepPolicy(keep_last=1))
    store.write(checkpoint_of(3, seal(first, CLIENT.peer_id, CLIENT.sign)), parts_of(3))
    write_rounds(store, 4, 5)
    assert store.rounds() == [3, 5]
    size = store.unread(5).manifest.size_bytes
    small = make_store(tmp_path, KeepPolicy(keep_last=1, max_bytes=2 * size))
    write_rounds(small, 6)
    assert small.rounds() == [6]


def test_a_file_that_does_not_fit_into_the_memory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path)
    write_rounds(store, 1)
    found = good(store)
    monkeypatch.setattr("shoal.runtime.memory.free_memory_bytes", lambda: 10)
    monkeypatch.setattr(places.LocalPlace, "read", lambda *_: pytest.fail("it is read"))
    with pytest.raises(StorageError, match=r"of free memory, it needs .* MB for client\.json in .*round_000001"):
        found.content("client.json")


def test_what_was_written_is_read_back_by_name_and_by_vector(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    written = store.write(checkpoint_of(12), reversed(parts_of(12)))
    assert written.location == str(folder(tmp_path, 12))
    assert sorted(path.name for path in folder(tmp_path, 12).iterdir()) == sorted(FILES)
    found = good(store)
    assert (found.record.round, found.manifest.cut, found.manifest.unix_s) == (12, (1, 1), 1.75e9 + 12)
    assert [stage.members for stage in found.manifest.stages] == [SERVERS[0::2], SERVERS[1::2]]
    assert json.loads(found.client) == {"round": 12}
    assert json.loads(found.genesis) == {"form": 2, "seed": 1}
    for stage, layout in enumerate(LAYOUTS):
        for vector, expected in zip(found.vectors(stage, layout), vectors_of(stage, 12), strict=True):
            assert vector.dtype == expected.dtype
            assert torch.equal(vector, expected)
    assert set(found.tensors(1).shapes) == {
        *(f"{kind}/units.block_1.{name}" for kind in ("parameters", "momentum") for name in ("weight", "bias")),
        "buffers/units.block_1.mean",
        "buffers/units.block_1.count",
    }
    inner = found.inner(0, 0)
    assert inner is not None
    assert inner.keys() == inner_of(0, 0).keys()
    assert all(torch.equal(inner[name], tensor) for name, tensor in inner_of(0, 0).items())
    assert found.inner(0, 1) == {}, "one that has begun anew"
    assert found.inner(1, 0) is None, "one that was not kept"


def test_another_run_and_another_signer_are_not_believed(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write_rounds(store, 1)
    other = CheckpointStore(str(tmp_path), "other", None)
    shutil.copytree(tmp_path / RUN_ID, tmp_path / "other")
    assert str(other.newest_good().passed_over[0]) == "round 1: manifest.json is of run test-run"
    said = [hashes(vectors_of(stage, 2)) for stage in range(2)]
    for signed in (
        signed_record(2, said, run_id="other"),
        signed_record(2, said, eras=False),
        msgspec.structs.replace(signed_record(2, said), signature=bytes(64)),
    ):
        with pytest.raises(RecordRejected, match=r"record\.msgpack"):
            store.write(checkpoint_of(2, signed), parts_of(2))

    def refuse(signed: object) -> Any:
        raise RecordRejected("the authority has not warranted it")

    strict = CheckpointStore(str(tmp_path), RUN_ID, refuse)
    with pytest.raises(RecordRejected, match="not warranted"):
        strict.write(checkpoint_of(2), parts_of(2))


def test_tensors_that_the_record_does_not_name_are_not_written(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write_rounds(store, 1)
    parts = parts_of(2)
    for number, wrong in enumerate(("parameters", "momentum", "buffers", "buffers")):
        vectors = [vector.clone() for vector in parts[1].vectors]
        vectors[number][0] += 1
        with pytest.raises(StateMismatch, match=f"stage 1 hash to .*{wrong}"):
            store.write(checkpoint_of(2), [parts[0], StagePart(1, vectors)])
    with pytest.raises(StateMismatch, match="of stages 1 nothing was given"):
        store.write(checkpoint_of(2), parts[:1])
    with pytest.raises(StateMismatch, match="stage 0 was given twice"):
        store.write(checkpoint_of(2), [parts[0], parts[0]])
    with pytest.raises(StateMismatch, match="record 2 is of 2 stages"):
        store.write(checkpoint_of(2, cut=(2,)), parts)
    assert sorted(path.name for path in (tmp_path / RUN_ID).iterdir()) == ["round_000001"]


class CrashPoints:
    """Copies a folder before and after every call that changes the disk, as a crash there would leave it.

    Twice: as a killed process leaves it, and as a loss of power may, of which a file that was not forced to the disk is
    empty.
    """

    CALLS = ("fsync", "rename", "mkdir", "unlink", "rmdir")

    def __init__(self, root: Path, to: Path) -> None:
        self.copies: list[Path] = []
        self._root, self._to = root, to
        # What was there before has lasted already.
        self._synced = {path.stat().st_ino for path in root.rglob("*")}
        self._is_copying = False

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        for name in self.CALLS:
            patch.setattr(os, name, self._watched(getattr(os, name)))
        patch.setattr(whole_folder, "exchange", self._watched(whole_folder.exchange))
        patch.setattr(DurableFile, "write", self._watched(DurableFile.write))

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            if self._is_copying:
                return call(*arguments, **options)
            self._copy()
            result = call(*arguments, **options)
            if call.__name__ == "fsync":
                self._synced.add(os.fstat(arguments[0]).st_ino)
            self._copy()
            return result

        return watched

    def _copy(self) -> None:
        self._is_copying = True
        for is_power_lost in (False, True):
            to = self._to / f"{len(self.copies):05d}"
            shutil.copytree(self._root, to)
            for path in self._root.rglob("*") if is_power_lost else ():
                if path.is_file() and path.stat().st_ino not in self._synced:
                    (to / path.relative_to(self._root)).write_bytes(b"")
            self.copies.append(to)
        self._is_copying = False


def crash_points(monkeypatch: pytest.MonkeyPatch, root: Path, act: Callable[[], None]) -> list[Path]:
    points = CrashPoints(root, root.with_name("copies"))
    with monkeypatch.context() as patch:
        points.watch(patch)
        act()
    return points.copies


@pytest.mark.usual("one that removes the one before-names exchanged", "the same round again-two renames")
@pytest.mark.parametrize("atomic", [True, False], ids=["names exchanged", "two renames"])
@pytest.mark.parametrize(
    ("before", "then", "keep_last"),
    [((), 1, 1), ((1,), 2, 1), ((1, 2), 3, 2), ((1, 2), 2, 1)],
    ids=["the first", "one that removes the one before", "one of several", "the same round again"],
)
def test_a_crash_at_any_step_of_a_write_leaves_a_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: tuple[int, ...], then: int, keep_last: int, atomic: bool
) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    store = make_store(root, KeepPolicy(keep_last=5))
    write_rounds(store, *before)
    store.policy = KeepPolicy(keep_last=keep_last)
    if not atomic:
        monkeypatch.setattr(whole_folder, "exchange", lambda one, other: False)
    copies = crash_points(monkeypatch, root, lambda: write_rounds(store, then))
    assert len(copies) > 80
    found = [make_store(copy).newest_good() for copy in copies]
    rounds = [0 if each.checkpoint is None else each.checkpoint.manifest.round for each in found]
    assert rounds[0] == max(before, default=0)
    assert rounds[-1] == then
    # Nothing but whole checkpoints ever has a name.
    assert [each.passed_over for each in found if each.passed_over] == []
    if (atomic and has(LinuxCall.EXCHANGE)) or then not in before:
        assert rounds == sorted(rounds)
    else:
        # Between two renames the round that is written again is away, and the one before it is still there.
        assert {*rounds} == {1, 2}
    # What a crash has left goes with the next write.
    for copy in copies[:: len(copies) // 7]:
        write_rounds(make_store(copy, KeepPolicy(keep_last=1)), 9)
        assert [path.name for path in (copy / RUN_ID).iterdir()] == ["round_000009"]


def test_who_is_to_die_in_a_write_is_told_where_it_is(tmp_path: Path) -> None:
    store = make_store(tmp_path, KeepPolicy(keep_last=2))
    write_rounds(store, 1, 2)
    seen: dict[str, set[str]] = {}
    told: list[str] = []

    def reached(point: str, round: int) -> None:
        assert round == 3
        told.append(point)
        paths = {path.relative_to(tmp_path / RUN_ID) for path in (tmp_path / RUN_ID).rglob("*")}
        paths.remove(Path(".writer"))
        # The first time it is reached, which is when somebody dies.
        seen.setdefault(point, {re.sub(r"\.\d+\.", ".", str(path)) for path in paths})

    store.reached = reached
    write_rounds(store, 3)
    assert [*seen] == ["file", "sync", "manifest", "rename", "renamed", "removal"]
    assert told.index("sync") > 1, "a part of a file is not the whole of it"
    aside, old = ".round_000003.unfinished", ".round_000001.old"
    first = {aside, f"{aside}/stage_00.safetensors"}
    kept = {path for path in seen["file"] if path.startswith("round_")}
    assert {path.partition("/")[0] for path in kept} == {"round_000001", "round_000002"}
    assert seen["file"] == seen["sync"] == kept | first
    whole = {aside, *(f"{aside}/{name}" for name in FILES)}
    assert seen["manifest"] == kept | whole - {f"{aside}/manifest.json"}
    assert seen["rename"] == kept | whole
    placed = {path.replace(aside, "round_000003") for path in whole}
    assert seen["renamed"] == kept | placed
    assert seen["removal"] == {path.replace("round_000001", old) for path in kept} | placed


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
def test_damage_of_any_file_is_noticed_and_named_and_the_checkpoint_before_is_taken(tmp_path: Path, name: str) -> None:
    store = make_store(tmp_path)
    write_rounds(store, 1, 2)
    path = folder(tmp_path, 2) / name
    content = path.read_bytes()

    def damaged() -> str:
        found = store.newest_good()
        path.write_bytes(content)
        assert found.checkpoint is not None
        if found.checkpoint.manifest.round == 2:
            return ""
        (passed,) = found.passed_over
        assert passed.round == 2
        return "; ".join(passed.problems)

    path.unlink()
    with pytest.raises(StateMismatch, match=f"of round 2: .*{name} is not there"):
        store.open(2)
    assert f"{name} is not there" in damaged()
    for size in (0, 1, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        assert name in damaged()
    path.write_bytes(content + b" ")
    assert name in damaged()
    # Every byte of the small files, and of the others some in header and tensors.
    for at in range(0, len(content), 1 if len(content) < 200 else 23):
        flip(path, at)
        assert name in damaged(), at
    assert damaged() == ""


def test_all_that_is_wrong_is_named(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write_rounds(store, 1, 2, 3, 4, 5)
    assert store.rounds() == [3, 4, 5]
    flip(folder(tmp_path, 5) / "stage_01.safetensors", -1)
    os.truncate(folder(tmp_path, 5) / "inner_00_00.safetensors", 10)
    (folder(tmp_path, 5) / "client.json").unlink()
    flip(folder(tmp_path, 5) / "record.msgpack", 30)
    (folder(tmp_path, 4) / "manifest.json").unlink()
    found = store.newest_good()
    assert found.checkpoint is not None
    assert found.checkpoint.manifest.round == 3
    first, second = found.passed_over
    assert (first.round, second.round) == (5, 4)
    inner_bytes = good(store).manifest.files["inner_00_00.safetensors"].size_bytes
    assert set(first.problems) == {
        "client.json is not there",
        f"inner_00_00.safetensors has 10 of {inner_bytes} bytes",
        "record.msgpack has changed since it was written",
        "stage_01.safetensors has changed since it was written",
    }
    assert second.problems == ("manifest.json is not there: it was never finished, or was removed",)
    listed = store.listed()
    assert [(each.round, bool(each.problems)) for each in listed] == [(3, False), (4, True), (5, True)]
    assert [each.unix_s for each in listed] == [1.75e9 + 3, None, 1.75e9 + 5]


def forge(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest on purpose, as one who knows how it is written."""
    said = msgspec.json.decode((folder / "manifest.json").read_bytes())
    for name, file in said["files"].items():
        content = (folder / name).read_bytes()
        file.update(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    change(said)
    (folder / "manifest.json").write_bytes(msgspec.convert(said, Manifest).encoded())


def test_a_wrong_stage_cannot_pass_even_with_a_forged_manifest(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write_rounds(store, 1, 2)
    place = folder(tmp_path, 2)
    flip(place / "stage_01.safetensors", -1)
    forge(place, lambda said: None)
    (passed,) = store.newest_good().passed_over
    assert "stage 1 hash to" in passed.problems[0]
    # Of another round, with all that belongs to it.
    write_rounds(store, 3)
    shutil.copy(folder(tmp_path, 1) / "stage_01.safetensors", folder(tmp_path, 3))
    forge(folder(tmp_path, 3), lambda said: None)
    assert "stage 1 hash to" in str(store.newest_good().passed_over[0])
    # Another record, of the same round, by somebody else.
    stranger = Identity.generate()
    forged = signed_record(3, [hashes(vectors_of(0, 3)), hashes(vectors_of(1, 1))], signer=stranger)
    (folder(tmp_path, 3) / "record.msgpack").write_bytes(msgspec.msgpack.encode(forged))
    forge(folder(tmp_path, 3), lambda said: said.update(record=record_hash(forged)))
    assert good(store).manifest.round == 3, "who asks for no authority believes whoever has signed"
    strict = CheckpointStore(str(tmp_path), RUN_ID, only_by(CLIENT.peer_id))
    assert "is not the client" in str(strict.newest_good().passed_over[0])


def only_by(peer: PeerId) -> Callable[[SignedRecord], Record]:
    def opened(signed: SignedRecord) -> Record:
        if signed.signer != peer:
            raise SignatureError(f"{signed.signer} is not the client")
        return open_record(signed)

    return opened


def test_names_that_are_exchanged_in_a_forged_manifest_do_not_reach_a_model(tmp_path: Path) -> None:
    shapes = [("a", torch.zeros(2)), ("b", torch.zeros(2))]
    none = FlatLayout.of_named([])
    layout = StageLayout(FlatLayout.of_named(shapes), none, FlatLayout.of_named([], torch.int64))
    vectors = [torch.arange(4.0), torch.ones(4), torch.zeros(0), torch.zeros(0, dtype=torch.int64)]
    store = make_store(tmp_path)
    signed = signed_record(1, [hashes(vectors)])
    checkpoint = checkpoint_of(1, signed, layouts=[layout], cut=(1,), members=[()])
    store.write(checkpoint, [StagePart(0, vectors)])
    path = folder(tmp_path, 1) / "stage_00.safetensors"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'/a"', b'/x"').replace(b'/b"', b'/a"').replace(b'/x"', b'/b"'))
    forge(path.parent, lambda said: said["stages"][0]["parameters"]["tensors"].reverse())
    assert good(store).vectors(0)
    with pytest.raises(StateMismatch, match="stage 0 hash to"):
        good(store).vectors(0, layout)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda said: said["files"].update({"../x": said["files"]["client.json"]}), "it names '../x'"),
        (lambda said: said["files"].update({inner_file(2, 0): said["files"]["client.json"]}), "it names 'inner_02_00"),
        (lambda said: said["files"].update({"inner_000_00.safetensors": said["files"]["client.json"]}), "it names"),
        (lambda said: said["files"].pop("stage_01.safetensors"), "it does not name stage_01"),
        (lambda said: said.update(form=2), "form 2, this version of shoal reads 1"),
        (lambda said: said["stages"][0]["parameters"].update(dtype="BF16"), "a vector of BF16"),
        (lambda said: said["stages"][0]["floats"].update(tensors=[["x", [1 << 30, 1 << 30]]]), "x has the shape"),
        (lambda said: said["stages"][0]["integers"].update(tensors=[["units.block_0.bias", []]]), "has two places"),
        (lambda said: said["stages"][0]["floats"].update(tensors=[]), "has other tensors than the stage"),
        (lambda said: said.update(round=3), "manifest.json is of round 3"),
        (lambda said: said.update(stages=said["stages"][:1]), "it names 'stage_01"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(tmp_path: Path, change: Callable[[Any], None], says: str) -> None:
    store = make_store(tmp_path)
    write_rounds(store, 1)
    forge(folder(tmp_path, 1), change)
    found = store.newest_good()
    assert found.checkpoint is None
    assert says in str(found.passed_over[0])


def test_a_hash_with_a_line_end_behind_it_is_none(tmp_path: Path) -> None:
    write_rounds(make_store(tmp_path), 1)
    content = (folder(tmp_path, 1) / "manifest.json").read_bytes()
    record = str(msgspec.json.decode(content)["record"])
    with pytest.raises(StateMismatch, match="matching regex"):
        Manifest.decoded(content.replace(record.encode(), rf"{record}\n".encode()))


@pytest.mark.parametrize("rounds", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_checkpoints_in_a_row_take_no_more_room_than_the_policy_says(tmp_path: Path, rounds: int) -> None:
    store = make_store(tmp_path, KeepPolicy(keep_last=2))
    most = one = 0

    def size() -> int:
        return sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())

    for round in range(1, rounds + 1):
        write_rounds(store, round)
        one = one or size()
        most = max(most, size())
        assert len(list((tmp_path / RUN_ID).iterdir())) == min(round, 2)
    # Numbers in the manifest grow by some digits.
    assert most <= 2 * one + 200
    assert store.rounds() == [rounds - 1, rounds]
    assert good(store).manifest.round == rounds


@pytest.mark.parametrize(
    ("policy", "gone"),
    [
        (KeepPolicy(keep_last=1), [2, 4, 6, 8, 10, 14]),
        (KeepPolicy(keep_last=3), [2, 4, 6, 14]),
        (KeepPolicy(keep_last=2, keep_every_rounds=4), [2, 6, 14]),
        (KeepPolicy(keep_last=9, max_bytes=350), [2, 4, 6, 14]),
        (KeepPolicy(keep_last=2, keep_every_rounds=4, max_bytes=300), [2, 4, 6, 14]),
        (KeepPolicy(keep_last=9, max_bytes=1), [2, 4, 6, 8, 10, 14]),
        (KeepPolicy(keep_last=9), [14]),
        (KeepPolicy(keep_last=0), [2, 4, 6, 8, 10, 14]),
    ],
)
def test_what_a_policy_does_not_keep(policy: KeepPolicy, gone: list[int]) -> None:
    # Of 14 the run has not gone on: 12 was written last.
    assert policy.surplus({round: 100 for round in range(2, 15, 2)}, 12) == gone


def test_what_a_policy_keeps_of_those_that_are_damaged() -> None:
    sizes = {round: 100 for round in (10, 20, 30, 40, 50)}
    two = KeepPolicy(keep_last=2)
    assert two.surplus(sizes, 50, damaged={40, 30}) == [10], "20 is the second good one"
    assert two.surplus(sizes, 50, damaged={20}) == [10, 20, 30], "there are two newer good ones"
    assert two.surplus(sizes, 50, damaged={10, 20, 30, 40}) == [], "there is no second good one"
    assert KeepPolicy(keep_last=1).surplus(sizes, 50, damaged={40}) == [10, 20, 30, 40]
    small = KeepPolicy(keep_last=2, max_bytes=350)
    assert small.surplus(sizes, 50, damaged={40, 30}) == [10, 30], "damaged ones make way first, the oldest of them"


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a bit of a stage": lambda place: flip(place / "stage_01.safetensors", -1),
    "a bit of the manifest": lambda place: flip(place / "manifest.json", 40),
    "a stage cut short": lambda place: os.truncate(place / "stage_00.safetensors", 10),
    "an empty manifest": lambda place: os.truncate(place / "manifest.json", 0),
    "no manifest": lambda place: (place / "manifest.json").unlink(),
    "a folder that cannot be read": lambda place: None,
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_checkpoint_takes_no_good_ones_place_and_stays_until_there_are_newer_good_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    write_rounds(make_store(tmp_path), 10, 20)
    DAMAGES[what](folder(tmp_path, 20))
    if what == "a folder that cannot be read":
        _unreadable(monkeypatch, folder(tmp_path, 20))
    store = make_store(tmp_path, KeepPolicy(keep_last=2))  # of the run that has gone on from 10
    assert good(store).manifest.round == 10
    write_rounds(store, 30)
    assert store.rounds() == [10, 20, 30], "or nothing would be left if 30 was damaged too"
    listed = {each.round: bool(each.problems) for each in store.listed()}
    assert listed == {10: False, 20: True, 30: False}
    write_rounds(store, 40)
    assert store.rounds() == [30, 40]


def test_what_a_crash_has_left_of_an_upload_is_not_kept_for_long(tmp_path: Path) -> None:
    write_rounds(make_store(tmp_path), 10)
    (folder(tmp_path, 10) / "manifest.json").unlink()
    store = make_store(tmp_path, KeepPolicy(keep_last=1, keep_every_rounds=10))
    write_rounds(store, 20)
    assert store.rounds() == [20]


def _unreadable(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """As for a user who may not look into it; root may."""
    scandir = os.scandir

    def refuse(path: Any = ".") -> Any:
        if path == place:
            raise PermissionError(errno.EACCES, "Permission denied", str(place))
        return scandir(path)

    monkeypatch.setattr("shoal.checkpoint.places.os.scandir", refuse)


def test_each_checkpoint_of_an_earlier_process_is_read_once_to_know_whether_it_is_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rounds(make_store(tmp_path, KeepPolicy(keep_last=9)), 1, 2, 3, 4)
    looked: list[int] = []
    store = make_store(tmp_path, KeepPolicy(keep_last=3))
    examined = CheckpointStore._examined

    def look(self: CheckpointStore, round: int) -> Any:
        looked.append(round)
        return examined(self, round)

    monkeypatch.setattr(CheckpointStore, "_examined", look)
    write_rounds(store, 5, 6, 7)
    assert looked == [4, 3]
    assert store.rounds() == [5, 6, 7]


def test_no_room_is_one_error_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path, KeepPolicy(max_bytes=100))
    with pytest.raises(StorageError, match=r"at most 100 are allowed"):
        write_rounds(store, 1)
    store.policy = KeepPolicy(keep_last=1)
    write_rounds(store, 1)
    monkeypatch.setattr(places.LocalPlace, "free_bytes", lambda self: 1 << 20)
    with pytest.raises(StorageError, match=r"bytes more in .*test-run, where 1,048,576 are free") as full:
        write_rounds(store, 2)
    assert number_of(full.value) == errno.ENOSPC
    assert [path.name for path in (tmp_path / RUN_ID).iterdir()] == ["round_000001"]
    monkeypatch.undo()
    free = store._place.free_bytes()
    assert free is not None
    assert 0 < free <= shutil.disk_usage(tmp_path).total


def test_one_mirror_at_a_time_writes_to_a_folder(tmp_path: Path) -> None:
    store, other = make_store(tmp_path), make_store(tmp_path)

    def meanwhile(point: str, _: int) -> None:
        if point == "rename":
            with pytest.raises(PlaceTaken, match=rf"process {os.getpid()} on .* writes to .*test-run now") as taken:
                write_rounds(other, 2)
            assert (taken.value.location, taken.value.holder.split()[-1]) == (str(tmp_path / RUN_ID), platform.node())
            assert "another --checkpoint-dir" in str(taken.value)

    store.reached = meanwhile
    write_rounds(store, 1)
    assert good(store).manifest.round == 1
    assert [path.name for path in (tmp_path / RUN_ID).iterdir()] == ["round_000001"]
    write_rounds(other, 2)
    assert good(store).manifest.round == 2


def test_who_may_write_where_checkpoints_lie_has_no_other_file_overwritten(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / RUN_ID).mkdir()
    (tmp_path / RUN_ID / ".writer").symlink_to(mine)
    store = make_store(tmp_path)
    write_rounds(store, 1)
    assert good(store).manifest.round == 1
    assert mine.read_text() == "mine"


def test_on_a_disk_that_knows_no_locks_nobody_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    store = make_store(tmp_path)
    write_rounds(store, 1)
    assert good(store).manifest.round == 1


@pytest.mark.parametrize("said", [None, b"", b"\x1b[2J\xff" + b"x" * 10_000])
def test_who_writes_to_a_folder_may_not_say_so_and_says_what_it_likes(tmp_path: Path, said: bytes | None) -> None:
    store, other = make_store(tmp_path), make_store(tmp_path)
    told: list[str] = []

    def meanwhile(point: str, _: int) -> None:
        if point == "rename":
            writer = tmp_path / RUN_ID / ".writer"
            writer.unlink()
            if said is not None:
                writer.write_bytes(said)
            with pytest.raises(PlaceTaken) as taken:
                write_rounds(other, 2)
            told.append(taken.value.holder)

    store.reached = meanwhile
    write_rounds(store, 1)
    [holder] = told
    assert holder.isprintable()
    assert len(holder) < 210
    assert said or holder == "a process that does not say its name"


@pytest.mark.parametrize("failing", ["write", "fsync", "short", "read back"])
def test_a_disk_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    store = make_store(tmp_path)
    write_rounds(store, 1)
    with monkeypatch.context() as patch:
        if failing == "short":
            patch.setattr(durable_files, "require_size", require_one_more)
        elif failing == "read back":
            patch.setattr(durable_files, "_forget_cached", change_under_the_reader)
        else:
            patch.setattr(DurableFile if failing == "write" else os, failing, full)
        with pytest.raises(StorageError, match=r"cannot write .*test-run \("):
            write_rounds(store, 2)
    assert good(store).manifest.round == 1
    assert [path.name for path in (tmp_path / RUN_ID).iterdir()] == ["round_000001"]


def full(*arguments: object) -> None:
    raise OSError(28, "No space left on device")


def require_one_more(path: Path, size_bytes: int) -> None:
    require_size(path, size_bytes + 1)


def change_under_the_reader(descriptor: int) -> None:
    flip(Path(os.readlink(f"/proc/self/fd/{descriptor}")), -1)


def test_an_older_one_that_cannot_be_removed_is_said_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path, KeepPolicy(keep_last=1))
    write_rounds(store, 1)
    monkeypatch.setattr(places, "remove_folder", full)
    written = store.write(checkpoint_of(2), parts_of(2))
    assert written.removed == ()
    assert "cannot be removed" in written.problem
    assert store.rounds() == [1, 2]
    monkeypatch.undo()
    assert store.write(checkpoint_of(3), parts_of(3)).removed == (1, 2)


def test_a_disk_that_cannot_be_read_is_told_from_one_that_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path)
    assert store.newest_good() == (None, ())
    write_rounds(store, 1, 2)

    def broken(self: object, folder: str, name: str, size_bytes: int) -> bytes:
        if folder == "round_000002" and name.startswith("stage"):
            raise OSError(5, "Input/output error")
        return read(self, folder, name, size_bytes)

    read: Any = places.LocalPlace.read
    monkeypatch.setattr(places.LocalPlace, "read", broken)
    found = store.newest_good()
    assert found.checkpoint is not None
    assert found.checkpoint.manifest.round == 1
    assert "stage_00.safetensors cannot be read (Input/output error)" in found.passed_over[0].problems


def test_a_bucket_that_is_missing_is_no_folder_of_this_machine() -> None:
    with pytest.raises(ConfigError, match="a bucket is missing"):
        make_store("s3://")


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "a\\b"])
def test_a_name_that_leads_elsewhere_is_no_run(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no name of a run"):
        CheckpointStore(str(tmp_path), name)


def test_the_runs_of_a_place_are_found_from_above_and_from_within(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rounds(make_store(tmp_path), 1, 2)
    (tmp_path / "something else").mkdir()
    for location in (str(tmp_path), str(tmp_path / RUN_ID), f"{tmp_path / RUN_ID}/"):
        (store,) = stores_at(location)
        assert (store.run_id, store.rounds()) == (RUN_ID, [1, 2])
    monkeypatch.chdir(tmp_path / RUN_ID)
    assert stores_at(".")[0].rounds() == [1, 2]
    with pytest.raises(ConfigError, match="nowhere is no folder"):
        stores_at(str(tmp_path / "nowhere"))


def test_only_a_name_that_a_writer_gives_is_of_a_round() -> None:
    names = {"round_000012": 12, "round_1000000": 1000000, "round_0000012": None, "round_12": None, "x": None}
    assert {name: round_of(name) for name in names} == names


def test_one_that_is_opened_unread_says_what_it_is_and_compares_each_part_when_it_is_read(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write_rounds(store, 4)
    (folder(tmp_path, 4) / stage_file(1)).write_bytes(b"something else")
    checkpoint = store.unread(4)
    assert checkpoint.manifest.round == 4
    checkpoint.vectors(0)
    with pytest.raises(StateMismatch, match="stage_01"):
        checkpoint.vectors(1)
    with pytest.raises(StorageError, match="cannot read"):
        store.unread(5)


def test_when_a_run_was_last_kept_says_the_newest_manifest_or_of_a_damaged_one_the_disk(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    assert store.newest_unix_s() == 0
    write_rounds(store, 4, 5)
    assert store.newest_unix_s() == 1.75e9 + 5
    (folder(tmp_path, 5) / "manifest.json").write_text("{}")
    os.utime(folder(tmp_path, 5), (1.75e9 + 7, 1.75e9 + 7))
    assert store.newest_unix_s() == 1.75e9 + 7
