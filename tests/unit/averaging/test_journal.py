"""The files of a run's rounds, and what can be recomputed from them."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import stat
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from shoal.averaging import journal
from shoal.averaging.audit import audit, audit_of
from shoal.averaging.journal import (
    Genesis,
    StepLine,
    follows,
    keep_steps,
    last_record,
    left_folders,
    read_genesis,
    read_records,
    read_steps,
    rounds_with_steps,
    set_aside,
    write_genesis,
    write_round,
)
from shoal.averaging.signing import Signer
from shoal.errors import RecordRejected, StorageError
from shoal.identity import Identity
from shoal.ids import Ballot, PeerId, StepKey
from shoal.swarm.cut_rule import CutRule
from shoal.swarm.records import rebase_record, record_hash
from shoal.wire.messages import SampleRange
from shoal.wire.messages.round import Basis, Record, SignedRecord, StageHashes, StageOutcome
from shoal.wire.messages.step import StepEntry

IDENTITY, AUTHORITY = Identity.generate(), Identity.generate()
CLIENT = IDENTITY.peer_id
seal = Signer(IDENTITY, AUTHORITY, "run").seal


def make_record(round: int, samples: Sequence[SampleRange] = (), *, lowest: int = 2) -> tuple[Record, SignedRecord]:
    outcome = StageOutcome(0, 1, (PeerId("R0"), PeerId("R1")), (3, 0), StageHashes("p", "m", "b"), 2)
    record = Record("run", round, Ballot(1, CLIENT, 1), "0", (outcome,), tuple(samples), (), {0: lowest})
    return record, seal(record)


def entry(
    number: int,
    start: int,
    stop: int,
    *,
    pass_number: int = 0,
    path: str = "ab",
    skipped: bool = False,
    attempt: int = 0,
) -> StepEntry:
    peers = tuple(PeerId(letter) for letter in path)
    samples = (SampleRange(pass_number, start, stop),)
    return StepEntry(StepKey(0, 1, number, attempt), peers, 0, samples, stop - start, stop - start, 1.0, 0.1, skipped)


Steps = Mapping[str, tuple[int, tuple[StepEntry, ...]]]


def begin(directory: Path, outer_steps: int = 0) -> None:
    if not (directory / "rounds/round_0000.json").exists():
        write_genesis(directory, Genesis(1, AUTHORITY.peer_id, {"diloco": {"outer_steps": outer_steps}}, (1,), {}))


def write(directory: Path, round: int, logs: Steps, samples: Sequence[SampleRange] = (), *, lowest: int = 2) -> None:
    begin(directory)
    record, signed = make_record(round, samples, lowest=lowest)
    if logs:
        keep_steps(directory, round, record_hash(signed), {PeerId(peer): log for peer, log in logs.items()})
    write_round(directory, record, signed)


def both(*entries: StepEntry) -> Steps:
    """Logs of two stages that both hold all entries."""
    return {"a": (0, entries), "b": (1, entries)}


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    record, signed = make_record(1, [SampleRange(0, 0, 4)])
    write_round(tmp_path, record, signed)
    assert list(read_records(tmp_path)) == [(record, signed)]
    content = json.loads((tmp_path / "rounds/round_0001.json").read_text())
    assert content["hash"] == record_hash(signed)
    assert content["record"]["stages"][0]["members"] == {"R0": 3, "R1": 0}
    assert content["record"]["samples"] == [[0, 0, 4]]
    assert content["record"]["ballot"] == {"number": 1, "peer": CLIENT, "generation": 1}


def test_records_are_in_the_order_of_their_rounds_also_where_names_get_another_digit(tmp_path: Path) -> None:
    begin(tmp_path)
    rounds = (1000, 1001, 9999, 10000, 10001, 100000)
    for round in reversed(rounds):
        write(tmp_path, round, {})
    assert [record.round for record, _ in read_records(tmp_path)] == [*rounds]
    newest = last_record(tmp_path)
    assert newest is not None
    assert newest[0].round == 100000
    # Nor is a run of weeks read from its first record on to know the last one.
    (tmp_path / "rounds/round_1000.json").write_text("{")
    assert last_record(tmp_path) == newest
    record = msgspec.structs.replace(newest[0], round=100001, previous=record_hash(newest[1]))
    assert follows(tmp_path, record)
    (tmp_path / "rounds/round_1000.json").unlink()
    write(tmp_path, 10000, both(entry(0, 0, 4)))
    tenth = next(record for record, _ in read_records(tmp_path) if record.round == 10000)
    digest = next(record_hash(signed) for record, signed in read_records(tmp_path) if record.round == 10000)
    set_aside(tmp_path, tenth, digest)
    assert [record.round for record, _ in read_records(tmp_path)] == [1001, 9999, 10000]
    assert [record.round for record, _ in read_records(tmp_path / "left/1")] == [10001, 100000]


def test_a_record_follows_those_before_it_also_where_its_own_file_is_damaged(tmp_path: Path) -> None:
    first, signed = make_record(1)
    write_round(tmp_path, first, signed)
    second = msgspec.structs.replace(first, round=2, previous=record_hash(signed))
    write_round(tmp_path, second, seal(second))
    assert not follows(tmp_path, second), "it is there"
    (tmp_path / "rounds/round_0002.json").write_text("{")
    assert follows(tmp_path, second)
    assert not follows(tmp_path, msgspec.structs.replace(second, previous="another"))
    (tmp_path / "rounds/round_0001.json").write_text("{")
    with pytest.raises(RecordRejected, match=r"round_0001\.json is no round record"):
        follows(tmp_path, second)
    (tmp_path / "rounds/round_0002.json").unlink()
    assert follows(tmp_path, first)


def test_steps_are_one_line_each_with_peer_and_stage(tmp_path: Path) -> None:
    write(tmp_path, 1, both(entry(0, 0, 4), entry(1, 4, 8)))
    lines = read_steps(tmp_path, 1)
    assert [(line.peer, line.stage, line.entry.key.number) for line in lines] == [
        ("a", 0, 0),
        ("a", 0, 1),
        ("b", 1, 0),
        ("b", 1, 1),
    ]
    assert lines[0].entry == entry(0, 0, 4)
    assert len((tmp_path / "steps/round_0001.jsonl").read_text().splitlines()) == 4


def test_a_disk_that_fails_as_logs_become_those_of_a_record_is_said_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, signed = make_record(1, [SampleRange(0, 0, 4)])
    keep_steps(tmp_path, 1, record_hash(signed), {PeerId("a"): (0, (entry(0, 0, 4),))})

    def fail(_: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(journal, "sync_directory", fail)
    with pytest.raises(StorageError, match=r"round_0001.jsonl \(Input/output error\): without its records"):
        write_round(tmp_path, record, signed)


def test_a_finished_round_without_logs_keeps_those_written_before(tmp_path: Path) -> None:
    write(tmp_path, 1, both(entry(0, 0, 4)))
    write(tmp_path, 1, {})
    assert len(read_steps(tmp_path, 1)) == 2
    write(tmp_path, 2, {})
    assert rounds_with_steps(tmp_path) == [1], "nobody can say which steps another host has gathered"


def test_names_that_no_round_has_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path, 1, both(entry(0, 0, 4)))
    for name in ("round_².jsonl", "round_x.jsonl", "round_1.jsonl", "round_-1.jsonl"):
        (tmp_path / "steps" / name).touch()
    assert rounds_with_steps(tmp_path) == [1]
    for name in ("2", "1", "²", "x"):
        (tmp_path / "left" / name).mkdir(parents=True)
    assert [path.name for path in left_folders(tmp_path)] == ["1", "2"]


def test_the_logs_of_the_record_that_was_committed_count_and_others_go(tmp_path: Path) -> None:
    committed, dropped = make_record(1, [SampleRange(0, 0, 4)]), make_record(1, [SampleRange(0, 0, 8)])
    for (_, signed), log in ((committed, (entry(0, 0, 4),)), (dropped, (entry(0, 0, 4), entry(1, 4, 8)))):
        keep_steps(tmp_path, 1, record_hash(signed), {PeerId("a"): (0, log)})
    assert rounds_with_steps(tmp_path) == [], "nothing is committed yet"
    for _ in range(2):
        # The second time is that of a client which was killed after the first and has found the record committed.
        write_round(tmp_path, *committed)
        assert [line.entry for line in read_steps(tmp_path, 1)] == [entry(0, 0, 4)]
    assert [path.name for path in (tmp_path / "steps").iterdir()] == ["round_0001.jsonl"]


@pytest.mark.parametrize(("form", "version"), [(None, "an earlier"), (1, "an earlier"), (3, "a later")])
def test_files_of_another_version_are_refused_with_what_to_do(tmp_path: Path, form: int | None, version: str) -> None:
    path = tmp_path / "rounds" / "round_0000.json"
    path.parent.mkdir()
    path.write_text(
        json.dumps({"seed": 7, "told": "in words that nobody knows"} | ({} if form is None else {"form": form}))
    )
    with pytest.raises(RecordRejected, match=f"written by {version} version of shoal: use that one for this run"):
        read_genesis(tmp_path)


def test_the_genesis_is_no_record_and_says_what_it_follows_from(tmp_path: Path) -> None:
    genesis = Genesis(7, AUTHORITY.peer_id, {"a": {"b": 1}}, (1, 2), {"torch": "2"}, {"processor": "one"})
    write_genesis(tmp_path, genesis)
    content = json.loads((tmp_path / "rounds/round_0000.json").read_text())
    assert content == {
        "form": 2,
        "seed": 7,
        "authority": AUTHORITY.peer_id,
        "configuration": {"a": {"b": 1}},
        "num_threads": [1, 2],
        "versions": {"torch": "2"},
        "machine": {"processor": "one"},
    }
    assert read_genesis(tmp_path) == genesis
    write(tmp_path, 1, {}, [SampleRange(0, 0, 4)])
    write(tmp_path, 2, {}, [SampleRange(0, 4, 6)])
    assert [record.round for record, _ in read_records(tmp_path)] == [1, 2]


def test_nothing_unfinished_is_left_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1, {}, [SampleRange(0, 0, 4)])
    before = (tmp_path / "rounds/round_0001.json").read_bytes()

    def fail(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match=r"No space.*free space there"):
        write(tmp_path, 1, {}, [])
    assert (tmp_path / "rounds/round_0001.json").read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "rounds").iterdir()) == ["round_0000.json", "round_0001.json"]


def test_a_disk_that_forces_no_directory_has_the_files_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force = os.fsync

    def of_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        force(descriptor)

    monkeypatch.setattr(os, "fsync", of_files)
    number = errno.EINVAL
    write(tmp_path, 1, both(entry(0, 0, 4)))
    assert [record.round for record, _ in read_records(tmp_path)] == [1]
    number = errno.EIO
    with pytest.raises(StorageError, match="Input/output error"):
        write(tmp_path, 2, {})


def test_a_short_write_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def truncate(descriptor: int) -> None:
        if os.path.isfile(f"/proc/self/fd/{descriptor}"):
            os.ftruncate(descriptor, 3)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", truncate)
    with pytest.raises(StorageError, match="is the disk full"):
        write(tmp_path, 1, both(entry(0, 0, 4)))
    assert not (tmp_path / "steps/round_0001.jsonl").exists()


@pytest.mark.parametrize(
    "text", ["{", 3000 * '{"body":', '{"body": "AA=="}', '{"body": "wA==", "signer": "C", "signature": "00"}']
)
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "rounds").mkdir()
    (tmp_path / "rounds/round_0001.json").write_text(text)
    with pytest.raises(RecordRejected, match=r"round_0001\.json"):
        list(read_records(tmp_path))


def test_a_damaged_step_log_is_named(tmp_path: Path) -> None:
    write(tmp_path, 1, both(entry(0, 0, 4)))
    path = tmp_path / "steps/round_0001.jsonl"
    for damaged in (path.read_bytes()[:-5], b"[" * 3000):
        path.write_bytes(damaged)
        with pytest.raises(RecordRejected, match=r"round_0001\.jsonl"):
            read_steps(tmp_path, 1)


def _is_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def test_an_audit_of_a_run_without_faults(tmp_path: Path) -> None:
    write(tmp_path, 1, both(entry(0, 0, 4), entry(1, 4, 8)))
    write(tmp_path, 2, both(entry(2, 8, 10), entry(3, 0, 4, pass_number=1)))
    found = audit(tmp_path, 10)
    assert (found.rounds, found.steps, found.samples, found.skipped) == (2, 4, 14, 0)
    assert (found.duplicates, found.missing, found.steps_lost) == (0, 0, {0: 0, 1: 0})


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes()[:-5]), _is_a_folder])
def test_an_audit_counts_the_round_whose_step_log_cannot_be_read_by_its_record_and_says_so(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    for round in (1, 2, 3):
        write(tmp_path, round, both(entry(round, 4 * round - 4, 4 * round)), [SampleRange(0, 4 * round - 4, 4 * round)])
    path = tmp_path / "steps/round_0002.jsonl"
    damage(path)
    found = audit(tmp_path, 12)
    assert (found.rounds, found.steps, found.samples, found.samples_before) == (2, 2, 8, 4)
    assert (found.duplicates, found.missing) == (0, 0)
    [(round, reason)] = found.unread.items()
    assert round == 2
    assert str(path) in reason


def _without_its_signature(path: Path) -> None:
    content = json.loads(path.read_bytes())
    path.write_text(json.dumps(content | {"signature": "0" * len(content["signature"])}))


@pytest.mark.parametrize(
    "damage",
    [lambda path: path.write_bytes(path.read_bytes()[:-5]), _is_a_folder, _without_its_signature],
    ids=["cut short", "a folder", "changed"],
)
@pytest.mark.parametrize("damaged", [0, 1, 2, 3])
@pytest.mark.parametrize("has_steps", [True, False])
def test_an_audit_names_a_record_that_cannot_be_read_and_counts_by_all_other_files(
    tmp_path: Path, damage: Callable[[Path], object], damaged: int, has_steps: bool
) -> None:
    for round in (1, 2, 3):
        start = 4 * round
        record, _ = make_record(round, [SampleRange(0, start, start + 4)])
        record = msgspec.structs.replace(record, recorded=(SampleRange(0, 0, start),))
        signed, logs = seal(record), both(entry(round, start, start + 4))
        begin(tmp_path, outer_steps=3)
        if has_steps or round == 3:
            keep_steps(tmp_path, round, record_hash(signed), {PeerId(peer): log for peer, log in logs.items()})
        write_round(tmp_path, record, signed)
    whole, path = audit(tmp_path, 16), tmp_path / f"rounds/round_{damaged:04d}.json"
    assert (whole.samples + whole.samples_before, whole.duplicates, whole.missing) == (16, 0, 0)
    if damaged == 0 and damage is _without_its_signature:
        path.write_text("{}")
    else:
        damage(path)
    with pytest.raises((RecordRejected, OSError), match=path.name):
        audit(tmp_path, 16)
    found = audit(tmp_path, 16, is_strict=False)
    [(round, reason)] = found.unread_records.items()
    assert round == damaged
    assert str(path) in reason
    assert dataclasses.replace(found, unread_records={}) == whole


def test_without_any_record_that_can_be_read_an_audit_counts_by_the_step_logs(tmp_path: Path) -> None:
    for round in (1, 2):
        write(tmp_path, round, both(entry(round, 4 * round - 4, 4 * round)), [SampleRange(0, 4 * round - 4, 4 * round)])
    for path in (tmp_path / "rounds").iterdir():
        path.write_bytes(b"\0" * 100)
    found = audit(tmp_path, 8, is_strict=False)
    assert (found.samples, found.duplicates, found.missing) == (8, 0, 0)
    assert sorted(found.unread_records) == [0, 1, 2]


def test_an_audit_of_a_long_run_has_one_step_log_in_memory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for round in (1, 2, 3):
        write(tmp_path, round, both(entry(round, 4 * round - 4, 4 * round)), [SampleRange(0, 4 * round - 4, 4 * round)])
    alive: weakref.WeakSet[_Lines] = weakref.WeakSet()

    def read(directory: Path, round: int) -> list[StepLine]:
        assert len(alive) <= 1, "that of the round before is let go when this one is there"
        alive.add(lines := _Lines(read_steps(directory, round)))
        return lines

    monkeypatch.setattr("shoal.averaging.audit.read_steps", read)
    found = audit(tmp_path, 12)
    assert (found.rounds, found.steps, found.samples, found.missing, found.first_round) == (3, 3, 12, 0, 1)


class _Lines(list[StepLine]):
    """That can be seen to be let go."""

    __hash__ = object.__hash__


def test_an_audit_counts_samples_in_two_steps(tmp_path: Path) -> None:
    write(tmp_path, 1, both(entry(0, 0, 4), entry(1, 2, 6)))
    assert audit(tmp_path, 10).duplicates == 2


def test_an_audit_counts_two_attempts_of_one_step_twice(tmp_path: Path) -> None:
    write(tmp_path, 1, both(entry(0, 0, 4), entry(0, 0, 4, attempt=1)))
    assert audit(tmp_path, 10).duplicates == 4


def test_an_audit_counts_a_step_that_is_in_two_rounds_twice(tmp_path: Path) -> None:
    write(tmp_path, 1, both(entry(0, 0, 4)))
    write(tmp_path, 2, both(entry(0, 0, 4)))
    assert audit(tmp_path, 10).duplicates == 4


def test_an_audit_counts_gaps_below_the_frontier_and_the_rest_of_ended_passes(tmp_path: Path) -> None:
    write(tmp_path, 1, both(entry(0, 0, 2), entry(1, 4, 6)))
    assert audit(tmp_path, 10).missing == 2
    write(tmp_path, 2, both(entry(2, 3, 4, pass_number=1)))
    assert audit(tmp_path, 10).missing == 2 + 4 + 3


def test_an_audit_makes_no_list_of_the_passes_that_a_step_may_name(tmp_path: Path) -> None:
    last = 1 << 32
    write(tmp_path, 1, both(entry(0, 0, 10), entry(1, 0, 4, pass_number=last)))
    assert audit(tmp_path, 10).missing == 10 * (last - 1)


def test_what_the_end_of_the_run_has_cut_off_is_not_missing(tmp_path: Path) -> None:
    write(tmp_path, 1, both(entry(0, 0, 4)))
    write(tmp_path, 2, both(entry(1, 4, 6), entry(2, 8, 9)))
    assert (audit(tmp_path, 10).missing, audit(tmp_path, 10).unreached) == (2, 0)
    # A client that has taken over ended round 2: its trainers could train 6 and 7 in a later one only.
    write(tmp_path, 2, both(entry(1, 4, 6), entry(2, 8, 9)), lowest=1002)
    assert (audit(tmp_path, 10).missing, audit(tmp_path, 10).unreached) == (0, 2)
    # There is one, and it was ended early as well.
    write(tmp_path, 3, both(entry(3, 9, 10)), lowest=2003)
    assert (audit(tmp_path, 10).missing, audit(tmp_path, 10).unreached) == (0, 2)
    # Another one ran to its end, without them.
    write(tmp_path, 4, both(entry(4, 0, 1, pass_number=1)))
    assert (audit(tmp_path, 10).missing, audit(tmp_path, 10).unreached) == (2, 0)


def test_what_the_last_round_before_an_interruption_has_left_out_is_not_missing(tmp_path: Path) -> None:
    begin(tmp_path, outer_steps=2)
    write(tmp_path, 1, both(entry(0, 0, 4), entry(1, 6, 8)))
    assert (audit(tmp_path, 10).missing, audit(tmp_path, 10).unreached) == (0, 2)
    write(tmp_path, 2, both(entry(2, 8, 9)))
    assert (audit(tmp_path, 10).missing, audit(tmp_path, 10).unreached) == (2, 0)


def test_what_only_replicas_had_that_were_lost_in_the_last_round_is_not_missing(tmp_path: Path) -> None:
    write(tmp_path, 1, both(entry(0, 0, 2), entry(1, 4, 6)))
    assert (audit(tmp_path, 10).missing, audit(tmp_path, 10).unreached) == (2, 0)
    # Stage 1 has lost a step of it, so replicas are gone that may have had others, of which nobody else knows.
    write(tmp_path, 1, {"a": (0, (entry(0, 0, 2), entry(1, 4, 6))), "b": (1, (entry(0, 0, 2),))})
    assert (audit(tmp_path, 10).missing, audit(tmp_path, 10).unreached) == (0, 2)
    # A later round was there to train them.
    write(tmp_path, 2, both(entry(2, 6, 8)))
    assert (audit(tmp_path, 10).missing, audit(tmp_path, 10).unreached) == (2, 0)


@pytest.mark.parametrize(("members", "counts"), [({"R0": 3, "R1": 0}, (2, 0)), ({"R0": 3}, (0, 2))])
def test_a_member_that_is_none_of_the_last_record_may_have_taken_steps_with_it(
    tmp_path: Path, members: dict[str, int], counts: tuple[int, int]
) -> None:
    write(tmp_path, 1, both(entry(0, 0, 2)))
    write(tmp_path, 2, both(entry(1, 4, 6)))
    lines = {round: read_steps(tmp_path, round) for round in (1, 2)}
    first, last = (record for record, _ in read_records(tmp_path))
    (outcome,) = last.stages
    peers, weights = tuple(map(PeerId, members)), tuple(members.values())
    last = msgspec.structs.replace(last, stages=(msgspec.structs.replace(outcome, members=peers, weights=weights),))
    found = audit_of(lines, (first, last), 10, 0)
    assert (found.missing, found.unreached) == counts


def test_what_an_earlier_round_has_left_out_is_missing_though_the_last_one_was_cut_short(tmp_path: Path) -> None:
    write(tmp_path, 1, both(entry(0, 0, 4), entry(1, 5, 6)))
    write(tmp_path, 2, both(entry(2, 8, 9)), lowest=1002)
    assert (audit(tmp_path, 10).missing, audit(tmp_path, 10).unreached) == (1, 2)


def test_an_audit_counts_a_pass_that_was_left_out(tmp_path: Path) -> None:
    write(tmp_path, 1, both(entry(0, 0, 10), entry(1, 0, 1, pass_number=2)))
    assert audit(tmp_path, 10).missing == 10


def test_an_audit_keeps_skipped_steps_apart(tmp_path: Path) -> None:
    write(tmp_path, 1, both(entry(0, 0, 4), entry(1, 4, 8, skipped=True)))
    found = audit(tmp_path, 10)
    assert (found.samples, found.skipped, found.missing, found.duplicates) == (4, 4, 0, 0)


def test_an_audit_counts_the_rounds_that_a_restored_stage_has_lost(tmp_path: Path) -> None:
    for round in (1, 2, 3, 4):
        write(tmp_path, round, both(entry(round, round * 4 - 4, round * 4)))
    # In round 2 stage 1 has lost its step already; in round 4 it goes on from what it was after round 1.
    write(tmp_path, 2, {"a": (0, (entry(2, 4, 8),)), "b": (1, ())})
    hashes = StageHashes("p", "m", "b")
    outcome = StageOutcome(1, 0, (PeerId("b"),), (4,), hashes, 0, Basis(1, hashes))
    record = Record("run", 4, Ballot(1, CLIENT, 1), "0", (outcome,), (), (), {})
    signed = seal(record)
    logs = {PeerId(peer): log for peer, log in both(entry(4, 12, 16)).items()}
    keep_steps(tmp_path, 4, record_hash(signed), logs)
    write_round(tmp_path, record, signed)
    assert audit(tmp_path, 16).steps_lost == {0: 0, 1: 2}


def test_an_audit_counts_what_a_stage_has_lost(tmp_path: Path) -> None:
    kept, lost = entry(0, 0, 4), entry(1, 4, 8)
    write(tmp_path, 1, {"a": (0, (kept, lost)), "b": (1, (kept,))})
    found = audit(tmp_path, 10)
    assert found.steps_lost == {0: 0, 1: 1}
    assert (found.samples, found.duplicates) == (8, 0)


FRAGMENT_CASES = {
    # Of two replicas and three fragments: what the second one weighs in rounds 3 and 4, and the steps of which it has
    # lost some fragments then. Each replica trains a step of four targets in each round.
    "nothing": (12, 12, 0),
    "it goes on without what it had": (4, 8, 2),
    "it is no member": (None, 4, 2),
    "it is not finite": (0, 4, 2),
    "and once more": (None, None, 2),
}


def of_fragments(
    weights: Sequence[tuple[int, int | None]], restored: Mapping[int, int] | None = None
) -> tuple[dict[int, list[StepLine]], list[Record]]:
    """Step logs and records of a stage; `restored` by round, and from the record of which round."""
    hashes = StageHashes("p", "m", "b")
    lines, records = dict[int, list[StepLine]](), list[Record]()
    for round, (first, second) in enumerate(weights, 1):
        weigh = {PeerId("a"): first} | ({} if second is None else {PeerId("b"): second})
        basis = Basis(restored[round], hashes) if restored and round in restored else None
        scales = (1.0, 0.0) if second == 0 else ()
        outcome = StageOutcome(0, 0, tuple(weigh), tuple(weigh.values()), hashes, 0, basis, scales)
        records.append(Record("run", round, Ballot(1, CLIENT, 1), "0", (outcome,), (), (), {}))
        lines[round] = [
            StepLine(peer, 0, entry(2 * round + slot, 8 * round + 4 * slot, 8 * round + 4 * slot + 4, path="a"))
            for slot, peer in enumerate(weigh)
        ]
    return lines, records


@pytest.mark.parametrize("case", FRAGMENT_CASES)
def test_an_audit_counts_steps_of_which_a_stage_has_some_fragments_only(case: str) -> None:
    third, fourth, lost = FRAGMENT_CASES[case]
    files = of_fragments([(4, 4), (8, 8), (12, third), (12, fourth)])
    assert sum(audit_of(*files, 1000, 4, CutRule(3)).lost_in_part.values()) == lost
    assert audit_of(*files, 1000, 4).lost_in_part == {}


@pytest.mark.parametrize(
    ("num_fragments", "weights", "lost"),
    [
        # Each replica trains three steps of four targets in each round, and is cut after two.
        (1, [(8, 8), (12, 12), (12, 12)], 0),
        (1, [(8, 8), (12, 8), (12, 12)], 1),
        (1, [(8, 8), (12, None), (12, 8)], 1),
        (2, [(8, 8), (20, 20), (24, 24)], 0),
        (2, [(8, 8), (20, 20), (24, 8)], 4),
    ],
)
def test_an_audit_counts_what_was_trained_behind_a_cut_and_is_in_no_average(
    num_fragments: int, weights: Sequence[tuple[int, int | None]], lost: int
) -> None:
    lines, records = of_fragments(weights)
    for round, of_round in lines.items():
        first = [msgspec.structs.replace(line.entry, version=0) for line in of_round]
        lines[round] = [
            StepLine(line.peer, 0, msgspec.structs.replace(each, key=each.key._replace(attempt=number)))
            for line, each in zip(of_round, first, strict=True)
            for number in range(3)
        ]
    cuts = CutRule(num_fragments, cut_after=2)
    assert sum(audit_of(lines, records, 1000, 3, cuts).lost_in_part.values()) == lost


@pytest.mark.parametrize(("basis", "lost"), [(1, 2), (0, 0)])
def test_steps_that_a_restored_stage_has_lost_altogether_are_not_counted_as_lost_in_part(basis: int, lost: int) -> None:
    found = audit_of(*of_fragments([(4, 4), (8, 8), (4, 4)], {3: basis}), 1000, 3, CutRule(3))
    assert (found.steps_lost[0], sum(found.lost_in_part.values())) == (2 * (2 - basis), lost)


def test_an_audit_counts_what_clients_of_other_hosts_have_used(tmp_path: Path) -> None:
    inherited, _ = make_record(3, [SampleRange(0, 8, 10), SampleRange(1, 0, 4)])
    inherited = msgspec.structs.replace(inherited, recorded=(SampleRange(0, 0, 8),))
    begin(tmp_path)
    write_round(tmp_path, inherited, seal(inherited))
    write(tmp_path, 4, both(entry(0, 4, 7, pass_number=1)), [SampleRange(1, 4, 7)])
    found = audit(tmp_path, 10)
    assert (found.first_round, found.samples_before, found.samples) == (4, 14, 3)
    assert (found.duplicates, found.missing) == (0, 0)
    write(tmp_path, 5, both(entry(1, 8, 9, pass_number=1), entry(2, 1, 3, pass_number=1), entry(3, 5, 6)))
    found = audit(tmp_path, 10)
    assert (found.duplicates, found.missing) == (2 + 1, 1), "as if this host had seen all"


def rebase(recorded: Sequence[SampleRange]) -> Record:
    """The first record of a fork of round 3 of another run."""
    origin, signed = make_record(3, [SampleRange(0, 0, 8)])
    return rebase_record(
        run_id="run",
        genesis="D_0",
        ballot=Ballot(1, CLIENT, 1),
        origin=msgspec.structs.replace(origin, run_id="other"),
        origin_hash=record_hash(signed),
        stages=[StageHashes("p", "m", "b")] * 2,
        recorded=recorded,
    )


@pytest.mark.parametrize("recorded", [(SampleRange(0, 0, 8),), ()], ids=["same data", "other data"])
def test_an_audit_of_a_fork_counts_what_it_takes_over_as_used_before(
    tmp_path: Path, recorded: Sequence[SampleRange]
) -> None:
    begin(tmp_path, outer_steps=5)
    first = rebase(recorded)
    write_round(tmp_path, first, seal(first))
    begun = audit(tmp_path, 10)
    assert (begun.samples_before, begun.samples, begun.missing) == (8 * bool(recorded), 0, 0)
    next_start = 8 * bool(recorded)
    write(tmp_path, 4, both(entry(0, next_start, next_start + 2)))
    found = audit(tmp_path, 10)
    assert (found.first_round, found.samples_before, found.samples) == (4, next_start, 2)
    assert (found.duplicates, found.missing, found.unreached) == (0, 0, 0)
    write(tmp_path, 5, both(entry(1, 1, 3)))
    assert audit(tmp_path, 10).duplicates == (2 if recorded else 1)


def test_an_audit_of_nothing_is_empty(tmp_path: Path) -> None:
    found = audit(tmp_path, 10)
    assert (found.rounds, found.samples, found.missing, found.steps_lost) == (0, 0, 0, {})


def test_an_audit_refuses_a_record_that_somebody_without_the_swarm_key_has_signed(tmp_path: Path) -> None:
    write(tmp_path, 1, both(entry(0, 0, 4)))
    stranger, own_authority = Identity.generate(), Identity.generate()
    record, _ = make_record(2)
    record = msgspec.structs.replace(record, ballot=Ballot(2, stranger.peer_id, 1))
    write_round(tmp_path, record, Signer(stranger, own_authority, "run").seal(record))
    with pytest.raises(RecordRejected, match=f"{stranger.peer_id} signed record 2 of run run without having the swarm"):
        audit(tmp_path, 10)
    write_round(tmp_path, record, Signer(stranger, AUTHORITY, "run").seal(record))
    assert audit(tmp_path, 10).rounds == 1, "a client of another host that has the key may take over"


def test_an_audit_of_records_wants_to_know_who_may_sign_them(tmp_path: Path) -> None:
    write(tmp_path, 1, both(entry(0, 0, 4)))
    (tmp_path / "rounds/round_0000.json").unlink()
    with pytest.raises(FileNotFoundError, match="round_0000"):
        audit(tmp_path, 10)


def test_records_of_a_chain_that_was_left_are_put_away_and_those_of_the_run_stay(tmp_path: Path) -> None:
    begin(tmp_path)
    first, signed = make_record(1)
    keep_steps(tmp_path, 1, record_hash(signed), {PeerId("R0"): (0, ())})
    write_round(tmp_path, first, signed)
    following = msgspec.structs.replace(first, round=2, previous=record_hash(signed))
    set_aside(tmp_path, following, "its hash")
    assert set_aside(tmp_path, first, record_hash(signed)) == {}
    assert [record.round for record, _ in read_records(tmp_path)] == [1]
    for number in (1, 2):
        set_aside(tmp_path, msgspec.structs.replace(first, previous="of another chain"), "another hash")
        assert (list(read_records(tmp_path)), rounds_with_steps(tmp_path)) == ([], [])
        assert read_genesis(tmp_path).seed == 1
        assert (tmp_path / "left" / str(number) / "rounds" / "round_0001.json").exists()
        assert (tmp_path / "left" / "1" / "steps" / "round_0001.jsonl").exists()
        write_round(tmp_path, first, signed)
