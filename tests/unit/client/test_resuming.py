"""The folder of a run as its client would have left it at a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from tests.unit.averaging.test_journal import both, entry, make_record, seal, write
from tests.unit.client.noted import totals_of
from tests.unit.swarm.test_round_coordinator import unsealed

from shoal.averaging.journal import genesis_file, keep_steps, read_records, rounds_with_steps, write_round
from shoal.checkpoint.stored import StoredCheckpoint
from shoal.client.diary import Diary, Saved, leave_saved
from shoal.client.resuming import KeptTotals, go_back, needed_checkpoint
from shoal.client.totals import RunTotals
from shoal.control.role_start import ResumedFrom
from shoal.errors import StorageError
from shoal.events.losses import ServerLost
from shoal.events.run import RoleCounted, RoundBegun, RunLaunched, RunPaused, ShareEvaluated, StepReported
from shoal.ids import PeerId
from shoal.swarm.records import record_hash
from shoal.wire.messages import SampleRange

A = PeerId("a")
USED = [SampleRange(0, 0, 8)]


def step(number: int, at_s: float, slot: int = 0) -> StepReported:
    return StepReported(slot, number, 0, 4, 4, 2.5, False, 0.5, at_s)


def checkpoint_of(round: int, client: bytes, genesis: bytes = b'{"a copy": 1}', marks: bytes = b"") -> StoredCheckpoint:
    record = msgspec.structs.replace(make_record(round, USED)[0], marks=marks)
    signed = seal(record)
    return cast(StoredCheckpoint, SimpleNamespace(signed=signed, record=record, client=client, genesis=genesis))


def counted(totals: RunTotals | None = None, at_s: float = 50.0) -> bytes:
    return KeptTotals(totals or totals_of(RunLaunched(10.0)), at_s).encoded()


def test_the_next_client_finds_the_record_its_samples_and_what_was_counted(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(2, counted(), marks=b"held outwindow 0")
    assert go_back(tmp_path, checkpoint, 1000.0) == []
    diary = Diary(tmp_path, "run")
    saved, digest = diary.saved, record_hash(checkpoint.signed)
    assert diary.is_resumed
    assert (saved.plan, saved.is_finished, saved.recorded) == (None, False, tuple(USED))
    assert (saved.base, saved.chain, saved.resumed) == (digest, digest, checkpoint.signed)
    assert saved.marks == b"held outwindow 0", "what is read anew is compared with it"
    assert saved.totals.launched_s == 960.0, "40 seconds of the run have passed, as on that clock"
    assert [record.round for record, _ in read_records(tmp_path)] == [2]
    assert (tmp_path / "rounds/round_0000.json").read_bytes() == checkpoint.genesis
    diary.close()


def test_records_after_the_checkpoint_are_set_aside_and_those_before_stay(tmp_path: Path) -> None:
    for round in (1, 2, 3):
        write(tmp_path, round, both(entry(round, 4 * round, 4 * round + 4)), USED if round == 2 else ())
    begun = (tmp_path / "rounds/round_0000.json").read_bytes()
    leave_saved(tmp_path, Saved("run", RunTotals(), generation=3))
    go_back(tmp_path, checkpoint_of(2, counted()), 1000.0)
    assert [record.round for record, _ in read_records(tmp_path)] == [1, 2]
    assert rounds_with_steps(tmp_path) == [1, 2]
    assert [record.round for record, _ in read_records(tmp_path / "left/1")] == [3]
    assert rounds_with_steps(tmp_path / "left/1") == [3]
    assert (tmp_path / "rounds/round_0000.json").read_bytes() == begun
    go_back(tmp_path, checkpoint_of(2, counted()), 1000.0)
    assert not (tmp_path / "left/2").exists(), "going back twice is going back once"


@pytest.mark.parametrize("client", [b"{}", b"", b"\xff", b'{"totals": [], "at_s": 1}', b"[" * 5000])
def test_without_what_was_counted_the_record_alone_is_gone_on_from(tmp_path: Path, client: bytes) -> None:
    [said] = go_back(tmp_path, checkpoint_of(2, client), 1000.0)
    assert "its summary counts from here" in said
    diary = Diary(tmp_path, "run")
    assert diary.saved.totals.rounds == 2
    assert diary.saved.totals.hashes == {0: "p"}
    assert diary.saved.recorded == tuple(USED)
    diary.close()


@pytest.mark.parametrize("damaged", [0, 2, 3])
def test_a_file_of_the_run_that_is_damaged_keeps_nobody_from_the_checkpoint_and_is_named_and_kept(
    tmp_path: Path, damaged: int
) -> None:
    """As a loss of power leaves it, or a disk that fails."""
    write(tmp_path, 1, both(entry(1, 4, 8)))
    first = make_record(1)[1]
    following, _ = make_record(2, USED)
    following = msgspec.structs.replace(following, previous=record_hash(first))
    signed = seal(following)
    for record in (following, make_record(3)[0]):
        keep_steps(tmp_path, record.round, record_hash(seal(record)), {A: (0, (entry(2, 8, 12),))})
        write_round(tmp_path, record, seal(record))
    copy = genesis_file(tmp_path)
    given = SimpleNamespace(signed=signed, record=following, client=counted(), genesis=copy)
    checkpoint = cast(StoredCheckpoint, given)
    [path] = tmp_path.glob(f"rounds/round_{damaged:04d}.json")
    path.write_bytes(b"")
    [said] = go_back(tmp_path, checkpoint, 1000.0)
    assert said.startswith(f"{path} is damaged (")
    assert said.endswith(": it is set aside")
    assert [record.round for record, _ in read_records(tmp_path)] == [1, 2]
    assert rounds_with_steps(tmp_path) == ([1] if damaged == 2 else [1, 2])
    assert genesis_file(tmp_path) == copy
    [kept] = tmp_path.rglob(f"{path.name}.damaged")
    assert kept.read_bytes() == b""
    assert go_back(tmp_path, checkpoint, 1000.0) == []


def test_times_move_with_the_clock_and_nobody_is_waited_for_any_more() -> None:
    lost = ServerLost(A, "server 0", 1, 0.5, "07:00:00Z", ("server 1",), (0, 1), 30.0)
    totals = totals_of(
        RunLaunched(10.0), RoundBegun(3, 4, 1, 1, 2), step(8, 20.0), step(9, 22.0), lost, RoleCounted(A, {"refused": 2})
    )
    assert totals.incidents.all[0].waiting == {0, 1}
    totals.move(50.0, 1050.0)
    assert totals.launched_s == 1010.0
    assert totals.seconds_to_first_step == 10.0
    assert totals.progress.mean_samples_per_s() == 4 / 2.0
    [incident] = totals.incidents.all
    assert (incident.noticed_s, incident.began_s, incident.waiting) == (1030.0, 1029.5, set())
    assert totals.progress.recent_samples_per_s() == 0.0
    totals.counted.take(RoleCounted(A, {"refused": 5}))
    assert totals.counted.sums() == {"refused": 7}, "a process that counts anew adds to what the last one had"


def test_a_paused_run_that_is_resumed_from_a_checkpoint_goes_on() -> None:
    totals = totals_of(RunLaunched(10.0), RunPaused("somebody", 40.0))
    totals.move(50.0, 1000.0)
    assert not totals.time.is_paused
    assert totals.time.paused_s == 10.0


def test_a_loss_that_is_no_number_makes_the_counts_unreadable_and_nothing_worse(tmp_path: Path) -> None:
    totals = totals_of(RunLaunched(10.0), RoundBegun(1, 4, 1, 1, 2), ShareEvaluated(0, 0, math.nan, 4, 4))
    totals.progress.eval_losses[0] = math.nan
    assert "float" in go_back(tmp_path, checkpoint_of(2, counted(totals)), 1000.0)[0]


def test_a_start_of_a_client_opens_the_checkpoint_only_while_the_run_has_not_gone_on(tmp_path: Path) -> None:
    source, resumes = ResumedFrom(str(tmp_path), 2), Saved("run", RunTotals(), resumed=checkpoint_of(2, b"").signed)
    with pytest.raises(StorageError):
        needed_checkpoint(source, resumes, unsealed)
    assert needed_checkpoint(source, Saved("run", RunTotals()), unsealed) is None
    assert needed_checkpoint(None, resumes, unsealed) is None


def test_totals_come_back_as_they_were() -> None:
    import msgspec

    lost = ServerLost(A, "server 0", 1, 0.5, "07:00:00Z", ("server 1",), (0, 1), 30.0)
    totals = totals_of(RunLaunched(10.0), RoundBegun(3, 4, 1, 1, 2), step(8, 20.0), step(9, 22.0, slot=1), lost)
    back: Any = msgspec.json.decode(counted(totals), type=KeptTotals)
    assert back.totals == totals
