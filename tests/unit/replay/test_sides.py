"""Which part of the replicas' generations belongs to the chain that is replayed, when a split has left another one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from shoal.averaging.journal import Genesis
from shoal.config.schema import Config
from shoal.ids import Ballot, PeerId, StepKey
from shoal.pipeline.replica_log import Applied, Began, Line, Loaded, Place, Resumed
from shoal.replay.generations import Generation, generations_of, members_of
from shoal.replay.order import Apply, Compute, ReplayOrder
from shoal.replay.run_files import RunFiles
from shoal.replay.sides import Side, later_records, needed_of, side_of
from shoal.swarm.records import Tip, record_hash, seal
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.round import Record, SignedRecord, StageHashes, StageOutcome

PLACE = Place("cpu", 1, {}, {})
HASHES = StageHashes("p", "m", "b")
ALL = ("P", "Q"), ("R", "S")
HERE = ("P",), ("R",)
"""Those that go on with the chain that stands; Q and S are parted from them."""


def sealed(round: int, members: Sequence[Sequence[str]]) -> tuple[Record, SignedRecord]:
    outcomes = [
        StageOutcome(stage, 0, tuple(map(PeerId, peers)), tuple(1 for _ in peers), HASHES, 0)
        for stage, peers in enumerate(members)
    ]
    record = Record("run", round, Ballot(1, PeerId("C"), 1), "", tuple(outcomes), (), (), {})
    return record, seal(record, PeerId("C"), lambda _: b"")


GENESIS = Tip(0, "D0", None)
CHAIN = [sealed(1, ALL), sealed(2, HERE), sealed(3, ALL)]


def key(step: str) -> StepKey:
    return StepKey("abc".index(step[0]), 1, int(step[1:]), 0)


def generations(chain: Sequence[tuple[Record, SignedRecord]] = CHAIN, /, **scripts: str) -> list[Generation]:
    """Generations by peer; P and Q serve stage 0. L1 loads record 1 of the chain and L1' that of another one, A3 does
    with an optimizer that begins anew, QS+a0 begins a step over that path, a0 commits it, S1 goes on from the snapshot
    of the peer's first file after one commit; | begins another file."""
    records = {str(record.round): record_hash(signed) for record, signed in chain}
    found: list[Generation] = []
    for name, script in scripts.items():
        peer = PeerId(name)
        files: dict[tuple[PeerId, int], list[Generation]] = {}
        for number, of_file in enumerate(script.split("|"), 1):
            told = list(lines(of_file, records))
            files[peer, number] = generations_of(len(found), peer, int(name in "RS"), PLACE, told, dict(files))
            found += files[peer, number]
    return found


def lines(script: str, records: Mapping[str, str]) -> Iterable[Line]:
    for word in script.split():
        if word[0] in "LA" and "+" not in word:
            yield Loaded(int(word[1:].rstrip("'")), HASHES, records.get(word[1:], word[1:]), anew=word[0] == "A")
        elif word[0] == "S" and "+" not in word:
            yield Resumed(1, int(word[1:]))
        elif "+" in word:
            path, step = word.split("+")
            yield Began(key(step), tuple(map(PeerId, path)), (SampleRange(0, 0, 1),), (1,), (1,))
        else:
            yield Applied(key(word), 1.0, 0.1, False, 1.0, None)


def done_by(
    all_generations: Sequence[Generation], chain: Sequence[tuple[Record, SignedRecord]] = CHAIN
) -> dict[str, list[str]]:
    """Which steps each peer commits when a chain is replayed, and which are computed at all."""
    side = side_of(GENESIS, chain, all_generations)
    assert not side.strays
    members = [members_of(record, side.generations, {}) for record, _ in chain]
    done: dict[str, list[str]] = {}
    for action in ReplayOrder([record for record, _ in chain], needed_of(side, all_generations, members), members):
        match action:
            case Compute(_, began, path):
                peers = "".join(generation.peer for generation in path)
                done.setdefault("computed", []).append(f"{'abc'[began.key.trainer]}{began.key.number}{peers}")
            case Apply(_, generation, applied):
                done.setdefault(generation.peer, []).append(f"{'abc'[applied.key.trainer]}{applied.key.number}")
            case _:
                pass
    return done


STANDING = {
    "P": "L0 PR+a0 a0 L1 PR+a1 a1 L2 PR+a2 a2 L3",
    "R": "L0 PR+a0 a0 L1 PR+a1 a1 L2 PR+a2 a2 L3",
}


def test_what_the_other_side_has_trained_is_left_out_and_what_it_trains_after_it_is_not() -> None:
    apart = "L0 QS+b0 b0 L1 QS+b1 b1 L2' QS+b2 b2 L3' QS+b3 b3 A2 QS+c2 c2 L3"
    done = done_by(generations(**STANDING, Q=apart, S=apart))
    assert done["Q"] == done["S"] == ["b0", "c2"]
    assert done["P"] == ["a0", "a1", "a2"]
    assert sorted(done["computed"]) == ["a0PR", "a1PR", "a2PR", "b0QS", "c2QS"]


def test_a_side_that_parts_in_the_first_round_has_only_the_beginning_in_common() -> None:
    apart = "L0 QS+a0 a0 L1' QS+b1 b1 A2 QS+c2 c2 L3"
    chain = [sealed(1, HERE), sealed(2, HERE), sealed(3, ALL)]
    done = done_by(generations(chain, **STANDING, Q=apart, S=apart), chain)
    assert (done["Q"], done["S"]) == (["c2"], ["c2"])


def test_of_the_round_in_which_they_parted_only_that_is_computed_on_which_the_chain_depends() -> None:
    # Q has committed b1 before a1, which P commits and Q too; b2 came when they were apart. S has no part in a1.
    found = generations(
        P="L0 PR+a0 a0 L1 QR+a1 L2 PR+a2 a2 L3",
        R="L0 PR+a0 a0 L1 QR+a1 a1 L2 PR+a2 a2 L3",
        Q="L0 L1 QS+b1 b1 QR+a1 a1 QS+b2 b2 L2' A2 L3",
        S="L0 L1 QS+b1 b1 QS+b2 b2 L2' A2 L3",
    )
    done = done_by(found)
    assert sorted(done["computed"]) == ["a0PR", "a1QR", "a2PR", "b1QS"]
    assert done["Q"] == ["b1"]


def test_what_was_trained_apart_counts_for_who_keeps_its_optimizer() -> None:
    """The other side has recorded nothing: its servers go on from where they were. Both sides had a step a1."""
    apart = "L0 L1 QS+a1 a1 L2 QS+c2 c2 L3"
    done = done_by(generations(**STANDING, Q=apart, S=apart))
    assert done["Q"] == done["S"] == ["a1", "c2"]
    assert sorted(done["computed"]) == ["a0PR", "a1PR", "a1QS", "a2PR", "c2QS"]


def test_a_server_of_the_side_that_was_left_may_have_been_started_again_there() -> None:
    found = generations(
        **STANDING,
        Q="L0 QS+b0 b0 L1 L2' QS+b2 b2 | L2' QS+b3 b3 A2 QS+c2 c2 L3",
        S="L0 QS+b0 b0 L1 L2' QS+b2 b2 QS+b3 b3 A2 QS+c2 c2 L3",
    )
    assert done_by(found)["Q"] == ["b0", "c2"]


def test_a_snapshot_is_that_of_the_chain_on_which_it_was_made() -> None:
    # The first file has two parts in round 3, of both chains; the second one goes on from that of this chain.
    found = generations(
        **STANDING,
        Q="L0 L1 L2 QS+c2 c2 QS+c3 A2' QS+b2 b2 QS+b3 b3 | L2 S1 QS+c4 c4 L3",
        S="L0 L1 L2 QS+c2 c2 QS+c3 QS+c4 c4 L3",
    )
    assert [entry.key.number for entry in found[-2].segments[0].log] == [2, 4]
    assert done_by(found)["Q"] == ["c2", "c4"]


def test_a_snapshot_from_before_the_sides_parted_is_made_again_though_its_server_then_left() -> None:
    found = generations(
        **STANDING,
        Q="L0 L1 L2 QS+c2 c2 QS+c3 L3' | L2 S1 QS+c4 c4 L3",
        S="L0 L1 L2 QS+c2 c2 QS+c3 QS+c4 c4 L3",
    )
    assert done_by(found)["Q"] == ["c2", "c4"]


def test_who_comes_back_from_another_chain_without_beginning_anew_is_named() -> None:
    apart = "L0 L1 QS+b1 b1 L2' L2 QS+c2 c2 L3"
    found = generations(**STANDING, Q=apart, S="L0 L1 L2' A2 QS+c2 c2 L3")
    [stray] = side_of(GENESIS, CHAIN, found).strays
    assert (stray.round, stray.stage, stray.replica) == (3, 0, "Q")
    assert "comes to record 2 from record 2 of another chain" in stray.what


def test_a_log_that_does_not_say_which_records_is_followed_by_their_rounds() -> None:
    generation = generations(P=STANDING["P"])[0]
    old = replace(
        generation, segments=tuple(replace(s, loaded=Loaded(s.loaded.round, HASHES)) for s in generation.segments)
    )
    side = side_of(GENESIS, CHAIN, [old])
    assert (side.generations, side.strays) == ((old,), ())


def later(found: Sequence[Generation], *, left: Iterable[str] = (), uncommitted: Iterable[int] = ()) -> str | None:
    files = RunFiles(
        Path(),
        "run",
        cast("Config", None),
        cast("Genesis", None),
        tuple(CHAIN),
        {},
        frozenset(uncommitted),
        tuple(found),
        frozenset(left),
    )
    side: Side = side_of(GENESIS, CHAIN, found)
    differences = list(later_records(side, files))
    assert len(differences) <= 1
    return differences[0].what if differences else None


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("L0 L1 L2 L3", None),
        ("L0 L1 L2 L3 L4", "has held record 4, whose file is missing"),
        ("L0 L1 L2' L3' L4' L5' A2 L3", None),
        ("L0 L1 L2' A4", "has held record 4, whose file is missing"),
        ("L5' A3", None),
        ("L5'", "has held record 5, whose file is missing"),
        ("L0 L1 L2 A4'", "of the side that was left"),
    ],
)
def test_a_record_that_is_missing_is_one_of_the_chain(script: str, found: str | None) -> None:
    what = later(generations(P=script))
    assert what is None if found is None else what is not None and found in what


def test_what_may_not_have_been_committed_or_is_known_to_be_of_another_chain_is_not_missing() -> None:
    assert later(generations(P="L0 L1 L2 L3 L4"), uncommitted=[4]) is None
    assert later(generations(P="L5'"), left=["5'"]) is None
