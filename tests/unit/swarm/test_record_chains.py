"""Which record came before which, and where chains have parted."""

from __future__ import annotations

import msgspec
import pytest

from shoal.ids import Ballot, PeerId
from shoal.swarm.record_chains import heads, is_before, num_samples, parted_after
from shoal.swarm.records import Tip, record_hash, seal, unseal
from shoal.wire.messages.base import Era, SampleRange
from shoal.wire.messages.round import Origin, Record, SignedRecord

ONE, OTHER = Ballot(1, PeerId("C"), 1), Ballot(2, PeerId("D"), 1)
GENESIS = Tip(0, "D0", None)


def opened(signed: SignedRecord) -> Record:
    return unseal(signed, "run", lambda *_: None)


def chain(*ballots: Ballot, on: Tip = GENESIS, samples: int = 4) -> list[Tip]:
    """One record for each of these ballots, each on top of the one before."""
    tips: list[Tip] = []
    for ballot in ballots:
        before = None if on.signed is None else opened(on.signed)
        eras = () if before is None else before.eras
        if not eras or eras[-1].ballot != ballot:
            eras = (*eras, Era(on.round + 1, ballot))
        recorded = SampleRange(0, 0, on.round * samples), SampleRange(0, on.round * samples, (on.round + 1) * samples)
        record = Record("run", on.round + 1, ballot, on.hash, (), recorded[1:], (), {}, recorded[:1], eras)
        signed = seal(record, ballot.peer, lambda _: b"")
        on = Tip(record.round, record_hash(signed), signed)
        tips.append(on)
    return tips


HERE = chain(ONE, ONE, ONE, ONE, ONE)
THERE = chain(OTHER, OTHER, on=HERE[1])


REBASE = msgspec.structs.replace(
    opened(HERE[4].signed), previous=GENESIS.hash, eras=(Era(5, ONE),), origin=Origin("other run", "its hash")
)
SIGNED = seal(REBASE, ONE.peer, lambda _: b"")
FORK = [GENESIS, Tip(5, record_hash(SIGNED), SIGNED)]
FORK += chain(OTHER, OTHER, on=FORK[1])


@pytest.mark.parametrize(
    ("tip", "head", "expected"),
    [
        (HERE[0], HERE[4], True),
        (HERE[3], HERE[4], True),
        (HERE[4], HERE[4], False),
        (HERE[4], HERE[0], False),
        (HERE[1], THERE[1], True),
        (HERE[0], THERE[1], True),
        (HERE[2], THERE[1], False),
        (THERE[0], HERE[4], False),
        (THERE[0], THERE[1], True),
        (GENESIS, HERE[0], True),
        (HERE[0], GENESIS, False),
        (GENESIS, GENESIS, False),
        *((tip, head, one < other) for one, tip in enumerate(FORK) for other, head in enumerate(FORK)),
    ],
)
def test_a_record_is_before_those_of_its_own_chain(tip: Tip, head: Tip, expected: bool) -> None:
    assert is_before(tip, head, opened) is expected


def test_the_record_right_before_is_known_by_its_hash_even_under_one_ballot() -> None:
    [twin] = chain(ONE, on=HERE[1], samples=7)
    assert not is_before(twin, HERE[3], opened)


def test_the_heads_are_the_newest_records_of_each_chain() -> None:
    assert set(heads([GENESIS, *HERE, *THERE], opened)) == {HERE[4], THERE[1]}
    assert heads([GENESIS], opened) == [GENESIS]


def test_chains_part_after_the_last_round_that_both_have() -> None:
    records = [opened(tip.signed) for tip in (HERE[4], THERE[1], chain(OTHER, OTHER)[1]) if tip.signed is not None]
    assert parted_after(records[0], records[1]) == parted_after(records[1], records[0]) == 2
    assert parted_after(records[0], records[2]) == 0


def test_all_samples_of_a_chain_count() -> None:
    assert (num_samples(GENESIS, opened), num_samples(HERE[4], opened), num_samples(THERE[1], opened)) == (0, 20, 16)
